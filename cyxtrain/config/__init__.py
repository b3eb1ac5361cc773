"""Every setting that a user writes: dataclasses, a docstring with the unit under each field.

Fields can be assigned freely; `validate()` is called where the settings are used.
"""

from cyxtrain.config.distributed_config import (
    BackendType,
    DistributedConfig,
    RingOptions,
    complete_config,
    requested_backend,
)
from cyxtrain.config.training import AMPConfig, DDPConfig, DistributedTrainingConfig, create_default_amp_config

__all__ = [
    "AMPConfig",
    "BackendType",
    "DDPConfig",
    "DistributedConfig",
    "DistributedTrainingConfig",
    "RingOptions",
    "complete_config",
    "create_default_amp_config",
    "requested_backend",
]
