"""Losses and metrics, summed over ranks. No loop."""

from cyxtrain.metrics.confusion_matrix import ConfusionMatrix
from cyxtrain.metrics.whole_set import WholeSet

__all__ = ["ConfusionMatrix", "WholeSet"]
