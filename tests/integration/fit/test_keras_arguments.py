"""Keras's arguments of `fit` that decide how long an epoch is, which ones there are, and when one is validated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import everywhere, fingerprint, flat, make_model, make_rows, one_process, run_world
from markers import by_night, nightly_where

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS, VALID = make_rows(40), make_rows(9, seed=1)
FIT = {"effective_batch_size": 8, "verbose": False}


class Seen(cx.callbacks.Callback):
    """Which epochs and steps there were, and what was in the logs."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[tuple[int, list[str]]] = []
        self.steps: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append((epoch, sorted(logs)))


def fit(**more: Any) -> tuple[cx.DistributedTrainer, Seen]:
    model, seen = make_model(), Seen()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    given = more.pop("callbacks", [])
    trainer.fit(*ROWS, **{**FIT, **more}, callbacks=[seen, *given])
    return trainer, seen


def test_an_epoch_has_as_many_steps_as_are_asked_for():
    with one_process():
        _, seen = fit(epochs=3, steps_per_epoch=2)
        assert seen.steps == [0, 1] * 3
        assert seen.epochs[-1][0] == 2
        whole, _ = fit(epochs=1)
        part, _ = fit(epochs=1, steps_per_epoch=5)
        assert fingerprint(part.model) == fingerprint(whole.model)


class LoggingLinear(torch.nn.Linear):
    """A model that notes the numbers of the rows that it is trained on: the first of each."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.seen: list[int] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += rows[:, 0].int().tolist()
        return super().forward(rows)


class Pairs(torch.utils.data.Dataset):
    """Rows of a number each."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), float(index)), index % 3


def data_of(kind: str) -> tuple[Any, ...]:
    rows, size = Pairs(), 4 // cx.get_world_size()
    inputs, targets = torch.stack([rows[i][0] for i in range(20)]), torch.tensor([rows[i][1] for i in range(20)])
    batches = [list(range(first, first + size)) for first in range(0, 20, size)]
    return {
        "arrays": lambda: (inputs, targets),
        "Dataset": lambda: (rows,),
        "DataLoader": lambda: (torch.utils.data.DataLoader(rows, size, shuffle=True, num_workers=1),),
        "batch sampler": lambda: (torch.utils.data.DataLoader(rows, batch_sampler=batches),),
        "iterable": lambda: (lambda: ((inputs[batch], targets[batch]) for batch in batches),),
    }[kind]()


KINDS = ["arrays", "Dataset", "DataLoader", "batch sampler", "iterable"]


def fit_in_parts(kind: str, folder: str, resume: str | None, **more: Any) -> tuple[list[int], str]:
    model = LoggingLinear()
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.zero_()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.01))
    sizes = {"effective_batch_size": 4} if kind in ("arrays", "Dataset") else {}
    settings: dict[str, Any] = {"verbose": False, "resume": resume}
    settings |= {"checkpoint_dir": folder, "checkpoint_every_n_steps": 1} if folder else {}
    trainer.fit(*data_of(kind), **{**sizes, **settings, **more})
    return model.seen, fingerprint(model)


@nightly_where(lambda kind: kind != "Dataset")
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_epoch_continues_in_the_data_and_they_come_again_when_they_are_over(kind, tmp_path):
    """Five epochs of two steps and two of five are the same ten steps: two passes through the data."""
    with one_process():
        seen, bits = fit_in_parts(kind, str(tmp_path / "parts"), None, epochs=5, steps_per_epoch=2)
        assert sorted(seen) == sorted([*range(20), *range(20)])
        assert sorted(seen[:20]) == list(range(20))
        assert (seen, bits) == fit_in_parts(kind, str(tmp_path / "whole"), None, epochs=2)
        assert seen == fit_in_parts(kind, str(tmp_path / "long"), None, epochs=1, steps_per_epoch=10)[0]
        for step in (3, 5, 7):  # in the middle of an epoch; at the end of a pass; in the next one
            path = str(tmp_path / "parts" / f"step-{step:08d}.ckpt")
            again = fit_in_parts(kind, str(tmp_path / "again"), path, epochs=5, steps_per_epoch=2)
            assert again == (seen[4 * step :], bits)


def fit_kinds_in_parts() -> list[list[int]]:
    return [fit_in_parts(kind, "", None, epochs=3, steps_per_epoch=2)[0] for kind in KINDS]


@pytest.mark.nightly
def test_two_ranks_continue_as_one_does():
    [alone] = everywhere(1, fit_kinds_in_parts)
    for one, *others in zip(alone, *run_world(2, fit_kinds_in_parts), strict=True):
        joined = [sorted(row for rank in others for row in rank[2 * step : 2 * step + 2]) for step in range(6)]
        assert joined == [sorted(one[4 * step : 4 * step + 4]) for step in range(6)]


def few_steps() -> tuple[Any, list[float]]:
    trainer, _ = fit(epochs=3, steps_per_epoch=3)
    return flat(trainer.model.parameters()), trainer.history.train_losses


@pytest.mark.parametrize("world_size", [2, by_night(4)])
def test_it_has_them_on_any_number_of_ranks(world_size):
    [(parameters, losses)] = everywhere(1, few_steps)
    for found in run_world(world_size, few_steps):
        assert abs(found[0] - parameters).max() < 1e-6
        assert found[1] == pytest.approx(losses, rel=1e-6)


def test_a_fit_with_few_steps_resumes_in_the_middle_and_not_with_others(tmp_path):
    with one_process():
        kept = {"epochs": 3, "steps_per_epoch": 3, "checkpoint_dir": str(tmp_path)}
        whole, _ = fit(checkpoint_every_n_steps=1, **kept)
        paths = sorted(Path(tmp_path).glob("step-*.ckpt"))
        for path in (paths[0], paths[3], paths[-2]):
            again, _ = fit(resume=str(path), **kept)
            assert fingerprint(again.model) == fingerprint(whole.model)
        with pytest.raises(cx.ConfigError, match="steps_per_epoch is 4 and was 3"):
            fit(resume=str(paths[0]), **{**kept, "steps_per_epoch": 4})


@pytest.mark.parametrize(("freq", "validated"), [(2, [2, 4]), ([1, 5], [1, 5]), (1, [1, 2, 3, 4, 5])])
def test_validation_comes_after_the_epochs_that_are_asked_for(freq, validated):
    with one_process():
        trainer, seen = fit(epochs=5, validation_data=VALID, validation_freq=freq)
    assert [epoch + 1 for epoch, names in seen.epochs if "val_loss" in names] == validated
    losses = trainer.history.val_losses
    assert [row + 1 for row, value in enumerate(losses) if value == value] == validated  # NaN else
    assert len(trainer.history.to_csv().splitlines()) == 6


def test_what_looks_at_validations_waits_for_them(tmp_path):
    early = cx.callbacks.EarlyStopping("val_loss", patience=1, baseline=0.0, min_delta=1e9)
    with one_process():
        _, seen = fit(
            epochs=9,
            validation_data=VALID,
            validation_freq=2,
            callbacks=[early],
            keep_best="val_loss",
            checkpoint_dir=str(tmp_path),
        )
    assert seen.epochs[-1][0] == 3  # the second validation is no better: the fourth epoch
    assert (tmp_path / "best.ckpt").exists()


def test_epochs_count_from_the_initial_one():
    with one_process():
        trainer, seen = fit(epochs=5, initial_epoch=3)
        assert [epoch for epoch, _ in seen.epochs] == [3, 4]
        assert trainer.history.epochs == [4, 5]
        assert trainer.epoch == 5
        straight, _ = fit(epochs=2)
        assert fingerprint(straight.model) != fingerprint(trainer.model)  # the order of samples is that of epochs 4, 5
        for wrong in (5, -1, True):
            with pytest.raises(cx.ConfigError, match="initial_epoch"):
                fit(epochs=5, initial_epoch=wrong)


def test_a_fit_from_an_initial_epoch_resumes(tmp_path):
    kept = {"epochs": 5, "initial_epoch": 3, "checkpoint_dir": str(tmp_path), "resume": "auto"}
    with one_process():
        whole, _ = fit(checkpoint_every_n_steps=2, **kept)
        last = sorted(Path(tmp_path).glob("*.ckpt"))[-1]
        last.unlink()
        again, seen = fit(checkpoint_every_n_steps=2, **kept)
        assert len(seen.steps) < 10
        assert fingerprint(again.model) == fingerprint(whole.model)


def test_a_resume_after_an_epoch_without_validation_leaves_the_best_alone(tmp_path):
    kept = {"validation_data": VALID, "validation_freq": 2, "keep_best": "val_loss", "checkpoint_every_n_epochs": 1}
    with one_process():
        fit(epochs=3, checkpoint_dir=str(tmp_path), **kept)
        best = (tmp_path / "best.ckpt").read_bytes()
        assert best == (tmp_path / "epoch-0002.ckpt").read_bytes()
        fit(epochs=3, checkpoint_dir=str(tmp_path), resume="auto", **kept)
        assert (tmp_path / "best.ckpt").read_bytes() == best


def test_the_last_epoch_is_what_was_asked_for_wherever_a_fit_goes_on(tmp_path):
    with one_process():
        fit(epochs=3, checkpoint_every_n_epochs=1, checkpoint_dir=str(tmp_path))
        for resume in ("auto", str(tmp_path / "epoch-0002.ckpt")):
            trainer, seen = fit(epochs=6, initial_epoch=3, resume=resume, checkpoint_dir=str(tmp_path))
            assert trainer.epoch == 6
            assert seen.epochs[-1][0] == 5


def few_steps_kept(folder: str, resume: str | None) -> list[float]:
    trainer, _ = fit(
        epochs=2,
        steps_per_epoch=4,
        effective_batch_size=None,
        batch_size=8,
        checkpoint_every_n_steps=3,
        checkpoint_dir=folder,
        resume=resume,
    )
    return trainer.history.train_losses


def test_few_steps_go_on_on_more_ranks(tmp_path):
    [alone] = everywhere(1, few_steps_kept, str(tmp_path), None)
    path = str(sorted(tmp_path.glob("step-*.ckpt"))[0])
    for found in run_world(2, few_steps_kept, str(tmp_path / "other"), path):
        assert found == pytest.approx(alone, rel=1e-6)


def set_in_a_validation(who: int) -> float:
    def lower(logs: Any) -> None:
        if cx.get_rank() == who:
            trainer.set_learning_rates([0.01])

    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    trainer.fit(
        *ROWS, epochs=2, validation_data=VALID, callbacks=[cx.callbacks.LambdaCallback(on_test_end=lower)], **FIT
    )
    return float(trainer.optimizer.param_groups[0]["lr"])


def test_a_rate_that_is_set_in_a_validation_is_set_on_all():
    assert run_world(2, set_in_a_validation, 1) == [0.01, 0.01]
    with one_process():
        for wrong in ([0.1, 0.2], [-1.0], ["fast"]):
            with pytest.raises(cx.ConfigError, match="set_learning_rates takes a number of at least 0"):
                fit(epochs=1)[0].set_learning_rates(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "steps"), [(True, 1), (3, 3), (99, 5)])
def test_a_try_takes_few_steps_and_makes_no_checkpoint(asked, steps, tmp_path, capsys):
    kept = {"checkpoint_every_n_steps": 1, "keep_best": "val_loss", "checkpoint_dir": str(tmp_path), "resume": "auto"}
    with one_process():
        trainer, seen = fit(
            epochs=9, fast_dev_run=asked, validation_data=VALID, validation_freq=4, verbose=True, **kept
        )
    assert seen.steps == list(range(steps))
    assert [epoch for epoch, _ in seen.epochs] == [0]
    assert len(trainer.history.val_losses) == 1
    assert not list(tmp_path.iterdir())
    assert "per epoch, epoch 1, a try" in capsys.readouterr().out


# --- how much is validated ------------------------------------------------------------------------------------------


def validate_some() -> list[list[float]]:
    found = []
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*VALID), 2)
    for data, more in (
        (VALID, {"validation_steps": 2, "validation_batch_size": 3}),
        (tuple(part[:6] for part in VALID), {}),
        (loader, {"validation_steps": 3}),
        (lambda: iter(loader), {"validation_steps": 3}),
        (VALID, {"validation_batch_size": 2}),
        (VALID, {}),
    ):
        trainer, _ = fit(epochs=1, validation_data=data, **more)
        found.append(trainer.history.val_losses)
    return found


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_so_many_batches_are_validated_as_are_asked_for_over_all_ranks(world_size):
    for some, six, of_loader, of_batches, small, whole in everywhere(world_size, validate_some):
        assert some == pytest.approx(six, rel=1e-6)
        assert of_loader == pytest.approx(six, rel=1e-6)
        assert of_batches == pytest.approx(six, rel=1e-6)
        assert small == pytest.approx(whole, rel=1e-6)
        assert some != whole


def test_a_loader_has_its_own_batch_size():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*VALID), 2)
    with one_process(), pytest.raises(cx.ConfigError, match="validation_batch_size=3, and the DataLoader makes"):
        fit(epochs=1, validation_data=loader, validation_batch_size=3)
