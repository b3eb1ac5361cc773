"""The GAN that three libraries train: examples/side_by_side/gan_task.py has models and data.

Expect no output: the other programs import it. The data are points in the plane, in eight clusters on
a circle. The dataset draws the noise, too: what a dataset draws is the same on any number of ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

NOISE, CLUSTERS, SPREAD = 8, 8, 0.1
EPOCHS, BATCH_SIZE, BETAS = 30, 128, (0.5, 0.9)
RATES = {"discriminator": 0.003, "generator": 0.001}

angles = torch.arange(CLUSTERS) * (2 * math.pi / CLUSTERS)
CENTERS = torch.stack([angles.cos(), angles.sin()], dim=1)


class PointsAndNoise(Dataset[tuple[Tensor, Tensor]]):
    """Points of the circle; each item has new noise in each epoch."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        cluster = torch.randint(CLUSTERS, (rows,), generator=generator)
        self.points = CENTERS[cluster] + SPREAD * torch.randn(rows, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.points[row], torch.randn(NOISE)


def make_generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def make_discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def discriminator_loss(discriminator: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return functional.softplus(-discriminator(real)).mean() + functional.softplus(discriminator(fake)).mean()


def generator_loss(discriminator: nn.Module, fake: Tensor) -> Tensor:
    return functional.softplus(-discriminator(fake)).mean()


@torch.no_grad()
def quality(generator: nn.Module) -> str:
    """Return how many clusters the generator draws, and the share of points that are near one."""
    fake = generator(torch.randn(2000, NOISE, generator=torch.Generator().manual_seed(1)))
    distance, cluster = torch.cdist(fake, CENTERS).min(1)
    near = distance < 3 * SPREAD
    drawn = (cluster[near].bincount(minlength=CLUSTERS) > 20).sum()
    return f"clusters {drawn}  near one {near.double().mean():.4f}"
