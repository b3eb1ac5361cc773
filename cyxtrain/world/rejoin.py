"""Whether the world that this process has joined is still its own: after a fork, or with other settings."""

from __future__ import annotations

import torch.distributed as dist

from cyxtrain.config import DistributedConfig, complete_config
from cyxtrain.environment import process_env
from cyxtrain.errors import ConfigError
from cyxtrain.ring import RingProcessGroup
from cyxtrain.world.consensus import backends_of


def is_rank_of_another_world(
    config: DistributedConfig | None, parent: DistributedConfig | None, *, refuses: bool
) -> bool:
    """Return whether a forked child is a rank of another world than its parent; refuse one that is no rank.

    `parent` is the config with which the parent joined, if `init` made its group. A child that is no rank is refused if
    `refuses`, and always one that cannot leave the group of its parent.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = complete_config(config or DistributedConfig())
    is_other = (own.rank, own.world_size) != (rank, world_size)
    if parent is not None and world_size > 1:
        is_other |= (own.master_addr, own.master_port) != (parent.master_addr, parent.master_port)
    is_alone = config is not None and config.rank is not None and config.world_size == 1
    forked = f"this process was forked from rank {rank} of {world_size} and is no rank itself"
    if not (is_other or is_alone):
        if not refuses:
            return False
        raise ConfigError(
            f"{forked}: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT to make it a rank of another world; or, to "
            "train alone, call cyxtrain.init(cyxtrain.DistributedConfig(rank=0, world_size=1)) in it."
        )
    if not isinstance(dist.group.WORLD, RingProcessGroup):
        raise ConfigError(
            f"{forked}, and its parent's {dist.get_backend()} group cannot be left in a child. Start it by "
            "multiprocessing's 'spawn', or before its parent joins."
        )
    return True


def environment_has_changed(joined: DistributedConfig) -> bool:
    """Return whether RANK and WORLD_SIZE describe another world than the one joined; refuse it if that has several."""
    described = process_env.own_identity()
    if described.items() <= {"RANK": joined.rank, "WORLD_SIZE": joined.world_size}.items():
        return False
    if joined.world_size != 1:
        found = " and ".join(f"{name}={value}" for name, value in described.items())
        raise ConfigError(
            f"this process has joined as rank {joined.rank} of {joined.world_size}, and the environment has {found} "
            "now. Call cyxtrain.finalize() on every rank before it joins another world, or set the variables back."
        )
    return True


def check_same(config: DistributedConfig, joined: DistributedConfig | None) -> None:
    """Refuse to join again with other settings; `joined` is None if `init` did not make the group."""
    if joined is not None:
        if config != joined:
            raise ConfigError(
                f"the world was joined with another config: {joined} is not {config}. Call finalize() first."
            )
    elif (config.rank, config.world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ConfigError(
            f"torch.distributed is initialized already, as rank {dist.get_rank()} of {dist.get_world_size()}, and "
            f"the config says rank {config.rank} of {config.world_size}. Call init() without a config to adopt what "
            "is there."
        )
    others = {*backends_of().values()} - {"ring"}
    if config.require_secret and config.world_size != 1 and others:
        raise ConfigError(
            f"require_secret=True, and the default group goes over {' and '.join(sorted(others))}, which lets in "
            "every process that reaches its port: make it with torch.distributed.init_process_group('ring'), or leave "
            "it to init()."
        )
