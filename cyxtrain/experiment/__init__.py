"""A YAML file -> settings -> a trainer with its data."""

from cyxtrain.experiment.experiment import Experiment
from cyxtrain.experiment.experiment_config import Config

__all__ = ["Config", "Experiment"]
