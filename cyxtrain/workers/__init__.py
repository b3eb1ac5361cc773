"""Processes: start, watch, end. No training."""
