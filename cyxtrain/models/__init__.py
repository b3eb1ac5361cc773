"""Models by name: the registry, and small models for examples and `configs/`."""

from cyxtrain.models.networks import CNN, MLP, VAE
from cyxtrain.models.registry import get_model, list_models, register_model

__all__ = ["CNN", "MLP", "VAE", "get_model", "list_models", "register_model"]
