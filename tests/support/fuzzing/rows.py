"""The rows of a random program, and the containers in which `fit` is given them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from .spec import Spec

CLASSES = 3
IGNORED = -100
_LONGEST = 7
Part = Any
"""Inputs or targets of several rows: a tensor, or a dictionary of tensors."""


def dtype_of(spec: Spec) -> torch.dtype:
    return torch.float64 if spec.dtype == "float64" else torch.float32


def make_rows(spec: Spec, count: int, salt: int = 0) -> tuple[Part, Part | None]:
    """Return inputs and targets; those of another salt are other rows."""
    generator = torch.Generator().manual_seed(1000 * spec.data_seed + salt)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype_of(spec))

    classes = torch.randint(CLASSES, (count,), generator=generator)
    if spec.task in ("tok", "seq"):
        return _texts(spec, count, classes, generator)
    if spec.task == "conv":
        return normal(count, 2, 4, 4), classes
    if spec.task == "multi":
        return {"a": normal(count, 3), "b": normal(count, 2)}, {"c": classes, "r": normal(count, 1)}
    inputs = normal(count, 5)
    if spec.computes_loss:
        return {"x": inputs, "labels": classes}, None
    if spec.task == "reg":
        return inputs, normal(count, 2)
    if spec.task == "bin":
        return inputs, (normal(count, 1) > 0).to(dtype_of(spec))
    return inputs, classes


def _texts(spec: Spec, count: int, classes: Tensor, generator: torch.Generator) -> tuple[Part, Part | None]:
    lengths = torch.randint(1, _LONGEST + 1, (count,), generator=generator)
    tokens = torch.randint(1, 13, (count, _LONGEST), generator=generator)
    padding = torch.arange(_LONGEST) >= lengths[:, None]
    labels = tokens.roll(-1, 1).remainder(5).masked_fill(padding, IGNORED)
    tokens = tokens.masked_fill(padding, 0)
    if spec.task == "seq":
        return tokens, classes
    if spec.computes_loss:
        return {"input_ids": tokens, "labels": labels}, None
    return tokens, labels


def row_weights(spec: Spec, count: int, period: int = 4) -> Tensor:
    return (torch.arange(count) % period + 0.5).to(dtype_of(spec)) / 2


def take(part: Part, index: Any) -> Any:
    return {name: each[index] for name, each in part.items()} if isinstance(part, dict) else part[index]


def first_of(part: Part) -> Tensor:
    first: Tensor = next(iter(part.values())) if isinstance(part, dict) else part
    return first


def identity_of(row: Tensor) -> bytes:
    """Return what identifies a row of the first input, however far it is padded."""
    values = row.detach().numpy().reshape(-1)
    return (np.trim_zeros(values, "b") if values.dtype.kind == "i" else values).tobytes()


def lengths_of(inputs: Part) -> list[int]:
    return [length_of(row) for row in first_of(inputs)]


def length_of(sample: Any) -> int:
    """Return the length of a text; of other samples, a number from their first value."""
    row = first_of(sample[0] if isinstance(sample, tuple | list) else sample)
    if row.dtype.is_floating_point:
        return 1 + int(10 * row.flatten()[0].abs())
    return int((row != 0).sum())


class Rows(Dataset[Any]):
    """Rows by number."""

    def __init__(self, inputs: Part, targets: Part | None, weights: Tensor | None = None, form: str = "pair") -> None:
        self.inputs, self.targets, self.weights, self.form = inputs, targets, weights, form

    def __len__(self) -> int:
        return len(first_of(self.inputs))

    def __getitem__(self, index: int) -> Any:
        inputs = take(self.inputs, index)
        if self.targets is None:
            return inputs
        target = take(self.targets, index)
        if self.form == "trimmed":
            inputs = inputs[: max(1, int((inputs != 0).sum()))]
            target = target[: len(inputs)] if target.dim() else target
        if self.form == "dict":
            return {"x": inputs, "labels": target}
        return (inputs, target) if self.weights is None else (inputs, target, self.weights[index])


class Stream(IterableDataset[Any]):
    """Rows in an order drawn from the global generator."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in torch.randperm(len(self.rows)).tolist())


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.rows)


class Drawn(Sampler[int]):
    """A sampler of the user's that draws from the global generator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())


class Stateful(Drawn):
    """A sampler with a state that checkpoints must hold."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(index * 7 + self.passes) % self.size for index in range(self.size)])

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Uneven(Sampler[list[int]]):
    """Batches of different sizes."""

    def __init__(self, size: int, batch: int) -> None:
        self.sizes: list[int] = []
        left = size
        while left:
            self.sizes.append(min(left, 1 + (batch + len(self.sizes)) % (2 * batch)))
            left -= self.sizes[-1]

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(torch.randperm(sum(self.sizes)).tolist())
        return iter([list(itertools.islice(order, size)) for size in self.sizes])


def pad(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collate texts: each batch as wide as its longest."""
    inputs = nn.utils.rnn.pad_sequence([text for text, _ in samples], batch_first=True)
    targets = [target for _, target in samples]
    if targets[0].dim():
        return inputs, nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORED)
    return inputs, torch.stack(targets)


_SAMPLERS: dict[str, Callable[[int], Sampler[int]]] = {
    "loader_own": Drawn,
    "loader_state": Stateful,
    "loader_subset": lambda size: SubsetRandomSampler(range(0, size, 2)),
    "loader_weighted": lambda size: WeightedRandomSampler([1.0 + index % 3 for index in range(size)], size),
}


def container(spec: Spec, world_size: int, inputs: Part, targets: Part | None) -> tuple[tuple[Any, ...], Any]:
    """Return the data of `fit`, and the keywords that go with them."""
    weights = row_weights(spec, len(first_of(inputs))) if spec.sample_weight else None
    kind, (name, size) = spec.data, spec.batch
    if kind in ("tensors", "numpy"):
        parts = [each if kind == "tensors" else _as_numpy(each) for each in (inputs, targets, weights)]
        return (parts[0], parts[1]), {} if weights is None else {"sample_weight": parts[2]}
    if kind == "tds":
        return (TensorDataset(*(each for each in (inputs, targets, weights) if each is not None)),), {}
    if kind == "generator":
        return (_batches(inputs, targets, size),), {"sharded_data": False}
    form = "dict" if kind == "dictds" else "trimmed" if kind == "loader_pad" else "pair"
    rows = Rows(inputs, targets, weights, form)
    if kind in ("mapds", "dictds"):
        return (rows,), {}
    if kind in ("stream", "stream_len"):
        stream = Stream(rows) if kind == "stream" else SizedStream(rows)
        return (stream,), {"batch_size": size, "sharded_data": False}
    more: dict[str, Any] = {"num_workers": spec.workers, "persistent_workers": spec.workers > 1}
    if kind == "loader_stream":
        return (DataLoader(Stream(rows), batch_size=size, **more),), {"sharded_data": False}
    if kind == "loader_batches":
        return (DataLoader(rows, batch_sampler=Uneven(len(rows), size), **more),), {}
    if kind in _SAMPLERS:
        more["sampler"] = _SAMPLERS[kind](len(rows))
    else:
        more["shuffle"] = spec.shuffle
    if kind == "loader_pad":
        more["collate_fn"] = pad
    per_rank = size if name == "eff" else max(1, size // world_size)
    return (DataLoader(rows, batch_size=per_rank, **more),), {}


def _as_numpy(part: Part | None) -> Any:
    if isinstance(part, dict):
        return {name: each.numpy() for name, each in part.items()}
    return None if part is None else part.numpy()


def _batches(inputs: Part, targets: Part | None, size: int) -> Callable[[], Iterator[Any]]:
    """Return a function that yields batches of two sizes in turns."""

    def batches() -> Iterator[Any]:
        order = torch.randperm(len(first_of(inputs)))
        for number, begin in enumerate(range(0, len(order), size)):
            index = order[begin : begin + size - (number % 2 if size > 1 else 0)]
            yield take(inputs, index) if targets is None else (take(inputs, index), take(targets, index))

    return batches
