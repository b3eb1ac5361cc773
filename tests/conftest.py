"""Every test starts in an empty folder, and fails if it leaves anything behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_SECONDS = 5.0  # for what is ending just now
_PROC = Path("/proc")


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compares threads, children, descriptors and environment before and after; the working folder stays empty."""
    home, folder = Path.cwd(), tmp_path_factory.mktemp("cwd")
    os.chdir(folder)
    threads, children, descriptors, environment = _threads(), _children(), _descriptors(), _environment()
    try:
        yield
        left = {
            "threads": _what_stays(lambda: _threads() - threads),
            "processes": _what_stays(lambda: _children() - children),
            "descriptors": _what_stays(lambda: _descriptors() - descriptors),
            "variables": {name for name, _ in environment.items() ^ _environment().items()},
            "files": {file.name for file in folder.iterdir()},
            "folders": set() if folder.samefile(Path.cwd()) else {"another working folder"},
            "process groups": _process_groups(),
        }
        assert not any(left.values()), f"left behind: { {kind: what for kind, what in left.items() if what} }"
    finally:
        os.chdir(home)


@pytest.fixture(scope="session")
def pipe_of_pytorchs_stores() -> None:
    """PyTorch's first TCP store opens a pipe that the process keeps: here, before a test with a store begins."""
    import torch.distributed as dist

    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _what_stays(find: Callable[[], Counter[str]]) -> Counter[str]:
    """Returns what is still there when there was time to end."""
    deadline = time.monotonic() + _SECONDS
    while found := find():
        gc.collect()  # a traceback may have kept it
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return found


def _threads() -> Counter[str]:
    return Counter(thread.name for thread in threading.enumerate())


def _children() -> Counter[str]:
    """Returns the processes that this one started and has not waited for; only Linux can tell."""
    found: Counter[str] = Counter()
    for thread in _PROC.glob("self/task/*/children"):
        for pid in thread.read_text().split():
            try:
                command = (_PROC / pid / "cmdline").read_text().replace("\0", " ")
            except FileNotFoundError:
                continue  # another thread has just waited for it
            # Python starts one per process, for shared memory, and keeps it until the end.
            if "multiprocessing.resource_tracker" not in command:
                found[f"{pid}: {command}"] += 1
    return found


def _descriptors() -> Counter[str]:
    """Returns what sockets, pipes and files are open; only Linux can tell."""
    found: Counter[str] = Counter()
    for entry in _PROC.glob("self/fd/*"):
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # the descriptor that lists this folder
        # Devices are opened once and kept (urandom, null).
        if not target.startswith("/dev/"):
            found[target] += 1
    return found


def _environment() -> dict[str, str]:
    # pytest says where it is, and PyTorch's compiler notes its cache when an optimizer first imports it.
    known = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
    return {name: value for name, value in os.environ.items() if name not in known}


def _process_groups() -> set[str]:
    distributed = sys.modules.get("torch.distributed")
    return {"the default process group"} if distributed is not None and distributed.is_initialized() else set()
