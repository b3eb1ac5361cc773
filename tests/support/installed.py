"""Separate environments for tests that install other packages."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from worlds import TESTS, child_environment

ROOT = TESTS.parent
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "-c", ROOT / "pyproject.toml")
NO_REGISTRY = ("connection broken by", "Failed to establish a new connection", "Temporary failure in name resolution")


def run(*command: object, seconds: float, folder: Path, **variables: str) -> str:
    """Runs a command in a folder, and returns what it wrote; nothing outlives it."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=child_environment(**variables),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, [str(part) for part in command[1:]], output)
    return output


def installed(folder: Path, *requirements: object, inherit: bool) -> Path:
    """Returns the Python of a new virtual environment with these requirements.

    Args:
        folder: Empty.
        requirements: As pip takes them.
        inherit: What the running Python has is there too, and its PyTorch stays.
    """
    venv.create(folder, with_pip=True)
    python, kept = folder / "bin" / "python", folder / "kept.txt"
    if inherit:
        packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        (Path(packages) / "inherited.pth").write_text(sysconfig.get_path("purelib") + "\n")
    kept.write_text(f"torch=={torch.__version__}\n" if inherit else "")
    try:
        run(python, "-m", "pip", "install", "-c", kept, *requirements, seconds=1200, folder=folder, PYTHONPATH="")
    except subprocess.CalledProcessError as error:
        if any(sign in error.output for sign in NO_REGISTRY):
            pytest.skip(f"pip reaches no registry: {error.output[-500:]}")
        raise AssertionError(error.output[-3000:]) from None
    return python
