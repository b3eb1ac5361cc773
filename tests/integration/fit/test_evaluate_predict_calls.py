"""Keras's arguments of `evaluate` and `predict`: callbacks, steps, verbose and return_dict; and parts that are None."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from fitting import adam, everywhere, make_model, make_rows, one_process, run_world
from markers import by_night
from refusals import refusal
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS = make_rows(20)
SCORES = make_model()


def trainer_of(model: nn.Module | None = None) -> cx.DistributedTrainer:
    model = model or make_model()
    return cx.DistributedTrainer(model, "cross_entropy", adam(model))


class Log(cx.callbacks.Callback):
    """Notes which hooks are called, with what; asks to stop after batch `last` on rank `rank`."""

    def __init__(self, last: int = -1, rank: int = 0, keras: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.last, self.rank, self.keras = last, rank, keras

    def on_test_begin(self, logs: Any = None) -> None:
        self.calls.append(("begin", self.params["steps"]))

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch begin", batch))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch end", batch, sorted(logs)))
        if (batch, cx.get_rank()) == (self.last, self.rank):
            (self.model if self.keras else self.trainer).stop_evaluating = True

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append(("end", sorted(logs)))

    def on_predict_begin(self, logs: Any = None) -> None:
        self.calls.append(("begin", self.params["steps"]))

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch begin", batch))

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch end", batch, tuple(logs["outputs"].shape)))
        if (batch, cx.get_rank()) == (self.last, self.rank):
            (self.model if self.keras else self.trainer).stop_predicting = True

    def on_predict_end(self, logs: Any = None) -> None:
        self.calls.append(("end",))


def test_evaluate_and_predict_call_the_hooks_of_their_callbacks():
    with one_process():
        log = Log()
        trainer_of().evaluate(*ROWS, batch_size=12, callbacks=log)
        names = ["accuracy", "loss"]
        batches = [[("batch begin", number), ("batch end", number, names)] for number in range(2)]
        assert log.calls == [("begin", 2), *batches[0], *batches[1], ("end", names)]
        log = Log()
        trainer_of().predict(ROWS[0], batch_size=12, callbacks=[log])
        batches = [[("batch begin", 0), ("batch end", 0, (12, 3))], [("batch begin", 1), ("batch end", 1, (8, 3))]]
        assert log.calls == [("begin", 2), *batches[0], *batches[1], ("end",)]


def data_of(kind: str) -> Any:
    """Returns the rows in batches of 3, as arrays or otherwise."""
    if kind == "arrays":
        return ROWS[0]
    loader = DataLoader(TensorDataset(*ROWS), 3)
    return loader if kind == "loader" else lambda: iter(loader)


KINDS = ("arrays", "loader", "stream")


def take_steps(kinds: tuple[str, ...]) -> list[Any]:
    found: list[Any] = []
    for kind in kinds:
        size = 3 if kind == "arrays" else None
        targets = ROWS[1] if kind == "arrays" else None
        for steps in (1, 2, 5, 99):
            found.append([*trainer_of().evaluate(data_of(kind), targets, batch_size=size, steps=steps)])
            found.append(trainer_of().predict(data_of(kind), batch_size=size, steps=steps).numpy())
    return found


@pytest.mark.parametrize(
    ("world_size", "kinds"), [(2, ("arrays", "stream")), *(by_night(world_size, KINDS) for world_size in (1, 2, 4))]
)
def test_steps_are_the_first_batches_of_all_ranks_together(world_size, kinds):
    with one_process():
        trainer, expected = trainer_of(), []
        for rows in (3, 6, 15, 20):
            expected.append([*trainer.evaluate(ROWS[0][:rows], ROWS[1][:rows], batch_size=3)])
            expected.append(trainer.predict(ROWS[0][:rows], batch_size=3).numpy())
    for found in everywhere(world_size, take_steps, kinds):
        for place, each in enumerate(found):
            np.testing.assert_allclose(each, expected[place % 8], rtol=1e-6)
            assert np.shape(each) == np.shape(expected[place % 8])


def stop_early(kind: str, last_rank: bool, keras: bool) -> list[Any]:
    """Stops after the second batch of one rank; returns the numbers, the rows and how many batches there were."""
    size = 3 if kind == "arrays" else None
    targets = ROWS[1] if kind == "arrays" else None
    rank = cx.get_world_size() - 1 if last_rank else 0
    log, other = Log(1, rank, keras), Log(1, rank, keras)
    trainer = trainer_of()
    # Only that rank has callbacks.
    more: list[Any] = [None, None] if cx.get_rank() != rank else [log, other]
    numbers = [*trainer.evaluate(data_of(kind), targets, batch_size=size, callbacks=more[0])]
    rows = trainer.predict(data_of(kind), batch_size=size, callbacks=more[1])
    again = len(trainer.predict(data_of(kind), batch_size=size, callbacks=Log()))
    return [numbers, rows.numpy(), again]


@pytest.mark.parametrize("kind", [by_night("arrays"), "loader", "stream"])
@pytest.mark.parametrize(("world_size", "rows"), [by_night(1, 6), (2, 12), by_night(4, 20)])
def test_a_callback_on_any_rank_ends_both_with_the_first_rows(world_size, rows, kind):
    with one_process():
        expected = [*trainer_of().evaluate(ROWS[0][:rows], ROWS[1][:rows], batch_size=3)]
        scores = trainer_of().predict(ROWS[0][:rows], batch_size=3).numpy()
    last_rank = world_size == 2
    for numbers, found, again in everywhere(world_size, stop_early, kind, last_rank, kind == "loader"):
        np.testing.assert_allclose(numbers, expected, rtol=1e-6)
        np.testing.assert_allclose(found, scores, rtol=1e-6)
        assert (found.shape, again) == (scores.shape, 20)


class StopsAtOnce(cx.callbacks.Callback):
    def on_test_begin(self, logs: Any = None) -> None:
        self.trainer.stop_evaluating = cx.get_rank() == cx.get_world_size() - 1


def stop_at_once() -> list[float]:
    trainer = trainer_of()
    found = trainer.evaluate(*ROWS, batch_size=2, callbacks=StopsAtOnce())
    rows = 2 * cx.get_world_size()
    expected = trainer.evaluate(ROWS[0][:rows], ROWS[1][:rows], batch_size=2)
    return [found.loss, expected.loss, len(trainer.predict(ROWS[0], callbacks=StopsAtOnce()))]


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_request_as_it_begins_ends_it_after_the_first_batches(world_size):
    for found, expected, rows in everywhere(world_size, stop_at_once):
        assert found == pytest.approx(expected, rel=1e-6)
        assert rows == 20


class StopsValidation(Log):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls = [logs["val_loss"]]


def validate_a_part() -> list[float]:
    stops = StopsValidation(0, cx.get_world_size() - 1)
    trainer_of().fit(
        *ROWS, epochs=1, validation_data=ROWS, validation_batch_size=5, verbose=False, callbacks=stops, batch_size=20
    )
    weights = stops.trainer.evaluate(ROWS[0][: 5 * cx.get_world_size()], ROWS[1][: 5 * cx.get_world_size()])
    return [*stops.calls, weights.loss]


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_validation_ends_likewise(world_size):
    for found, expected in everywhere(world_size, validate_a_part):
        assert found == pytest.approx(expected, rel=1e-6)


class Fails(cx.callbacks.Callback):
    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        if cx.get_rank() == 1 and batch == 1:
            raise OSError("no space in the hook")


def fail_in_a_hook() -> list[str]:
    found = []
    with pytest.raises((OSError, cx.CyxtrainError)) as error:
        trainer_of().predict(ROWS[0], batch_size=3, callbacks=Fails())
    found.append(f"{error.type.__name__}: {error.value}")
    for more in ({"steps": 0}, {"verbose": 3}, {"callbacks": [3]}, {"steps": 1 + cx.get_rank()}):
        found.append(refusal(trainer_of().evaluate, *ROWS, **more))
    trainer_of().predict(ROWS[0])  # the world still works
    return found


def test_what_goes_wrong_in_a_hook_or_in_the_arguments_is_an_error_on_every_rank():
    first, second = run_world(2, fail_in_a_hook)
    assert first[0].startswith("DistributedTrainingError: rank 1: OSError: no space in the hook")
    assert second[0] == "OSError: no space in the hook"
    assert first[1] == "evaluate.steps must be a whole number of at least 1, got 0."
    assert first[2] == "evaluate.verbose must be 0, 1, 2 or 'auto', got 3."
    assert first[3].startswith("callbacks must be instances of cyxtrain.callbacks.Callback, got 3 (a int)")
    assert second[4].startswith("rank 1 differs from rank 0 in steps: 2 on rank 1, 1 on rank 0")


@pytest.mark.parametrize(("verbose", "lines"), [(0, 0), (1, 1), ("auto", 1), (2, 1), (False, 0), (True, 1)])
def test_verbose_prints_a_line_as_fit_does(verbose, lines, capsys):
    with one_process():
        evaluation = trainer_of().evaluate(*ROWS, verbose=verbose)
        trainer_of().predict(ROWS[0], verbose=verbose)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 * lines
    if lines:
        assert printed[0].startswith(f"evaluate  loss {evaluation.loss:.4f}  accuracy {evaluation['accuracy']:.4f}  ")
        assert printed[0].endswith(" samples/s")
        assert printed[1].startswith("predict  ")


def test_return_dict_gives_a_dictionary():
    with one_process():
        evaluation = trainer_of().evaluate(*ROWS)
        found = trainer_of().evaluate(*ROWS, return_dict=True)
    assert type(found) is dict
    assert found == {"loss": evaluation.loss, "accuracy": evaluation.accuracy}


# --- parts that are None ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Part:
    inputs: Any
    labels: Any = None
    mask: Any = None


class Masked(nn.Module):
    """Takes a mask that may be None, and something after it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, inputs: Tensor, mask: Tensor | None, shift: Tensor | None = None) -> Tensor:
        scores: Tensor = self.body(inputs if mask is None else inputs * mask)
        return scores if shift is None else scores + shift


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return len(ROWS[0])

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return ROWS[0][row], ROWS[1][row]


def loader_of(make: Any) -> DataLoader[Any]:
    return DataLoader(Pairs(), 6, collate_fn=lambda rows: make(*map(torch.stack, zip(*rows, strict=True))))


def use_parts_that_are_none() -> list[list[float]]:
    shift = torch.ones(len(ROWS[0]), 3)
    ways: list[tuple[Any, ...]] = [
        ({"inputs": ROWS[0], "mask": None}, ROWS[1]),
        ((ROWS[0], None), ROWS[1]),
        ((ROWS[0], None, shift), ROWS[1]),
        (loader_of(lambda x, y: {"inputs": x, "mask": None, "labels": y}),),
        (loader_of(lambda x, y: ((x, None, torch.ones(len(x), 3)), y)),),
        (loader_of(Part),),
        (lambda: iter(loader_of(lambda x, y: {"inputs": x, "mask": None, "labels": y, "name": ["a"] * len(x)})),),
    ]
    found = []
    for way in ways:
        trainer = trainer_of(make_model() if len(found) == 5 else Masked())
        history = trainer.fit(*way, epochs=1, effective_batch_size=None, batch_size=64, verbose=False)
        scores = trainer.predict(way[0])
        found.append([*history.train_losses, trainer.evaluate(*way).loss, *scores.reshape(-1).tolist()])
    return found


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_parts_of_the_data_that_are_none_reach_the_model_as_none(world_size):
    for found in everywhere(world_size, use_parts_that_are_none):
        assert all(len(each) == 2 + 60 for each in found)
        assert found[0] == found[1]
        assert found[3][0] == found[6][0] == found[5][0]
    with one_process(), pytest.raises(cx.ConfigError, match="X has no samples: it is None, or all of its parts are"):
        trainer_of(Masked()).predict({"inputs": None, "mask": None})


class StopsFirstSet(cx.callbacks.Callback):
    """Ends the validation of the first set after its first batch, and notes the batches of all sets."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.batches:
            self.trainer.stop_evaluating = True
        self.batches.append(batch)


def validate_two_sets() -> tuple[list[int], float, float]:
    stops = StopsFirstSet()
    trainer = trainer_of()
    sets = {"a": ROWS, "b": ROWS}
    history = trainer.fit(
        *ROWS, epochs=1, validation_data=sets, validation_batch_size=5, verbose=False, callbacks=stops, batch_size=20
    )
    return stops.batches, history.validations[-1]["val_b_loss"], trainer.evaluate(*ROWS).loss


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_request_in_one_of_several_validation_sets_leaves_the_others_whole(world_size):
    for batches, second, whole in everywhere(world_size, validate_two_sets):
        assert batches == [0, *range(4 // world_size)]
        assert second == pytest.approx(whole, rel=1e-6)
