"""A YAML file -> settings -> a trainer with its data."""

from cyxtrain.experiment.config import Config
from cyxtrain.experiment.experiment import Experiment

__all__ = ["Config", "Experiment"]
