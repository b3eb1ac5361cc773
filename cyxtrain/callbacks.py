"""Callbacks for `fit`: `cx.callbacks.Callback` to derive from, and ready ones under Keras's names."""

from cyxtrain.training.callbacks import Callback
from cyxtrain.training.ready.averaging import EMA
from cyxtrain.training.ready.early_stopping import EarlyStopping
from cyxtrain.training.ready.learning_rates import LearningRateMonitor, LearningRateScheduler, ReduceLROnPlateau
from cyxtrain.training.ready.model_checkpoint import ModelCheckpoint
from cyxtrain.training.ready.monitors import GradientNormMonitor, TerminateOnNaN, ThroughputMonitor, Timer
from cyxtrain.training.ready.progress import ProgressBar
from cyxtrain.training.ready.slow_ranks import SlowRankMonitor
from cyxtrain.training.ready.tensorboard import TensorBoard
from cyxtrain.training.ready.writing import CSVLogger, LambdaCallback

__all__ = [
    "EMA",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "GradientNormMonitor",
    "LambdaCallback",
    "LearningRateMonitor",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ProgressBar",
    "ReduceLROnPlateau",
    "SlowRankMonitor",
    "TensorBoard",
    "TerminateOnNaN",
    "ThroughputMonitor",
    "Timer",
]
