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
    """Return what `plan` made of this rank's input, and every rank's facts about it, by rank.

    Every rank calls it, also one whose input is wrong: so all refuse, and none waits for another. Cost: two
    all_gathers of some kilobytes.
    """
    facts: dict[str, Any] = {}
    problem: Exception | None = None
    try:
        planned, facts = plan()
    except Exception as error:
        problem = error
    gathered = agree(world, facts, problem)
    return planned, gathered


def agree(world: World, facts: dict[str, Any], problem: Exception | None = None) -> list[dict[str, Any]]:
    """Return every rank's facts, by rank, when they are the same and no rank has a problem."""
    facts = {"_cpu": consensus.own_arithmetic(), **facts}
    if world.sends_nothing:
        if problem is not None:
            raise problem
        return [facts]
    gathered = world.gather_json({"facts": facts, "problem": None if problem is None else _text(problem)})
    refused = next((rank for rank, other in enumerate(gathered) if other["problem"] is not None), None)
    if problem is not None:
        raise on_all_ranks(problem)
    if refused is not None:
        error = ConfigError(f"rank {refused} refuses to start: {gathered[refused]['problem']}", rank=refused)
        raise on_all_ranks(error)
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

    Every rank calls it. The rank itself raises its own error; the others one that names the rank, of the same type
    where that is ours. Cost: two small all_gathers.
    """
    if world.sends_nothing:
        if problem is not None:
            raise problem
        return
    mine = ""
    if problem is not None:
        failed = DistributedTrainingError(_text(problem), failures=[Failure.of(problem, world.rank)])
        mine = json.dumps((problem if isinstance(problem, CyxtrainError) else failed).to_facts())
    gathered = world.gather(mine)
    if problem is not None:
        raise on_all_ranks(problem)
    for rank, text in enumerate(gathered):
        if text:
            facts = json.loads(text)
            raise on_all_ranks(error_from_facts({**facts, "message": f"rank {rank}: {facts['message']}", "rank": rank}))


def on_first(world: World, action: Callable[[], object]) -> None:
    """Run something on rank 0, and raise its error on every rank. All ranks call it."""
    problem: Exception | None = None
    if world.is_first:
        try:
            action()
        except Exception as error:  # the others wait
            problem = error
    raise_together(world, problem)


def _text(problem: Exception) -> str:
    return str(problem) if isinstance(problem, CyxtrainError) else f"{type(problem).__name__}: {problem}"


def _compare(first: dict[str, Any], other: dict[str, Any], rank: int) -> None:
    for name in {**first, **other}:
        if not name.startswith("_") and first.get(name) != other.get(name):
            own_rows = " Each rank's own rows go as a DataLoader, with sharded_data=True." * ("training" in name)
            if "the batch's" in name:
                own_rows = " For each rank's own rows, pass those of all ranks: cyxtrain.all_gather_with_grad(x)."
            what, before = ("models", "the model is made") if "the model's" in name else ("data", "torch.randn")
            seed = f" Random {what} need one seed: torch.manual_seed(0) before {before}."
            if first["_cpu"][-8:] != other["_cpu"][-8:]:
                seed = (
                    f" Their CPUs ({other['_cpu']} and {first['_cpu']}) compute differently, so one seed gives "
                    f"different random {what}: load them from a file, or set ATEN_CPU_CAPABILITY=default on every rank."
                )
            seed *= "hash of its values" in name
            error = ConfigError(
                f"rank {rank} differs from rank 0 in {name}: {brief(other.get(name))} on rank {rank}, "
                f"{brief(first.get(name))} on rank 0. Every rank must be given the same.{seed}{own_rows}",
                rank=rank,
            )
            raise on_all_ranks(error)
