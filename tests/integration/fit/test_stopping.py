"""Claims about a fit that is asked to stop: all ranks do so at one step, and it can be resumed as if it had not."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fitting import CLASSES, FEATURES, fingerprint, make_rows, one_process, run_world, seeded
from kept_worlds import close_worlds
from markers import by_night
from torch import nn
from worlds import wait_until

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint
from cyxtrain.checkpoint.folder import CheckpointFolder
from cyxtrain.training.stopping import stopping_signals

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.skipif(os.name == "nt", reason="these ranks get POSIX signals"),
]
ROWS, BATCH, EPOCHS = 55, 5, 3


class Struck(nn.Module):
    """Something happens in its n-th forward, in training or in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.3), nn.Linear(16, CLASSES))
        self.forwards = {True: 0, False: 0}
        self.blows: dict[tuple[bool, int], Any] = {}
        self.has_begun = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.has_begun:  # the dry run
            return self.layers(rows)
        training = torch.is_grad_enabled()
        self.forwards[training] += 1
        self.blows.get((training, self.forwards[training]), lambda: None)()
        return self.layers(rows)


class Begin(cx.callbacks.Callback):
    """Tells the model that its dry run is over."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.trainer.model.has_begun = True


def strike(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def fit(folder: str, blows: dict[int, dict[tuple[bool, int], Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """Fits, and returns how that ended. `blows` are by rank."""
    with seeded():
        model = Struck()
    model.blows = blows.get(cx.get_rank(), {})
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), 1e-2))
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    given = {"epochs": EPOCHS, "batch_size": BATCH, "verbose": False, "checkpoint_dir": folder, "resume": "auto"}
    # It is made at the end and where the fit stops.
    given |= {"validation_data": make_rows(40, seed=1), "checkpoint_every_n_epochs": 100}
    given["callbacks"] = [Begin()]
    ended = "returned"
    try:
        trainer.fit(*make_rows(ROWS), **{**given, **settings})
    except (KeyboardInterrupt, SystemExit) as error:
        ended = repr(error)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    return {
        "ended": ended,
        "bits": fingerprint(model),
        "history": trainer.history.history,
        "epoch": trainer.epoch,
        "forwards": model.forwards,
    }


def result(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("bits", "history", "epoch")}


@functools.cache
def uninterrupted(world_size: int, folder: Path) -> list[dict[str, Any]]:
    return run_world(world_size, fit, str(folder), {}, {})


@pytest.mark.parametrize(
    ("number", "ended", "world_size", "count"),
    [
        (signal.SIGTERM, "SystemExit(143)", 2, 3),
        *(by_night(signal.SIGTERM, "SystemExit(143)", world_size, 5) for world_size in (1, 2, 3)),
        *(by_night(signal.SIGINT, "KeyboardInterrupt()", world_size, 5) for world_size in (1, 2, 3)),
    ],
)
def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_fit_can_be_resumed(
    number, ended, world_size, count, tmp_path
):
    whole = run_world(world_size, fit, str(tmp_path / "whole"), {}, {})
    steps = -(-ROWS // (BATCH * world_size))
    draw = random.Random(world_size)
    moments = [(True, steps), (True, draw.randrange(2, 3 * steps)), (False, 1), (True, 1), (True, 3 * steps)]
    folders = {moment: tmp_path / f"{number}-{moment}" for moment in moments[:count]}
    for moment, folder in folders.items():
        struck = {draw.randrange(world_size): {moment: functools.partial(strike, number)}}
        found = run_world(world_size, fit, str(folder), struck, {})
        assert [rank["ended"] for rank in found] == [ended] * world_size, moment
        assert [result(rank) for rank in found] == [result(found[0])] * world_size
    close_worlds()  # what resumes is another process
    for moment, folder in folders.items():
        [checkpoint] = CheckpointFolder(folder).newest_first()
        done = read_checkpoint(checkpoint.path).position["step"]
        # What comes in a step travels with the next one; at the end of an epoch all are asked.
        assert done == (steps if not moment[0] else moment[1] + bool(moment[1] % steps))
        resumed = run_world(world_size, fit, str(folder), {}, {})
        assert [result(rank) for rank in resumed] == [result(rank) for rank in whole], moment
        assert resumed[0]["forwards"][True] == whole[0]["forwards"][True] - done


def test_time_that_is_over_stops_all_ranks_and_returns_the_history(tmp_path):
    found = run_world(2, fit, str(tmp_path), {}, {"max_time_seconds": 1e-6, "epochs": 50})
    assert [rank["ended"] for rank in found] == ["returned"] * 2
    assert [rank["forwards"][True] for rank in found] == [1, 1]
    close_worlds()  # what resumes is another process
    resumed = run_world(2, fit, str(tmp_path), {}, {})
    whole = run_world(2, fit, str(tmp_path / "whole"), {}, {})
    assert [result(rank) for rank in resumed] == [result(rank) for rank in whole]


def test_checkpoints_come_every_so_many_minutes_by_rank_0s_clock(tmp_path):
    every = {"checkpoint_every_n_epochs": 0, "checkpoint_every_n_minutes": 1e-9}
    run_world(2, fit, str(tmp_path), {}, {**every, "epochs": 1})
    steps = -(-ROWS // (2 * BATCH))
    assert len(list(tmp_path.glob("step-*.ckpt"))) == steps


def test_the_second_ctrl_c_does_not_wait_for_the_step(tmp_path):
    def twice() -> None:
        strike(signal.SIGINT)
        strike(signal.SIGINT)
        threading.Event().wait(30)

    with one_process():
        found = fit(str(tmp_path), {0: {(True, 3): twice}}, {})
    assert found["ended"] == "KeyboardInterrupt()"
    assert list(tmp_path.iterdir()) == []


def twice_while_the_main_thread_waits_in_c() -> None:
    """As in a backward on an accelerator: another thread is in a collective, to which no other rank comes."""
    done: torch.futures.Future[None] = torch.futures.Future()
    frame, lines = sys._getframe(), []

    def collective() -> None:
        wait_until(lambda: frame.f_lineno in lines)
        strike(signal.SIGINT)
        with contextlib.suppress(cx.CyxtrainError):
            dist.all_reduce(torch.ones(1))
        done.set_result(None)

    strike(signal.SIGINT)
    threading.Thread(target=collective, daemon=True).start()
    lines.append(frame.f_lineno + 1)
    done.wait()


def until_the_group_has_ended() -> None:
    wait_until(lambda: dist.group.WORLD.group.failure.error)


def fit_or_error(*arguments: Any) -> dict[str, Any]:
    try:
        return fit(*arguments)
    except cx.CyxtrainError as error:
        return {"ended": str(error)}


def test_the_second_ctrl_c_ends_a_wait_in_c_too(tmp_path):
    struck = {0: {(True, 3): twice_while_the_main_thread_waits_in_c}, 1: {(True, 3): until_the_group_has_ended}}
    first, second = run_world(2, fit_or_error, str(tmp_path), struck, {}, seconds=30)
    assert first["ended"] == "KeyboardInterrupt()"
    assert "rank 0 has failed: KeyboardInterrupt" in second["ended"]


def test_nothing_is_written_where_nobody_asked_for_checkpoints(tmp_path):
    with one_process():
        struck = {0: {(True, 3): functools.partial(strike, signal.SIGTERM)}}
        found = fit(str(tmp_path), struck, {"checkpoint_every_n_epochs": 0, "resume": None})
    assert found["ended"] == "SystemExit(143)"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_after_the_last_step_ends_the_program_in_good_order(number):
    hook = cx.callbacks.LambdaCallback(on_train_end=lambda logs: signal.raise_signal(number))
    trainer = cx.DistributedTrainer(nn.Linear(FEATURES, CLASSES), "cross_entropy", callbacks=hook)
    with one_process(), pytest.raises(SystemExit) as ended:
        trainer.fit(*make_rows(8), epochs=1, verbose=False)
    assert ended.value.code == 128 + number


def test_an_error_in_flight_is_not_replaced_by_a_signal(tmp_path):
    def both() -> None:
        strike(signal.SIGINT)
        fail()

    with one_process(), pytest.raises(ValueError, match="this row is no row"):
        fit(str(tmp_path), {0: {(True, 3): both}}, {})


def test_signals_that_the_program_uses_itself_are_left_alone():
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGUSR1)}
    try:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        assert {signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM} < set(stopping_signals())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        signal.signal(signal.SIGUSR1, lambda *_: None)
        assert not {signal.SIGHUP, signal.SIGUSR1} & set(stopping_signals())
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        if sys.platform == "linux":
            faulthandler.register(signal.SIGUSR1)
            assert signal.SIGUSR1 not in stopping_signals()
            faulthandler.unregister(signal.SIGUSR1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_fit_in_another_thread_hears_no_signals_and_works(tmp_path):
    found = []
    with one_process():
        thread = threading.Thread(target=lambda: found.append(fit(str(tmp_path), {}, {})))
        thread.start()
        thread.join(60)
    assert found[0]["ended"] == "returned"


def fail() -> None:
    raise ValueError("this row is no row")


def fit_until_somebody_fails(moment: tuple[bool, int]) -> dict[str, Any]:
    try:
        fit("", {1: {moment: fail}}, {"checkpoint_every_n_epochs": 0, "resume": None, "checkpoint_dir": "."})
    except cx.DistributedTrainingError as error:
        return {"at": time.monotonic(), "message": str(error), "failures": error.failures, "rank": error.rank}
    except ValueError as error:
        return {"at": time.monotonic(), "message": str(error), "failures": None, "rank": None}
    raise AssertionError("it went on")


@pytest.mark.parametrize("moment", [(True, 4), by_night((False, 3))], ids=["in training", "in validation"])
def test_an_error_on_one_rank_ends_all_within_two_seconds_and_its_traceback_is_what_they_show(moment):
    first, failed, third = run_world(3, fit_until_somebody_fails, moment)
    assert failed["message"] == "this row is no row"
    assert failed["failures"] is None
    for other in (first, third):
        assert other["rank"] == 1
        assert other["at"] - failed["at"] < 2.0
        [failure] = other["failures"]
        assert (failure.rank, failure.type, failure.message) == (1, "ValueError", "this row is no row")
        for text in (failure.traceback, other["message"] if moment[0] else failure.traceback):
            assert "test_stopping.py" in text
            assert 'raise ValueError("this row is no row")' in text
        assert "rank 1" in other["message"]
