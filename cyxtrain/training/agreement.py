"""Ranks agree before anything starts: on what they were given, and on whether it is right."""

from __future__ import annotations

import json
from typing import Any

from cyxtrain import runtime
from cyxtrain.errors import ConfigError, CyxtrainError


def agree(facts: dict[str, Any], problem: Exception | None = None) -> list[dict[str, Any]]:
    """Returns every rank's facts, by rank, when they are the same and no rank has a problem.

    Every rank calls it, also one that has found its input wrong: so all refuse, and none waits for another.
    Keys that begin with "_" may differ. Cost: two all_gathers of some kilobytes.

    Args:
        facts: JSON values by name, as people call them.
        problem: What is wrong on this rank.

    Raises:
        ConfigError: Some rank has a problem, or the facts differ; the same on every rank.
    """
    text = json.dumps({"facts": facts, "problem": None if problem is None else _text(problem)})
    everyone = [json.loads(found) for found in runtime.gather_texts(text)]
    if problem is not None:
        raise problem
    for rank, other in enumerate(everyone):
        if other["problem"] is not None:
            raise ConfigError(f"rank {rank} refuses to start: {other['problem']}", rank=rank)
    for rank, other in enumerate(everyone):
        _compare(everyone[0]["facts"], other["facts"], rank)
    return [other["facts"] for other in everyone]


def _text(problem: Exception) -> str:
    return str(problem) if isinstance(problem, CyxtrainError) else f"{type(problem).__name__}: {problem}"


def _compare(first: dict[str, Any], other: dict[str, Any], rank: int) -> None:
    for name in {**first, **other}:
        if not name.startswith("_") and first.get(name) != other.get(name):
            raise ConfigError(
                f"rank {rank} differs from rank 0 in {name}: {other.get(name)} on rank {rank}, {first.get(name)} on "
                "rank 0. Every rank must be given the same.",
                rank=rank,
            )
