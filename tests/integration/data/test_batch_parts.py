"""What the parts of a batch are taken for: texts are left out, integers are no weights, fields go by their names."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, fingerprint, make_model, make_rows, one_process
from markers import by_night
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import cyxtrain as cx
from cyxtrain.data.batches.collate import as_batch, left_out

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS = 24
NAMES = ["a.png", "b.png"]
X, Y = torch.ones(2, 3), torch.tensor([0, 1])
Labelled = namedtuple("Labelled", "image labels")
Whole = namedtuple("Whole", "image mask labels")
Usual = namedtuple("Usual", "rows target weight")


@dataclasses.dataclass
class Pair:
    """Two parts."""

    x: Any
    label: Any


@dataclasses.dataclass
class Several:
    """Two inputs, targets and a name."""

    image: Any
    mask: Any
    labels: Any
    path: Any = None


BATCHES: dict[str, tuple[Any, Any, list[str]]] = {
    "a third text": ((X, Y, NAMES), X, ["part 3"]),
    "a third and a fourth": ([X, Y, NAMES, ("c", "d")], X, ["part 3"]),
    "weights and texts": ((X, Y, torch.ones(2), NAMES), X, ["part 3"]),
    "an array of texts": ((X, Y, np.array(NAMES)), X, ["part 3"]),
    "by name": ({"x": X, "path": NAMES, "labels": Y}, {"x": X}, ["X['path']"]),
    "beside an input": (((X, NAMES), Y), X, ["X[1]"]),
    "in targets": ((X, {"y": Y, "name": NAMES}), X, ["y['name']"]),
    "a named tuple": (Labelled(X, Y), X, []),
    "a named tuple of three": (Whole(X, 2 * X, Y), {"image": X, "mask": 2 * X}, []),
    "a usual named tuple": (Usual(X, Y, torch.ones(2)), X, []),
    "a dataclass": (Pair(X, Y), X, []),
    "a dataclass of several": (Several(X, 2 * X, Y, NAMES), {"image": X, "mask": 2 * X}, ["X['path']"]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_texts_are_left_out_and_fields_go_by_name(name):
    given, inputs, texts = BATCHES[name]
    rows = as_batch(given)
    torch.testing.assert_close(rows.inputs, inputs)
    targets = rows.targets["y"] if isinstance(rows.targets, dict) else rows.targets
    assert torch.equal(targets, Y)
    assert left_out(given)[:1] == texts


def test_a_dataclass_among_the_inputs_goes_by_name():
    rows = as_batch((Pair(X, 2 * X), Y))
    assert list(rows.inputs) == ["x", "label"]
    assert left_out((X, Y, torch.ones(2))) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((X, Y, torch.tensor([7, 8])), r"has integers \(int64\): give weights as floats.*nest it"),
        ((X, Y, [7, 8]), "has integers"),
        ((X, Y, np.array([True, False])), "has integers"),
        ((NAMES, Y), "X holds <U5 values"),
        ((X, NAMES), "y holds <U5 values"),
        ({"path": NAMES, "y": Y}, "holds <U5 values"),
        ((X, Y, torch.ones(2), torch.ones(2)), "one has 4 parts"),
    ],
)
def test_what_cannot_be_meant_so_is_refused(given, words):
    with pytest.raises(cx.ConfigError, match=words):
        as_batch(given)


class Files(Dataset):
    """Rows with the name of a file, in one form or another."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.inputs, self.targets = make_rows(ROWS)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        x, y, path = self.inputs[row], self.targets[row], f"{row}.png"
        forms = {"plain": (x, y), "tuple": (x, y, path), "nested": ((x, path), y), "fields": Pair(x, y)}
        named = {"rows": x, "path": path, "labels": y}
        forms["ids"] = {"rows": x, "id": row, "labels": y}
        return {**forms, "dict": named, "fields of texts": Labelled(x, y)}[self.form]


class Named(nn.Module):
    """Takes its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows)


def collate(items: list[Any]) -> Any:
    batch = torch.utils.data.default_collate([dataclasses.asdict(item) for item in items])
    return Pair(**batch)


FORMS = ["tuple", "nested", "dict", "ids", "fields", "fields of texts"]


def fit_forms() -> tuple[list[str], list[int]]:
    bits, predicted = [], []
    for form in ["plain", *FORMS]:
        model = Named()
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
        loader = DataLoader(Files(form), 4, collate_fn=collate if form == "fields" else None)
        trainer.fit(loader, loader, epochs=2, verbose=False)
        bits.append(fingerprint(model))
        predicted.append(len(trainer.predict(loader)))
    return bits, predicted


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_each_form_trains_as_rows_without_texts(world_size):
    for bits, predicted in everywhere(world_size, fit_forms):
        assert len(set(bits)) == 1
        assert predicted == [ROWS] * (1 + len(FORMS))


def test_the_header_says_what_is_left_out_and_what_counts(capsys):
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    weights = torch.linspace(0.5, 2, ROWS)
    with one_process():
        trainer.fit(DataLoader(Files("tuple"), 4), epochs=1)
        assert "left out   strings in each batch: part 3" in capsys.readouterr().out
        cx.DistributedTrainer(Named(), "cross_entropy").fit(DataLoader(Files("ids"), 4), epochs=1)
        assert "left out   inputs that the model's forward does not take: id\n" in capsys.readouterr().out
        trainer.fit(TensorDataset(*make_rows(ROWS), weights), epochs=1)
        assert "weights    of samples (sample_weight, class_weight), from 0.5 to 2\n" in capsys.readouterr().out
        with pytest.raises(cx.ConfigError, match="such as ids or noise, nest it"):
            trainer.fit(TensorDataset(*make_rows(ROWS), torch.arange(ROWS)), epochs=1)
        with pytest.raises(cx.ConfigError, match="such as ids or noise, nest it"):
            trainer.fit(lambda: iter([(*make_rows(ROWS), torch.arange(ROWS))]), epochs=1)
