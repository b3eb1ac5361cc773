"""Predictions in files, as `predict` writes them."""
