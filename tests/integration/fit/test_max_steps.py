"""Claims about max_steps: a fit ends after so many optimizer steps, in the middle of an epoch too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import (
    CLASSES,
    FEATURES,
    everywhere,
    fingerprint,
    flat,
    make_model,
    make_rows,
    one_process,
    run_world,
    seeded,
)
from markers import by_night
from torch import nn

import cyxtrain as cx
from cyxtrain.training.state import Position

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS, VALID = make_rows(40), make_rows(9, seed=1)
FIT: dict[str, Any] = {"effective_batch_size": 8, "verbose": False}
"""Five steps an epoch."""


class Steps(cx.callbacks.Callback):
    """The steps of each epoch, and the learning rate in each."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append((self.trainer.epoch, batch))
        self.rates.append(float(self.trainer.optimizer.param_groups[0]["lr"]))


def make_trainer(scheduler: Any = None) -> cx.DistributedTrainer:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return cx.DistributedTrainer(model, "cross_entropy", optimizer, scheduler=scheduler)


def test_a_fit_ends_after_so_many_steps_and_its_last_epoch_is_shorter():
    seen, trainer = Steps(), make_trainer()
    with one_process():
        history = trainer.fit(*ROWS, max_steps=7, validation_data=VALID, callbacks=seen, **FIT)
        assert seen.steps == [*((0, step) for step in range(5)), (1, 0), (1, 1)]
        assert history.epochs == [1, 2]
        assert len(history.val_losses) == 2
        assert [row["step"] for row in history.validations] == [5, 7]
        assert seen.params["epochs"] == 2
        trainer.fit(*ROWS, max_steps=7, **FIT)  # of this fit: those of earlier ones do not count
        assert trainer.step == 14


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_steps": 12, "effective_batch_size": 40}, 12),  # more than ten epochs, the default
        ({"max_steps": 100, "epochs": 2}, 10),
        ({"config": cx.DistributedTrainingConfig(max_steps=11)}, 11),
        ({"config": cx.DistributedTrainingConfig(epochs=1), "max_steps": 11}, 5),
        ({"max_steps": 3, "steps_per_epoch": 2}, 3),
        ({"max_steps": 9, "epochs": 3, "initial_epoch": 2}, 5),
        ({"max_steps": 9, "initial_epoch": 2}, 9),
        ({"max_steps": 9, "fast_dev_run": True}, 1),
    ],
)
def test_epochs_are_a_bound_or_absent(settings, steps):
    with one_process():
        trainer = make_trainer()
        trainer.fit(*ROWS, **{**FIT, **settings})
        assert trainer.step == steps


def on_ranks() -> tuple[Any, list[float]]:
    trainer = make_trainer("cosine")
    losses = trainer.fit(*ROWS, max_steps=7, **FIT).train_losses
    return flat(trainer.model.parameters()), losses


def test_it_is_the_same_on_more_ranks():
    [(parameters, losses)] = everywhere(1, on_ranks)
    for found in run_world(2, on_ranks):
        assert abs(found[0] - parameters).max() < 1e-6
        assert found[1] == pytest.approx(losses, rel=1e-6)


def test_schedules_have_as_many_steps():
    totals: list[int] = []

    def linear(optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        totals.append(total_steps)
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_steps)

    with one_process():
        assert cx.count_steps(*ROWS, max_steps=7, **FIT) == (5, 7)
        assert cx.count_steps(*ROWS, max_steps=7, epochs=1, **FIT) == (5, 5)
        assert cx.count_steps(iter([ROWS]), max_steps=7) == (7, 7)
        make_trainer(linear).fit(*ROWS, max_steps=7, warmup_steps=2, **FIT)
        make_trainer(linear).fit(*ROWS, max_steps=7, scheduler_interval="epoch", **FIT)
        make_trainer(linear).fit(lambda: iter([ROWS] * 9), max_steps=7, verbose=False)
    assert [*dict.fromkeys(totals)] == [5, 2, 7]
    seen = Steps()
    with one_process():
        make_trainer("linear").fit(*ROWS, max_steps=4, callbacks=seen, **FIT)
    assert seen.rates == pytest.approx([0.075, 0.05, 0.025, 0.0])


def test_it_resumes_from_any_step(tmp_path):
    def fit(**more: Any) -> str:
        trainer = make_trainer("cosine")
        trainer.fit(*ROWS, epochs=1, **FIT)
        trainer.fit(*ROWS, max_steps=7, checkpoint_dir=str(tmp_path), **FIT, **more)
        assert trainer.step == 12
        return fingerprint(trainer.model)

    with one_process():
        whole = fit(checkpoint_every_n_steps=1)
        paths = sorted(Path(tmp_path).glob("*.ckpt"))
        assert len(paths) == 8  # seven steps, and the end
        for path in (paths[0], paths[-2], paths[-1]):
            assert fit(resume=str(path)) == whole


def fit_longer(folder: str, shorter: dict[str, Any], longer: dict[str, Any]) -> list[Any]:
    """What a longer fit comes to, in one go and where it continues a shorter one."""

    def fit(**more: Any) -> list[Any]:
        with seeded():
            model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES))
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.Adam(model.parameters(), 0.05))
        early = cx.callbacks.EarlyStopping(patience=50, restore_best_weights=True)
        callbacks = [cx.callbacks.SWA(0), cx.callbacks.ReduceLROnPlateau(patience=1), early]
        history = trainer.fit(*ROWS, validation_data=VALID, callbacks=callbacks, **{**FIT, **more}).to_dict()
        del history["total_time_seconds"], history["samples_per_second"]
        return [fingerprint(model), early.wait, history]

    kept = {"checkpoint_dir": folder, "checkpoint_every_n_epochs": 1}
    whole = fit(**longer)
    fit(**shorter, **kept)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the fit resumed from .*: lr")  # the callback's
        return [whole, fit(**longer, **kept, resume="auto")]


@pytest.mark.parametrize(
    ("world_size", "shorter", "longer"),
    [
        by_night(1, {"max_steps": 7}, {"max_steps": 13}),
        by_night(2, {"max_steps": 7}, {"max_steps": 13}),
        by_night(1, {"max_steps": 7, "scheduler_interval": "epoch"}, {"epochs": 2, "scheduler_interval": "epoch"}),
        (1, {"max_steps": 7, "epochs": 2, "validate_every_n_steps": 3}, {"epochs": 2, "validate_every_n_steps": 3}),
        by_night(2, {"epochs": 1, "validate_every_n_steps": 3}, {"epochs": 2, "validate_every_n_steps": 3}),
    ],
)
def test_a_longer_fit_continues_where_the_shorter_one_ended(world_size, shorter, longer, tmp_path):
    for whole, again in everywhere(world_size, fit_longer, str(tmp_path), shorter, longer):
        assert again == whole


class Hooks(cx.callbacks.Callback):
    """Notes the validations of a fit."""

    def __init__(self) -> None:
        self.validations: list[int] = []

    def on_test_begin(self, logs: Any = None) -> None:
        self.validations.append(self.trainer.step)


def fit_by_rank(folder: str, settings: dict[str, Any], saves: str = "") -> list[Any]:
    """A fit with more samples in a step on more ranks, unless it continues another one; saved at its end."""
    hooks = Hooks()
    trainer = make_trainer()
    kept = {"checkpoint_dir": folder, "checkpoint_every_n_epochs": 1, "validate_every_n_steps": 3, "verbose": False}
    given = {"epochs": 1, "batch_size": 3, "resume": "auto", "callbacks": hooks, "validation_data": VALID}
    history = trainer.fit(*make_rows(48), **{**given, **kept, **settings})
    if saves:
        trainer.save_checkpoint(saves)
    return [trainer.step, hooks.validations, history.train_losses]


def steps_of(ranks: int) -> int:
    """Of an epoch: twice as many ranks take half as many steps."""
    return 16 // ranks


def validated(first: int, last: int) -> list[int]:
    return [step for step in range(first, last + 1) if step % 3 == 0 or step == last]


@pytest.mark.parametrize(("few", "many"), [(1, 2), by_night(2, 4)])
def test_a_longer_fit_on_more_ranks_counts_the_steps_of_the_checkpoint(few, many, tmp_path):
    steps = steps_of(few)
    whole, *_ = everywhere(few, fit_by_rank, str(tmp_path / "whole"), {})
    everywhere(few, fit_by_rank, str(tmp_path / "kept"), {"max_steps": steps // 2})
    for found, validations, losses in run_world(many, fit_by_rank, str(tmp_path / "kept"), {}):
        assert (found, validations) == (steps, validated(steps // 2 + 1, steps))
        assert losses == pytest.approx(whole[2], rel=1e-5)


@pytest.mark.parametrize(("few", "many"), [(1, 2), by_night(2, 4)])
def test_a_complete_fit_is_complete_on_more_ranks_too(few, many, tmp_path):
    steps = steps_of(few)
    whole, *_ = everywhere(few, fit_by_rank, str(tmp_path), {})
    assert whole[:2] == [steps, validated(1, steps)]
    for found in run_world(many, fit_by_rank, str(tmp_path), {}):
        assert found == [steps, [], whole[2]]


def test_a_complete_fit_that_one_rank_has_saved_again_can_be_continued(tmp_path):
    run_world(2, fit_by_rank, str(tmp_path), {"max_steps": 4})
    again = str(tmp_path / "again.ckpt")
    with one_process():
        assert fit_by_rank(str(tmp_path), {"max_steps": 4}, again)[:2] == [4, []]
        assert fit_by_rank(str(tmp_path), {"resume": again})[:2] == [8, [6, 8]]


def test_a_complete_fit_is_complete_whatever_epoch_counts_as_its_first(tmp_path):
    with one_process():
        whole = fit_by_rank(str(tmp_path), {"initial_epoch": 2, "epochs": 3})
        path = str(tmp_path / "epoch-0003.ckpt")
        again = fit_by_rank(str(tmp_path), {"initial_epoch": 0, "epochs": 3, "resume": path})
    assert again == [16, [], whole[2]]


def test_a_checkpoint_of_an_older_version_has_no_first_step():
    values = {name: 0 for name in vars(Position()) if name != "first_step"}
    assert Position.from_json(values, "it") == Position()


def test_batches_without_an_end_are_read_as_far_as_that(recwarn, capsys):
    def batches(count: int) -> Iterator[Any]:
        for number in range(count):
            yield make_rows(8, seed=number)

    with one_process():
        trainer = make_trainer()
        history = trainer.fit(batches(10**9), max_steps=4, validation_data=VALID)
        shown = capsys.readouterr().out
        assert "as many as there are batches, at most 4, from epoch 1\n" in shown
        assert "\nepoch 1  loss" in shown
        assert (trainer.step, history.epochs) == (4, [1])
        assert not recwarn.list
        trainer.fit(batches(3), max_steps=5, verbose=False)
        assert trainer.step == 7
    assert "X ended after 3 steps" in str(recwarn.pop(UserWarning).message)
