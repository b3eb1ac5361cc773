"""What people see of a run: bars, history, timers, profiles, summaries; none of it changes training."""
