"""Claims about validations: within epochs, of several sets, of rows that are held out; what they decide and record."""

from __future__ import annotations

import csv
import functools
import io
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import CLASSES, FEATURES, everywhere, fingerprint, make_model, make_rows, one_process, run_world, seeded
from markers import by_night, nightly_where
from refusals import refuses
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS, VALID, FAR = make_rows(40), make_rows(9, seed=1), make_rows(7, seed=2)
FIT: dict[str, Any] = {"effective_batch_size": 4, "epochs": 2, "verbose": False, "validation_data": VALID}
"""Ten steps an epoch."""
NAMED = {"near": VALID, "far": DataLoader(TensorDataset(*FAR), 3)}


def make_trainer(model: nn.Module | None = None) -> cx.DistributedTrainer:
    with seeded():
        layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES))
    model = model or layers
    return cx.DistributedTrainer(model, "cross_entropy", torch.optim.Adam(model.parameters(), 0.05), metrics=["f1"])


def fit(**more: Any) -> cx.DistributedTrainer:
    trainer = make_trainer()
    trainer.fit(*ROWS, **{**FIT, **more})
    return trainer


def steps_of(history: cx.TrainingHistory) -> list[tuple[float, float]]:
    return [(row["epoch"], row["step"]) for row in history.validations]


@functools.cache
def plain(max_steps: int | None) -> tuple[str, list[float]]:
    """What a fit comes to that validates after each epoch."""
    with one_process():
        trainer = fit(max_steps=max_steps)
    return fingerprint(trainer.model), trainer.history.train_losses


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        by_night({}, [(1, 10), (2, 20)]),
        by_night({"validation_freq": 2}, [(2, 20)]),
        by_night({"validate_every_n_steps": 4}, [(1, 4), (1, 8), (2, 12), (2, 16), (2, 20)]),
        ({"validate_every_n_steps": 7}, [(1, 7), (2, 14), (2, 20)]),
        by_night({"validate_every_n_steps": 99}, [(2, 20)]),
        ({"validation_freq": 0.5}, [(1, 5), (1, 10), (2, 15), (2, 20)]),
        by_night({"validation_freq": 0.3}, [(1, 3), (1, 6), (1, 9), (1, 10), (2, 13), (2, 16), (2, 19), (2, 20)]),
        ({"validation_freq": 0.3, "max_steps": 8}, [(1, 3), (1, 6), (1, 8)]),
        ({"validate_every_n_minutes": 1e-9, "max_steps": 3}, [(1, 1), (1, 2), (1, 3)]),
        ({"validate_every_n_minutes": 1e9, "max_steps": 3}, [(1, 3)]),
    ],
)
def test_validations_come_when_they_are_asked_for_and_training_stays_the_same(settings, steps):
    with one_process():
        found = fit(**settings)
    assert steps_of(found.history) == steps
    assert (fingerprint(found.model), found.history.train_losses) == plain(settings.get("max_steps"))
    last = {row["epoch"]: row["val_loss"] for row in found.history.validations}
    assert [last.get(epoch) for epoch in found.history.epochs][-1] == found.history.val_losses[-1]


class Hooks(cx.callbacks.Callback):
    """Which hooks of validations are called, and when."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_test_begin(self, logs: Any = None) -> None:
        self.calls.append(("begin", self.trainer.step))

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append(("end", sorted(logs)))

    def on_validation_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append((epoch, sorted(logs)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(sorted(logs))


def test_each_validation_calls_the_hooks():
    hooks = Hooks()
    with one_process():
        fit(validate_every_n_steps=6, epochs=1, callbacks=hooks)
    names = ["accuracy", "f1", "loss"]
    of_validation = [f"val_{name}" for name in names]
    each = [("end", names), (0, of_validation)]
    assert hooks.calls == [("begin", 6), *each, ("begin", 10), *each, sorted([*names, "learning_rate", *of_validation])]


def rows_of() -> list[list[dict[str, float]]]:
    ways = ({"validate_every_n_steps": 6, "validation_data": NAMED}, {"validate_every_n_minutes": 1e-9, "max_steps": 2})
    # A model without dropout, which every rank would draw for itself.
    return [make_trainer(make_model()).fit(*ROWS, **{**FIT, **way}).validations for way in ways]


@pytest.mark.parametrize("world_size", [2, by_night(4)])
def test_they_are_the_same_on_any_number_of_ranks(world_size):
    [alone] = everywhere(1, rows_of)
    ranks = run_world(world_size, rows_of)
    for found in ranks:
        assert found == ranks[0]
        for ours, theirs in zip(found, alone, strict=True):
            assert len(ours) == len(theirs)
            assert all(our == pytest.approx(their, rel=1e-5) for our, their in zip(ours, theirs, strict=True))
    assert [row["step"] for row in alone[1]] == [1, 2]


class StopsAt(cx.callbacks.Callback):
    """Stops the first time that a batch is validated after some steps, by a signal; and saves each step by hand."""

    def __init__(self, step: int, folder: Path) -> None:
        self.step, self.folder = step, folder

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trainer.save_checkpoint(self.folder / f"by-hand-{self.trainer.step:02d}.ckpt")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.trainer.step == self.step:
            self.step = 0
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(
    ("freq", "places", "stops"),
    [
        ({"validate_every_n_steps": 4}, (3, -5), (8,)),
        by_night({"validate_every_n_steps": 4}, (3, 4, 9, -5), (4, 8, 20)),
        by_night({"validation_freq": 0.4}, (3, 4, 9, -5), (4, 8, 20)),
    ],
)
def test_a_fit_resumes_between_and_within_validations(freq, places, stops, tmp_path):
    """Stops are within an epoch; in the last one; at its end."""
    early = {"monitor": "val_f1", "patience": 9, "restore_best_weights": True}

    def run(**more: Any) -> tuple[Any, ...]:
        callbacks = [cx.callbacks.EarlyStopping(**early), *more.pop("callbacks", ())]
        trainer = make_trainer()
        try:
            trainer.fit(*ROWS, **{**FIT, **freq, **more}, callbacks=callbacks, checkpoint_dir=str(tmp_path / "runs"))
        except KeyboardInterrupt:
            return ()
        numbers = trainer.history.to_dict()
        return fingerprint(trainer.model), numbers["validations"], numbers["val_losses"], numbers["train_losses"]

    with one_process():
        whole = run(checkpoint_every_n_steps=2, callbacks=[StopsAt(0, tmp_path)])
        paths = [*sorted(tmp_path.glob("by-hand-*")), *sorted(tmp_path.glob("runs/step-*"))]
        assert len(paths) == 30
        for place in places:
            assert run(resume=str(paths[place])) == whole
        for step in stops:
            for path in tmp_path.glob("runs/*"):
                path.unlink()
            kept = {"checkpoint_every_n_epochs": 9, "resume": "auto"}
            assert run(**kept, callbacks=[StopsAt(step, tmp_path)]) == ()
            assert run(**kept) == whole


# --- what they decide ----------------------------------------------------------------------------------------------


def stopped_by(patience: int, who: int) -> list[Any]:
    early = [cx.callbacks.EarlyStopping("val_loss", patience=patience, min_delta=1e9)] if cx.get_rank() == who else []
    trainer = fit(validate_every_n_steps=3, callbacks=early)
    return [trainer.step, steps_of(trainer.history), len(trainer.history.train_losses)]


def test_early_stopping_stops_at_the_validation_on_all_ranks():
    for world_size, who in ((1, 0), (2, 1)):
        for found in everywhere(world_size, stopped_by, 2, who):
            assert found == [9, [(1, 3), (1, 6), (1, 9)], 1]


def test_patience_counts_validations():
    plateau = cx.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=2, min_delta=1e9)
    early = cx.callbacks.EarlyStopping("val_loss", patience=4, min_delta=1e9)
    with one_process():
        trainer = fit(validate_every_n_steps=2, callbacks=[plateau, early])
    assert trainer.step == 10
    assert trainer.optimizer.param_groups[0]["lr"] == 0.05 * 0.5 * 0.5
    assert early.stop_reason.startswith("val_loss has not improved for 4 validations")


@pytest.mark.parametrize("better", [by_night("val_loss"), "val_f1"])
def test_the_best_validation_is_kept_and_its_weights_loaded(better, tmp_path):
    class Weights(cx.callbacks.Callback):
        def on_validation_end(self, epoch: int, logs: Any = None) -> None:
            found[self.trainer.step] = fingerprint(self.model)

    found: dict[int, str] = {}
    kept = {"keep_best": better, "checkpoint_dir": str(tmp_path), "resume": "auto"}
    with one_process():
        trainer = fit(validate_every_n_steps=3, load_best=True, callbacks=Weights(), **kept)
        rows = trainer.history.validations
        values = [row[better] for row in rows]
        best = int(rows[values.index(max(values) if better == "val_f1" else min(values))]["step"])
        assert best != 20  # the last weights are others
        assert fingerprint(trainer.model) == found[best]
        assert read_checkpoint(tmp_path / "best.ckpt").position["step"] == best
        again = fit(validate_every_n_steps=3, load_best=True, **kept)  # nothing is left to train
        assert fingerprint(again.model) == found[best]
        assert fingerprint(fit(validate_every_n_steps=3, **kept).model) == found[20]


def saved_best(folder: str, average: bool, resume: str | None = None) -> Any:
    """Whether ModelCheckpoint keeps the weights that `load_best` loads, and the numbers of the fit."""
    averages = [cx.callbacks.EMA(0.7)] if average else []
    saving = [cx.callbacks.ModelCheckpoint(f"{folder}/own.ckpt", save_best_only=True)]
    saving += [cx.callbacks.ModelCheckpoint(f"{folder}/weights", save_best_only=True, save_weights_only=True)]
    saving += [cx.callbacks.ModelCheckpoint(f"{folder}/all-{{epoch}}-{{step}}-{{loss:.1f}}.ckpt", save_best_only=True)]
    kept = {"keep_best": "val_loss", "checkpoint_dir": f"{folder}/runs"}
    trainer = fit(validate_every_n_steps=3, callbacks=[*saving, *averages], load_best=True, resume=resume, **kept)
    history, found = trainer.history.to_dict(), fingerprint(trainer.model)
    cx.load_weights(trainer.model, f"{folder}/weights")
    return [found == fingerprint(trainer.model), history["validations"], history["train_losses"]]


@pytest.mark.parametrize(("world_size", "average"), [(1, True), by_night(2, False)])
def test_a_callback_saves_the_best_validation_as_keep_best_does(world_size, average, tmp_path):
    for found in everywhere(world_size, saved_best, str(tmp_path), average):
        assert found[0]  # the weights that were validated, an average too
    values = [row["val_loss"] for row in found[1]]
    best = int(found[1][values.index(min(values))]["step"])
    assert best % 10, "it is within an epoch"
    for path in (tmp_path / "own.ckpt", tmp_path / "runs" / "best.ckpt"):
        assert read_checkpoint(path).position["step"] == best
    assert [*tmp_path.glob(f"all-?-{best}-nan.ckpt")]
    if world_size == 1:
        with one_process(), pytest.warns(UserWarning, match="load_best: this fit has no"):  # it is a new run
            again = saved_best(str(tmp_path), average, str(tmp_path / "own.ckpt"))
        assert again[1:] == found[1:]


@nightly_where(lambda first, validates: not first or not validates)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("validates", [True, False])
def test_the_best_weights_are_those_that_were_validated(validates, first, tmp_path):
    class Weights(cx.callbacks.Callback):
        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            found[self.trainer.step] = fingerprint(self.model)

    found: dict[int, str] = {}

    def run(**more: Any) -> tuple[str, int]:
        average = cx.callbacks.EMA(0.7, validates=validates)
        callbacks = [average, *more.pop("callbacks", ())]
        callbacks = [*(callbacks if first else callbacks[::-1]), Weights()]
        trainer = fit(validate_every_n_steps=3, callbacks=callbacks, **more)
        rows = trainer.history.validations
        return fingerprint(trainer.model), int(min(rows, key=lambda row: row["val_loss"])["step"])

    with one_process():
        early = cx.callbacks.EarlyStopping(patience=99, restore_best_weights=True)
        for more in (
            {"keep_best": "val_loss", "load_best": True, "checkpoint_dir": str(tmp_path)},
            {"callbacks": [early]},
        ):
            weights, step = run(**more)
            assert step != 20
            assert weights == found[step]


@pytest.mark.parametrize(
    ("early", "steps", "reason"),
    [
        ({"patience": 2}, 9, "val_near_loss has not improved for 2 validations; best 1.*at step 3$"),
        ({"patience": 2, "start_from_epoch": 1}, 18, "for 2 validations; best .* at step 12$"),
        by_night({"patience": 3, "baseline": -1.0}, 9, "for 3 validations; best"),
        ({"patience": 2, "monitor": "val_far_accuracy", "mode": "max"}, 9, "val_far_accuracy has not improved"),
    ],
)
def test_early_stopping_counts_validations_of_any_set_within_epochs(early, steps, reason, capsys):
    early = {"monitor": "val_near_loss", "min_delta": 1e9, **early}
    stopping = cx.callbacks.EarlyStopping(**early, verbose=1, restore_best_weights=True)
    with one_process():
        trainer = fit(validate_every_n_steps=3, epochs=9, validation_data=NAMED, callbacks=stopping, verbose=True)
    assert trainer.step == steps
    assert re.search(reason, stopping.stop_reason)
    shown = capsys.readouterr().out
    assert f"\nstopped    after step {steps}, in epoch {1 + steps // 10} of 9: {stopping.stop_reason}\n" in shown
    assert re.search(
        r"epoch \d: early stopping, val_\w+ was best at step \d+\nrestored the weights of step \d+\n", shown
    )


def test_without_a_best_checkpoint_the_last_weights_stay(tmp_path):
    with one_process():
        fit(keep_best="val_loss", checkpoint_dir=str(tmp_path))
        with pytest.warns(UserWarning, match="this fit has no .*best.ckpt"):
            make_trainer().fit(
                *ROWS,
                **{**FIT, "validation_freq": [9]},
                keep_best="val_loss",
                load_best=True,
                checkpoint_dir=str(tmp_path / "other"),
            )


# --- where they are recorded ---------------------------------------------------------------------------------------


def test_files_have_a_line_for_each_validation(tmp_path):
    path = tmp_path / "lines.csv"
    with one_process():
        trainer = fit(validate_every_n_steps=4, callbacks=cx.callbacks.CSVLogger(path))
    history = trainer.history
    lines = [*csv.DictReader(io.StringIO(history.to_csv()))]
    assert [(line["epoch"], line["step"]) for line in lines] == [(str(e), str(s)) for e, s in steps_of(history)]
    assert [line["train_loss"] != "" for line in lines] == [False, True, False, False, True]
    assert [float(line["val_f1"]) for line in lines] == [row["val_f1"] for row in history.validations]
    assert cx.TrainingHistory.from_json(history.to_json()) == history
    logged = [*csv.DictReader(path.open())]
    assert [line["step"] for line in logged] == ["4", "8", "10", "12", "16", "20"]
    assert [line["loss"] != "" for line in logged] == [False, False, True, False, False, True]
    assert [float(line["val_loss"]) for line in logged[:2]] == [row["val_loss"] for row in history.validations[:2]]


def test_lines_are_printed(capsys):
    with one_process():
        fit(validate_every_n_steps=4, epochs=1, verbose=True, log_every_n_steps=5, validation_data=NAMED)
        fit(validation_freq=0.5, epochs=1, callbacks=cx.callbacks.ProgressBar(), validation_data=NAMED)
    lines = capsys.readouterr().out.splitlines()
    [first] = [number for number, line in enumerate(lines) if line.endswith("step 4")]
    assert lines[first + 1].startswith("  val_near  loss ")
    assert lines[first + 2].startswith("  val_far   loss ")
    assert sum("val_near" in line for line in lines) == 4  # after steps 4, 8 and 10; in the other fit after the epoch
    assert not any("val_loss" in line for line in lines)  # it is the same number
    assert sum("batch 5/10" in line or "batch 10/10" in line for line in lines) == 2
    assert any("9 samples near, 7 samples far for validation" in line for line in lines)


def test_the_old_name_for_logging_warns(capsys):
    with one_process(), pytest.warns(UserWarning, match="log_every_n_batches is deprecated: use log_every_n_steps"):
        fit(log_every_n_batches=5, epochs=1, verbose=True)
    assert "batch 10/10" in capsys.readouterr().out


# --- several sets --------------------------------------------------------------------------------------------------


def test_several_sets_have_names_and_the_first_has_the_plain_ones_too(tmp_path):
    early = cx.callbacks.EarlyStopping("val_far_f1", patience=1, min_delta=1e9)
    kept = {"keep_best": "val_far_loss", "checkpoint_dir": str(tmp_path)}
    with one_process():
        trainer = fit(validation_data=NAMED, epochs=9, callbacks=early, **kept)
        near, far = trainer.evaluate(*VALID), trainer.evaluate(*FAR)
    numbers = trainer.history.history
    names = [f"val_{name}{metric}" for name in ("", "near_", "far_") for metric in ("loss", "accuracy", "f1")]
    assert {name for name in numbers if name.startswith("val_")} == set(names)
    assert trainer.epoch == 2
    assert numbers["val_loss"] == numbers["val_near_loss"] == trainer.history.val_losses
    assert numbers["val_near_loss"][-1] == near.loss
    assert numbers["val_far_f1"][-1] == far["f1"]
    assert (tmp_path / "best.ckpt").exists()


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        scores = self.layer(rows)
        return {"scores": scores} if labels is None else {"loss": nn.functional.cross_entropy(scores, labels)}


def named_inputs(rows: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"rows": rows[0], "labels": rows[1]}


def test_a_mapping_of_arrays_is_one_set_with_named_inputs():
    with one_process():
        model = ByName()
        trainer = cx.DistributedTrainer(model, None, torch.optim.SGD(model.parameters(), 0.1))
        for given, names in (
            (named_inputs(VALID), ["val_loss"]),
            ({"a": named_inputs(VALID), "b": named_inputs(FAR)}, ["val_loss", "val_a_loss", "val_b_loss"]),
        ):
            history = trainer.fit(named_inputs(ROWS), epochs=1, validation_data=given, verbose=False)
            assert [name for name in history.history if name.startswith("val_")] == names


def fit_with(data: Any, **more: Any) -> None:
    fit(validation_data=data, **more)


test_what_makes_no_sense_is_refused = refuses(
    (lambda: fit_with({"near": VALID, "far": FAR[0]}), "'far' with no y: give each set its y"),
    (lambda: fit_with({}), "validation_data has no set"),
    (lambda: fit_with({1: VALID}), "validation_data has 1: give each set its y and a name"),
    (lambda: fit_with({"near": (1, 2, 3, 4)}), r"validation_data\['near'\] must be \(X_val, y_val\)"),
    (lambda: fit_with({"a": VALID, "far": (FAR[0][:, :2], FAR[1])}), "validation data 'far': "),
    (lambda: fit_with({"a": VALID}, keep_best="val_b_loss"), "keep_best='val_b_loss': no such metric"),
    (lambda: fit_with(None, validate_every_n_steps=5), "validate_every_n_steps=5 needs validation data"),
    (lambda: fit_with(None, validation_freq=0.5), "validation_freq=0.5 needs validation data"),
    (lambda: fit(validation_freq=2, validate_every_n_steps=5), "validation_freq=2 and validate_every_n_steps"),
    (lambda: fit(load_best=True), "load_best=True needs keep_best"),
    (lambda: fit(validation_stratify=True), "validation_stratify=True needs validation_split"),
    (lambda: fit(validation_groups=[1] * 40), "validation_groups needs validation_split"),
    (
        lambda: make_trainer().fit(lambda: iter([ROWS]), validation_data=VALID, validation_freq=0.5, verbose=False),
        "the number of batches is unknown: set steps_per_epoch",
    ),
    (
        lambda: fit(callbacks=[cx.callbacks.EMA(0.9), cx.callbacks.SWA(0)]),
        "validation uses one average, and EMA and SWA have one",
    ),
)


# --- rows that are held out ----------------------------------------------------------------------------------------


class Noting(nn.Module):
    """A model that notes which rows it is trained on and validated with: their first feature is the number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)
        self.seen: dict[bool, set[int]] = {True: set(), False: set()}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen[self.training].update(rows[:, 0].long().tolist())
        return self.layer(rows)


def held_out(labels: Any, **settings: Any) -> tuple[list[int], list[int]]:
    """Returns which rows all ranks train on, and which they validate with."""
    model, count = Noting(), len(labels)
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    begin = cx.callbacks.LambdaCallback(on_train_begin=lambda logs: [each.clear() for each in model.seen.values()])
    numbers = torch.arange(count, dtype=torch.float32)[:, None]
    given = {"epochs": 1, "batch_size": 4, "verbose": False, "validation_split": 0.25, "callbacks": begin}
    trainer.fit(numbers, torch.as_tensor(labels), **{**given, **settings})
    table = torch.zeros(2, count)
    for row, each in enumerate((True, False)):
        table[row, sorted(model.seen[each])] = 1.0
    cx.all_reduce(table)
    return table[0].nonzero().flatten().tolist(), table[1].nonzero().flatten().tolist()


LABELS = [0] * 30 + [1] * 10
GROUPS = [f"patient {number % 7}" for number in range(40)]


def split_in_both_ways() -> list[Any]:
    seeds = (1, 1, 2)
    stratified = [held_out(LABELS, validation_stratify=True, seed=seed) for seed in seeds]
    return stratified + [held_out(LABELS, validation_groups=GROUPS, seed=seed) for seed in seeds]


def test_rows_are_held_out_by_class_and_by_group_on_any_number_of_ranks():
    [found] = everywhere(1, split_in_both_ways)
    for train, validation in found:
        assert sorted(train + validation) == list(range(40))
    for _, validation in found[:3]:
        assert [LABELS[row] for row in validation].count(0) in (7, 8)
        assert len(validation) == 10
    for train, validation in found[3:]:
        assert 0 < len(validation) <= 10
        assert not {GROUPS[row] for row in train} & {GROUPS[row] for row in validation}
    assert found[0] == found[1] != found[2]
    assert found[3] == found[4] != found[5]
    for rank in run_world(2, split_in_both_ways):
        assert rank == found


test_rows_that_cannot_be_held_out_are_refused = refuses(
    (lambda: held_out(LABELS[:-9], validation_stratify=True), "needs two samples of each class, and these have one: 1"),
    (lambda: held_out(np.ones((40, 2), "float32"), validation_stratify=True), r"y is torch.float32 of shape \[40, 2\]"),
    (
        lambda: held_out(LABELS, validation_groups=GROUPS[1:]),
        r"validation_groups has the shape \[39\], and X has 40 samples",
    ),
    (lambda: held_out(LABELS, validation_groups=[0] * 40), "validation_groups has 1 group"),
    (lambda: held_out(LABELS, validation_groups=GROUPS, validation_stratify=True), "Samples are held out in one way"),
)


# --- from a file, and by workers of a notebook ----------------------------------------------------------------------


def of_a_file() -> dict[str, Any]:
    """The data of an experiment."""
    return {"train": ROWS, "validation": {"near": VALID, "far": FAR}}


def test_a_file_has_the_settings_and_the_sets(tmp_path):
    training = {"max_steps": 7, "validate_every_n_steps": 3, "effective_batch_size": 8, "verbose": False}
    training |= {"keep_best": "val_far_loss", "load_best": True, "checkpoint_dir": str(tmp_path)}
    settings = {"model": {"name": "mlp", "inputs": FEATURES, "outputs": CLASSES}, "training": training}
    with one_process():
        experiment = cx.Experiment({**settings, "data": f"{__name__}:of_a_file", "loss_fn": "cross_entropy"})
        history = experiment.fit()
    assert [row["step"] for row in history.validations] == [3, 6, 7]
    assert "val_far_loss" in history.history


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX processes")
def test_workers_of_a_notebook_do_the_same():
    given = {"max_steps": 12, "validate_every_n_steps": 5, "validation_data": {"near": VALID, "far": FAR}}
    hooks = Hooks()
    hooks.stays_in_notebook = True
    try:
        history = fit(num_processes=2, callbacks=hooks, **given).history
    finally:
        cx.finalize()
    assert [row["step"] for row in history.validations] == [5, 10, 12]
    assert "val_far_loss" in history.validations[0]
    assert [call[0] for call in hooks.calls if call[0] in (0, 1)] == [0, 0, 1]
    for found in run_world(2, rows_of_workers):
        assert found == history.validations


def rows_of_workers() -> list[dict[str, float]]:
    given = {"max_steps": 12, "validate_every_n_steps": 5, "validation_data": {"near": VALID, "far": FAR}}
    return fit(**given).history.validations
