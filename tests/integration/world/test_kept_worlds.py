"""Worlds that stay from one test of a module to the next give each test what a new world would."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kept_worlds import run_kept
from markers import by_night
from rank_processes import values
from worlds import wait_until

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
_wait = threading.Event()


def who() -> tuple[int, float, float, str, str | None]:
    """This process, and what a task finds in it: the next number of each generator, folder and environment."""
    return os.getpid(), torch.rand(1).item(), float(np.random.rand()), os.getcwd(), os.environ.get("LEFT_BY_A_TASK")


def leave_settings() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT_BY_A_TASK"] = "1"
    os.chdir("/")


def leave_a_thread() -> None:
    threading.Thread(target=_wait.wait, daemon=True).start()


def leave_a_group() -> None:
    dist.new_group([0, 1])


def leave_the_world() -> None:
    cx.finalize()


def fail_on_rank_1() -> None:
    if cx.get_rank() == 1:
        raise ValueError("of this task")
    cx.barrier()


def call_on_rank_0_alone() -> None:
    if cx.get_rank() == 0:
        cx.all_reduce(torch.ones(1))


def found(task: Callable[[], Any]) -> tuple[list[Any], list[Any], Any]:
    """What `who` returns before and after a task, and what came of that."""
    before = values(run_kept(2, who))
    outcomes = run_kept(2, task)
    return before, values(run_kept(2, who)), outcomes


def test_a_task_finds_the_processes_and_nothing_else_of_the_one_before():
    before, after, _ = found(leave_settings)
    assert after == before
    assert [folder for _, _, _, folder, _ in after] == [os.getcwd()] * 2


@pytest.mark.parametrize("task", [leave_a_thread, by_night(leave_a_group), leave_the_world])
def test_a_task_that_leaves_something_behind_succeeds_and_the_next_one_has_a_new_world(task):
    before, after, outcomes = found(task)
    values(outcomes)
    assert not {each[0] for each in before} & {each[0] for each in after}
    assert [each[1:] for each in before] == [each[1:] for each in after]


@pytest.mark.parametrize("task", [fail_on_rank_1, call_on_rank_0_alone])
def test_a_task_that_fails_says_so_itself_and_the_next_one_has_a_new_world(task):
    before, after, outcomes = found(task)
    with pytest.raises(AssertionError, match=task.__name__ if task is fail_on_rank_1 else "barrier"):
        values(outcomes)
    assert not {each[0] for each in before} & {each[0] for each in after}


def test_a_world_of_which_a_rank_has_died_takes_no_other_task():
    (first, *_), _ = before = values(run_kept(2, who))
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{first}"))
    assert not {each[0] for each in values(run_kept(2, who))} & {each[0] for each in before}
