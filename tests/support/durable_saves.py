"""What processes do in test_durability.py: they save, and are killed; no pytest here."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import random
import select
import shutil
import signal
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch

from cyxtrain.checkpoint.checkpoint_file import CheckpointState, read_checkpoint
from cyxtrain.checkpoint.folder import CheckpointFolder
from cyxtrain.checkpoint.writer import Writer
from cyxtrain.errors import CheckpointError

_TRACE_ME, _GO_ON_TO_THE_NEXT_CALL = 0, 24  # ptrace(2)


def state(step: int, count: int) -> CheckpointState:
    """Returns a state that tells its step in every number."""
    values = {"weight": torch.full((count,), float(step))}
    return CheckpointState(
        model=values,
        optimizer={"weight": {"exp_avg": torch.full((count,), -float(step))}},
        optimizer_groups=[{"lr": 0.1, "params": ["weight"]}],
        position={"step": step, "epoch": step},
        run={"id": "one", "started": 1.0},
    )


class Inline:
    """A pool that works in the thread that asks."""

    def submit(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)
        return done

    def shutdown(self) -> None:
        """Has nothing to wait for."""


def save(writer: Writer, step: int, count: int) -> None:
    """Saves a step as a fit does: the newest two stay, and the second one is the best so far."""
    folder = writer.folder

    def afterwards() -> None:
        if step == 2:
            folder.mark_best(folder.file(f"epoch-{step:04d}"))
        folder.prune("one", 2, folder.file(f"epoch-{step:04d}"))

    writer.write(f"epoch-{step:04d}", state(step, count), afterwards)
    error = writer.wait()
    if error is not None:
        raise error


def newest(path: Path) -> int:
    """Returns the step of the newest checkpoint that loads, as the next start would find it; 0: there is none."""
    folder = CheckpointFolder(path)
    folder.remove_leftovers()
    hidden = [file.name for file in path.iterdir() if file.name.startswith(".")] if path.exists() else []
    assert hidden == [], hidden
    for found in folder.newest_first():
        try:
            loaded = read_checkpoint(found.path)
        except CheckpointError:
            continue  # a fit skips it, and says so
        step = loaded.position["step"]
        assert set(loaded.model["weight"].tolist()) == {float(step)}
        return int(step)
    return 0


def damaged(path: Path) -> list[str]:
    """Returns the checkpoints that do not load: a kill may leave none, under whatever name."""
    bad = []
    for file in path.iterdir():
        try:
            read_checkpoint(file)
        except CheckpointError:
            bad.append(file.name)
    return bad


# --- a kill at every system call ------------------------------------------------------------------------------------


def kill_at_each_call(folder: str, every: int) -> list[tuple[int, list[str], bool]]:
    """Kills a process that saves step 3 at its first, second ... entry to the kernel or return from it.

    Args:
        folder: Of the checkpoints.
        every: Only every so many of them.

    Returns:
        For each kill: (the step that loads, damaged files, whether the process had come to its end); only the last one
        had.
    """
    path, found = Path(folder), []
    for stop in itertools.count(1, every):
        shutil.rmtree(path, ignore_errors=True)
        writer = Writer(CheckpointFolder(path))
        for step in (1, 2):
            save(writer, step, 300)
        writer.close()
        complete = _killed_at(stop, lambda: _save_inline(path, 3))
        found.append((newest(path), damaged(path), complete))
        if complete:
            return found
    raise AssertionError("never")


def _save_inline(path: Path, step: int) -> None:
    writer = Writer(CheckpointFolder(path))
    writer._pool.shutdown()
    writer._pool = Inline()  # type: ignore[assignment]  # it has all that the writer calls
    save(writer, step, 300)


def _killed_at(stop: int, work: Callable[[], None]) -> bool:
    """Runs something in a process that is killed at its n-th stop; returns whether it ended before that."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes, ptrace.restype = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p), ctypes.c_long
    child = os.fork()
    if child == 0:
        try:
            ptrace(_TRACE_ME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSTOPPED(status), status
    for _ in range(stop):
        assert ptrace(_GO_ON_TO_THE_NEXT_CALL, child, None, None) == 0, ctypes.get_errno()
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            return True
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


# --- kills at random times --------------------------------------------------------------------------------------------


def kill_while_saving(folder: str, kills: int, seed: int) -> list[tuple[int, int]]:
    """Kills processes that save one step after the other; each goes on where the one before was killed.

    Returns:
        For each kill: (the last step for which saving had returned, the step that loads).
    """
    draw, path, found = random.Random(seed), Path(folder), []
    last = 0
    for _ in range(kills):
        done = _killed_after(draw, functools.partial(_save_for_ever, path, last + 1))
        returned = done[-1] if done else last
        last = newest(path)
        found.append((returned, last))
        assert damaged(path) == []
    return found


def _save_for_ever(path: Path, first: int, told: int) -> None:
    writer = Writer(CheckpointFolder(path))
    for step in itertools.count(first):
        save(writer, step, 200_000)
        os.write(told, struct.pack("q", step))


def _killed_after(draw: random.Random, work: Callable[[int], None]) -> list[int]:
    """Runs something in a process, kills it after a random time, and returns what it told by then."""
    reader, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            work(told)
        finally:
            os._exit(1)
    os.close(told)
    text = b"".join(os.read(reader, 8) for _ in range(draw.randrange(3)))  # so many saves are over
    select.select([], [], [], draw.uniform(0.0, 0.05))  # waits for nothing: the time is the scenario
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while piece := os.read(reader, 4096):
        text += piece
    os.close(reader)
    return [step for (step,) in struct.iter_unpack("q", text)]


# --- a power cut ----------------------------------------------------------------------------------------------------


def save_until(path: Path, seconds: float, end: Callable[[], None]) -> int:
    """Saves step after step, from where it was left; after some time, in the middle of it, `end` is called.

    Returns:
        The last step for which saving had returned by then.
    """
    first = newest(path) + 1
    done = [first - 1]
    began, over = threading.Event(), threading.Event()

    def work() -> None:
        writer = Writer(CheckpointFolder(path))
        with contextlib.suppress(CheckpointError):  # the file system is gone
            for step in itertools.count(first):
                save(writer, step, 100_000)
                done.append(step)
                began.set()
        over.set()
        writer.close()

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    over.wait(seconds)  # the time is the scenario
    last = done[-1]
    end()
    thread.join()
    return last
