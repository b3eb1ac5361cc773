"""Gradients are clipped after they have been averaged: every rank does what one process with the joined batch does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fitting import everywhere, flat, make_model, make_rows, one_process
from markers import by_night
from torch import nn

import cyxtrain as cx
from cyxtrain.optim.clipping import clip_adaptive, unit_norms

pytestmark = pytest.mark.usefixtures("rank_server")
WAYS = [{"clip_norm": 0.05}, {"clip_value": 0.01}, {"clip_adaptive": 0.02}, {"clip_norm": 1e9}]


def train(ways: list[dict[str, float]], effective_batch_size: int) -> list[Any]:
    """Returns the parameters after a fit with each way of clipping."""
    found = []
    for way in ways:
        model = make_model("float64")
        trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.5))
        trainer.fit(*make_rows(50), epochs=2, effective_batch_size=effective_batch_size, verbose=False, **way)
        found.append(flat(model.parameters()))
    return found


def by_hand(clip: Any) -> Any:
    """The same on one process, written out."""
    from cyxtrain.data.sampler import DistributedSampler

    model, (inputs, targets) = make_model("float64"), make_rows(50)
    optimizer, sampler = torch.optim.SGD(model.parameters(), 0.5), DistributedSampler(50, rank=0, world_size=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows in torch.from_numpy(sampler.global_indices().copy()).split(12):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows].double()), targets[rows]).backward()
            clip(list(model.parameters()))
            optimizer.step()
    return flat(model.parameters())


def clip_units_by_hand(parameters: Any, factor: float) -> None:
    """Brock et al. (2021), section 4.1, a unit at a time."""
    for parameter in parameters:
        for unit, gradient in zip(parameter.detach(), parameter.grad, strict=True):
            limit = factor * max(float(unit.norm()), 1e-3)
            if float(gradient.norm()) > limit:
                gradient *= limit / float(gradient.norm())


@pytest.mark.parametrize("world_size", [1, by_night(2), by_night(3)])
def test_every_way_of_clipping_is_that_of_one_process(world_size):
    expected = [
        by_hand(lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05)),
        by_hand(lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01)),
        by_hand(lambda parameters: clip_units_by_hand(parameters, 0.02)),
        by_hand(lambda _: None),
    ]
    assert len({vector.tobytes() for vector in expected}) == 4  # each way does something
    for found in everywhere(world_size, train, WAYS, 12):
        for ours, wanted in zip(found, expected, strict=True):
            assert float(abs(ours - wanted).max()) < 1e-12


def test_what_is_small_enough_is_left_alone_to_the_bit():
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 3, 2))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-5
    before = [parameter.grad.clone() for parameter in model.parameters()]
    clip_adaptive(list(model.parameters()), 1.0)
    assert all(torch.equal(p.grad, kept) for p, kept in zip(model.parameters(), before, strict=True))


def test_a_unit_is_what_feeds_one_output():
    assert unit_norms(torch.full((3, 1, 2, 2), 2.0)).tolist() == [[[[4.0]]]] * 3
    assert unit_norms(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).tolist() == [[5.0], [1.0]]
    assert unit_norms(torch.tensor([-2.0, 1.0])).tolist() == [2.0, 1.0]
    assert unit_norms(torch.tensor(-3.0)).item() == 3.0


def test_gradients_are_clipped_in_one_way_and_by_something_above_zero():
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), nn.CrossEntropyLoss(), "sgd")
        with pytest.raises(cx.ConfigError, match="clip_norm and clip_value are set"):
            trainer.fit(*make_rows(4), clip_norm=1.0, clip_value=1.0)
        for value in (0, -1.0, math.nan, math.inf, True, "1"):
            with pytest.raises(cx.ConfigError, match="clip_adaptive must be a finite number above 0 or None"):
                trainer.fit(*make_rows(4), clip_adaptive=value)
