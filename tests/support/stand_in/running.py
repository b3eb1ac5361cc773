"""Runs what needs the stand-in for a GPU in processes that have it: PyTorch cannot forget a device."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from worlds import child_environment, run_processes

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
        *args: Its arguments: JSON types.
        env: More variables, such as FAKEGPU_DEVICES=2.
        seconds: Until the ranks are killed.

    Returns:
        What the function returned, by rank. A rank that fails fails the test, with all that it printed.
    """
    variables = fakegpu.environment(folder) | (env or {})
    return [each.value for each in run_processes(world_size, function, *args, env=variables, seconds=seconds)]


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
