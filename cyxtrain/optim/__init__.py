"""Optimizers, learning rates, clipping and precision. No data and no loop."""
