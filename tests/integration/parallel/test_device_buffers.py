"""Buffers on accelerators: the same numbers as on CPUs, and running statistics without a look from the host."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from fitting import CLASSES, FEATURES, fingerprint, make_rows, seeded
from stand_in import fakegpu
from stand_in.running import run_on_stand_in
from torch import Tensor, nn

import cyxtrain as cx
from cyxtrain.parallel.consistency import broadcasting

STEPS = 12
OURS = (
    "parallel/consistency/broadcasting.py",
    "tensors/fingerprint.py",
    "tensors/layouts.py",
    "accelerator.py",
)


class Model(nn.Module):
    """Has running statistics, a mask that stays, and what it has seen, unless that stays as well."""

    def __init__(self, notes_from: int) -> None:
        super().__init__()
        with seeded():
            self.layers = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
        self.register_buffer("mask", torch.ones(CLASSES))
        self.register_buffer("seen", torch.zeros(FEATURES))
        self.notes_from, self.forwards = notes_from, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.forwards >= self.notes_from:
            self.seen.mul_(0.9).add_(x.detach().mean(0))
        self.forwards += self.training
        return self.layers(x) * self.mask + self.seen.sum()


def train(device: str, notes_from: int) -> tuple[str, int, int]:
    """Returns (bits of parameters and buffers; in the last 8 steps: how often ranks compared, how often one waited)."""
    inputs, targets = make_rows(STEPS * 5)
    model = cx.DistributedDataParallel(Model(notes_from).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = slice(0, 3) if cx.get_rank() == 0 else slice(3, 5)  # ranks have different numbers of rows
    with mock.patch.object(broadcasting, "share_tensors", wraps=broadcasting.share_tensors) as compare:
        for step, (x, y) in enumerate(zip(inputs.split(5), targets.split(5), strict=True)):
            if step == STEPS - 8:
                compare.reset_mock()
                fakegpu.start_counting()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows].to(device)), y[rows].to(device)).backward()
            optimizer.step()
        fakegpu.stop_counting()
        compared = compare.call_count
    waits = sum(n for (kind, place), n in fakegpu.stops.items() if "SYNC" in kind and place.split(":")[0] in OURS)
    model.sync_buffers()
    bits = fingerprint(model.module.cpu())
    model.close()
    return bits, compared, waits


def train_on_both() -> list[Any]:
    found = []
    with cx.init():
        for notes_from in (STEPS, 0, 6):
            found.append([*train("cpu", notes_from), *train(f"{fakegpu.NAME}:0", notes_from)])
    return found


@pytest.mark.nightly
def test_running_statistics_are_shared_without_a_look_and_all_others_as_on_cpus(fakegpu_folder):
    ranks = run_on_stand_in(fakegpu_folder, 2, train_on_both)
    assert ranks[0] == ranks[1]
    constant, changing, later = ranks[0]
    assert constant[0] == constant[3]
    assert constant[1:3] == [8, 0]
    assert constant[4:] == [0, 0]
    assert changing[0] == changing[3]
    assert changing[4] == 8
    assert 0 < later[4] < 8  # noticed in the middle, one step later than on CPUs
