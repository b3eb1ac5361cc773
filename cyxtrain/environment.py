"""The only reader of `os.environ`: what the launcher, torchrun or a shell says about this process.

    RANK, WORLD_SIZE              who this process is, and of how many
    LOCAL_RANK                    among those of its machine; default: RANK
    MASTER_ADDR, MASTER_PORT      where rank 0 waits; default 127.0.0.1 and 29500
    DISTRIBUTED_BACKEND           cpu, nccl or gloo
    DISTRIBUTED_TIMEOUT_MS        milliseconds until joining gives up

torchrun sets these very names. Slurm, Open MPI and others come with clusters.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

from cyxtrain.config import BackendType, DistributedConfig
from cyxtrain.errors import ConfigError

_IDENTITY = ("RANK", "WORLD_SIZE")
_SIGNS = ("LOCAL_RANK", "MASTER_ADDR")
"""What nobody sets for a process that is alone."""


def read_config(variables: Mapping[str, str] | None = None) -> DistributedConfig:
    """Returns what the environment says, complete: alone it is a world of one.

    Args:
        variables: The environment; None: this process's.

    Raises:
        ConfigError: Half an environment, a number that is none, a rank outside the world.
    """
    variables = os.environ if variables is None else variables
    if "NCCL_TIMEOUT" in variables:
        warnings.warn(
            "NCCL_TIMEOUT is set, and PyTorch ignores it: set collective_timeout_ms in DistributedConfig.",
            stacklevel=2,
        )
    config = DistributedConfig(
        rank=0,
        world_size=1,
        local_rank=0,
        master_addr=variables.get("MASTER_ADDR") or "127.0.0.1",
        backend=_backend(variables),
    )
    if "MASTER_PORT" in variables:
        config.master_port = _number(variables, "MASTER_PORT")
    if "DISTRIBUTED_TIMEOUT_MS" in variables:
        config.timeout_ms = _number(variables, "DISTRIBUTED_TIMEOUT_MS")
    missing = [name for name in _IDENTITY if name not in variables]
    present = [name for name in (*_IDENTITY, *_SIGNS) if name in variables]
    if missing and present:
        raise ConfigError(
            f"the environment is half set: {', '.join(present)} is there and {' and '.join(missing)} is missing. "
            "Start with ./launch_distributed.sh or torchrun, set RANK and WORLD_SIZE by hand, or unset them all."
        )
    if not missing:
        config.rank = _number(variables, "RANK")
        config.world_size = _number(variables, "WORLD_SIZE")
        config.local_rank = _number(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else config.rank
    config.validate()
    return config


def agent_store_prefix(variables: Mapping[str, str] | None = None) -> str | None:
    """Returns the prefix of our keys where torchrun's agent keeps the store; None where rank 0 does."""
    variables = os.environ if variables is None else variables
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return f"/worker/attempt_{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _backend(variables: Mapping[str, str]) -> BackendType:
    return BackendType.parse(variables.get("DISTRIBUTED_BACKEND") or BackendType.CPU)


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ConfigError(f"{name}={variables[name]!r} in the environment is not a whole number.") from None
