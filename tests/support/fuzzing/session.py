"""Runs the programs of many seeds, keeps the results in a file, and makes what disagrees smaller."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .checks import Disagreement, Refused, check
from .generate import generate
from .ranks import Worlds
from .spec import Checks, Spec, features, simpler

ACCEPTED = "accepted"
REFUSED = "refused"


@dataclasses.dataclass
class Result:
    """What came of a program.

    Attributes:
        seed: Of the program.
        outcome: ACCEPTED, REFUSED, or the kind of a disagreement.
        detail: The refusal, or the first difference.
        features: What the program has.
        made: Which comparisons were made.
        seconds: That it took.
        program: The fields of the spec that are not the plainest, and the checks; those of the smallest program that
            disagrees in this way, if it was made smaller.
    """

    seed: int
    outcome: str
    detail: str = ""
    features: list[str] = dataclasses.field(default_factory=list)
    made: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    program: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def disagrees(self) -> bool:
        return self.outcome not in (ACCEPTED, REFUSED)


def examine(spec: Spec, checks: Checks, worlds: Worlds, seed: int = -1) -> Result:
    """Run one program."""
    began = time.monotonic()
    result = Result(seed, ACCEPTED, features=features(spec, checks), program=_program(spec, checks))
    try:
        result.made = check(spec, checks, worlds)
    except Refused as error:
        result.outcome, result.detail = REFUSED, str(error)
    except Disagreement as error:
        result.outcome, result.detail = error.kind, error.detail
    result.seconds = round(time.monotonic() - began, 2)
    return result


def run_seeds(seeds: Iterable[int], worlds: Worlds) -> Iterator[Result]:
    """Yield the result of each seed."""
    for seed in seeds:
        yield examine(*generate(seed), worlds, seed)


def make_smaller(result: Result, worlds: Worlds, seconds: float) -> Result:
    """Return the result of the smallest program found that disagrees in the same way."""
    deadline = time.monotonic() + seconds
    spec, checks = generate(result.seed)
    smallest = result
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in simpler(spec, checks):
            if time.monotonic() > deadline:
                return smallest
            found = examine(*candidate, worlds, result.seed)
            if found.outcome == result.outcome:
                spec, checks = candidate
                smallest = found
                is_smaller = True
                break
    return smallest


def read(file: Path) -> list[Result]:
    """Return the results of a file; none, if it does not exist."""
    if not file.exists():
        return []
    return [Result(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def as_line(result: Result) -> str:
    return json.dumps(dataclasses.asdict(result)) + "\n"


def table(results: list[Result]) -> str:
    """Return a table of features, and how many accepted programs had each."""
    counts = {True: Counter[str](), False: Counter[str]()}
    for result in results:
        counts[result.outcome == ACCEPTED].update({*result.features, *(f"compared: {each}" for each in result.made)})
    accepted, others = counts[True], counts[False]
    names = sorted({*accepted, *others}, key=lambda name: (accepted[name], name))
    width = max(map(len, names), default=7)
    lines = [f"{'feature':{width}}  accepted  others"]
    lines += [f"{name:{width}}  {accepted[name]:8}  {others[name]:6}" for name in names]
    return "\n".join(lines)


def _program(spec: Spec, checks: Checks) -> dict[str, Any]:
    """Return a program as it is read from a file."""
    program: dict[str, Any] = json.loads(json.dumps({"spec": spec.changed(), "checks": dataclasses.asdict(checks)}))
    return program
