"""How many steps a fit will take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.environment import accelerator, process_env
from cyxtrain.errors import ConfigError
from cyxtrain.training.inputs.arguments import parse_fit
from cyxtrain.training.inputs.plan import all_steps, requested_steps, steps_per_epoch
from cyxtrain.training.inputs.training_data import open_fit
from cyxtrain.workers.machine import ranks_by_cores
from cyxtrain.world import runtime


def count_steps(*data: Any, **keywords: Any) -> tuple[int, int]:
    """Return (optimizer steps of an epoch, of the whole fit) that `fit` takes with the same arguments, at most.

    For schedules that need it: the numbers are the same on every rank, and smaller with more ranks. All ranks call it;
    like `fit`, it joins the world. Cost: data that give batches one after the other are opened.

    Args:
        *data: As `DistributedTrainer.fit`: X and y, or what gives batches; a `DistributedTrainingConfig`, or none.
        **keywords: As `DistributedTrainer.fit`.

    Raises:
        ConfigError: As `fit`; or the number of batches is unknown.
    """
    runtime.join_if_nobody_has()
    runtime.check_same_call("count_steps")
    config = parse_fit(*data, **keywords).config
    if isinstance(data[0] if data else None, Iterator):  # opening it would take batches that fit should have
        steps = requested_steps(config)
    else:
        arguments, opened = open_fit(lambda: parse_fit(*data, **keywords), None, 0)
        config = arguments.config
        feed = opened[0].feed(config, *_rank_and_world_size(config))
        steps = steps_per_epoch(config, feed)
    total = all_steps(config, steps)
    if total is None:
        raise ConfigError("the number of batches is unknown: set steps_per_epoch, or max_steps.")
    return total if steps is None else steps, total


def _rank_and_world_size(config: DistributedTrainingConfig) -> tuple[int, int]:
    """Return those of this process, or those of the workers that a notebook would start."""
    rank, world_size, asked = runtime.get_rank(), runtime.get_world_size(), config.num_processes
    if asked is None or world_size > 1 or process_env.is_launched():
        return rank, world_size
    if asked == "auto" and accelerator.visible() is not None:
        raise ConfigError('num_processes="auto" depends on where the model is: give count_steps a number of processes.')
    return rank, ranks_by_cores(process_env.to_pass_on()) if asked == "auto" else int(asked)
