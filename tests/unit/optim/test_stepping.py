"""The fused kernel, called by itself, takes the steps that optimizer.step() takes, to the bit, and gives way to it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from fitting import make_model, make_rows, seeded
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from cyxtrain.optim.fused_step import FusedStep

OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adam, weight decay": partial(torch.optim.Adam, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-4),
    "adam, maximize": partial(torch.optim.Adam, maximize=True),
    "adamw": torch.optim.AdamW,
    "adam, decoupled": partial(torch.optim.Adam, weight_decay=0.1, decoupled_weight_decay=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "sgd, nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
}


class Trained:
    """A model, its optimizer, and the gradients of one batch after the other."""

    def __init__(self, make: Any, dtype: str = "float32", groups: int = 1) -> None:
        self.model = make_model(dtype)
        parameters = list(self.model.parameters())
        kinds: list[Any] = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}]
        self.optimizer = make(kinds if groups == 2 else parameters, fused=True)
        self._rows = make_rows(12)
        self._loss = nn.CrossEntropyLoss()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        inputs, targets = self._rows
        self._loss(self.model(inputs.to(next(self.model.parameters()).dtype)), targets).backward()

    def everything(self) -> list[Tensor]:
        """Parameters, and all that the optimizer keeps."""
        state = self.optimizer.state_dict()["state"]
        kept = [value for number in sorted(state) for value in state[number].values() if isinstance(value, Tensor)]
        return [*(parameter.detach() for parameter in self.model.parameters()), *kept]


def is_quick(stepping: FusedStep) -> bool:
    """Whether the next step is the kernel's alone."""
    return stepping._prepare is not None and not stepping._is_watched() and bool(stepping._prepared(stepping._prepare))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_the_optimizers_own_step(name, dtype, groups):
    with seeded():
        theirs, ours = (Trained(OPTIMIZERS[name], dtype, groups) for _ in range(2))
    stepping, quick = FusedStep(ours.optimizer), 0
    for number in range(6):
        for each in (theirs, ours):
            each.backward()
            each.optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)  # as a schedule sets it
        quick += is_quick(stepping)
        theirs.optimizer.step()
        stepping()
    assert quick == (6 if name == "sgd" else 5)  # the first step makes what the optimizer keeps
    pairs = list(zip(theirs.everything(), ours.everything(), strict=True))
    assert len(pairs) >= 4
    assert all(torch.equal(one, other) for one, other in pairs)


def test_it_gives_way_where_anything_is_unusual():
    trained = Trained(torch.optim.Adam)
    stepping = FusedStep(trained.optimizer)
    trained.backward()
    assert not is_quick(stepping)  # it keeps nothing yet
    stepping()
    trained.backward()
    assert is_quick(stepping)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not is_quick(stepping)
    group, first = trained.optimizer.param_groups[0], next(trained.model.parameters())
    for name, value in (("fused", None), ("amsgrad", True)):
        before, group[name] = group[name], value
        assert not is_quick(stepping)
        group[name] = before
    gradient, first.grad = first.grad, None
    assert not is_quick(stepping)
    first.grad = gradient
    kept = trained.optimizer.state.pop(first)
    assert not is_quick(stepping)
    trained.optimizer.state[first] = kept
    assert is_quick(stepping)


@pytest.mark.parametrize("where", ["before", "after", "before, of all", "after, of all"])
def test_a_hook_of_a_step_is_called(where):
    trained, called = Trained(partial(torch.optim.SGD, lr=0.1)), []
    stepping = FusedStep(trained.optimizer)

    def hook(*_: Any) -> None:
        called.append(where)

    register = {
        "before": trained.optimizer.register_step_pre_hook,
        "after": trained.optimizer.register_step_post_hook,
        "before, of all": register_optimizer_step_pre_hook,
        "after, of all": register_optimizer_step_post_hook,
    }[where]
    handle = register(hook)
    trained.backward()
    stepping()
    handle.remove()
    stepping()
    assert called == [where]


def test_a_schedule_is_told_of_each_step(recwarn):
    trained = Trained(torch.optim.Adam)
    scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 1)
    torch.optim.lr_scheduler.ConstantLR(trained.optimizer)  # two of them
    stepping = FusedStep(trained.optimizer)
    trained.optimizer.step()  # without a gradient: as the first step of all
    trained.optimizer._opt_called = False
    trained.backward()
    stepping()
    trained.backward()
    trained.optimizer._opt_called = False
    assert is_quick(stepping)
    stepping()
    scheduler.step()  # it would warn of steps in the wrong order
    assert not recwarn.list


def test_another_step_in_its_place_is_called(monkeypatch):
    trained, called = Trained(partial(torch.optim.SGD, lr=0.1)), []
    stepping = FusedStep(trained.optimizer)
    trained.backward()
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: called.append(self))
    stepping()
    FusedStep(trained.optimizer)()  # also where it was there before
    monkeypatch.undo()
    trained.optimizer.step = lambda: called.append(trained.optimizer)  # type: ignore[method-assign]
    stepping()
    assert called == [trained.optimizer] * 3


def test_parameters_of_two_dtypes_and_other_optimizers_go_their_own_way():
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    for optimizer in (torch.optim.Adam(parameters, fused=True), torch.optim.RMSprop(parameters[:1])):
        stepping = FusedStep(optimizer)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        for _ in range(2):
            stepping()
        assert stepping._prepare is None
        assert not torch.equal(parameters[0].detach(), torch.ones(2))
