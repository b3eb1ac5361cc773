"""What `evaluate` and `predict` do besides computing: callbacks, progress, and predictions in files."""
