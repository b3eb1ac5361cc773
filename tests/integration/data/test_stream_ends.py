"""Streams that end, resume or are read again: no batch is lost, repeated or changed in silence."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import FEATURES, everywhere, fingerprint, make_rows, one_process, seeded
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import cyxtrain as cx
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.prefetch import Placement
from cyxtrain.data.feed import DataInterruptedError, Place
from cyxtrain.data.sources.stream import StreamSource
from cyxtrain.environment import loader_workers
from cyxtrain.world.world import World

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS = 40
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


class Noting(nn.Module):
    """Notes the first feature of each sample that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)
        self.seen: list[float] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += rows[:, 0].tolist()
        return self.layer(rows)


def trained(data: Any, **settings: Any) -> tuple[list[float], int, str]:
    with seeded():
        model = Noting()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    trainer.fit(data, **{"epochs": 1, "verbose": False, **settings})
    return model.seen, trainer.step, fingerprint(model)


def in_pieces(size: int, batches: int | None = None) -> Batches:
    inputs, targets = make_rows(ROWS)
    for begin in itertools.islice(range(0, ROWS, size), batches):
        yield inputs[begin : begin + size], targets[begin : begin + size]


# --- the end --------------------------------------------------------------------------------------------------------


def refusals_of_uneven() -> list[str]:
    """Ten batches on rank 0, eight on rank 1: what a fit, an evaluation and a prediction raise."""
    data = functools.partial(in_pieces, 4, 10 - 2 * cx.get_rank())
    trainer = cx.DistributedTrainer(Noting(), "cross_entropy")
    calls = [
        lambda: trained(data),
        lambda: trained(data, accumulation_steps=3),
        lambda: trainer.evaluate(data),
        lambda: trainer.predict(data),
    ]
    said = []
    for call in calls:
        try:
            call()
        except cx.ConfigError as error:
            said.append(str(error))
    return said


def test_shared_batches_that_end_earlier_on_a_rank_are_refused():
    for said in everywhere(2, refusals_of_uneven):
        assert len(said) == 4
        for each in said:
            assert "end after 8 on rank 1, and rank 0 has 10: samples would be lost" in each


class Restarting:
    """An iterator that begins anew after its end."""

    def __init__(self) -> None:
        self.batches = in_pieces(8)

    def __iter__(self) -> Restarting:
        return self

    def __next__(self) -> Any:
        found = next(self.batches, None)
        if found is None:
            self.batches = in_pieces(8)
            raise StopIteration
        return found


def test_a_pass_ends_once_even_if_its_iterator_begins_anew():
    with one_process():
        seen, step, _ = trained(functools.partial(Restarting), accumulation_steps=2, max_steps=9)
    assert step == 3
    assert seen == make_rows(ROWS)[0][:, 0].tolist()


# --- workers --------------------------------------------------------------------------------------------------------


class Shuffled(IterableDataset):
    """Rows in an order of the epoch; each with a random number."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        inputs, targets = make_rows(ROWS)
        for row in np.random.default_rng(self.epoch).permutation(ROWS):
            yield inputs[row] + torch.rand(1), targets[row]


def test_an_epoch_reaches_workers_that_were_to_stay():
    def seen(stays: bool) -> list[float]:
        return trained(DataLoader(Shuffled(), 8, num_workers=1, persistent_workers=stays), epochs=2)[0]

    with one_process():
        staying = seen(True)
        assert staying == seen(False)
    assert staying[:ROWS] != staying[ROWS:]


class Slow(IterableDataset):
    """The first worker is slow."""

    def __iter__(self) -> Any:
        inputs, targets = make_rows(ROWS)
        info = get_worker_info()
        for row in range(info.id, ROWS, info.num_workers):
            time.sleep(0.02 * (info.id == 0))
            yield inputs[row], targets[row]


@pytest.mark.skipif("in_order" not in inspect.signature(DataLoader).parameters, reason="PyTorch has no in_order yet")
def test_shared_batches_come_in_order():
    with one_process():
        found = [trained(DataLoader(Slow(), 4, num_workers=2, in_order=each))[0] for each in (True, False)]
    assert found[0] == found[1]


class Shifted(Dataset):
    """Rows plus an offset that a worker_init_fn sets."""

    offset = 0.0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> Any:
        return torch.full((FEATURES,), self.offset + row), row % 3


def shift(worker: int) -> None:
    get_worker_info().dataset.offset = 100.0


def test_a_worker_init_fn_finds_the_users_dataset():
    with one_process():
        seen, _, _ = trained(DataLoader(Shifted(), 4, num_workers=1, worker_init_fn=shift))
    assert seen == [100.0 + row for row in range(8)]


# --- how much is validated ------------------------------------------------------------------------------------------


class CountingBatches(cx.callbacks.Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1


@pytest.mark.parametrize("limit", [{"validation_steps": 3}, {"fast_dev_run": 3}])
@pytest.mark.parametrize("kind", ["loader", "function"])
def test_limits_of_validation_count_batches_of_the_size_that_the_training_data_decide(kind, limit):
    counting = CountingBatches()
    data = {"loader": DataLoader(Shifted(), 4), "function": functools.partial(in_pieces, 4)}[kind]
    with one_process():
        trained(data, validation_data=make_rows(100), callbacks=[counting], **limit)
    assert counting.count == 3


# --- changed in place -----------------------------------------------------------------------------------------------


class Halving(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)
        self.in_place = in_place

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        halved = rows.div_(2) if self.in_place else rows / 2
        return self.layer(halved)


class Listed(Dataset):
    def __init__(self) -> None:
        self.inputs, self.targets = make_rows(ROWS)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return self.inputs[row], self.targets[row]


@pytest.mark.parametrize("data", [DataLoader(Listed(), 8), functools.partial(in_pieces, 8)], ids=["dataset", "stream"])
def test_a_step_that_reads_its_samples_again_gets_them_unchanged(data):
    def fit(in_place: bool) -> str:
        with seeded():
            model = Halving(in_place)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        more = {"epochs": 1, "verbose": False, "accumulation_steps": 2}
        cx.DistributedTrainer(model, "cross_entropy", optimizer).fit(data, **more)
        return fingerprint(model)

    with one_process():
        assert fit(True) == fit(False)


# --- a fit that resumes ---------------------------------------------------------------------------------------------


def test_own_batches_keep_the_size_of_a_step_when_a_fit_resumes(tmp_path):
    more = {"sharded_data": True, "checkpoint_dir": str(tmp_path), "checkpoint_every_n_steps": 2}
    data = functools.partial(in_pieces, 4)
    with one_process():
        whole = trained(data, accumulation_steps=2, **more)
        for path in Path(tmp_path).glob("*.ckpt"):
            if path.name != "step-00000002.ckpt":
                path.unlink()
        with pytest.warns(UserWarning, match="accumulation_steps"):
            again = trained(data, accumulation_steps=1, resume="auto", **more)
    assert again[1:] == whole[1:]


def dying() -> Batches:
    yield from in_pieces(4, 1)
    raise RuntimeError("DataLoader worker exited")


def test_workers_that_die_while_a_fit_skips_batches_are_told_to_the_other_ranks(monkeypatch):
    sums: list[list[int]] = []

    def reduce(world: World, values: torch.Tensor, *_: Any) -> torch.Tensor:
        sums.append(values.tolist())
        return values

    monkeypatch.setattr(World, "reduce", reduce)
    monkeypatch.setattr(loader_workers, "_wait_for_stop", lambda seconds: True)
    config = DistributedTrainingConfig()
    source = StreamSource(dying, "dying", config, 0, World(), once=False)
    source.reconcile([source.summary()], 0, sharded=None)
    placement = Placement(torch.device("cpu"), torch.float32, lambda tensor, _: tensor)
    shares = source.feed(config, World()).shares(Place(0, 3, 12, 0, 3), placement, None)
    with pytest.raises(DataInterruptedError):
        next(shares)
    assert len(sums) == 1
    assert sums[0][0] < 0


def dying_in_a_stop() -> Batches:
    yield from in_pieces(4, 2)
    if cx.get_rank() == 1 and is_validating:
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("DataLoader worker exited")


is_validating = False


class Watching(cx.callbacks.Callback):
    def on_test_begin(self, logs: Any = None) -> None:
        globals()["is_validating"] = True


def fit_dying(folder: str) -> str:
    more = {"checkpoint_dir": folder, "checkpoint_every_n_epochs": 100, "callbacks": [Watching()]}
    try:
        trained(functools.partial(in_pieces, 4), validation_data=dying_in_a_stop, sharded_data=None, **more)
    except (SystemExit, Exception) as error:
        return repr(error)
    return ""


def test_a_worker_of_the_validation_that_dies_in_a_stop_does_not_break_it(tmp_path):
    assert everywhere(2, fit_dying, str(tmp_path)) == ["SystemExit(143)"] * 2
    assert len(list(tmp_path.glob("*.ckpt"))) == 1
