"""Find the first step and tensor in which two runs differ, by the hashes that `log_hashes` has written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cyxtrain.environment.regular_files import local_path, open_regular
from cyxtrain.errors import CheckpointError, brief, counted, reason_of, shortened

FILES = "hashes-*.jsonl"
# As a step computes them.
_PARTS = ("start", "slices", "average", "end")
_SHOWN_PLACES = 4
_VIRTUAL = "the setting virtual_ranks"
# A rank alone exchanges no gradients.
_OF_EXCHANGE = ("the size of buckets", "the compression of gradients", "the rank of their approximation")
_WORDS = {
    "start": "the parameters when step {step:,} begins",
    "slices": "the gradients of step {step:,}, before they are added up",
    "average": "the average of the gradients of step {step:,}",
    "end": "the parameters after step {step:,}",
}
_BEFORE = "What comes before in that step is equal: the difference arises in step {step:,}"
_MORE = {
    "slices": ", in the samples, in the forward or in the backward.",
    "average": ", when the gradients are added up.",
    "end": ", in the optimizer, its state, clipping or a buffer.",
}


class Step(NamedTuple):
    """The line of a step, and the line about the run that precedes it."""

    hashes: Mapping[str, Any]
    about: Mapping[str, Any]

    def rows(self, part: str) -> dict[int, dict[str, str | None]]:
        """Return the hashes of a part by the number of the slice or rank, by tensor."""
        found = self.hashes[part]
        if part == "slices":
            rows = {int(number): row for number, row in found.items()}
        else:
            rows = {rank: found[0] if row is None else row for rank, row in enumerate(found)}
        return {number: dict(zip(self.about["tensors"], row, strict=False)) for number, row in rows.items()}


class HashFile(NamedTuple):
    """What a run has logged; if it took a step more than once, because it continued from a checkpoint, the last."""

    path: Path
    steps: Mapping[int, Step]

    @property
    def about(self) -> Mapping[str, Any]:
        """The latest line about the run."""
        return self.steps[max(self.steps)].about

    def describe(self) -> str:
        """Return the file, and the steps in it."""
        ranks = counted(len(self.about["ranks"]), "rank")
        logged = counted(len(self.steps), "step")
        return f"{self.path}: {logged} from {min(self.steps):,} to {max(self.steps):,}, on {ranks}"


class Difference(NamedTuple):
    """The first difference of two runs.

    Attributes:
        step: The step in which it was found.
        part: "start", "slices", "average" or "end": the first part of the step that differs.
        tensors: Those that differ, by the number of the slice, or of the rank.
        equal_step: The last equal step before, logged by both runs or of a checkpoint; None: there is none.
    """

    step: int
    part: str
    tensors: dict[int, list[str]]
    equal_step: int | None


def bisect(first: str, second: str) -> int:
    """Print where two runs differ first, and what else differs; return the exit code: 1 if they differ.

    Each is a file of hashes, or a folder of checkpoints, in which the newest such file counts.

    Raises:
        CheckpointError: A file cannot be read, or both have no step in common.
    """
    runs = [read_hashes(first), read_hashes(second)]
    for name, run in zip("AB", runs, strict=True):
        print(f"{name}  {run.describe()}")
    return report(first_difference(*runs), *runs)


def report(difference: Difference | None, first: HashFile, second: HashFile) -> int:
    """Print the first difference of two runs, and what else differs; return the exit code: 1 if they differ."""
    print(f"\n{explain(difference, first, second)}")
    facts = other_differences(first, second)
    if facts:
        print("\nWhat else differs (A / B):", *(f"  {fact}" for fact in facts), sep="\n", flush=True)
    return int(difference is not None)


def read_hashes(path: str) -> HashFile:
    """Return the hashes in a file, or in the newest one of a folder; raise CheckpointError if there are none."""
    file = Path(local_path("the path of hashes", path))
    if file.is_dir():
        found = sorted(file.glob(FILES), key=lambda each: each.stat().st_mtime)
        if not found:
            raise CheckpointError(f"{path} has no {FILES}: fit writes it there with log_hashes=50.")
        file = found[-1]
    about: Mapping[str, Any] = {}
    steps: dict[int, Step] = {}
    for line in _lines(file):
        if "tensors" in line:
            about = line
        elif about and "step" in line:
            steps[line["step"]] = Step(line, about)
    if not steps:
        raise CheckpointError(f"{file} has no hashes yet: the run writes the first ones after so many steps.")
    return HashFile(file, steps)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that are complete: a process that was killed may have left a part of one."""
    try:
        with open_regular(file) as opened:
            for text in opened:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue
                if isinstance(line, dict):
                    yield line
    except OSError as error:
        raise CheckpointError(f"Cannot read {file}: {reason_of(error)}.") from error


def first_difference(first: HashFile, second: HashFile, *, before: int | None = None) -> Difference | None:
    """Return the first difference of the steps that both runs have logged; None: they are equal.

    All is known to be equal after the step `before`; None: no such step is known.

    Raises:
        CheckpointError: They have no step in common.
    """
    common = sorted(first.steps.keys() & second.steps.keys())
    if not common:
        raise CheckpointError(f"A and B have logged no step in common: {first.describe()}; {second.describe()}.")
    for step in common:
        for part in _PARTS:
            found = differing_tensors(first.steps[step], second.steps[step], part)
            if found:
                return Difference(step, part, found, before)
        before = step
    return None


def differing_tensors(first: Step, second: Step, part: str) -> dict[int, list[str]]:
    """Return the tensors that differ in a part of a step, by the number of the slice or rank."""
    a = first.rows(part)
    b = second.rows(part)
    of_both = a.keys() & b.keys()
    if part != "slices":
        # Ranks have the same: one that the other run does not have is compared with rank 0.
        a = {number: a.get(number, a[0]) for number in a | b}
        b = {number: b.get(number, b[0]) for number in a}
    found: dict[int, list[str]] = {}
    for number in sorted(a.keys() & b.keys()):
        other = b[number]
        names = [name for name, value in a[number].items() if value != other.get(name, value)]
        if number not in of_both:
            names = [name for name in names if name not in found.get(0, ())]
        if names:
            found[number] = names
    return found


def explain(difference: Difference | None, first: HashFile, second: HashFile) -> str:
    """Return a difference in words."""
    if difference is None:
        common = len(first.steps.keys() & second.steps.keys())
        return f"equal: all hashes of {counted(common, 'step')}, of {counted(len(first.about['tensors']), 'tensor')}"
    kind = "rank"
    if difference.part == "slices":
        kind = "slice"
    lines = [f"different: {_WORDS[difference.part].format(step=difference.step)}"]
    lines += [f"  {kind} {number}: {shortened(names)}" for number, names in difference.tensors.items()]
    left_out = len(lines) - 1 - _SHOWN_PLACES
    if left_out > 0:
        lines[_SHOWN_PLACES + 1 :] = [f"  and {counted(left_out, kind)} more"]
    lines.append(_interval(difference))
    if len(first.about["ranks"]) != len(second.about["ranks"]) and first.about["facts"].get(_VIRTUAL) is None:
        lines.append("Without virtual_ranks, the bits depend on the number of ranks.")
    return "\n".join(lines)


def _interval(difference: Difference) -> str:
    """Return in which steps the difference has arisen."""
    last = difference.equal_step
    if difference.part != "start":
        return _BEFORE.format(step=difference.step) + _MORE[difference.part]
    if last is None:
        return "It is the first step that both have logged: the difference arises before it."
    if last == difference.step - 1:
        return f"All is equal after step {last:,}: the difference arises between the two steps, as in a callback."
    steps = f"step {last + 1:,}"
    if last + 2 < difference.step:
        steps = f"steps {last + 1:,} to {difference.step - 1:,}"
    return f"All is equal after step {last:,}: the difference arises in {steps}."


def other_differences(first: HashFile, second: HashFile) -> list[str]:
    """Return what differs besides hashes, each as "name: A / B": versions, threads, processors, data, settings."""
    a = _facts(first.about)
    b = _facts(second.about)
    names = [name for name in (a | b) if a.get(name) != b.get(name)]
    names = [name for name in names if name not in _OF_EXCHANGE or name in a.keys() & b.keys()]
    return [f"{name}: {brief(a.get(name, '-'))} / {brief(b.get(name, '-'))}" for name in names]


def _facts(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run, with those of its ranks, each kind once."""
    facts: dict[str, Any] = dict(about["facts"])
    ranks: Sequence[Mapping[str, str]] = about["ranks"]
    for name in {name: None for rank in ranks for name in rank}:
        facts[name] = ", ".join(dict.fromkeys(rank.get(name, "-") for rank in ranks))
    return facts
