"""How much of the package a step enters: each file and class more is one that the next feature must know.

The bounds are what there is and one or two more, as what ran before in a process may matter; they fall, and rise only
by what a new capability needs.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from fitting import everywhere
from markers import by_night

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

PACKAGE = f"{os.sep}cyxtrain{os.sep}"
STEPS, ROWS = 8, 32


class Marked(torch.optim.SGD):
    """Notes how many calls there were before each step, and which classes of the package are alive in one."""

    def __init__(self, parameters: Any, calls: list[str], **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.calls, self.marks, self.alive = calls, list[int](), Counter[str]()
        self.before = own_objects()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.marks.append(len(self.calls))
        if len(self.marks) == STEPS // 2:
            profile = sys.getprofile()
            sys.setprofile(None)
            self.alive = own_objects() - self.before
            sys.setprofile(profile)
        return super().step(closure)


def own_objects() -> Counter[str]:
    """Returns how many objects there are of each class of the package."""
    gc.collect()
    kinds = map(type, gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).split(".")[0] == "cyxtrain")


def breadth(kind: str) -> list[int]:
    """Returns the files that a fit enters before its first step, and in one step, and the classes that are alive."""
    calls: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and PACKAGE in name and "site-packages" not in name:
            calls.append(name.rpartition(PACKAGE)[2])

    torch.manual_seed(0)
    inputs, labels = torch.randn(ROWS * STEPS, 64), torch.randint(0, 10, (ROWS * STEPS,))
    settings: dict[str, Any] = {"epochs": 1, "batch_size": ROWS // cx.get_world_size(), "verbose": False}
    if kind == "masked":
        labels[::3] = -100
        settings["clip_norm"] = 1.0
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = Marked(model.parameters(), calls, lr=0.1)
    trainer = cx.DistributedTrainer(model, torch.nn.CrossEntropyLoss(), optimizer)
    sys.setprofile(profile)
    try:
        trainer.fit(inputs, labels, **settings)
    finally:
        sys.setprofile(None)
    first, *others = optimizer.marks
    assert len(others) == STEPS - 1
    # The fewest of any step: heartbeats are due in some.
    in_step = min(len({*calls[begin:end]}) for begin, end in itertools.pairwise(others))
    return [len({*calls[:first]}), in_step, len(optimizer.alive)]


@pytest.mark.parametrize(
    ("world_size", "kind", "most"),
    [
        # Before the first step two files more than in part 12: whether X is a table, and whether it has parts. Part 14
        # adds what belongs to a slice (one object), what virtual ranks exclude, and the rows of a bucket (three).
        (1, "plain", (101, 40, 58)),
        (2, "plain", (128, 58, 79)),
        by_night(1, "masked", (101, 41, 58)),
        by_night(2, "masked", (129, 61, 79)),
    ],
)
def test_a_step_enters_no_more_files_and_classes(world_size, kind, most):
    found = everywhere(world_size, breadth, kind)[0]
    assert all(number <= bound for number, bound in zip(found, most, strict=True)), found
