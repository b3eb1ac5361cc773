"""Checkpoint files: write, read, keep, validate. No training."""
