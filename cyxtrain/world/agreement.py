"""Ranks check before anything starts that their inputs are valid and the same, and raise errors together."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from cyxtrain.errors import (
    ConfigError,
    CyxtrainError,
    DistributedTrainingError,
    Failure,
    brief,
    error_from_facts,
    is_on_all_ranks,
    on_all_ranks,
)
from cyxtrain.world import consensus, runtime
from cyxtrain.world.world import World

_Planned = TypeVar("_Planned")


def agree_on(
    world: World, plan: Callable[[], tuple[_Planned, dict[str, Any]]]
) -> tuple[_Planned, list[dict[str, Any]]]:
    """Return `plan`'s result for this rank's input, and every rank's facts about its input, by rank.

    Every rank calls it, also one whose input is wrong: so all refuse, and no rank waits for another. Cost: two
    all_gathers of some kilobytes.
    """
    facts: dict[str, Any] = {}
    problem: Exception | None = None
    try:
        planned, facts = plan()
    except Exception as error:
        problem = error  # raised below, when the other ranks know of it
    gathered = agree(world, facts, problem)  # raises the problem, if there is one
    return planned, gathered


def agree(world: World, facts: dict[str, Any], problem: Exception | None = None) -> list[dict[str, Any]]:
    """Return every rank's facts, by rank, when they are the same and no rank has a problem."""
    facts = {"_cpu": consensus.own_arithmetic(), **facts}
    if world.sends_nothing:
        if problem is not None:
            raise problem
        return [facts]
    own = {"facts": facts, "problem": None if problem is None else _message(problem)}
    gathered = world.gather_json(own)
    if problem is not None:
        raise on_all_ranks(problem)
    for rank, other in enumerate(gathered):
        if other["problem"] is not None:
            raise on_all_ranks(ConfigError(f"rank {rank} refuses to start: {other['problem']}", rank=rank))
    for rank, other in enumerate(gathered):
        _compare(gathered[0]["facts"], other["facts"], rank)
    return [other["facts"] for other in gathered]


@contextlib.contextmanager
def ending_group_on_error(world: World) -> Iterator[None]:
    """End the world if something within fails on this rank alone: the others would wait for it."""
    if world.sends_nothing:
        yield
        return
    try:
        yield
    except BaseException as error:
        if is_on_all_ranks(error):
            raise
        cause = runtime.cause_of(error)
        runtime.end_group(error, in_training=True)
        if cause is not None:
            raise cause from error
        raise


def raise_together(world: World, problem: Exception | None) -> None:
    """Raise on every rank an error of any of them, so that no rank waits for one that has failed.

    Every rank calls it. A rank that has failed raises its own error; the others raise one that names that rank, of the
    same type if it is a type of this package. Cost: two small all_gathers.
    """
    if world.sends_nothing:
        if problem is not None:
            raise problem
        return
    own = ""
    if problem is not None:
        own = json.dumps(_as_ours(problem, world.rank).to_facts())
    gathered = world.gather(own)
    if problem is not None:
        raise on_all_ranks(problem)
    for rank, sent in enumerate(gathered):
        if sent:
            facts = json.loads(sent)
            named = {**facts, "message": f"rank {rank}: {facts['message']}", "rank": rank}
            raise on_all_ranks(error_from_facts(named))


def on_first(world: World, action: Callable[[], object]) -> None:
    """Run an action on rank 0, and raise its error on every rank. All ranks call it."""
    on_each(world, action if world.is_first else lambda: None)


def on_each(world: World, action: Callable[[], object]) -> None:
    """Run an action on every rank, and raise an error of any of them on every rank. All ranks call it."""
    problem: Exception | None = None
    try:
        action()
    except Exception as error:  # the others wait
        problem = error
    raise_together(world, problem)


def _message(problem: Exception) -> str:
    return str(problem) if isinstance(problem, CyxtrainError) else f"{type(problem).__name__}: {problem}"


def _as_ours(problem: Exception, rank: int) -> CyxtrainError:
    """Return an error of this package that can be sent to other ranks."""
    if isinstance(problem, CyxtrainError):
        return problem
    return DistributedTrainingError(_message(problem), failures=[Failure.of(problem, rank)])


def _compare(first: dict[str, Any], other: dict[str, Any], rank: int) -> None:
    """Refuse a rank with other facts than rank 0; those whose names begin with "_" may differ."""
    for name in {**first, **other}:
        if name.startswith("_") or first.get(name) == other.get(name):
            continue
        hints = _hint_at_seeds(name, first["_cpu"], other["_cpu"]) + _hint_at_own_samples(name)
        error = ConfigError(
            f"rank {rank} differs from rank 0 in {name}: {brief(other.get(name))} on rank {rank}, "
            f"{brief(first.get(name))} on rank 0. Every rank must be given the same.{hints}",
            rank=rank,
        )
        raise on_all_ranks(error)


def _hint_at_seeds(name: str, first_cpu: str, other_cpu: str) -> str:
    """Return how ranks make the same random values; "" for a fact without values."""
    if "hash of its values" not in name:
        return ""
    made = "data"
    before = "torch.randn"
    if "the model's" in name:
        made = "models"
        before = "the model is made"
    if first_cpu[-8:] == other_cpu[-8:]:  # the hash of what they compute
        return f" Random {made} need one seed: torch.manual_seed(0) before {before}."
    return (
        f" Their CPUs ({other_cpu} and {first_cpu}) compute differently, so one seed gives different random {made}: "
        "load them from a file, or set ATEN_CPU_CAPABILITY=default on every rank."
    )


def _hint_at_own_samples(name: str) -> str:
    """Return how each rank passes samples of its own; "" where all ranks pass the same."""
    if "the batch's" in name:
        return " If each rank has its own samples, gather them first: cyxtrain.all_gather_with_grad(x)."
    if "training" in name:
        return " If each rank has its own samples, pass a DataLoader and sharded_data=True."
    return ""
