"""Iterable data sets and generators: dealt without duplicates, or each rank's own; who runs dry waits for nobody."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fitting import FEATURES, everywhere, fingerprint, flat, keep_only, make_model, make_rows, one_process, seeded
from kept_worlds import close_worlds
from markers import by_night
from refusals import ending, refuses, warning_texts
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS = 41
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


class Noting(nn.Module):
    """Notes what it is trained on, and draws its own random numbers."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.layers, self.drop = make_model("float64"), nn.Dropout(drop)
        self.seen: list[float] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += rows[:, 0].tolist()
        return self.layers(self.drop(rows))


def trained(data: Any, *, drop: float = 0.0, **settings: Any) -> dict[str, Any]:
    with seeded():
        model = Noting(drop)
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    history = trainer.fit(data, **{"epochs": 2, "verbose": False, **settings})
    return {
        "bits": fingerprint(model),
        "parameters": flat(model.parameters()),
        "history": history.history,
        "seen": model.seen,
        "step": trainer.step,
    }


def in_pieces(size: int, rows: int = ROWS, first: int = 0) -> Batches:
    inputs, targets = make_rows(rows)
    for begin in range(first, rows, size):
        yield inputs[begin : begin + size], targets[begin : begin + size]


def noisy(size: int) -> Batches:
    """In a random order, with noise: other ones in each epoch, the same on all ranks."""
    inputs, targets = make_rows(ROWS)
    order = torch.randperm(ROWS)
    for begin in range(0, ROWS, size):
        rows = order[begin : begin + size]
        yield inputs[rows] + 0.1 * torch.randn(len(rows), FEATURES) + float(np.random.rand()), targets[rows]


class Samples(IterableDataset):
    """One row after the other; its workers share them out, as PyTorch wants."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        every, first = (1, 0) if info is None else (info.num_workers, info.id)
        inputs, targets = make_rows(ROWS)
        for row in range(first, ROWS, every):
            yield inputs[row] + 0.1 * torch.randn(FEATURES), targets[row]


class Again:
    """Can be gone through again and again."""

    def __iter__(self) -> Batches:
        return in_pieces(6)


def arrays(**settings: Any) -> dict[str, Any]:
    inputs, targets = make_rows(ROWS)
    return trained(TensorDataset(inputs, targets), shuffle=False, **settings)


# --- dealt ----------------------------------------------------------------------------------------------------------


def dealt(kind: str) -> dict[str, Any]:
    size = 12 // cx.get_world_size()
    data = {
        "function": lambda: functools.partial(in_pieces, size),
        "iterable": Again,
        "samples": lambda: DataLoader(Samples(), 6, num_workers=2),
        "own samples": Samples,
    }[kind]()
    return trained(data, **({"batch_size": 6} if kind == "own samples" else {}))


@pytest.mark.parametrize("world_size", [1, by_night(2), by_night(4)])
def test_what_all_ranks_have_is_dealt_and_equals_one_rank(world_size):
    with one_process():
        alone = arrays(effective_batch_size=12)
    for found in everywhere(world_size, dealt, "function"):
        np.testing.assert_allclose(found["parameters"], alone["parameters"], atol=1e-12)
        np.testing.assert_allclose(found["history"]["loss"], alone["history"]["loss"], atol=1e-12)
        assert found["step"] == alone["step"] == 8


@pytest.mark.parametrize("kind", ["iterable", by_night("samples"), by_night("own samples")])
def test_nothing_comes_twice(kind):
    with one_process():
        alone = dealt(kind)["seen"]
    found = [row for each in everywhere(2, dealt, kind) for row in each["seen"]]
    assert sorted(found) == sorted(alone)
    assert len(found) == 2 * ROWS


def accumulated() -> dict[str, Any]:
    return trained(functools.partial(in_pieces, 12 // (2 * cx.get_world_size())), accumulation_steps=2)


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_micro_batches_are_batches(world_size):
    with one_process():
        alone = arrays(effective_batch_size=12)
    for found in everywhere(world_size, accumulated):
        np.testing.assert_allclose(found["parameters"], alone["parameters"], atol=1e-12)


# --- each rank's own ------------------------------------------------------------------------------------------------

COUNTS = (0, 1, 7)
"""Batches of each rank."""


def own_batches() -> Batches:
    """Of another size on each rank, and other rows."""
    rank = cx.get_rank()
    inputs, targets = make_rows(100)
    for number in range(COUNTS[rank]):
        rows = slice(10 * number + 3 * rank, 10 * number + 4 * rank)
        yield inputs[rows], targets[rows]


def joined_batches() -> Batches:
    inputs, targets = make_rows(100)
    for number in range(max(COUNTS)):
        rows = [
            row
            for rank, count in enumerate(COUNTS)
            if number < count
            for row in range(10 * number + 3 * rank, 10 * number + 4 * rank)
        ]
        yield inputs[rows], targets[rows]


def fit_own(**settings: Any) -> dict[str, Any]:
    data = own_batches if cx.get_world_size() > 1 else joined_batches
    return trained(data, validation_data=data, **settings)


def test_ranks_that_end_after_0_1_and_7_batches_equal_one_that_has_them_all():
    with one_process():
        alone = fit_own()
    found = everywhere(3, fit_own)
    assert len({each["bits"] for each in found}) == 1
    for each in found:
        np.testing.assert_allclose(each["parameters"], alone["parameters"], atol=1e-12)
        for name, values in alone["history"].items():
            np.testing.assert_allclose(each["history"][name], values, atol=1e-12)
        assert each["step"] == alone["step"] == 14
    assert [len(each["seen"]) for each in found] == [0, 2, 2 * 7 * 2]


def fit_with_workers() -> dict[str, Any]:
    """Data sets of each rank's own, with workers."""
    rank = cx.get_rank()
    inputs, targets = make_rows(ROWS)
    own = TensorDataset(inputs[rank::2], targets[rank::2])
    return trained(DataLoader(own, 4, shuffle=True, num_workers=1), sharded_data=True)


@pytest.mark.nightly
def test_loaders_of_each_ranks_own_rows_see_them_all_once():
    found = [row for each in everywhere(2, fit_with_workers) for row in each["seen"]]
    assert sorted(found) == sorted(2 * make_rows(ROWS)[0][:, 0].double().tolist())


def fit_alike(sharded: bool | None) -> int:
    return len(trained(functools.partial(in_pieces, 5), sharded_data=sharded)["seen"])


def test_who_has_which_can_be_said():
    assert sum(everywhere(2, fit_alike, None)) == sum(everywhere(2, fit_alike, False)) == 2 * ROWS
    assert everywhere(2, fit_alike, True) == [2 * ROWS] * 2


class Unaware(IterableDataset):
    """One row after the other, the same in each worker; on each rank the same rows, or its own."""

    def __init__(self, own: bool = False) -> None:
        self.own = own
        self.seed = cx.get_rank() if own else 0

    def __iter__(self) -> Any:
        inputs, targets = make_rows(40, seed=self.seed)
        yield from (
            (row + 0.1 * torch.randn(FEATURES) * self.own, target) for row, target in zip(inputs, targets, strict=True)
        )


def through_workers() -> tuple[list[float], float, int]:
    data = DataLoader(Unaware(), 5, num_workers=2)
    found = trained(data, epochs=1, batch_size=5)
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy")
    return found["seen"], trainer.evaluate(data).loss, len(trainer.predict(data))


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_data_set_that_does_not_know_its_workers_is_split_over_them(world_size):
    found = everywhere(world_size, through_workers)
    inputs, targets = make_rows(40)
    seen = [row for rows, _, _ in found for row in rows]
    assert sorted(seen) == sorted(inputs[:, 0].double().tolist())
    expected = nn.functional.cross_entropy(make_model()(inputs), targets).item()
    assert all(loss == pytest.approx(expected) and rows == 40 for _, loss, rows in found)


def test_the_header_says_that_rows_are_split_over_workers(capsys):
    with one_process():
        trained(DataLoader(Unaware(), 5, num_workers=2), epochs=1, verbose=True)
    assert "batches of DataLoader, each sample by one of 2 workers" in capsys.readouterr().out


SHARDED = {
    "function": lambda: functools.partial(own_rows, 3),
    "generator": lambda: own_rows(3),
    "loader": lambda: DataLoader(Unaware(own=True), 5, num_workers=1),
}


def own_said_and_found() -> list[dict[str, Any]]:
    """What comes of data that each rank has of its own, found to be and said to be."""
    found = []
    for kind, sharded in itertools.product(SHARDED, (None, True)):
        epochs = 1 if kind == "generator" else 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(trained(SHARDED[kind](), epochs=epochs, drop=0.2, sharded_data=sharded))
    return found


@pytest.mark.nightly
def test_data_said_to_be_each_ranks_own_train_exactly_as_data_found_to_be():
    for results in everywhere(2, own_said_and_found):
        for found, said in zip(results[::2], results[1::2], strict=True):
            for what in ("seen", "bits", "history", "step"):
                assert found[what] == said[what]


# --- a fit that goes on ---------------------------------------------------------------------------------------------


def stream_of(kind: str) -> Any:
    return {
        "function": lambda: functools.partial(noisy, 4),
        "workers": lambda: DataLoader(Samples(), 4, num_workers=2),
        "own": lambda: functools.partial(own_rows, 3),
    }[kind]()


def own_rows(size: int) -> Batches:
    inputs, targets = make_rows(60 + 7 * cx.get_rank(), seed=cx.get_rank())
    for begin in range(0, len(inputs), size):
        yield inputs[begin : begin + size] + 0.1 * torch.randn(FEATURES), targets[begin : begin + size]


def interrupted(kind: str, folder: str, resume: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(cx.get_rank() + 100 * (resume is not None))
    saving = {"checkpoint_every_n_steps": 2, "checkpoint_dir": folder}
    return trained(stream_of(kind), drop=0.3, resume=resume, **{"epochs": 3, **saving, **settings})


@pytest.mark.parametrize(
    ("kind", "settings", "step"),
    [
        ("function", {}, 8),
        by_night("workers", {}, 8),
        by_night("own", {}, 24),
        by_night("function", {"steps_per_epoch": 4}, 6),
    ],
)
def test_two_ranks_go_on_in_the_middle_of_an_epoch_with_the_same_bits(kind, settings, step, tmp_path):
    through = everywhere(2, interrupted, kind, str(tmp_path), None, settings)
    keep_only(tmp_path, step)
    close_worlds()  # what resumes is another process
    again = everywhere(2, interrupted, kind, str(tmp_path), "auto", settings)
    for before, after in zip(through, again, strict=True):
        assert before["bits"] == after["bits"]
        assert before["history"] == after["history"]
        assert before["seen"][-len(after["seen"]) :] == after["seen"]
        assert 0 < len(after["seen"]) < len(before["seen"])


def rows_of(folder: str, kind: str, resume: str | None, sharded: bool | None = None) -> list[float]:
    more = {"sharded_data": sharded, "checkpoint_every_n_steps": 2, "checkpoint_dir": folder}
    data = functools.partial(in_pieces, 5) if kind == "dealt" else functools.partial(own_rows, 5)
    return trained(data, epochs=1, resume=resume, **more)["seen"]


def test_another_number_of_ranks_goes_on_where_batches_are_dealt(tmp_path):
    through = everywhere(2, rows_of, str(tmp_path), "dealt", None)
    keep_only(tmp_path, 2)
    with one_process():
        again = rows_of(str(tmp_path), "dealt", "auto")
    assert sorted(row for each in through for row in each[10:]) == sorted(again)


def test_another_number_of_ranks_cannot_go_on_in_the_middle_of_what_each_has(tmp_path):
    everywhere(2, rows_of, str(tmp_path), "own", None)
    keep_only(tmp_path, 2)
    with one_process():
        for sharded in (None, True):
            with pytest.raises(cx.ConfigError, match="made by 2 ranks in the middle of each rank's own data"):
                rows_of(str(tmp_path), "own", "auto", sharded)


# --- steps per epoch ------------------------------------------------------------------------------------------------


def endless() -> Batches:
    for number in itertools.count():
        inputs, targets = make_rows(4, seed=number)
        yield inputs, targets


@pytest.mark.parametrize("once", [True, False])
def test_what_never_ends_needs_steps_and_goes_on_in_the_next_epoch(once):
    with one_process():
        found = trained(endless() if once else endless, epochs=3, steps_per_epoch=5)
    assert found["step"] == 15
    expected = [row for number in range(15) for row in make_rows(4, seed=number)[0][:, 0].double().tolist()]
    assert found["seen"] == expected


def test_an_epoch_goes_over_the_end_of_the_data():
    with one_process():
        found = trained(functools.partial(in_pieces, 10), epochs=2, steps_per_epoch=4)
    assert found["step"] == 8  # five batches, then three of the next pass
    assert len(found["seen"]) == ROWS + 30


def test_data_that_come_once_end_an_epoch_with_a_word():
    with one_process(), pytest.warns(UserWarning, match="X ended after 1 step of epoch 2: it gives its batches once"):
        found = trained(in_pieces(10), epochs=2, steps_per_epoch=4)
    assert found["step"] == 5


def test_validation_stops_where_a_try_is_asked_for():
    with one_process():
        found = trained(endless, fast_dev_run=2, validation_data=endless)
    assert found["step"] == 2
    assert len(found["history"]["val_loss"]) == 1


# --- evaluation and prediction --------------------------------------------------------------------------------------


def evaluated() -> list[Any]:
    with seeded():
        model = make_model("float64")
    trainer = cx.DistributedTrainer(model, "cross_entropy")
    inputs, targets = make_rows(ROWS)
    data = functools.partial(in_pieces, 6)
    given = [tuple(trainer.evaluate(inputs, targets, batch_size=6)), tuple(trainer.evaluate(data))]
    return [*given, trainer.predict(inputs, batch_size=6).tolist(), trainer.predict(data).tolist()]


@pytest.mark.parametrize("world_size", [1, by_night(2), by_night(3)])
def test_evaluation_and_prediction_of_batches_are_those_of_arrays(world_size):
    for measured, of_batches, outputs, predicted in everywhere(world_size, evaluated):
        np.testing.assert_allclose(measured, of_batches, rtol=1e-12)
        assert outputs == predicted


def predicted_own() -> list[list[float]]:
    return [[len(cx.DistributedTrainer(make_model(), "mse").predict(own_batches))]]


def test_predictions_of_each_ranks_own_come_rank_by_rank():
    assert everywhere(3, predicted_own) == [[[1 + 2 * 7]]] * 3


# --- refusals -------------------------------------------------------------------------------------------------------


def no_batches() -> Iterator[Any]:
    return iter(())


def of_another_type() -> Batches:
    inputs, targets = make_rows(8)
    yield (inputs.double() if cx.get_rank() else inputs), targets


def broken() -> Batches:
    yield from itertools.islice(in_pieces(5), 3 if cx.get_rank() else None)
    if cx.get_rank():
        raise OSError("the disk of rank 1 is gone")


def weights_later() -> Iterator[Any]:
    inputs, targets = make_rows(8)
    yield inputs, targets
    yield inputs, targets, torch.ones(8)


def fit_stream(data: Any, scheduler: Any = None, **settings: Any) -> None:
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd", scheduler=scheduler)
    trainer.fit(data, **{"epochs": 2, "verbose": False, **settings})


FOURS = functools.partial(in_pieces, 4)
test_what_cannot_work_is_refused = refuses(
    (lambda: fit_stream(in_pieces(4)), "X gives its batches once, and epochs=2"),
    (lambda: fit_stream(FOURS, validation_data=in_pieces(4)), "validation data: it gives its batches once"),
    (lambda: fit_stream(FOURS, scheduler="cosine"), "set steps_per_epoch"),
    (lambda: fit_stream(FOURS, effective_batch_size=8), "effective_batch_size is"),
    (lambda: fit_stream(no_batches), "the no_batches gives no batch"),
    (lambda: fit_stream(lambda: 3), "returned a int"),
    (lambda: fit_stream(FOURS, y=torch.zeros(3)), "which gives y itself"),
    (lambda: fit_stream(lambda: iter([(np.array(["a"]), np.array([1]))])), "in a batch of the data, X holds <U1"),
    (lambda: fit_stream(lambda: iter([(torch.zeros(3, FEATURES), torch.zeros(2))])), "X and y have different lengths"),
    (lambda: fit_stream(weights_later), "has some sample_weight, and the first one had none"),
)


def said(data: Any) -> str:
    return ending(trained, data, sharded_data=True)


def test_batches_of_other_types_are_refused_on_all_ranks():
    for text in everywhere(2, said, of_another_type):
        assert "rank 1 differs from rank 0 in the first batch of its of_another_type: " in text


def test_an_error_in_one_ranks_generator_ends_the_fit_on_all():
    found = everywhere(2, said, broken)
    assert all("the disk of rank 1 is gone" in text for text in found), found
    assert "OSError" in found[1]


def test_whoever_calls_finds_the_generators_as_they_were():
    with one_process():
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        trained(functools.partial(noisy, 4), validation_data=functools.partial(noisy, 4))
        assert torch.rand(1) == expected


# --- what a second pair of eyes has found ---------------------------------------------------------------------------


def with_nothing_between() -> Batches:
    for number, (inputs, targets) in enumerate(in_pieces(6)):
        yield inputs, targets
        if number in (1, 2):
            yield inputs[:0], targets[:0]


def fit_with_nothing_between() -> dict[str, Any]:
    return trained(with_nothing_between, validation_data=with_nothing_between)


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_batch_without_rows_ends_nothing_and_counts_for_nothing(world_size):
    with one_process():
        expected = trained(
            functools.partial(in_pieces, 6 * world_size), validation_data=functools.partial(in_pieces, 6)
        )
    for found in everywhere(world_size, fit_with_nothing_between):
        np.testing.assert_allclose(found["parameters"], expected["parameters"], atol=1e-12)
        np.testing.assert_allclose(found["history"]["val_loss"], expected["history"]["val_loss"], rtol=1e-12)


def test_data_that_are_over_end_the_fit_with_the_epochs_that_there_were():
    with one_process():
        with pytest.warns(UserWarning, match="after 0 steps of epoch 3"):
            even = trained(
                in_pieces(10, 40), epochs=3, steps_per_epoch=2, validation_data=functools.partial(in_pieces, 9)
            )
        with pytest.warns(UserWarning, match="after 1 step of epoch 2"):
            odd = trained(in_pieces(10, 40), epochs=4, steps_per_epoch=3)
    assert [len(found["history"]["loss"]) for found in (even, odd)] == [2, 2]
    assert all(np.isfinite(value) for found in (even, odd) for value in found["history"]["loss"])


class OnlyOnce(IterableDataset):
    """Has nothing the second time."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Any:
        self.times += 1
        if self.times == 1:
            inputs, targets = make_rows(8)
            yield from zip(inputs, targets, strict=True)


@pytest.mark.parametrize("settings", [{"steps_per_epoch": 3}, {}])
@pytest.mark.parametrize("sharded", [True, None])
def test_data_that_have_nothing_the_second_time_are_an_error(settings, sharded):
    with one_process(), pytest.raises(cx.ConfigError, match="has no batch"):
        trained(DataLoader(OnlyOnce(), 2), sharded_data=sharded, **{"epochs": 3, **settings})


def fit_with_classes() -> str:
    inputs, targets = make_rows(12)
    targets = targets % 2 + cx.get_rank()
    weights = {0: 1.0, 1: 1.0}
    return ending(trained, lambda: iter([(inputs, targets)]), sharded_data=True, class_weight=weights)


def test_a_class_without_a_weight_on_one_rank_ends_the_fit_on_all():
    found = everywhere(2, fit_with_classes)
    assert found[1].startswith("ConfigError")
    assert all("class_weight has no weight for class 2" in text for text in found), found


class Evaluating(cx.callbacks.Callback):
    """Rank 0 alone evaluates what is over after the first time."""

    def __init__(self) -> None:
        self.data = in_pieces(6)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if cx.is_master():
            self.trainer.evaluate(self.data, distributed=False)


def fit_evaluating() -> str:
    return ending(trained, functools.partial(in_pieces, 5), callbacks=[Evaluating()])


def test_an_error_in_an_evaluation_of_one_rank_alone_is_told_to_all():
    found = everywhere(2, fit_evaluating)
    assert found[0].startswith("ConfigError")
    assert all("the generator gives no batch" in text for text in found), found


def shrinking(folder: str, resume: str | None) -> str:
    rows = ROWS if resume is None or cx.get_rank() == 0 else 6
    more = {"checkpoint_every_n_steps": 3, "checkpoint_dir": folder, "sharded_data": False}
    return ending(lambda: trained(functools.partial(in_pieces, 3, rows), epochs=1, resume=resume, **more)["step"])


def test_data_that_are_others_on_one_rank_end_a_resumed_fit_on_all(tmp_path):
    assert everywhere(2, shrinking, str(tmp_path), None) == ["returned 7"] * 2
    keep_only(tmp_path, 3)
    found = everywhere(2, shrinking, str(tmp_path), "auto")
    assert found[1].startswith("ConfigError")
    assert all("the data have changed since" in text for text in found), found


class Counting(IterableDataset):
    """Rows without an end, and the epochs that it was told of."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __iter__(self) -> Any:
        inputs, targets = make_rows(200)
        yield from zip(inputs, targets, strict=True)


@pytest.mark.nightly
def test_validation_and_training_may_go_through_one_loader_whose_workers_stay():
    def fit(stays: bool) -> list[float]:
        loader = DataLoader(Counting(), 4, num_workers=1, persistent_workers=stays)
        more = {"epochs": 3, "steps_per_epoch": 3, "validation_steps": 2}
        return trained(loader, validation_data=loader, **more)["seen"]

    with one_process():
        assert fit(True) == fit(False)


def test_data_are_told_the_number_of_each_pass():
    data = Counting()
    with one_process():
        trained(data, epochs=3)
    assert data.told == [0, 1, 2]


def fit_generator(folder: str, resume: str | None) -> dict[str, Any]:
    own = torch.Generator()
    own.manual_seed(1)
    data = TensorDataset(*make_rows(24))
    loader = DataLoader(data, 4, shuffle=True, generator=own)
    torch.empty((), dtype=torch.int64).random_(generator=own) if resume else None
    more = {"checkpoint_every_n_steps": 4, "checkpoint_dir": folder, "epochs": 3, "sharded_data": True}
    return trained(loader, resume=resume, **more)


def test_a_loader_with_a_generator_of_its_own_goes_on_with_the_same_bits(tmp_path):
    with one_process():
        whole = fit_generator(str(tmp_path), None)
        keep_only(tmp_path, 8)
        assert fit_generator(str(tmp_path), "auto")["bits"] == whole["bits"]


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class TakesPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)

    def forward(self, pair: Any) -> torch.Tensor:
        return self.layer(pair.left + pair.right)


def fit_pairs() -> int:
    inputs, targets = make_rows(12)
    batches = [] if cx.get_rank() else [(Pair(inputs, inputs), targets)]
    trainer = cx.DistributedTrainer(TakesPairs(), "cross_entropy")
    trainer.fit(lambda: iter(batches), epochs=2, sharded_data=True, verbose=False)
    return trainer.step


def test_a_rank_without_batches_knows_their_form():
    assert everywhere(2, fit_pairs) == [2, 2]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows.mul_(0.5))


def test_what_a_model_changes_in_place_is_not_the_users():
    inputs, targets = make_rows(12)
    before = inputs.clone()
    with one_process():
        trainer = cx.DistributedTrainer(InPlace(), "cross_entropy")
        trainer.fit(lambda: iter([(inputs, targets)]), epochs=2, verbose=False)
        predicted = trainer.predict(lambda: iter([inputs.numpy()]))
    assert torch.equal(inputs, before)
    assert isinstance(predicted, np.ndarray)


def test_a_refused_fit_leaves_the_history_of_the_one_before():
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", scheduler="cosine")
        trainer.fit(*make_rows(12), epochs=1, verbose=False)
        with pytest.raises(cx.ConfigError, match="set steps_per_epoch"):
            trainer.fit(functools.partial(in_pieces, 4), epochs=1, verbose=False)
        assert len(trainer.history.epochs) == 1


def own_without_a_word() -> list[str]:
    with warning_texts() as said:
        trained(functools.partial(own_rows, 5), epochs=1)
        trained(functools.partial(own_rows, 5), epochs=1, sharded_data=True)
    return [text for text in said if "trains on all of its own" in text]


def test_what_is_taken_for_each_ranks_own_is_said_unless_the_user_has():
    assert [len(each) for each in everywhere(2, own_without_a_word)] == [1, 0]


def test_an_iterable_data_set_may_have_fewer_rows_than_a_batch():
    with one_process():
        assert trained(Samples(), batch_size=50)["step"] == 2
