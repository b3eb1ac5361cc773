"""A step that the device may skip takes the bits of optimizer.step(), and changes nothing if it is skipped."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from fitting import make_model, make_rows, seeded
from markers import by_night, nightly_where
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from cyxtrain.optim.optimizer_step import OptimizerStep

OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adam, weight decay": partial(torch.optim.Adam, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-4),
    "adam, maximize": partial(torch.optim.Adam, maximize=True),
    "adam, amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "adam, decoupled": partial(torch.optim.Adam, weight_decay=0.1, decoupled_weight_decay=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "sgd, nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
}
GOOD, BAD = torch.tensor(0.0), torch.tensor(1.0)


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


def step_without_waiting(step: OptimizerStep, skip: Tensor = GOOD) -> bool:
    """Take a step that the device may skip, or else a plain one; return whether it was the former."""
    late = step.unless(skip)
    (late or step)()
    return late is not None


@nightly_where(lambda name, groups: groups == 1 and name not in ("adam", "sgd"))
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", by_night("float64")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_the_optimizers_own_step(name, dtype, groups):
    with seeded():
        theirs, ours = (Trained(OPTIMIZERS[name], dtype, groups) for _ in range(2))
    step, late = OptimizerStep(ours.optimizer), 0
    for number in range(6):
        for each in (theirs, ours):
            each.backward()
            each.optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)  # as a schedule sets it
        theirs.optimizer.step()
        late += step_without_waiting(step)
        before = [each.clone() for each in ours.everything()]
        skip = step.unless(BAD)
        assert skip is not None
        skip()
        assert all(map(torch.equal, before, ours.everything()))
    assert late == (6 if name == "sgd" else 5)  # the first step creates the optimizer's state
    pairs = list(zip(theirs.everything(), ours.everything(), strict=True))
    assert len(pairs) >= 4
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not hasattr(ours.optimizer, "found_inf")


def test_the_host_must_know_first_where_a_skipped_step_would_change_something():
    trained = Trained(torch.optim.Adam)
    step = OptimizerStep(trained.optimizer)
    trained.backward()
    assert step.unless(GOOD) is None  # there is no state yet
    step()
    trained.backward()
    assert step.unless(GOOD) is not None
    group, first = trained.optimizer.param_groups[0], next(trained.model.parameters())
    for name, value in (("fused", None), ("lr", torch.tensor(0.1))):
        before, group[name] = group[name], value
        assert step.unless(GOOD) is None
        group[name] = before
    kept = trained.optimizer.state.pop(first)
    assert step.unless(GOOD) is None
    gradient, first.grad = first.grad, None
    assert step.unless(GOOD) is not None
    first.grad = gradient
    trained.optimizer.state[first] = {"momentum_buffer": None}
    assert step.unless(GOOD) is None
    trained.optimizer.state[first] = kept
    assert step.unless(GOOD) is not None


@pytest.mark.parametrize("where", ["before", "after", "before, of all", "after, of all"])
def test_a_hook_sees_each_step_that_is_taken_and_no_other(where):
    trained, called = Trained(partial(torch.optim.SGD, lr=0.1)), []
    step = OptimizerStep(trained.optimizer)

    def hook(*_: Any) -> None:
        called.append(where)

    register = {
        "before": trained.optimizer.register_step_pre_hook,
        "after": trained.optimizer.register_step_post_hook,
        "before, of all": register_optimizer_step_pre_hook,
        "after, of all": register_optimizer_step_post_hook,
    }[where]
    trained.backward()
    handle = register(hook)
    assert not step_without_waiting(step)
    handle.remove()
    assert step_without_waiting(step)
    assert called == [where]


def test_a_schedule_knows_of_each_step(recwarn):
    trained = Trained(torch.optim.Adam)
    scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 1)
    torch.optim.lr_scheduler.ConstantLR(trained.optimizer)  # two of them
    step = OptimizerStep(trained.optimizer)
    trained.optimizer.step()  # without a gradient, before the first step
    trained.backward()
    step()
    trained.backward()
    trained.optimizer._opt_called = False
    assert step_without_waiting(step)
    scheduler.step()  # it would warn of steps in the wrong order
    assert not recwarn.list


def test_another_step_in_its_place_is_called(monkeypatch):
    trained, called = Trained(partial(torch.optim.SGD, lr=0.1)), []
    step = OptimizerStep(trained.optimizer)
    trained.backward()
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: called.append(self))
    assert not step_without_waiting(step)
    assert not step_without_waiting(OptimizerStep(trained.optimizer))  # also where it was there before
    monkeypatch.undo()
    trained.optimizer.step = lambda: called.append(trained.optimizer)  # type: ignore[method-assign]
    assert not step_without_waiting(step)
    assert called == [trained.optimizer] * 3


def test_optimizers_that_are_not_fused_step_by_themselves():
    parameter = nn.Parameter(torch.ones(2))
    step = OptimizerStep(torch.optim.RMSprop([parameter]))
    parameter.grad = torch.ones_like(parameter)
    assert [step_without_waiting(step) for _ in range(2)] == [False, False]
    assert not torch.equal(parameter.detach(), torch.ones(2))
