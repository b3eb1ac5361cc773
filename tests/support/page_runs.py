"""Runs the blocks of a page as its readers do: programs in this process, which is a rank, and commands of a shell."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from pages import ROOT, Block, Page, read_page
from rank_processes import OURS
from worlds import free_port

import cyxtrain as cx

SHELL_SECONDS = 120.0


def run_program(path: str, folder: str) -> str:
    """Runs a program in this process, which is a rank and ends afterwards, in a folder; returns what it has printed."""
    os.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def run_page(path: str, folder: str, with_slow: bool) -> dict[int, str]:
    """Runs the blocks of a page in this process, which is a rank and ends afterwards.

    Args:
        path: Of the page.
        folder: An empty one, where they run.
        with_slow: Whether blocks of `sh` run, too, and those that take long.

    Returns:
        What each of them has printed, by its number.
    """
    page = read_page(Path(path))
    os.chdir(folder)
    write_files(page)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    outputs = {}
    with open(Path(folder).with_suffix(f".{os.getpid()}"), "w+", encoding="utf-8") as output:
        sys.stdout.flush(), sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        for number, block in enumerate(page.blocks):
            if block.language not in ("python", "sh") or block.file or not block.is_run:
                continue
            if block.is_slow and not with_slow:
                continue
            start = os.stat(output.fileno()).st_size
            try:
                run_block(page, block, vars(main))
            except BaseException as error:
                printed = _since(output, 0)
                raise AssertionError(f"{page.path.name}:{block.line}: {error}\nprinted so far:\n{printed}") from error
            outputs[number] = _since(output, start)
        cx.finalize()
    return outputs


def _since(output: TextIO, start: int) -> str:
    sys.stdout.flush(), sys.stderr.flush()
    output.seek(start)
    return output.read()


def write_files(page: Page) -> None:
    """Writes the blocks that have the name of a file."""
    for block in page.blocks:
        if block.file:
            file = Path(block.file)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")


def run_block(page: Page, block: Block, names: dict[str, object]) -> None:
    """Runs one block, of either kind."""
    if block.language == "python":
        # The lines before it are empty, so that a traceback has the page's line numbers.
        exec(compile("\n" * (block.line - 1) + block.text, str(page.path), "exec"), names)
    elif "hosts" in block.marks:
        run_commands([re.sub(r"\bnode\d\b", "127.0.0.1", line) for line in block.text.splitlines()])
    else:
        run_commands([block.text])


def run_commands(commands: Sequence[str]) -> None:
    """Runs commands of a shell side by side; fails where one does, and leaves none behind."""
    shell = ["bash", "-euo", "pipefail", "-c"]
    with contextlib.ExitStack() as stack:
        environment = shell_environment()
        if len(commands) > 1:  # hosts of their own do not know that they share the cores
            environment["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // len(commands), 1))
        running = {
            subprocess.Popen(
                [*shell, command], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            ): command
            for command in commands
            if command.strip()
        }
        for process in running:
            stack.callback(_end, process)
        for process, command in running.items():
            code = process.wait(SHELL_SECONDS)
            assert code == 0, f"exit code {code}: {command}"


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def shell_environment() -> dict[str, str]:
    """What commands begin with: `python`, `cyxtrain` and `torchrun` of this interpreter, and nobody's rank."""
    folder = Path(f"../bin{os.getpid()}").absolute()
    folder.mkdir(exist_ok=True)
    modules = {"python": "", "cyxtrain": "-m cyxtrain ", "torchrun": "-m torch.distributed.run "}
    for name, module in modules.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
        (folder / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    return environment | {
        "PATH": os.pathsep.join([str(folder), environment["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "MASTER_PORT": str(free_port()),
    }
