"""A model of several blocks that count how often they run."""

from __future__ import annotations

import torch
from fitting import seeded
from torch import Tensor, nn


class Block(nn.Module):
    """Has all that may go wrong when it is run twice: randomness, and running means."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        output: Tensor = x + self.dropout(torch.tanh(self.norm(self.linear(x))))
        return output


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.last(x)
        return output


def make_deep() -> Deep:
    with seeded():
        return Deep()
