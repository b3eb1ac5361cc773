"""Models by name: the registry, and small models for examples and `configs/`."""

from cyxtrain.models.cnn import CNN
from cyxtrain.models.mlp import MLP
from cyxtrain.models.registry import get_model, list_models, register_model
from cyxtrain.models.vae import VAE

__all__ = ["CNN", "MLP", "VAE", "get_model", "list_models", "register_model"]
