"""Processes that do our bidding: one supervisor, for the launcher and for the notebook. Knows nothing of training."""
