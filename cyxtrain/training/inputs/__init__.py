"""What fit, evaluate and predict were given: arguments, checks, dry run, plan. No loop."""
