"""What moves between the CPU and a device is where it has to be, on a stand-in for a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from placement_runs import OPTIMIZERS, ROWS, all_alone, all_in_world
from stand_in.running import run_command, run_on_stand_in

DAILY = ["Adam", "SGD", "NAdam"]
NIGHTLY = [name for name in OPTIMIZERS if name not in DAILY]


@pytest.fixture(scope="module")
def alone(fakegpu_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [found] = run_on_stand_in(fakegpu_folder, 1, all_alone, str(tmp_path_factory.mktemp("saved")), DAILY)
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone_by_night(fakegpu_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [found] = run_on_stand_in(fakegpu_folder, 1, all_alone, str(tmp_path_factory.mktemp("saved")), NIGHTLY)
    return found  # type: ignore[no-any-return]


def check_optimizer(results: list[Any]) -> None:
    on_cpu, on_device = results
    np.testing.assert_allclose(on_device, on_cpu, atol=1e-5)


@pytest.mark.parametrize("name", DAILY)
def test_an_optimizers_state_follows_the_model_to_a_device_and_back(alone, name):
    check_optimizer(alone["optimizers"][name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_the_state_of_other_optimizers_does_so_too(alone_by_night, name):
    check_optimizer(alone_by_night["optimizers"][name])


def test_counts_that_python_reads_stay_on_the_cpu_unless_the_step_is_capturable(alone):
    moved = ["deep", "exp_avg", "exp_avg_sq", "own"]
    assert alone["state"] == [[moved, []], [sorted([*moved, "mu_product", "step"]), []]]


def test_a_checkpoint_holds_its_step_and_training_does_not_wait_for_it(alone):
    assert alone["checkpoints"] == [[True] * (ROWS // 8), []]


def test_generators_of_any_device_are_seeded_and_kept(alone):
    assert alone["generators"] == [1, [True]]


def test_a_fit_under_a_default_device_is_that_of_the_cpu(alone):
    on_cpu, on_device = alone["default device"]
    np.testing.assert_allclose(on_device, on_cpu, rtol=1e-3)


@pytest.fixture(scope="module")
def together(fakegpu_folder: Path) -> list[dict[str, Any]]:
    return run_on_stand_in(fakegpu_folder, 2, all_in_world)


def test_replicas_are_compared_on_the_device_with_one_stop(together):
    flipped = "ranks 0, 1 differ from each other in {}, without a majority"
    for found in together:
        assert (found["equal"], found["mixed"]) == ("", "")
        assert found["flipped"] == flipped.format("large, small")
        assert found["mixed and flipped"] == flipped.format("turned")
        assert found["stops"] == ["event SYNC"]


def test_tensors_of_any_type_are_sent_as_bytes(together):
    assert [found["buffers"] for found in together] == [[[], []]] * 2
    assert [found["gathered"] for found in together] == [[0, 1, 300, 301]] * 2


def test_ranks_under_a_default_device_train_as_on_cpus(together):
    for found in together:
        np.testing.assert_allclose(*found["losses"], rtol=1e-4)


@pytest.mark.nightly
def test_workers_and_their_notebook_have_the_optimizers_state_where_the_parameters_are(fakegpu_folder):
    printed = run_command(fakegpu_folder, [sys.executable, "-c", "import placement_runs; placement_runs.main()"])
    (losses, devices), (expected, _) = json.loads(printed.splitlines()[-1])
    assert devices == ["cpu", "cpu"]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
