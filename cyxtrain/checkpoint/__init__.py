"""Checkpoint files: format, write, read, validate. No training: see `training/checkpoint_manager.py`, `resume/`."""
