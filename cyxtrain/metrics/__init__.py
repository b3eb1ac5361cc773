"""Losses and metrics, summed over ranks. No loop."""
