"""Callbacks for `fit`: `cx.callbacks.Callback` to derive from, and ready ones under Keras's names."""

from cyxtrain.callbacks.averaging import EMA, SWA
from cyxtrain.callbacks.callback import Callback, LambdaCallback
from cyxtrain.callbacks.csv_logger import CSVLogger
from cyxtrain.callbacks.early_stopping import EarlyStopping
from cyxtrain.callbacks.model_checkpoint import ModelCheckpoint
from cyxtrain.callbacks.monitors import GradientNormMonitor, SlowRankMonitor, TerminateOnNaN, ThroughputMonitor, Timer
from cyxtrain.callbacks.progress_bar import ProgressBar
from cyxtrain.callbacks.rate_callbacks import LearningRateMonitor, LearningRateScheduler, ReduceLROnPlateau
from cyxtrain.callbacks.tensorboard import TensorBoard
from cyxtrain.callbacks.trackers.services import MLflow, Trackio, WandB
from cyxtrain.callbacks.trackers.tracker import Tracker

__all__ = [
    "EMA",
    "SWA",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "GradientNormMonitor",
    "LambdaCallback",
    "LearningRateMonitor",
    "LearningRateScheduler",
    "MLflow",
    "ModelCheckpoint",
    "ProgressBar",
    "ReduceLROnPlateau",
    "SlowRankMonitor",
    "TensorBoard",
    "TerminateOnNaN",
    "ThroughputMonitor",
    "Timer",
    "Tracker",
    "Trackio",
    "WandB",
]
