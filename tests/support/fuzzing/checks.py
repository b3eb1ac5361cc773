"""What must agree about a program: ranks, a plain loop, transports, a pool, variants, and resumed runs."""

from __future__ import annotations

import dataclasses
import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rank_processes import Ended

from .models import SCHEDULES
from .plain_loop import can_repeat, repeat
from .program import Job, Outcome, run_program
from .ranks import Ranks, Worlds
from .spec import Checks, Spec, words
from .variants import MAY_BE_REFUSED, VARIANTS

Tolerance = tuple[float, float]
"""Relative and absolute."""
ROUNDING: Tolerance = (1e-8, 1e-11)
"""Of sums of float64 in another order."""
LAST_DIGIT: Tolerance = (1e-12, 1e-14)
LINE_SEARCH: Tolerance = (2e-2, 1e-2)
"""Of LBFGS, whose steps depend on quotients of differences."""
DIVERGED = 10.0
COARSE = {"float32": (1e-3, 1e-4), "bf16": (5e-2, 2e-2), "fp16": (5e-2, 2e-2)}
"""Of the first loss of a fit that rounds more."""
EVERYTHING = words(
    "history second_history params buffers optimizer evaluate predict before between batches step epoch frozen "
    "is_stopped"
)
TRAINED = [part for part in EVERYTHING if part not in ("before", "between", "batches", "is_stopped")]
"""What a run comes to that is not whole: see `Job.is_whole`."""
ON_OTHER_RANKS = [part for part in EVERYTHING if part not in ("before", "optimizer", "is_stopped")]
ON_OTHER_RANKS_RESUMED = ("params", "buffers", "history", "evaluate", "predict", "step", "epoch")


class Disagreement(Exception):  # noqa: N818 - what is looked for is no error of ours
    """Two runs that must agree do not.

    Attributes:
        kind: What disagreements of one cause have in common.
        detail: The first difference.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Refused(Exception):  # noqa: N818
    """All ranks refuse the program alike."""


def check(spec: Spec, checks: Checks, worlds: Worlds) -> list[str]:
    """Run a program in all the ways that its checks name; return which comparisons were made.

    Raises:
        Disagreement: Two runs differ.
        Refused: All ranks refuse the program.
    """
    folder = Path(tempfile.mkdtemp(dir=worlds.folder))
    try:
        examination = _Examination(spec, checks, worlds, folder)
        examination.compare_numbers_of_ranks()
        if checks.plain_loop and can_repeat(spec):
            examination.compare_with_plain_loop()
        if checks.variant:
            examination.compare_variant(checks.variant)
        if checks.resumes:
            examination.compare_resumed()
        return examination.made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Examination:
    """The runs of one program, by the number of ranks."""

    def __init__(self, spec: Spec, checks: Checks, worlds: Worlds, folder: Path) -> None:
        self.spec, self.checks, self.worlds, self.folder = spec, checks, worlds, folder
        self.made = ["run"]
        self.runs: dict[int, list[Outcome]] = {}
        self._run_everywhere()
        self.size = checks.size if checks.size in self.runs else max(self.runs)
        self.ranks = worlds.by_size[self.size]
        self.run = self.runs[self.size]

    def _run_everywhere(self) -> None:
        """Run the program on each number of ranks, over a transport and in a pool, all at once."""
        worlds: dict[int | str, Ranks] = {size: self.worlds.by_size[size] for size in self.checks.worlds}
        if self.checks.transport:
            worlds[f"over {self.checks.transport}"] = self.worlds.by_transport[self.checks.transport]
        if self.checks.pool:
            worlds["in a pool"] = self.worlds.pool
        for name, ranks in worlds.items():
            more = {} if ranks.size else {"num_processes": 2}
            ranks.send(run_program, self.spec, Job(ranks.size or 2, str(self.folder / str(name)), more, is_whole=True))
        ended = {name: ranks.collect() for name, ranks in worlds.items()}
        runs: dict[int | str, list[Outcome]] = {}
        refusals: dict[int | str, str] = {}
        for name, outcomes in ended.items():
            try:
                runs[name] = agreed(outcomes, f"{name} ranks" if isinstance(name, int) else str(name))
            except Refused as error:
                refusals[name] = str(error)
        if refusals and runs:
            raise Disagreement("refused by some", f"runs: {[*runs]}; refused: {refusals}")
        if refusals:
            raise Refused(next(iter(refusals.values())))
        for name, outcome in runs.items():
            if isinstance(name, int):
                self.runs[name] = outcome
            else:
                self.made.append(name)
                must_agree(EVERYTHING, runs[2][0], outcome[0], name, f"two ranks and two ranks {name}")

    def compare_numbers_of_ranks(self) -> None:
        first, *others = sorted(self.runs)
        for size in others:
            one, many = self.runs[first], self.runs[size]
            what = f"{first} and {size} ranks"
            self._compare_rows(one, many, what)
            if self.spec.is_exact:
                self.made.append("ranks")
                if "before" in one[0]:
                    self._compare_before(one[0]["before"], many[0]["before"], what)
                self.must_be_close(ON_OTHER_RANKS, one[0], many[0], "ranks", what)
            else:
                self._compare_first_loss(one[0], many[0], what)

    def _compare_rows(self, one: list[Outcome], many: list[Outcome], what: str) -> None:
        if not self.spec.notes_rows:
            return
        rows, others = rows_of(one), rows_of(many)
        if self.spec.repeats_forward:
            rows = {step: sorted({*each}) for step, each in rows.items()}
            others = {step: sorted({*each}) for step, each in others.items()}
        if not self.spec.is_exact:  # a metric may have ended one of them earlier
            others = {step: each for step, each in others.items() if step in rows}
            rows = {step: each for step, each in rows.items() if step in others}
        if found := difference(rows, others):
            raise Disagreement("ranks: rows", f"{what}: {found}")

    def _compare_before(self, one: Outcome, other: Outcome, what: str) -> None:
        """Compare evaluate and predict of the same parameters: outputs and the built-in metrics have the same bits."""
        must_agree(["predict"], one, other, "ranks before training", what)
        must_agree(["evaluate"], one, other, "ranks before training", what, LAST_DIGIT)
        must_agree(["loss", "accuracy"], one["evaluate"], other["evaluate"], "ranks before training", what)

    def _compare_first_loss(self, one: Outcome, other: Outcome, what: str) -> None:
        spec = self.spec
        if (
            spec.differs_by_rank
            or spec.repeats_forward
            or spec.ddp.get("compression") == "powersgd"
            or not one["history"]["train_losses"]
        ):
            return
        tolerance = COARSE[spec.precision if spec.precision != "fp32" else spec.ddp.get("compression", "float32")]
        self.made.append("first loss")
        losses = [{"first loss": each["history"]["train_losses"][0]} for each in (one, other)]
        must_agree(["first loss"], losses[0], losses[1], "ranks", what, tolerance)

    def must_be_close(self, parts: Sequence[str], one: Outcome, other: Outcome, kind: str, what: str) -> None:
        """Compare up to rounding, which LBFGS amplifies: what it has trained, if it has converged, and no counts."""
        if not self.spec.optimizer.startswith("lbfgs"):
            must_agree(parts, one, other, kind, what, ROUNDING)
        elif all(loss < DIVERGED for each in (one, other) for loss in each["history"]["train_losses"]):
            trained = [part for part in parts if part in ("params", "buffers", "step", "epoch")]
            must_agree(trained, one, other, kind, what, LINE_SEARCH)

    def compare_with_plain_loop(self) -> None:
        size = min(self.runs)
        run, rows = self.runs[size][0], rows_of(self.runs[size])
        [ended] = self.worlds.by_size[1].run(repeat, self.spec, Job(1, str(self.folder / "loop")))
        if ended.error is not None:
            raise Disagreement("plain loop: error", ended.traceback[-1500:])
        loop, what = ended.value, f"{size} ranks"
        self.made.append("plain loop")
        if self.spec.notes_rows and (found := difference(loop["rows"], rows)):
            raise Disagreement("plain loop: rows", f"{what}: {found}")
        if found := difference(loop["losses"], run["history"]["train_losses"], ROUNDING):
            raise Disagreement("plain loop: losses", f"{what}: {found}")
        must_agree(["params"], loop, run, "plain loop", what, ROUNDING)
        validations = run["history"]["validations"]
        if "val_loss" in loop and validations and validations[-1]["step"] == run["step"]:
            last = {"val_loss": run["history"]["val_losses"][-1]}
            must_agree(["val_loss"], loop, last, "plain loop", what, ROUNDING)

    def compare_variant(self, name: str) -> None:
        variant = VARIANTS[name](self.spec)
        if variant is None:
            return
        try:
            other = self.again(variant.spec, "variant", is_whole=True)
        except Refused as error:
            if name in MAY_BE_REFUSED:
                return
            raise Disagreement(f"variant {name}: refused", str(error)) from None
        self.made.append(f"variant {name}")
        what = f"{self.size} ranks"
        must_agree(variant.same, self.run[0], other[0], f"variant {name}", what)
        self.must_be_close(variant.close, self.run[0], other[0], f"variant {name}", what)

    def again(self, spec: Spec, name: str, size: int | None = None, **job: Any) -> list[Outcome]:
        """Run another program in a folder of that name; return what the ranks agree on."""
        ranks = self.ranks if size is None else self.worlds.by_size[size]
        ended = ranks.run(run_program, spec, Job(ranks.size, str(self.folder / name), **job))
        return agreed(ended, f"{name}, {ranks.size} ranks")

    def compare_resumed(self) -> None:
        """Save checkpoints, which must change nothing, and resume from them."""
        saving = {"checkpoint_every_n_steps": self.checks.save_every}
        whole = self.again(self.spec, "saving", fit=saving)
        if not self.spec.batches_between and not self.spec.evaluates_between:
            must_agree(["params", "buffers", "history", "second_history"], self.run[0], whole[0], "saving", "")
        _Resumed(self, whole, saving).compare()


class _Resumed:
    """Resumed runs, against one that was not interrupted."""

    def __init__(self, examination: _Examination, whole: list[Outcome], saving: dict[str, Any]) -> None:
        self.examination, self.whole, self.saving = examination, whole, saving
        self.spec, self.checks = examination.spec, examination.checks
        self.random = random.Random(self.checks.seed)

    def compare(self) -> None:
        kinds = self.checks.resumes
        files = self._files("saving")
        if self.spec.second_fit is None and files and not self.spec.load_best:  # best.ckpt is in the other folder
            file = self.random.choice(files)
            if "path" in kinds:
                self._resume("path", "resumed", file)
                if "twice" in kinds and (later := self._files("resumed")):
                    self._resume("twice", "resumed twice", self.random.choice(later))
            if "other" in kinds and self.spec.is_exact and self.spec.batch[0] != "per":
                self._resume_on_other_ranks(file)
        if "ctrl_c" in kinds and self.whole[0]["step"] > 1:
            self._stop_by_ctrl_c()
        if "longer" in kinds and self._may_be_prolonged():
            self._prolong()

    def _files(self, folder: str) -> list[Path]:
        return sorted(each for kind in ("step", "epoch") for each in (self._folder / folder).glob(f"{kind}*.ckpt"))

    @property
    def _folder(self) -> Path:
        return self.examination.folder

    def _same(self, other: list[Outcome], kind: str, what: str) -> None:
        self.examination.made.append(f"resume {kind}")
        must_agree(TRAINED, self.whole[0], other[0], f"resume {kind}", what)
        self._same_rows(other, what)

    def _same_rows(self, other: list[Outcome], what: str) -> None:
        if self.spec.notes_rows and not self.spec.repeats_forward:
            rows, others = rows_of(self.whole), rows_of(other)
            if found := difference({step: rows.get(step) for step in others}, others):
                raise Disagreement("resume: rows", f"{what}: {found}")

    def _resume(self, kind: str, folder: str, file: Path) -> None:
        found = self.examination.again(self.spec, folder, fit=self.saving | {"resume": str(file)})
        self._same(found, kind, f"{self.examination.size} ranks, from {file.name} of {self.whole[0]['step']} steps")

    def _resume_on_other_ranks(self, file: Path) -> None:
        size = next(each for each in (3, 2, 1) if each != self.examination.size)
        what = f"{file.name} of {self.examination.size} ranks on {size}"
        try:
            found = self.examination.again(self.spec, "others", size, fit=self.saving | {"resume": str(file)})
        except Refused as error:
            raise Disagreement("resume other: refused", f"{what}: {error}") from None
        self.examination.made.append("resume other")
        self._same_rows(found, what)
        self.examination.must_be_close(ON_OTHER_RANKS_RESUMED, self.whole[0], found[0], "resume other", what)

    def _stop_by_ctrl_c(self) -> None:
        step = self.random.randrange(1, self.whole[0]["step"])
        rank = self.random.randrange(self.examination.size)
        fit = self.saving | {"resume": "auto"}
        stopped = self.examination.again(self.spec, "stopped", fit=fit, stop_at=("ctrl_c", step, rank), evaluates=False)
        if stopped[0]["is_stopped"]:
            found = self.examination.again(self.spec, "stopped", fit=fit)
            self._same(found, "ctrl_c", f"{self.examination.size} ranks, Ctrl-C on rank {rank} after step {step}")

    def _may_be_prolonged(self) -> bool:
        """Return whether a longer fit begins like a shorter one."""
        spec = self.spec
        knows_its_end = spec.scheduler not in (None, "constant", *SCHEDULES) or spec.warmup_steps
        ends_otherwise = spec.load_best or spec.initial_epoch is not None or spec.fast_dev_run or spec.second_fit
        return not (knows_its_end or ends_otherwise or spec.has_callback("ema", "swa", "early"))

    def _prolong(self) -> None:
        field = "epochs" if self.spec.max_steps is None else "max_steps"
        length = getattr(self.spec, field)
        if length < 2:
            return
        shorter = self.random.randrange(1, length)
        what = f"{self.examination.size} ranks, {shorter} {field}, then {length}"
        try:
            length_alone: dict[str, Any] = {field: shorter}
            short = dataclasses.replace(self.spec, **length_alone)
            self.examination.again(short, "longer", fit=self.saving, evaluates=False)
            found = self.examination.again(self.spec, "longer", fit=self.saving | {"resume": "auto"})
        except Refused as error:
            if "drop_last" in str(error) or "fraction" in str(error):  # of a fit that is too short for them
                return
            raise Disagreement("resume longer: refused", f"{what}: {error}") from None
        self._same(found, "longer", what)


def agreed(ended: Sequence[Ended], what: str) -> list[Outcome]:
    """Return the outcomes of all ranks, which must be the same to the bit."""
    errors = [each for each in ended if each.error is not None]
    if len(errors) == len(ended) and all(each.kind == "ConfigError" for each in errors):
        raise Refused(errors[0].message)
    if errors:
        kinds = "/".join(sorted({str(each.kind) for each in errors}))
        texts = [f"rank {each.rank}: {each.kind}: {each.message[:300]}" for each in errors]
        where = errors[0].traceback[-1500:]
        raise Disagreement(f"error {kinds}", f"{what}, {len(ended) - len(errors)} ranks returned: {texts}\n{where}")
    outcomes = [each.value for each in ended]
    for rank, outcome in enumerate(outcomes):
        must_agree(EVERYTHING, outcomes[0], outcome, "ranks differ", f"{what}, rank {rank}")
        if "note" in outcome:
            raise Disagreement("left behind", f"{what}: {outcome['note']}")
    return outcomes


def must_agree(
    parts: Sequence[str], one: Outcome, other: Outcome, kind: str, what: str, tolerance: Tolerance | None = None
) -> None:
    """Compare the parts that the first outcome has."""
    for part in parts:
        if part in one and (found := difference(one[part], other.get(part), tolerance)):
            raise Disagreement(f"{kind}: {part}", f"{what}: {found}")


def rows_of(outcomes: Sequence[Outcome]) -> dict[int, list[int]]:
    """Return the rows of each step, of all ranks together."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for outcome in outcomes:
        for step, rows in outcome["rows"].items():
            found[step] += rows
    return {step: sorted(rows) for step, rows in found.items()}


def difference(one: Any, other: Any, tolerance: Tolerance | None = None, path: str = "") -> str | None:
    """Return the first difference between two trees; without a tolerance, numbers must have the same bits."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if {*map(str, one)} != {*map(str, other)}:
            return f"{path}: {sorted(map(str, one))} and {sorted(map(str, other))}"
        pairs = [(name, one[name], other[name]) for name in one]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{path}: {len(one)} and {len(other)} of them"
        pairs = [(index, *pair) for index, pair in enumerate(zip(one, other, strict=True))]
    elif all(isinstance(each, int | float | np.ndarray) for each in (one, other)):
        return _difference_of_numbers(np.asarray(one), np.asarray(other), tolerance or (0.0, 0.0), path)
    else:
        return None if one == other else f"{path}: {one!r} and {other!r}"
    found = (difference(mine, its, tolerance, f"{path}/{name}") for name, mine, its in pairs)
    return next(filter(None, found), None)


def _difference_of_numbers(one: Any, other: Any, tolerance: Tolerance, path: str) -> str | None:
    if one.shape != other.shape:
        return f"{path}: {one.shape} and {other.shape}"
    if one.dtype.kind not in "fciub":
        return None if np.array_equal(one, other) else f"{path}: {one} and {other}"
    if np.allclose(one, other, *tolerance, equal_nan=True):
        return None
    if one.ndim == 0:
        return f"{path}: {one.item()!r} and {other.item()!r}"
    return f"{path}: {np.nanmax(np.abs(one - other)):.3g} apart, of values up to {np.nanmax(np.abs(one)):.3g}"
