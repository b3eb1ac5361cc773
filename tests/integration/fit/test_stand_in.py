"""Whole fits on a stand-in for a GPU: no devices are mixed, the bits are a CPU's, and host stops have bounds.

A fit on the stand-in is compared with the same fit on the CPU, in the same processes. A step stops the host where it
waits for what the device computes: a GPU then idles while Python runs the optimizer and asks for the next batch.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from refusals import warning_texts
from stand_in import fakegpu
from stand_in.running import run_command, run_on_stand_in
from stand_in_fits import CASES, fits
from worlds import TESTS

import cyxtrain as cx

DAILY = {
    1: ["dataset", "class weights, ignored targets", "accumulation, ignored targets"],
    2: ["arrays", "batch norm", "fp16"],
}
"""By number of ranks; the others run by night."""
BOUND = (0.1, 0.1)
"""Host stops per step, alone and on two ranks with several buckets."""
BOUNDS = {
    # PyTorch's kernels skip a step on the device only where they are fused: the others ask whether it was finite.
    "rmsprop": (1.0, 1.0),
    "adagrad": (1.0, 1.0),
    "adam not fused": (1.0, 1.0),
    # The next loss scale, the averaged weights and the next row to leave out follow from whether the step was taken.
    "fp16": (1.0, 1.0),
    "EMA": (1.0, 1.0),
    "skipped rows": (2.5, 2.5),  # and the search for the row stops it some twenty times
    "powersgd": (1.0, 2.0),
}
"""Where they are more."""


LOOK = """
import cyxtrain, torch, torch.distributed as dist
from stand_in import fakegpu
values = torch.arange(3.0, device=fakegpu.NAME)
with fakegpu.counting() as stops:
    total = values.sum().item()
print(torch.accelerator.current_accelerator(), total, *stops)
print(values.device, dist.Backend.backend_capability["ring"])
"""


@pytest.mark.nightly
def test_a_program_has_the_device_once_it_imports_torch_also_when_the_launcher_starts_it(fakegpu_folder, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LOOK)
    command = [sys.executable, "-m", "cyxtrain", "launch", "-n", "2", "--", sys.executable, str(program)]
    printed = run_command(fakegpu_folder, command)
    assert printed.count("fakegpu 3.0 ('item SYNC', '") == 2
    assert printed.count("fakegpu:0 ['cpu', 'fakegpu']") == 2


def warned_in_two_fits() -> list[str]:
    model = torch.nn.Linear(2, 2)
    trainer = cx.DistributedTrainer(model, "mse", "sgd")
    with warning_texts() as caught:
        for _ in range(2):
            trainer.fit(torch.ones(4, 2), torch.ones(4, 2), epochs=1, verbose=False)
    return [text for text in caught if "never been tested" in text]


def test_a_kind_of_device_that_has_never_been_used_is_a_warning_once_on_rank_0(fakegpu_folder):
    text = "Cyxtrain has never been tested on fakegpu: compare the first losses with a run on device='cpu'."
    assert run_on_stand_in(fakegpu_folder, 2, warned_in_two_fits) == [[text], []]


# --- whole fits -----------------------------------------------------------------------------------------------------


def found_by(folder: Any, world_size: int, names: list[str]) -> list[dict[str, Any]]:
    """By rank what each case came to, on both devices. Two ranks talk by the stand-in for NCCL."""
    backend = ["ring"] if world_size == 1 else []
    return run_on_stand_in(folder, world_size, fits, names, [fakegpu.NAME, "cpu"], *backend, seconds=300.0)


def stops_of(found: dict[str, Any]) -> Counter[str]:
    """Returns host stops per step by kind and place; copies within the ring are by design."""
    stops = {what: count for what, count in found["stops"].items() if "SYNC" in what and " ring/" not in what}
    return Counter(stops)


def check(found: list[dict[str, Any]], name: str) -> None:
    """Looks at one case of one world: on each rank what it came to on both devices."""
    case = CASES[name]
    for rank, results in enumerate(found):
        on_device, on_cpu = results[name][fakegpu.NAME], results[name]["cpu"]
        for result in (on_device, on_cpu):
            assert "error" not in result, f"{name}, rank {rank}:\n{result['error']}"
        assert on_device["devices"] == [fakegpu.NAME]
        assert len(set(on_device["bits"])) == 1, "a resumed fit came to other parameters"
        if not case.close:
            assert on_device["bits"] == on_cpu["bits"]
        np.testing.assert_allclose(on_device["losses"], on_cpu["losses"], rtol=case.close)
        bound = BOUNDS.get(name, BOUND)[len(found) - 1]
        stops = stops_of(on_device)
        assert sum(stops.values()) <= bound, f"{name}, {len(found)} ranks, stops per step: {dict(stops)}"
    assert len({each[name][fakegpu.NAME]["bits"][0] for each in found}) == 1, "ranks differ"


def cases_of(daily: bool) -> list[Any]:
    return [(size, name) for size, names in DAILY.items() for name in CASES if (name in names) == daily]


@pytest.fixture(scope="module")
def found(fakegpu_folder):
    return {size: found_by(fakegpu_folder, size, list(names)) for size, names in DAILY.items()}


@pytest.fixture(scope="module")
def found_by_night(fakegpu_folder):
    others = {size: [name for name in CASES if name not in names] for size, names in DAILY.items()}
    return {size: found_by(fakegpu_folder, size, names) for size, names in others.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world_size", "name"), cases_of(daily=True))
def test_a_fit_has_the_bits_of_a_cpu_and_seldom_stops_the_host(found, name, world_size):
    check(found[world_size], name)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world_size", "name"), cases_of(daily=False))
def test_more_fits_have_the_bits_of_a_cpu_and_seldom_stop_the_host(found_by_night, name, world_size):
    check(found_by_night[world_size], name)


def test_bounds_are_of_cases_that_there_are():
    assert {*BOUNDS, *DAILY[1], *DAILY[2]} <= set(CASES)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_what_cuda_must_do_the_stand_in_does(fakegpu_folder):
    """Those of test_cuda.py that need NCCL, Triton or what PyTorch has for CUDA alone are skipped there."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(TESTS / "integration" / "fit" / "test_cuda.py"),
    ]
    printed = run_command(fakegpu_folder, command, env={"CYXTRAIN_TEST_GPU": fakegpu.NAME}, seconds=500.0)
    passed = re.search(r"(\d+) passed", printed.splitlines()[-1])
    assert passed is not None, printed
    assert int(passed[1]) >= 20, printed
