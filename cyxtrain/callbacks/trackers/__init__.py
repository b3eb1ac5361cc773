"""Callbacks for experiment trackers (MLflow, W&B, Trackio), and their base class; TensorBoard is not here."""
