"""A world is a value: one that nobody has joined sends nothing, however many ranks it has."""

from __future__ import annotations

import pytest
import torch

from cyxtrain.world.world import World


@pytest.mark.parametrize("size", [1, 3])
def test_a_world_without_a_group_sends_nothing(size):
    world = World(size=size)
    assert world.reduce(torch.tensor([2.0])).tolist() == [2.0]
    assert world.broadcast(torch.tensor([2.0])).tolist() == [2.0]
    assert world.gather("here") == ["here"]
