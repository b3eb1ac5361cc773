"""Checkpoint files: format, write, read, validate; `training/` decides when to save and resume."""
