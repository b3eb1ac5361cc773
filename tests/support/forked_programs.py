"""Runs Python programs as processes that need not import torch: forks of the rank server."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rank_processes import run_processes, values


def run_python(
    words: Sequence[str], folder: Path, env: dict[str, str] | None = None, seconds: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Does as `subprocess.run([sys.executable, *words])`; tests that use it have the fixture `rank_server`.

    Args:
        words: "-m" and a module, or a script; then its arguments.
        folder: An empty one, where the program runs.
        env: More of the environment. The rest is the rank server's.
        seconds: Until the program is killed.
    """
    [(code, stdout, stderr)] = values(run_processes(_run, [env or {}], list(words), str(folder), seconds=seconds))
    return subprocess.CompletedProcess(words, code, stdout, stderr)


def _run(words: list[str], folder: str) -> tuple[int, str, str]:
    os.chdir(folder)
    files = [Path(folder).with_suffix(f".{os.getpid()}.{name}") for name in ("stdout", "stderr")]
    for descriptor, file in enumerate(files, 1):
        with open(file, "wb") as opened:
            os.dup2(opened.fileno(), descriptor)
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    sys.path.insert(0, folder if is_module else str(Path(words[0]).parent))
    code = 0
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    stdout, stderr = (file.read_text("utf-8") for file in files)
    return code, stdout, stderr
