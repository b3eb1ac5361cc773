"""Sees to it that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

_kept: set[str] = set()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Let the descriptors that are opened within stay from one test to the next."""
    before = _descriptors()
    yield
    _kept.update(_descriptors() - before)


@contextlib.contextmanager
def nothing_left_behind(folder: Path, seconds: float = 5.0) -> Iterator[None]:
    """Runs a block in an empty folder, and compares what there is before and after it.

    Args:
        folder: The working folder of the block; it must stay empty.
        seconds: For threads, processes and sockets that are ending just then.

    Raises:
        AssertionError: Something is there that was not there before: all of it is named.
    """
    home = Path.cwd()
    os.chdir(folder)
    threads, children, descriptors, environment = _threads(), _children(), _descriptors(), _environment()
    try:
        yield
        deadline = time.monotonic() + seconds
        left = {
            "process groups": _process_group(),
            "threads": what_stays(lambda: _threads() - threads, deadline),
            "processes": what_stays(lambda: _children() - children, deadline),
            "descriptors": what_stays(lambda: _descriptors() - descriptors, deadline),
            "variables": {name for name, _ in environment.items() ^ _environment().items()},
            "files": {file.name for file in folder.iterdir()},
            "folders": set() if folder.samefile(Path.cwd()) else {"another working folder"},
        }
        assert not any(left.values()), f"left behind: { {kind: what for kind, what in left.items() if what} }"
    finally:
        os.chdir(home)
        for file in folder.iterdir():  # the next test begins in an empty folder, too
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file)
            else:
                file.unlink()


def what_stays(find: Callable[[], Counter[str]], deadline: float) -> Counter[str]:
    """Returns what is still there when there was time to end."""
    while found := find():
        gc.collect()  # a traceback may have kept it
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return found


def _threads() -> Counter[str]:
    # pytest-timeout has one for each test.
    return Counter(each.name for each in threading.enumerate() if not each.name.startswith("pytest_timeout "))


def _children() -> Counter[str]:
    """Returns the processes that this one started and has not waited for; only Linux can tell."""
    found: Counter[str] = Counter()
    for thread in _listed("/proc/self/task"):
        for pid in _read(f"/proc/self/task/{thread}/children").split():
            command = _read(f"/proc/{pid}/cmdline").replace("\0", " ")
            # Python starts one per process, for shared memory, and keeps it until the end.
            if "multiprocessing.resource_tracker" not in command:
                found[f"{pid}: {command}"] += 1
    return found


def _listed(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _read(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as opened:
            return opened.read()
    except OSError:
        return ""  # the thread or the process has just ended


def _descriptors() -> Counter[str]:
    """Returns what sockets, pipes and files are open; only Linux can tell."""
    found: Counter[str] = Counter()
    for entry in _listed("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the descriptor that lists this folder
        # Devices are opened once and kept (urandom, null); event counters are ZeroMQ's, which drives notebooks and
        # closes its sockets when it likes: nothing of ours has one.
        if not target.startswith("/dev/") and target != "anon_inode:[eventfd]" and target not in _kept:
            found[target] += 1
    return found


def _environment() -> dict[str, str]:
    # pytest says where it is, PyTorch's compiler notes its cache when an optimizer first imports it, and Lightning and
    # Polars set a variable when they are imported.
    known = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK", "_RJEM_MALLOC_CONF")
    return {name: value for name, value in os.environ.items() if name not in known}


def _process_group() -> set[str]:
    """Returns the default process group that is still there, and ends it, so that the next test finds none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return set()
    distributed.destroy_process_group()
    return {"the default one"}
