"""The work that benchmarks of `fit` do: models, and learnable data shaped like MNIST."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

BATCH, LEARNING_RATE = 64, 1e-3
_SIGNAL = 0.4


def make_mlp(*widths: int) -> nn.Sequential:
    """Returns 784-widths-10."""
    layers: list[nn.Module] = []
    for before, width in zip((784, *widths), widths, strict=False):
        layers += [nn.Linear(before, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def make_convnet() -> nn.Sequential:
    """Two small convolutions on 28 x 28 images."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )


class Work(NamedTuple):
    """A model; on how many rows, and for how many epochs, it is trained in one launch."""

    make: Callable[[], nn.Module]
    rows: int
    epochs: int


MODELS = {
    "mlp": Work(lambda: make_mlp(256), 60_000, 1),
    "large mlp": Work(lambda: make_mlp(1536, 1536, 512), 8_192, 1),
    "convnet": Work(make_convnet, 20_000, 1),
}


def make_data(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns X (rows, 784), from 0 to 1, and y (rows,): ten pictures, the same for any seed, in much noise."""
    pictures = torch.rand(10, 784, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(10, (rows,), generator=generator)
    inputs = torch.rand(rows, 784, generator=generator)
    for some, of in zip(inputs.split(1000), targets.split(1000), strict=True):  # in place: peak memory is measured
        some.mul_(1 - _SIGNAL).add_(pictures[of], alpha=_SIGNAL)
    return inputs, targets
