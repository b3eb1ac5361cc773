"""Datasets and DataLoaders: each row once per epoch on any number of ranks; the same bits wherever a fit goes on."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import FEATURES, everywhere, fingerprint, flat, keep_only, make_model, make_rows, one_process, seeded
from kept_worlds import close_worlds
from markers import by_night, nightly_where
from refusals import ending, refusal, refuses
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS, BATCH = 41, 4  # no multiple of a step
WORLDS = [1, 2, by_night(4)]


class Augmented(Dataset):
    """Rows that are other ones each time: noise from all three generators. The number of the row comes first."""

    def __init__(self, rows: int = ROWS) -> None:
        self.inputs, self.targets = make_rows(rows)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.1 * torch.randn(FEATURES) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return torch.cat([torch.tensor([float(index)]), self.inputs[index] + noise]), self.targets[index]


class Plain(Augmented):
    """The same without noise."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([torch.tensor([float(index)]), self.inputs[index]]), self.targets[index]


class Noting(nn.Module):
    """Notes which rows it is trained on; drops, so that its own random numbers count."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.layers, self.drop = make_model("float64"), nn.Dropout(drop)
        self.seen: list[int] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += rows[:, 0].int().tolist()
        return self.layers(self.drop(rows[:, 1:]))


def trainer_of(drop: float = 0.0) -> cx.DistributedTrainer:
    with seeded():
        model = Noting(drop)
    return cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def trained(data: Any, *, drop: float = 0.0, **settings: Any) -> dict[str, Any]:
    trainer = trainer_of(drop)
    history = trainer.fit(data, **{"epochs": 2, "verbose": False, **settings})
    return {
        "bits": fingerprint(trainer.model),
        "parameters": flat(trainer.model.parameters()),
        "history": history.history,
        "seen": trainer.model.seen,
        "step": trainer.step,
    }


def loader_of(kind: str, world_size: int = 1) -> Any:
    """The same rows in each step on any number of ranks: a DataLoader's batches are those of one rank."""
    size = 12 // world_size
    weights = [1.0 + row % 3 for row in range(ROWS)]
    return {
        "data set": lambda: Augmented(),
        "shuffled": lambda: DataLoader(Augmented(), size, shuffle=True),
        "in order": lambda: DataLoader(Plain(), size),
        "workers": lambda: DataLoader(Augmented(), size, shuffle=True, num_workers=2),
        "kept workers": lambda: DataLoader(Augmented(), size, shuffle=True, num_workers=1, persistent_workers=True),
        "weighted": lambda: DataLoader(Augmented(), size, sampler=WeightedRandomSampler(weights, 50)),
        "a generator": lambda: DataLoader(
            Augmented(), size, sampler=WeightedRandomSampler(weights, 50, generator=torch.Generator())
        ),
        "subset": lambda: DataLoader(Augmented(), size, sampler=SubsetRandomSampler(range(0, ROWS, 2))),
        "dealt already": lambda: DataLoader(Plain(), size, sampler=TorchSampler(Plain(), 1, 0)),
        "drop_last": lambda: DataLoader(Augmented(), size, shuffle=True, drop_last=True),
        "a batch sampler": lambda: DataLoader(
            Augmented(), batch_sampler=BatchSampler(RandomSampler(range(ROWS)), size, False)
        ),
        "own batches": lambda: DataLoader(Augmented(), batch_sampler=Longer(size)),
    }[kind]()


class Longer(Sampler):
    """Makes its own batches: of random rows, the last one shorter."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return -(-ROWS // self.size)

    def __iter__(self) -> Any:
        order = torch.randperm(ROWS).tolist()
        return iter([order[first : first + self.size] for first in range(0, ROWS, self.size)])


def fit_kind(kind: str) -> dict[str, Any]:
    more = {"effective_batch_size": 12} if kind == "data set" else {}
    return trained(loader_of(kind, cx.get_world_size()), **more)


KINDS = ["data set", "shuffled", "in order", "workers", "kept workers", "weighted", "a generator", "subset"]
KINDS += ["dealt already", "drop_last", "a batch sampler", "own batches"]


@nightly_where(lambda kind: kind != "shuffled")
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_on_the_rows_of_one_also_where_they_are_augmented(kind):
    alone = everywhere(1, fit_kind, kind)[0]
    found = everywhere(2, fit_kind, kind)
    assert len({each["bits"] for each in found}) == 1
    np.testing.assert_allclose(found[0]["parameters"], alone["parameters"], atol=1e-12)
    np.testing.assert_allclose(found[0]["history"]["loss"], alone["history"]["loss"], atol=1e-12)
    assert sorted(row for each in found for row in each["seen"]) == sorted(alone["seen"])
    assert alone["step"] == found[0]["step"]
    counts = np.bincount(alone["seen"], minlength=ROWS)
    if kind == "drop_last":
        assert counts.sum() == 2 * 36
        assert counts.max() <= 2
    elif kind in ("weighted", "a generator"):
        assert counts.sum() == 100
    else:
        once = set(range(0, ROWS, 2)) if kind == "subset" else set(range(ROWS))
        assert {row for row in range(ROWS) if counts[row] == 2} == once
    first, second = np.split(np.array(alone["seen"]), 2)
    assert (first.tolist() == second.tolist()) == (kind == "in order")


def fit_as_arrays(shuffle: bool) -> tuple[str, str]:
    inputs, targets = make_rows(ROWS)
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(3))
    found = []
    for data in ((inputs, targets, weights), (DataLoader(TensorDataset(inputs, targets, weights), 5, shuffle),)):
        model = make_model()
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
        more = {"sample_weight": data[2], "batch_size": 5, "shuffle": shuffle} if len(data) == 3 else {}
        trainer.fit(*data[:2], epochs=2, verbose=False, **more)
        found.append(fingerprint(model))
    return found[0], found[1]


@nightly_where(lambda world_size: world_size == 2)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_loader_of_tensors_gives_the_bits_of_arrays(world_size, shuffle):
    for arrays, loader in everywhere(world_size, fit_as_arrays, shuffle):
        assert arrays == loader


def test_the_number_of_workers_changes_no_bit():
    with one_process():
        found = [
            trained(DataLoader(Augmented(), BATCH, shuffle=True, num_workers=workers), drop=0.3)["bits"]
            for workers in (0, 1, 3)
        ]
    assert found[0] == found[1] == found[2]


# --- a fit that goes on ---------------------------------------------------------------------------------------------


def interrupted(kind: str, folder: str, resume: str | None, steps: int) -> dict[str, Any]:
    """Makes a checkpoint after so many steps, also in the middle of an epoch, and another at the end."""
    torch.manual_seed(cx.get_rank() + 100 * (resume is not None))  # where a process begins must not matter
    random.seed(cx.get_rank())
    saving = {"checkpoint_every_n_steps": steps, "checkpoint_dir": folder}
    return trained(loader_of(kind, 2), drop=0.3, epochs=3, resume=resume, **saving)


def check_resumed(kind: str, ranks: int, folder: Path, steps: int) -> None:
    through = everywhere(ranks, interrupted, kind, str(folder), None, steps)
    keep_only(folder, steps)
    close_worlds()  # what resumes is another process
    again = everywhere(ranks, interrupted, kind, str(folder), "auto", steps)
    for before, after in zip(through, again, strict=True):
        assert before["bits"] == after["bits"]
        assert before["history"] == after["history"]
        assert before["seen"][-len(after["seen"]) :] == after["seen"]
        assert 0 < len(after["seen"]) < len(before["seen"])


@pytest.mark.parametrize("kind", [by_night("workers"), by_night("kept workers"), "weighted", by_night("own batches")])
def test_two_ranks_go_on_in_the_middle_of_an_epoch_with_the_same_bits(kind, tmp_path):
    check_resumed(kind, 2, tmp_path, 6)


def test_one_rank_goes_on_in_the_middle_of_an_epoch_with_the_same_bits(tmp_path):
    check_resumed("shuffled", 1, tmp_path, 6)


def rows_of_kind(kind: str, folder: str, resume: str | None) -> list[int]:
    more = {"checkpoint_every_n_steps": 2, "checkpoint_dir": folder}
    return trained(loader_of(kind, 2), epochs=1, resume=resume, **more)["seen"]


@pytest.mark.parametrize("kind", ["shuffled", by_night("weighted"), by_night("own batches")])
def test_another_number_of_ranks_goes_on_with_the_same_rows(kind, tmp_path):
    through = everywhere(2, rows_of_kind, kind, str(tmp_path), None)
    keep_only(tmp_path, 2)
    again = everywhere(1, rows_of_kind, kind, str(tmp_path), "auto")[0]
    # Two steps of two ranks have 12 rows each; what is left comes alone.
    left = [row for each in through for row in each[12:]]
    assert sorted(left) == sorted(again)


class Stubborn(Sampler):
    """Gives another order each time, whatever is seeded; or another one on each rank."""

    def __init__(self, seed: int) -> None:
        self.own = np.random.default_rng(seed)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(self.own.permutation(ROWS).tolist())


def fit_stubborn(same: bool, folder: str = "", resume: str | None = None) -> dict[str, Any]:
    sampler = Stubborn(7 if same else cx.get_rank())
    more = {"checkpoint_every_n_steps": 2, "checkpoint_dir": folder} if folder else {}
    return trained(DataLoader(Plain(), BATCH, sampler=sampler), resume=resume, **more)


def refused(*arguments: Any) -> str:
    return refusal(fit_stubborn, *arguments)


def test_a_sampler_that_differs_between_ranks_is_refused():
    for said in everywhere(2, refused, False):
        assert "rank 1" in said
        assert "the order of the training data: hash" in said


def test_a_sampler_that_gives_another_order_where_a_fit_goes_on_is_refused(tmp_path):
    with one_process():
        fit_stubborn(True, str(tmp_path))
        keep_only(tmp_path, 14)  # in the middle of the second epoch
        said = refused(True, str(tmp_path), "auto")
    assert "a different order of this epoch" in said
    shutil.rmtree(tmp_path)


def test_a_sampler_that_gives_another_order_is_named_where_a_fit_resumes_between_epochs(tmp_path):
    more = {"checkpoint_every_n_epochs": 1, "checkpoint_dir": str(tmp_path)}
    with one_process():
        trained(DataLoader(Plain(), BATCH, sampler=Stubborn(7)), **more)
        with pytest.warns(UserWarning, match="a different order than before the checkpoint"):
            trained(DataLoader(Plain(), BATCH, sampler=Stubborn(7)), resume="auto", epochs=3, **more)


# --- evaluation and prediction --------------------------------------------------------------------------------------


def evaluated(workers: int) -> list[Any]:
    inputs, targets = Plain().inputs, Plain().targets
    rows = torch.cat([torch.arange(float(ROWS))[:, None], inputs], 1)
    trainer = trainer_of()
    loader = DataLoader(Plain(), 6, shuffle=True, num_workers=workers)
    return [
        tuple(trainer.evaluate(rows, targets, batch_size=6)),
        tuple(trainer.evaluate(loader)),
        trainer.predict(rows, batch_size=6).tolist(),
        trainer.predict(loader).tolist(),
        tuple(trainer.evaluate(Plain(), batch_size=6)),
    ]


@pytest.mark.parametrize("world_size", [1, by_night(2), by_night(3)])
def test_evaluation_and_prediction_of_a_loader_are_those_of_arrays_to_the_bit(world_size):
    for arrays, loader, outputs, predicted, data_set in everywhere(world_size, evaluated, 2 if world_size == 2 else 0):
        assert arrays == loader == data_set
        assert outputs == predicted


def validated() -> list[Any]:
    arrays = (torch.cat([torch.arange(9.0)[:, None], Plain(9).inputs], 1), Plain(9).targets)
    loader = DataLoader(Plain(9), BATCH)
    train = DataLoader(Plain(), BATCH)
    return [
        trained(train, validation_data=arrays)["history"],
        trained(train, validation_data=loader)["history"],
        trainer_of().fit(train, loader, cx.DistributedTrainingConfig(epochs=2, verbose=False)).history,
    ]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_loader_validates(world_size):
    for arrays, named, positional in everywhere(world_size, validated):
        assert len(arrays["val_loss"]) == 2
        assert arrays == named == positional


# --- what a batch may be --------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self, own_loss: bool) -> None:
        super().__init__()
        self.layers, self.own_loss = make_model(), own_loss

    def forward(self, rows: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        output = self.layers(rows)
        return output if labels is None else {"loss": nn.functional.cross_entropy(output, labels), "logits": output}


class Dictionaries(Augmented):
    def __getitem__(self, index: int) -> Any:
        return {"rows": self.inputs[index], "labels": self.targets[index]}


class Weighted(Augmented):
    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index], 1.0 + index % 4


def fit_forms() -> list[str]:
    data = Augmented()
    weights = torch.arange(ROWS) % 4 + 1.0

    def bits(model: nn.Module, loss: Any, *given: Any, **more: Any) -> str:
        trainer = cx.DistributedTrainer(model, loss, torch.optim.SGD(model.parameters(), 0.1))
        trainer.fit(*given, epochs=2, verbose=False, **more)
        return fingerprint(model)

    arrays = {"batch_size": BATCH, "shuffle": False}
    classes = {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}
    inputs, targets = data.inputs, data.targets
    dictionaries = DataLoader(Dictionaries(), BATCH)
    return [
        # Of a loader nobody knows whether a class number is one that does not count: its mean is a weighted one.
        bits(Named(False), nn.CrossEntropyLoss(ignore_index=0), inputs, targets, **arrays),
        bits(Named(False), nn.CrossEntropyLoss(ignore_index=0), dictionaries),
        bits(Named(True), None, {"rows": inputs}, targets, **arrays),
        bits(Named(True), None, dictionaries),
        bits(make_model(), "cross_entropy", inputs, targets, sample_weight=weights, **arrays),
        bits(make_model(), "cross_entropy", DataLoader(Weighted(), BATCH)),
        bits(make_model(), "cross_entropy", inputs, targets, sample_weight=weights, **arrays, **classes),
        bits(make_model(), "cross_entropy", DataLoader(Weighted(), BATCH), **classes),
    ]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_dictionaries_weights_and_classes_count_as_those_of_arrays(world_size):
    for found in everywhere(world_size, fit_forms):
        assert found[0] == found[1]
        assert found[2] == found[3]
        assert found[4] == found[5] != found[6] == found[7]


def class_numbers_that_do_not_count() -> list[list[float]]:
    inputs, targets = make_rows(ROWS)
    targets[::5] = -100

    def parameters(*data: Any, **more: Any) -> list[float]:
        model = make_model("float64")
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
        trainer.fit(*data, epochs=2, verbose=False, **more)
        return flat(model.parameters()).tolist()

    class Rows(Augmented):
        def __getitem__(self, index: int) -> Any:
            return inputs[index], targets[index]

    return [parameters(inputs, targets, batch_size=BATCH, shuffle=False), parameters(DataLoader(Rows(), BATCH))]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_rows_whose_class_does_not_count_are_found_in_each_batch(world_size):
    for arrays, loader in everywhere(world_size, class_numbers_that_do_not_count):
        np.testing.assert_allclose(arrays, loader, atol=1e-12)


def test_whoever_calls_finds_the_generators_as_they_were():
    with one_process():
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        expected = torch.rand(1), np.random.rand(), random.random()
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        trainer = trainer_of()
        loader = DataLoader(Augmented(), BATCH, shuffle=True)
        trainer.fit(loader, epochs=1, verbose=False, validation_data=loader)
        trainer.evaluate(loader)
        trainer.predict(loader)
        assert (torch.rand(1), np.random.rand(), random.random()) == expected


# --- refusals -------------------------------------------------------------------------------------------------------


class NoLength(Dataset):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(FEATURES), 0


class Four(Augmented):
    def __getitem__(self, index: int) -> Any:
        return (torch.zeros(FEATURES),) * 4


def halved(items: list[Any]) -> Any:
    return torch.utils.data.default_collate(items[: -(-len(items) // 2)])


class Miscounted(list):
    def __len__(self) -> int:
        return ROWS


FOURS = functools.partial(DataLoader, Plain(), 4)
LISTED = functools.partial(DataLoader, Plain())
test_what_cannot_work_is_refused = refuses(
    (lambda: trained(NoLength()), "NoLength has no length"),
    (lambda: trained(FOURS(), y=torch.zeros(ROWS)), "X is a DataLoader, which gives y itself"),
    (lambda: trained(Plain(), sample_weight=torch.ones(ROWS)), "X is a Plain, which gives sample_weight"),
    (lambda: trained(FOURS(), batch_size=8), "batch_size=8, and X makes batches of"),
    (lambda: trained(FOURS(), validation_split=0.5), "validation_split divides arrays"),
    (lambda: trained(DataLoader(Four(), 4)), r"one has 4 parts"),
    (lambda: trained(TensorDataset(torch.zeros(0, 4), torch.zeros(0))), "X has no samples"),
    (lambda: trained(DataLoader(Plain(0), 4)), "the Plain has no samples"),
    (lambda: trained(FOURS(sampler=[0.5, 1])), "the DataLoader's list must give sample numbers"),
    (lambda: trained(LISTED(batch_sampler=[[0, 1], []])), "list gave an empty batch"),
    (lambda: trained(FOURS(sampler=Miscounted([0, 1]))), rf"length {ROWS}, but gave 2\."),
    (lambda: trained(FOURS(sampler=map(int, "123"))), "the DataLoader's map has no length"),
    (lambda: trained(FOURS(collate_fn=halved)), "the DataLoader's collate_fn turned 2 samples into 1"),
    (lambda: trained(DataLoader(Plain(5), 8, drop_last=True)), "drop_last leaves nothing: 5 samples"),
    (lambda: trained(LISTED(batch_sampler=Longer(4)), effective_batch_size=8), "batch_sampler determines the batches"),
    (lambda: trained(torch.zeros(4, FEATURES), sharded_data=True), "sharded_data=True is for data that give"),
    (lambda: trainer_of().evaluate(FOURS(), batch_size=8), "batch_size=8, and X makes batches of 4"),
)


def lengths_differ() -> str:
    return refusal(trained, Plain(20 + cx.get_rank()))


def test_data_sets_of_different_length_are_refused():
    for said in everywhere(2, lengths_differ):
        assert "rank 1 differs from rank 0 in the training data set: 21 rows of Plain on rank 1, 20 rows" in said


class Failing(Plain):
    def __getitem__(self, index: int) -> Any:
        if cx.is_initialized() and index == 30:
            raise KeyError("row 30 is broken")
        return super().__getitem__(index)


def fit_failing() -> str:
    return ending(trained, DataLoader(Failing(), BATCH))


def test_a_row_that_cannot_be_had_ends_the_fit_on_all_ranks():
    said = everywhere(2, fit_failing)
    assert any("row 30 is broken" in each and "KeyError" in each for each in said)
    assert all("row 30 is broken" in each for each in said), said


# --- what a second pair of eyes has found ---------------------------------------------------------------------------


def other_calls_after_own_rows() -> list[Any]:
    trainer, data = trainer_of(), Plain()
    rows = torch.cat([torch.arange(float(ROWS))[:, None], data.inputs], 1)
    own = DataLoader(torch.utils.data.Subset(data, range(cx.get_rank(), ROWS, 2)), 4)
    trainer.fit(own, epochs=1, sharded_data=True, verbose=False, validation_data=(rows, data.targets))
    return [
        len(trainer.predict(DataLoader(data, 8))),
        len(trainer.predict(rows)),
        tuple(trainer.evaluate(rows, data.targets, batch_size=8)) == tuple(trainer.evaluate(DataLoader(data, 8))),
    ]


def test_own_rows_of_a_fit_are_not_those_of_later_calls():
    assert everywhere(2, other_calls_after_own_rows) == [[ROWS, ROWS, True]] * 2


def rows_in_batches(folder: str, resume: str | None) -> list[int]:
    more = {"checkpoint_every_n_steps": 6, "checkpoint_dir": folder, "epochs": 1}
    return trained(DataLoader(Plain(), batch_sampler=Longer(4)), resume=resume, **more)["seen"]


@pytest.mark.nightly
def test_more_ranks_go_on_in_the_middle_of_batches_that_are_made_in_advance(tmp_path):
    with one_process():
        through = rows_in_batches(str(tmp_path), None)
    (tmp_path / "epoch-0001.ckpt").unlink()
    close_worlds()  # what resumes is another process
    again = everywhere(2, rows_in_batches, str(tmp_path), "auto")
    assert sorted(through[24:]) == sorted(row for each in again for row in each)
    assert len(through) == ROWS


def test_a_batch_sampler_keeps_its_size_and_what_it_drops_where_the_rows_are_tensors():
    data = TensorDataset(*make_rows(64))
    for drop_last, steps in ((True, 6), (False, 7)):
        loader = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 10, drop_last))
        model = make_model()
        trainer = cx.DistributedTrainer(model, "cross_entropy")
        with one_process():
            trainer.fit(loader, epochs=1, verbose=False)
        assert trainer.step == steps


def test_a_sampler_of_other_rows_is_that_of_these_rows():
    with one_process():
        found = trained(DataLoader(Plain(), 4, sampler=torch.utils.data.SequentialSampler(range(16))), epochs=1)
    assert found["seen"] == list(range(16))


def mixing(items: list[Any]) -> Any:
    rows, targets = torch.utils.data.default_collate(items)
    rows[:, 1:] += 0.1 * torch.rand(len(rows), 1) + random.random() + float(np.random.rand())
    return rows, targets


def fit_mixing(workers: int, folder: str = "", resume: str | None = None) -> dict[str, Any]:
    more = {"checkpoint_every_n_steps": 5, "checkpoint_dir": folder} if folder else {}
    loader = DataLoader(Plain(), 6, shuffle=True, num_workers=workers, collate_fn=mixing)
    return trained(loader, drop=0.3, resume=resume, **more)


def test_what_a_collate_fn_draws_is_the_same_with_workers_and_where_a_fit_goes_on(tmp_path):
    with one_process():
        whole = fit_mixing(1, str(tmp_path))
        assert whole["bits"] == fit_mixing(0)["bits"]
        keep_only(tmp_path, 10)
        again = fit_mixing(1, str(tmp_path), "auto")
        assert 0 < len(again["seen"]) < len(whole["seen"])
        assert again["bits"] == whole["bits"]
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        trainer = trainer_of()
        loader = DataLoader(Plain(), 6, collate_fn=mixing)
        assert trainer.evaluate(loader) == trainer.evaluate(loader)
        assert torch.rand(1) == expected


class Unseeded(Augmented):
    """Draws from its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng()

    def __getitem__(self, index: int) -> Any:
        noise = torch.tensor(self.own.random(FEATURES), dtype=torch.float32)
        return torch.cat([torch.tensor([float(index)]), self.inputs[index] + noise]), self.targets[index]


def fit_unseeded() -> list[int]:
    return trained(DataLoader(Unseeded(), 6, shuffle=True), epochs=1)["seen"]


def test_a_data_set_with_random_numbers_of_its_own_is_trained_on_and_said(capsys):
    found = [row for each in everywhere(2, fit_unseeded) for row in each]
    assert sorted(found) == list(range(ROWS))
    with one_process():
        trained(Unseeded(), epochs=1, verbose=True)
    assert "random numbers that cannot be seeded" in capsys.readouterr().out


class OfAnyLength(Augmented):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(1 + index % 5, FEATURES), torch.tensor([1.0 + index % 5])


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows).sum(1)


def four_together(items: list[Any]) -> Any:
    assert len(items) == 4
    return torch.utils.data.default_collate(items)


def test_the_first_look_is_at_a_batch_as_the_loader_makes_it():
    with one_process():
        trainer = cx.DistributedTrainer(Summing(), "mse")
        trainer.fit(DataLoader(OfAnyLength(), batch_size=1), epochs=1, verbose=False)
        assert trainer.step == ROWS
        fours = [list(range(first, first + 4)) for first in range(0, 40, 4)]
        trained(DataLoader(Plain(40), batch_sampler=fours, collate_fn=four_together), epochs=1)


class NotTorchs:
    """Rows by number, as data sets of others have them."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        inputs, targets = make_rows(ROWS)
        return {"rows": inputs[index], "labels": targets[index]}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))


def test_a_data_set_that_is_not_torchs_has_rows_by_number():
    with one_process():
        trainer = cx.DistributedTrainer(Named(False), "cross_entropy")
        trainer.fit(NotTorchs(), epochs=1, batch_size=4, verbose=False)
        assert trainer.step == 11
        assert len(trainer.predict(NotTorchs())) == ROWS


def test_an_error_says_which_row_it_came_with():
    class Broken(Plain):
        def __getitem__(self, index: int) -> Any:
            if index == 30:
                raise KeyError("no such picture")
            return super().__getitem__(index)

    with one_process(), pytest.raises(KeyError) as caught:
        trained(Broken())
    if hasattr(caught.value, "__notes__"):
        assert caught.value.__notes__ == ["This happened while loading sample 30 of the dataset."]


class Stopping(cx.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trainer.stop_training = True


def test_workers_that_stay_end_with_the_fit_also_where_it_is_stopped():
    close_worlds()
    gc.disable()  # nobody may need the collector for it
    try:
        with one_process():
            trained(DataLoader(Plain(), 4, num_workers=1, persistent_workers=True), callbacks=[Stopping()])
            assert not multiprocessing.active_children()
    finally:
        gc.enable()


# --- settings of a loader that ranks must have alike ----------------------------------------------------------------


def fit_on_rank(kind: str) -> str:
    """Fits with a loader that rank 1 has otherwise; returns the refusal."""
    is_first = cx.get_rank() == 0
    inputs, targets = make_rows(ROWS)
    rows = torch.cat([torch.zeros(ROWS, 1), inputs], 1)
    arrays = TensorDataset(rows, targets)
    data, settings = {
        "shuffle": lambda: (DataLoader(arrays, BATCH, shuffle=is_first), {}),
        "batch_size": lambda: (DataLoader(arrays, BATCH if is_first else 8), {}),
        "batch_size of a data set": lambda: (DataLoader(Plain(), BATCH if is_first else 8), {}),
        "drop_last of a data set": lambda: (DataLoader(Plain(), BATCH, drop_last=is_first), {}),
        "validation": lambda: (arrays, {"validation_data": DataLoader(Plain(), BATCH if is_first else 8)}),
        "class_weight of a stream": lambda: (
            lambda: iter([(rows, targets)]),
            {"class_weight": dict.fromkeys(range(3), 1.0 if is_first else 2.0)},
        ),
    }[kind]()
    try:
        trained(data, **settings)
    except cx.ConfigError as error:
        return str(error)
    return ""


DIFFERING = {
    "shuffle": "rank 1 differs from rank 0 in shuffle of the training data: False on rank 1, True on rank 0",
    "batch_size": "rank 1 differs from rank 0 in batch_size of the training data: 8 on rank 1, 4 on rank 0",
    "batch_size of a data set": "in batch_size of the training data: 8 on rank 1, 4 on rank 0",
    "drop_last of a data set": "in drop_last of the training data: False on rank 1, True on rank 0",
    "validation": "in batch_size of the validation data: 8 on rank 1, 4 on rank 0",
    "class_weight of a stream": "in class_weight: ['0: 2.0', '1: 2.0', '2: 2.0'] on rank 1",
}


def fit_on_rank_each() -> dict[str, str]:
    return {kind: fit_on_rank(kind) for kind in DIFFERING}


def test_settings_of_a_loader_that_differ_between_ranks_are_refused():
    for found in everywhere(2, fit_on_rank_each):
        for kind, words in DIFFERING.items():
            assert words in found[kind]


def fit_own_sizes() -> tuple[int, list[float]]:
    """Own batches of a stream may have another size on each rank."""
    data = DataLoader(Plain(), BATCH * (1 + cx.get_rank()))
    found = trained(data, sharded_data=True, epochs=1)
    return found["step"], found["parameters"].tolist()


def test_own_batches_may_have_another_size_on_each_rank():
    first, second = everywhere(2, fit_own_sizes)
    assert first == second
    assert first[0] == -(-ROWS // BATCH)


def fit_shared_sizes() -> str:
    batches = list(DataLoader(Plain(), BATCH * (1 + cx.get_rank())))
    try:
        trained(lambda: iter(batches), sharded_data=False)
    except cx.ConfigError as error:
        return str(error)
    return ""


def test_shared_batches_of_another_size_on_a_rank_are_refused():
    for said in everywhere(2, fit_shared_sizes):
        assert "rank 1 differs from rank 0 in the batches of its <lambda>: 8 samples on rank 1, 4 on rank 0" in said


def test_a_fit_does_not_resume_with_another_shuffle(tmp_path):
    inputs, targets = make_rows(ROWS)
    data = TensorDataset(torch.cat([torch.zeros(ROWS, 1), inputs], 1), targets)
    more = {"checkpoint_every_n_steps": 4, "checkpoint_dir": str(tmp_path)}
    with one_process():
        trained(DataLoader(data, BATCH, shuffle=True), epochs=1, **more)
        with pytest.raises(cx.ConfigError, match="shuffle is False and was True"):
            trained(DataLoader(data, BATCH), resume="auto", **more)
