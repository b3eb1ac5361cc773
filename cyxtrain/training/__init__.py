"""The loop, and what it keeps: history, checkpoints, weights."""
