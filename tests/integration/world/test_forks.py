"""A forked child, such as a DataLoader's worker, is no rank: it hides no death, and ends without harm."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from markers import by_night
from rank_processes import run_ranks

import cyxtrain as cx
from cyxtrain.world import runtime

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork"),
]
SECONDS = 20.0


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def lose_a_rank_with_a_child(folder: str) -> tuple[float, int | None]:
    """Rank 1 is killed while its child lives on; the others say how long they took to notice, and whom they miss."""
    child_lives, noticed = Path(folder) / "child", Path(folder) / "noticed"
    cx.init()
    if cx.get_rank() == 1:
        if os.fork() == 0:
            child_lives.touch()
            wait_for(noticed)
            os._exit(0)
        wait_for(child_lives)
        cx.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    cx.barrier()
    began = time.monotonic()
    try:
        while True:
            cx.all_reduce(torch.ones(1000))
    except cx.PeerLostError as error:
        return time.monotonic() - began, error.rank
    finally:
        noticed.touch()


def test_a_child_that_lives_on_does_not_hide_that_its_rank_was_killed(tmp_path):
    first, _, third = run_ranks(3, lose_a_rank_with_a_child, str(tmp_path), seconds=SECONDS)
    for ended in (first, third):
        seconds, rank = ended.value
        assert rank == 1
        assert seconds < 2


def fork_children_that_leave() -> list[str]:
    """Each rank forks a child that tries to communicate, then leaves as a program does; the parents go on."""
    with cx.init():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                cx.barrier()
                said = "it passed"
            except cx.CyxtrainError as error:
                said = str(error)
            runtime._at_exit()
            cx.finalize()
            os.write(writer, said.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
        tensor = torch.ones(3)
        cx.all_reduce(tensor)
        return [said, str(tensor.tolist())]


@pytest.mark.parametrize("world_size", [2, by_night(3)])
def test_a_child_is_no_rank_and_ends_without_harm(world_size):
    for rank, ended in enumerate(run_ranks(world_size, fork_children_that_leave, seconds=SECONDS)):
        said, total = ended.value
        assert said.startswith(f"this process was forked from rank {rank} and is not a rank")
        assert total == str([float(world_size)] * 3)
