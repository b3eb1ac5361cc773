"""Buffers on accelerators: the same numbers as on CPUs, and running statistics without a look from the host."""

from __future__ import annotations

from typing import Any

import torch
from fitting import CLASSES, FEATURES, fingerprint, make_rows, seeded
from stand_in import fakegpu
from stand_in.running import run_on_stand_in
from torch import Tensor, nn

import cyxtrain as cx

STEPS = 12


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


def train(device: str, notes_from: int) -> tuple[str, int]:
    """Returns (the bits of parameters and buffers, how often the host has waited for buffers in the last 8 steps)."""
    inputs, targets = make_rows(STEPS * 5)  # of uneven length: ranks have different numbers of rows
    own = cx.get_rank()
    model = cx.DistributedDataParallel(Model(notes_from).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, (x, y) in enumerate(zip(inputs.split(5), targets.split(5), strict=True)):
        rows = slice(0, 3) if own == 0 else slice(3, 5)
        if step == STEPS - 8:
            fakegpu.start_counting()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows].to(device)), y[rows].to(device)).backward()
        optimizer.step()
    fakegpu.stop_counting()
    waits = sum(n for (kind, place), n in fakegpu.stops.items() if "SYNC" in kind and "parallel/broadcasting" in place)
    waits += sum(n for (kind, place), n in fakegpu.stops.items() if "SYNC" in kind and "tensor_parts" in place)
    model.sync_buffers()
    bits = fingerprint(model.module.cpu())
    model.close()
    return bits, waits


def train_on_both() -> list[Any]:
    found = []
    with cx.init():
        for notes_from in (STEPS, 0, 6):
            found.append([train("cpu", notes_from)[0], *train(f"{fakegpu.NAME}:0", notes_from)])
    return found


def test_running_statistics_are_shared_without_a_look_and_all_others_as_on_cpus(fakegpu_folder):
    ranks = run_on_stand_in(fakegpu_folder, 2, train_on_both)
    assert ranks[0] == ranks[1]
    constant, changing, later = ranks[0]
    assert constant[0] == constant[1]
    assert constant[2] == 0
    assert changing[0] == changing[1]
    assert changing[2] > 0  # compared in each step
    assert later[2] > 0  # noticed in the middle, one step later than on CPUs
