"""Claims about what `predict` returns: rows of different lengths, structures of outputs, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from fitting import adam, everywhere, make_model, make_rows, one_process, run_world, seeded
from markers import by_night
from refusals import refusal, refuses
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

SIZES = (1, 2, 3, 4, 5, 7, 9)
DAILY_SIZES = (1, 2, 5)
WORLDS = [by_night(1), 2, by_night(4)]


def trainer_of(model: nn.Module, loss_fn: Any = None) -> cx.DistributedTrainer:
    return cx.DistributedTrainer(model, loss_fn, adam(model))


# --- outputs in memory that the model uses again ----------------------------------------------------------------------


class OneBuffer(nn.Module):
    """Writes the outputs of every batch to the same tensor, and returns it or a view of it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.outputs = torch.zeros(size, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch.mul(x[:, :3], 2.0, out=self.outputs[: len(x)])
        return self.outputs[: len(x)]


def predict_from_one_buffer() -> tuple[Any, Any]:
    inputs, targets = make_rows(12)
    trainer = cx.DistributedTrainer(OneBuffer(2), "cross_entropy", "sgd", metrics={"all": cx.metrics.WholeSet(spread)})
    found = trainer.predict(inputs, batch_size=2).numpy()
    return found, dict(trainer.evaluate(inputs, targets, batch_size=2))["all"]


def spread(output: Any, target: Any) -> float:
    return float(np.std(output))


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_model_that_returns_the_same_memory_for_each_batch_has_the_outputs_of_all(world_size):
    wanted = 2.0 * make_rows(12)[0][:, :3].numpy()
    for found, over_all in everywhere(world_size, predict_from_one_buffer):
        np.testing.assert_array_equal(found, wanted)
        assert over_all == pytest.approx(np.std(wanted), rel=1e-5)


# --- rows of different lengths ----------------------------------------------------------------------------------------


class Sentences(Dataset[dict[str, Any]]):
    """Words, and what is carried along with them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"words": torch.arange(1, 2 + row * 3 % 5), "id": row, "text": f"sentence {row}"}


def to_longest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    words = pad_sequence([row["words"] for row in rows], batch_first=True)
    return {"words": words, "labels": words, "id": [row["id"] for row in rows], "text": [row["text"] for row in rows]}


def batches_of(size: int) -> DataLoader[Any]:
    return DataLoader(Sentences(size), 2, collate_fn=to_longest)


class Scorer(nn.Module):
    """Scores each word; returns its loss if it gets labels."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.scores = nn.Embedding(6, 3)

    def forward(self, words: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        scores = self.scores(words)
        loss = None if labels is None else (scores[..., 0] - labels).square().mean()
        return {"loss": loss, "scores": scores, "last": words[:, -1], "cache": None}


def plain(output: Any) -> Any:
    """Returns an output, with each tensor as its type and numbers."""
    if isinstance(output, dict):
        return {name: plain(part) for name, part in output.items()}
    if isinstance(output, (list, tuple)):
        return [plain(row) for row in output]
    return output if output is None else (type(output).__name__, str(output.dtype), output.tolist())


def predict_sentences(sizes: tuple[int, ...]) -> list[Any]:
    trainer = trainer_of(Scorer())
    found = []
    for size in sizes:
        for data in (batches_of(size), functools.partial(iter, batches_of(size))):
            found += [plain(trainer.predict(data, pad_value=pad_value)) for pad_value in (None, -1.5)]
    return found


def expected_sentences(sizes: tuple[int, ...]) -> list[Any]:
    model, found = Scorer(), []
    for size in sizes:
        with torch.no_grad():
            outputs = [model(batch["words"]) for batch in batches_of(size)]
        last = torch.cat([output["last"] for output in outputs])
        rows = [row for output in outputs for row in output["scores"]]
        padded = pad_sequence(rows, batch_first=True, padding_value=-1.5)
        unpadded: Any = rows if len({row.shape for row in rows}) > 1 else padded
        each = [plain({"scores": scores, "last": last, "cache": None}) for scores in (unpadded, padded)]
        found += [*each, *each]
    return found


@pytest.mark.parametrize(
    ("world_size", "sizes"), [(2, DAILY_SIZES), *(by_night(world_size, SIZES) for world_size in (1, 2, 4))]
)
def test_rows_of_batches_that_are_padded_to_their_longest_are_a_list_or_are_padded(world_size, sizes):
    expected = expected_sentences(sizes)
    assert sum(isinstance(found["scores"], list) for found in expected) == 2 * sum(size > 2 for size in sizes)
    for found in everywhere(world_size, predict_sentences, sizes):
        assert found == expected


def test_a_model_that_predicts_rows_of_different_lengths_is_one_that_trains_on_them():
    with one_process():
        trainer = trainer_of(Scorer())
        losses = trainer.fit(batches_of(9), epochs=2, verbose=False).train_losses
        assert losses[1] < losses[0]
        assert trainer.evaluate(batches_of(9)).loss < losses[0]
        assert len(trainer.predict(batches_of(9))["scores"]) == 9


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Any:
        return inputs * self.scale


def test_several_dimensions_are_padded_and_rows_of_arrays_are_arrays():
    shapes = [(2, 3, 1), (1, 2, 4)]
    arrays = [np.ones(shape, "float32") for shape in shapes]
    with one_process():
        rows = trainer_of(Scaled(), "mse").predict(lambda: iter(arrays))
        padded = trainer_of(Scaled(), "mse").predict(lambda: iter(arrays), pad_value=7)
        alike = trainer_of(Scaled(), "mse").predict(lambda: iter(arrays[:1]), pad_value=7)
    assert [(type(row), row.shape) for row in rows] == [(np.ndarray, shape) for shape in [(3, 1), (3, 1), (2, 4)]]
    expected = np.full((3, 3, 4), 7, "float32")
    expected[:2, :3, :1] = expected[2:, :2, :4] = 1
    np.testing.assert_array_equal(padded, expected, strict=True)
    np.testing.assert_array_equal(alike, arrays[0], strict=True)


# --- structures of outputs --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Out:
    """A loss and what it is computed of."""

    loss: Any
    logits: Any
    states: Any = None


@dataclasses.dataclass
class Named(OrderedDict[str, Any]):
    """As Hugging Face's outputs: also a dictionary of the fields that are not None."""

    loss: Any = None
    logits: Any = None
    past: Any = None

    def __post_init__(self) -> None:
        self.update({name: value for name, value in vars(self).items() if value is not None})


@dataclasses.dataclass
class Doubled:
    """It computes a field itself, so that nobody else can make one with other rows."""

    logits: Any
    twice: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.twice = 2 * self.logits


class Returns(nn.Module):
    """Returns what `make` makes of its scores and its loss, which is None without targets."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.body, self.make = make_model(), make

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.body(inputs)
        return self.make(None if labels is None else nn.functional.cross_entropy(logits, labels), logits)


MADE: dict[str, Any] = {
    "dataclass": lambda loss, logits: Out(loss, logits),
    "dataclass with a loss": lambda loss, logits: Out(logits.mean(), logits, (logits[:, 0], None)),
    "both": lambda loss, logits: Named(loss, logits),
    "computed": lambda loss, logits: Doubled(logits),
    "tuple": lambda loss, logits: (logits, None, [logits[:, 0]]),
    "nested": lambda loss, logits: {"inner": Out(None, logits), "outer": None},
}


def predict_structures() -> dict[str, str]:
    inputs = make_rows(3)[0]
    return {name: repr(trainer_of(Returns(make)).predict(inputs, batch_size=2)) for name, make in MADE.items()}


@pytest.mark.parametrize("world_size", WORLDS)
def test_outputs_keep_their_structure_and_their_class_on_every_rank(world_size):
    inputs = make_rows(3)[0]
    with torch.no_grad():
        logits = torch.cat([make_model()(inputs[:2]), make_model()(inputs[2:])])
    first = logits[:, 0].clone()
    expected = {
        "dataclass": Out(None, logits),
        "dataclass with a loss": Out(None, logits, (first, None)),
        "both": Named(None, logits),
        "computed": {"logits": logits, "twice": 2 * logits},
        "tuple": (logits, None, [first]),
        "nested": {"inner": Out(None, logits), "outer": None},
    }
    for found in everywhere(world_size, predict_structures):
        assert found == {name: repr(each) for name, each in expected.items()}


@pytest.mark.parametrize("kind", [by_night("dataclass"), "both"])
def test_a_model_that_returns_a_dataclass_is_one_that_trains(kind):
    inputs, labels = make_rows(8)
    with one_process():
        trainer = trainer_of(Returns(MADE[kind]))
        losses = trainer.fit(inputs, labels, epochs=2, batch_size=4, verbose=False).train_losses
        assert losses[1] < losses[0]
        assert trainer.evaluate(inputs, labels).loss < losses[0]
        found = trainer.predict(inputs)
    assert type(found) in (Out, Named)
    assert (found.loss, found.logits.shape) == (None, (8, 3))


class Reporter(nn.Module):
    """Returns its loss and two more numbers, as a VAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> dict[str, Any]:
        rebuilt = self.body(rows)
        error = (rebuilt - rows).square()
        return {"loss": error.mean(), "error": error.mean(), "share": (error.sum(), error.numel()), "rebuilt": rebuilt}


def test_scalars_that_a_fit_shows_beside_the_models_loss_are_left_out_of_predictions():
    rows, model = make_rows(7)[0], Reporter()
    with one_process():
        trainer = trainer_of(model)
        history = trainer.fit(rows, epochs=1, batch_size=4, verbose=False)
        found = trainer.predict(rows, batch_size=4)
    assert {"loss", "error", "share"} <= history.history.keys()
    assert found.keys() == {"rebuilt"}
    assert torch.allclose(found["rebuilt"], model(rows)["rebuilt"])


# --- recurrent models -------------------------------------------------------------------------------------------------


class Packing(nn.Module):
    """Reads rows of different lengths as a packed sequence, and returns one, or padded to the batch's longest."""

    def __init__(self, kind: str, batch_first: bool = True) -> None:
        super().__init__()
        with seeded():
            self.cell = nn.LSTM(4, 3, 2, batch_first=batch_first)
        self.kind, self.batch_first = kind, batch_first

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        x = x if self.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=self.batch_first, enforce_sorted=False)
        output, states = self.cell(packed)
        if self.kind == "packed":
            return {"output": output, "states": states}
        return {"output": pad_packed_sequence(output, self.batch_first)[0], "states": states}


def sequences(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 6, (rows,), generator=generator)
    return {"x": torch.randn(rows, 5, 4, generator=generator), "lengths": lengths}


def predict_packed(rows: int, folder: str) -> list[Any]:
    """Returns what is predicted, without tensors; from a folder, too."""
    found, x = [], sequences(rows)
    for kind, batch_first in (("packed", True), ("packed", False), ("padded", True), ("padded", False)):
        trainer = trainer_of(Packing(kind, batch_first), "mse")
        for pad_value in (None, 0.0):
            output = trainer.predict(x, batch_size=4, pad_value=pad_value)
            saved = trainer.predict(x, batch_size=4, pad_value=pad_value, output_dir=f"{folder}/{len(found)}")[:]
            assert plain(saved) == plain(output)
            if isinstance(output["output"], Tensor) and kind == "padded" and not batch_first:
                output["output"] = output["output"].transpose(0, 1)
            found.append([[row.tolist() for row in output["output"]], [each.tolist() for each in output["states"]]])
    return found


@pytest.mark.parametrize("world_size", [by_night(1), 2])
@pytest.mark.parametrize("rows", [by_night(1), 7, by_night(13)])
def test_packed_sequences_are_rows_in_the_order_of_the_data_and_states_stay_beside_them(rows, world_size, tmp_path):
    inputs = sequences(rows)
    with torch.no_grad():
        cell = Packing("packed").cell
        each = [cell(x[None, :length]) for x, length in zip(inputs["x"], inputs["lengths"], strict=True)]
    ragged = [output[0] for output, _ in each]
    states = [torch.cat([pair[number] for _, pair in each], dim=1) for number in (0, 1)]
    of_batches = [row for first in range(0, rows, 4) for row in pad_sequence(ragged[first : first + 4], True)]
    padded = [*pad_sequence(ragged, True)]
    for found in everywhere(world_size, predict_packed, rows, str(tmp_path)):
        for (output, found_states), expected in zip(
            found, [ragged, padded, ragged, padded, of_batches, padded, of_batches, padded], strict=True
        ):
            torch.testing.assert_close([torch.tensor(row) for row in output], expected, rtol=0, atol=1e-6)
            torch.testing.assert_close([torch.tensor(state) for state in found_states], states, rtol=0, atol=1e-6)


class Recurrent(nn.Module):
    """Returns the states of an LSTM, too."""

    def __init__(self, rows_first: bool, layers: int = 1) -> None:
        super().__init__()
        self.cell, self.rows_first = nn.LSTM(4, 3, layers, batch_first=True), rows_first

    def forward(self, inputs: Tensor) -> Any:
        output, states = self.cell(inputs[:, None])
        return output, tuple(state.transpose(0, 1) if self.rows_first else state for state in states)


def predict_states(rows_first: bool, layers: int, rows: int) -> tuple[list[Any], list[Any]]:
    """Returns the shapes of what the model gives and of what is predicted, and where they differ."""
    with seeded():
        model = Recurrent(rows_first, layers)
    output, states = trainer_of(model, "mse").predict(make_rows(rows)[0], batch_size=3)
    with torch.no_grad():
        expected, expected_states = model(make_rows(rows)[0])
    for found, other in zip((output, *states), (expected, *expected_states), strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=1e-6)
    return [list(state.shape) for state in states], list(output.shape)


@pytest.mark.parametrize("world_size", [by_night(1), 2])
@pytest.mark.parametrize(("layers", "rows"), [by_night(1, 1), by_night(1, 7), (2, 1), by_night(2, 2), (3, 7)])
def test_states_keep_their_rows_in_the_second_dimension(world_size, layers, rows):
    for states, output in everywhere(world_size, predict_states, False, layers, rows):
        assert (states, output) == ([[layers, rows, 3]] * 2, [rows, 1, 3])


def test_states_with_rows_first_stay_so_also_if_there_are_as_many_layers():
    with one_process():
        assert predict_states(True, 2, 2) == ([[2, 2, 3]] * 2, [2, 1, 3])


# --- what is refused --------------------------------------------------------------------------------------------------


class NeedsLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Returns(MADE["dataclass"])

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        return self.body(inputs, labels)


@pytest.mark.parametrize("by_name", [by_night(False), True])
def test_a_model_that_requires_the_targets_trains_and_does_not_predict(by_name):
    inputs, labels = make_rows(8)
    given: Any = {"inputs": inputs} if by_name else inputs
    words = (
        "the forward of NeedsLabels requires labels, and predict passes the inputs alone: give labels a default, as in "
        "labels=None"
    )
    with one_process():
        trainer = trainer_of(NeedsLabels())
        assert len(trainer.fit(given, labels, epochs=1, batch_size=4, verbose=False).train_losses) == 1
        trainer.evaluate(given, labels)
        with pytest.raises(cx.ConfigError, match=words):
            trainer.predict(given)


def predict(make: Any, rows: int = 4, **settings: Any) -> None:
    """Predict with a model that returns what `make` makes of its scores."""
    trainer_of(Returns(lambda loss, logits: make(logits))).predict(make_rows(rows)[0], **settings)


def predict_classes(pad_value: Any) -> None:
    predict(lambda logits: logits.argmax(1)[:, None].expand(-1, len(logits)), 5, batch_size=3, pad_value=pad_value)


PACKED = nn.utils.rnn.pack_sequence([torch.ones(length, 4) for length in (2, 1)])
test_what_predict_cannot_take_or_return_is_refused = refuses(
    (
        lambda: predict(lambda logits: logits.T),
        r"for 4 samples it returned a tensor of shape \[3, 4\]\. Its rows are in the second dimension, .* return it "
        r"with the rows first \(state\.transpose\(0, 1\)\), or return only what you need",
    ),
    (
        lambda: predict(lambda logits: {"logits": logits, "past_key_values": object()}),
        r"it returned object as output\['past_key_values'\]\. Set model\.config\.use_cache = False",
    ),
    (
        lambda: trainer_of(Scaled(), "mse").predict(lambda: iter([PACKED])),
        r"X is a PackedSequence, .* give padded rows and their ",
    ),
    (
        lambda: trainer_of(NeedsLabels(), "mse").predict(make_rows(2)[0]),  # what is missing is not taken for targets
        "the model cannot take X, tried on shape",
    ),
    (lambda: predict_classes("0"), r"predict\.pad_value must be a number, got '0'"),
    (lambda: predict_classes(True), r"predict\.pad_value must be a number, got True"),
    (lambda: predict_classes(0.5), r"pad_value must be an integer for outputs of torch\.int64, got 0\.5"),
    (lambda: predict_classes(float("nan")), "pad_value must be an integer"),
)


def pad_differently() -> str:
    return refusal(trainer_of(Scorer()).predict, batches_of(5), pad_value=float(cx.get_rank()))


def test_ranks_pad_with_the_same_value():
    for text in run_world(2, pad_differently):
        assert text.startswith("rank 1 differs from rank 0 in pad_value: 1.0 on rank 1, 0.0 on rank 0")
