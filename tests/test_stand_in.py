"""Whole fits on a stand-in for a GPU: no devices are mixed, and the host does not stop in the hot loop."""

from __future__ import annotations

import sys
from typing import Any

import torch
from stand_in import fakegpu
from stand_in.running import run_command, run_on_stand_in


def look_at_the_device() -> list[Any]:
    values = torch.arange(3.0, device=fakegpu.NAME)
    with fakegpu.counting() as stops:
        total = values.sum().item()
    return [str(torch.accelerator.current_accelerator()), total == 3.0, [kind for kind, _ in stops]]


def test_a_process_has_the_device_once_it_imports_torch(fakegpu_folder):
    found = run_on_stand_in(fakegpu_folder, 2, look_at_the_device)
    assert found == [[fakegpu.NAME, True, ["item SYNC"]]] * 2


def test_a_program_has_the_device_when_the_launcher_starts_it(fakegpu_folder, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import torch, json\nprint(json.dumps(str(torch.ones(1, device='fakegpu').device)))")
    command = [sys.executable, "-m", "cyxtrain", "launch", "-n", "2", "--", sys.executable, str(program)]
    printed = run_command(fakegpu_folder, command)
    assert printed.count("fakegpu:0") == 2
