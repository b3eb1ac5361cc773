"""Callbacks for `fit`: `cx.callbacks.Callback` to derive from, and ready ones under Keras's names."""

from cyxtrain.training.callbacks import Callback
from cyxtrain.training.early_stopping import EarlyStopping

__all__ = ["Callback", "EarlyStopping"]
