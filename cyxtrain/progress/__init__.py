"""What people see of a run: bars and lines, history, timers, profiles, summaries. Nothing here changes a number."""
