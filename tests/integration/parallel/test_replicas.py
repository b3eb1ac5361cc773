"""Ranks whose parameters have drifted apart are found, and the odd one is named."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from fitting import adam, make_model, make_rows, one_process, run_world
from markers import by_night
from refusals import warning_texts
from torch import Tensor, nn
from worlds import child_environment

import cyxtrain as cx
from cyxtrain.world import consensus

pytestmark = pytest.mark.usefixtures("rank_server")


def flip(parameter: Tensor, bit: int = 0) -> None:
    """Flips a bit of its last element, as a broken memory would."""
    with torch.no_grad():
        parameter.view(-1).view(torch.int32)[-1] ^= 1 << bit


def check(flips: dict[int, list[str]], dtype: str = "float32") -> list[Any] | None:
    """Flips a bit of these parameters on these ranks; returns what the comparison says."""
    model = make_model(dtype)
    ddp = cx.DistributedDataParallel(model)
    ddp.check_replicas()  # all alike
    for name in flips.get(cx.get_rank(), []):
        flip(model.get_parameter(name))
    try:
        ddp.check_replicas()
    except cx.ReplicasDifferError as error:
        return [str(error), error.rank]
    return None


def test_the_odd_rank_and_the_parameter_are_named_by_all():
    found = run_world(3, check, {1: ["0.weight"]})
    assert found == found[:1] * 3
    text, rank = found[0]
    assert text.startswith("rank 1 differs from the 2 others in 0.weight: ")
    assert "Go back to a checkpoint that was made before" in text
    assert rank == 1


def test_of_two_nobody_knows_who_is_right():
    for text, rank in run_world(2, check, {0: ["2.bias"]}):
        assert text.startswith("ranks 0, 1 differ from each other in 2.bias, without a majority: ")
        assert rank is None


def test_several_odd_ranks():
    for text, rank in run_world(5, check, {4: ["0.bias"], 2: ["0.bias", "2.bias"]}):
        assert text.startswith("ranks 2, 4 differ from most in 0.bias, 2.bias: ")
        assert rank is None


def compute_with(types: list[str]) -> list[Any]:
    """Returns warnings, and errors of replicas and of data that differ, if ranks have such CPUs."""
    own = types[cx.get_rank()]
    consensus.own_arithmetic = lambda: own  # type: ignore[assignment]
    with warning_texts() as warned:
        replicas = check({1: ["0.weight"]})
    inputs, targets = make_rows(8 + cx.get_rank())
    with pytest.raises(cx.ConfigError) as caught:
        cx.DistributedTrainer(make_model(), "cross_entropy").fit(inputs[:8], targets[:8] * 0, epochs=1, verbose=False)
    return [warned, replicas, str(caught.value)]


def test_cpus_that_compute_differently_are_named_at_the_start_and_as_the_cause():
    found = run_world(2, compute_with, ["AVX2 01234567", "DEFAULT 89abcdef"])
    types = "rank 0: AVX2 01234567; rank 1: DEFAULT 89abcdef"
    [[warned], no_warnings] = [warned for warned, _, _ in found]
    assert warned.startswith(f"the ranks' CPUs compute differently ({types})")
    assert no_warnings == []
    for _, (replicas, _), data in found:
        assert f"different CPUs ({types})" in replicas
        assert "set ATEN_CPU_CAPABILITY=default on every rank" in replicas
        assert "Their CPUs (DEFAULT 89abcdef and AVX2 01234567) compute differently" in data
        assert "torch.manual_seed" not in data


def test_cpus_of_different_types_that_compute_alike_are_named_with_replicas_that_differ_only():
    for warned, (replicas, _), data in run_world(2, compute_with, ["AVX2 01234567", "AVX512 01234567"]):
        assert warned == []
        assert "different CPUs (rank 0: AVX2 01234567; rank 1: AVX512 01234567)" in replicas
        assert "torch.manual_seed(0) before torch.randn" in data


@pytest.mark.nightly
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch has no other kernels here")
def test_kernels_of_other_cpus_compute_differently():
    program = "from cyxtrain.world.consensus import own_arithmetic; print(own_arithmetic())"
    command, env = [sys.executable, "-c", program], child_environment() | {"ATEN_CPU_CAPABILITY": "default"}
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    assert found.startswith("DEFAULT ")
    assert found[-8:] != consensus.own_arithmetic()[-8:]
    assert consensus.differing_types([found] * 3) == ""


def test_half_precision_and_frozen_parameters_are_compared_too():
    assert run_world(2, check_kinds) == [["frozen"]] * 2


def check_kinds() -> list[str]:
    model = nn.Module()
    model.small = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    model.turned = nn.Parameter(torch.ones(4, 6).t())  # not contiguous
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    model.single = nn.Parameter(torch.ones(()))
    ddp = cx.DistributedDataParallel(model)
    ddp.check_replicas()
    if cx.get_rank() == 1:
        flip(model.frozen)
    with pytest.raises(cx.ReplicasDifferError) as caught:
        ddp.check_replicas()
    return [name for name, _ in model.named_parameters() if f" in {name}" in str(caught.value)]


def test_alone_there_is_nothing_to_compare():
    with one_process():
        cx.DistributedDataParallel(make_model()).check_replicas()


class Drifting(nn.Module):
    """One rank's parameters change by themselves in its third training step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net, self.steps, self.rank = make_model(), 0, rank

    def forward(self, rows: Tensor) -> Tensor:
        self.steps += self.training
        if self.steps == 3 and self.training and cx.get_rank() == self.rank:
            flip(self.net[2].bias, 3)
        output: Tensor = self.net(rows)
        return output


def fit_drifting(settings: dict[str, Any]) -> list[Any]:
    model = Drifting(1)
    trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
    inputs, targets = make_rows(30)
    try:
        trainer.fit(inputs, targets, epochs=2, effective_batch_size=5, verbose=False, **settings)
    except cx.ReplicasDifferError as error:
        alive = torch.ones(1)
        cx.all_reduce(alive)  # the group is as good as before
        return [trainer._state.position.step, error.rank, alive.item(), "net.2.bias" in str(error)]
    return [trainer._state.position.step]


@pytest.mark.parametrize(("every", "step"), [(None, 6), by_night(2, 4), by_night(5, 5)])
def test_fit_compares_after_each_epoch_or_every_n_steps(every, step):
    found = run_world(3, fit_drifting, {} if every is None else {"check_replicas_every_n_steps": every})
    assert found == [[step, 1, 3.0, True]] * 3


def test_with_0_it_never_does():
    assert run_world(2, fit_drifting, {"check_replicas_every_n_steps": 0}) == [[12]] * 2
