"""Runs what needs the stand-in for a GPU in processes that have it: PyTorch cannot forget a device.

Functions run in forks of the rank server, which register the device, commands in processes that import torch with it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rank_processes
import torch.distributed as dist
from worlds import child_environment, free_port

from stand_in import fakegpu


def run_on_stand_in(
    folder: Path,
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    env: dict[str, str] | None = None,
    seconds: float = 60.0,
) -> list[Any]:
    """Calls a function as every rank of a world of processes that have the device "fakegpu".

    Args:
        folder: The fixture `fakegpu_folder`.
        world_size: How many ranks. RANK and its siblings are set; the function calls `cx.init` itself.
        function: It stands at the top of a module of the tests, and returns JSON types.
        *args: Its arguments.
        env: More variables, such as FAKEGPU_DEVICES=2.
        seconds: Until the ranks are killed.

    Returns:
        What the function returned, by rank. A rank that fails fails the test, with its traceback.
    """
    port, variables = free_port(), fakegpu.environment(folder) | (env or {})
    environments = [rank_processes.environment(rank, world_size, port, **variables) for rank in range(world_size)]
    with tempfile.TemporaryDirectory(prefix="world") as home:
        call = (str(folder), home, function.__module__, function.__qualname__, args)
        return rank_processes.values(
            rank_processes.run_processes(_call_with_device, environments, *call, seconds=seconds)
        )


def _call_with_device(folder: str, home: str, module: str, function: str, args: Sequence[Any]) -> Any:
    """Registers the device in this process, a fork without one, and calls a function in an empty folder."""
    fakegpu.register(Path(folder))
    dist.Backend.backend_capability["ring"] = ["cpu", fakegpu.NAME]  # as where cyxtrain is imported after the device
    os.chdir(home)
    return json.loads(json.dumps(getattr(importlib.import_module(module), function)(*args)))


def run_command(
    folder: Path, command: Sequence[str], *, env: dict[str, str] | None = None, seconds: float = 60.0
) -> str:
    """Runs a command whose processes have the device "fakegpu"; returns what it printed.

    Raises:
        AssertionError: It did not exit with 0; with all that it printed.
    """
    variables = child_environment() | fakegpu.environment(folder) | (env or {})
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=seconds, check=False)
    assert ended.returncode == 0, f"{command} exited with {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout
