"""Continuing a fit from a checkpoint: which one, whether it fits, and what differs from it."""
