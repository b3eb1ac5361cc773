"""What people see of a run: header, bars, history, timers, profiles, tables. Nothing here changes a number."""
