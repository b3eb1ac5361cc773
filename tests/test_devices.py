"""Which device and which backend a run gets, on a stand-in for GPUs."""

from __future__ import annotations

import pytest
from stand_in import fakegpu
from stand_in.running import run_on_stand_in
from test_ring_cuda import every_collective


@pytest.mark.parametrize(("world_size", "communication"), [(2, "inline"), (3, "thread")])
def test_the_ring_carries_the_tensors_of_any_accelerator(fakegpu_folder, world_size, communication):
    env = {"CYXTRAIN_COMMUNICATION": communication}
    found = run_on_stand_in(fakegpu_folder, world_size, every_collective, fakegpu.NAME, [1, 100_003], env=env)
    assert found == [[]] * world_size
