"""Claims about signals to programs that fit: whoever gets them, all ranks stop at one step and save, and end as asked.

what gets the signal             what a cell shows
one rank, all ranks, the         one checkpoint that is whole, one line of ours, exit code 128 + n, and no process
launcher, or every process       left; two SIGINT are the second Ctrl-C: ended at once, nothing half written
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from markers import by_night
from stopped_fits import SECONDS, SIGNALS, Cell, Outcome, Program, every_cell
from worlds import wait_until

from cyxtrain.checkpoint.folder import CheckpointFolder
from cyxtrain.environment import loader_workers, torch_compat

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.skipif(os.name == "nt", reason="these ranks get POSIX signals"),
]
AT_ONCE = 4
EVERY_CELL = every_cell()


def outcomes(cells: Sequence[Cell], folder: Path, **variables: str) -> list[Outcome]:
    """Start a few programs at a time, and send each its signals when it is where they shall come."""
    found: list[Outcome] = []
    for first in range(0, len(cells), AT_ONCE):
        batch = cells[first : first + AT_ONCE]
        programs = []
        for cell in batch:
            epochs = 1_000_000 if cell.target == "starter" else 3  # which passes a signal on when it comes to it
            place = folder / str(cell)
            programs.append(Program(place, cell.starter, cell.moment, cell.workers, epochs=epochs, **variables))
        try:
            for cell, program in zip(batch, programs, strict=True):
                program.wait_until_there()
                program.send(cell.number, cell.target, twice=cell.twice)
                program.go_on()
        finally:
            found += [program.end() for program in programs]
    return found


def problem(cell: Cell, outcome: Outcome, folder: Path) -> str:
    """Return what is wrong; "": nothing."""
    wrong = []
    stopped = outcome.lines("stopped   ")
    newest = CheckpointFolder(folder / str(cell) / "ck").newest_first()
    is_second = cell.twice and cell.number == signal.SIGINT
    if outcome.left:
        wrong.append(f"left: {outcome.left}")
    if [name for name in outcome.files if name.startswith(".")]:
        wrong.append(f"half written: {outcome.files}")
    if len(newest) != len(outcome.files) or not all(each.position for each in newest):
        wrong.append(f"damaged: {outcome.files}")
    if len(newest) != 1 and not is_second:
        wrong.append(f"checkpoints: {outcome.files}")
    if len(stopped) != 1 and not (is_second and not stopped):
        wrong.append(f"lines: {stopped}")
    if "Traceback" in outcome.output and cell.starter != "torchrun":
        wrong.append("a traceback")
    others = {1} if is_second and cell.target == "rank" else set[int]()  # the other rank has an error that names it
    if cell.starter != "torchrun" and set(outcome.codes) - others != {128 + cell.number}:
        wrong.append(f"codes: {outcome.codes}")
    if cell.starter == "launch" and not outcome.output.endswith(f"all ranks were stopped by {cell.number.name}\n"):
        wrong.append("the launcher's line")
    return "; ".join(wrong)


def check(cells: Sequence[Cell], folder: Path) -> None:
    found = outcomes(cells, folder)
    problems = [problem(cell, outcome, folder) for cell, outcome in zip(cells, found, strict=True)]
    wrong = [
        f"--- {cell}: {what}\n{outcome.output}"
        for cell, outcome, what in zip(cells, found, problems, strict=True)
        if what
    ]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cells)}", *wrong])


def by_day() -> list[Cell]:
    """Each signal with each starter: targets, moments and workers in turns."""
    chosen: list[Cell] = []
    for starter in ("alone", "by hand", "launch"):
        cells = [cell for cell in EVERY_CELL if cell.starter == starter]
        targets = itertools.cycle(dict.fromkeys(cell.target for cell in cells))
        for number in SIGNALS:
            target = next(targets)
            among = [cell for cell in cells if (cell.number, cell.target) == (number, target)]
            chosen.append(among[5 * len(chosen) % len(among)])
    return chosen


def test_signals_stop_a_fit_and_save_whoever_gets_them(tmp_path):
    check(by_day(), tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("starter", ["alone", "by hand", "launch", "torchrun"])
@pytest.mark.parametrize("number", SIGNALS)
def test_every_pair_of_a_signal_and_a_program(number, starter, tmp_path):
    check([cell for cell in EVERY_CELL if (cell.number, cell.starter) == (number, starter)], tmp_path)


# --- a stop that takes too long -------------------------------------------------------------------------------------


def late(folder: Path, *cells: Cell, **variables: str) -> list[Outcome]:
    """Signals to programs whose step does not end."""
    programs = [Program(folder / str(cell), cell.starter, cell.moment, cell.workers, **variables) for cell in cells]
    try:
        for cell, program in zip(cells, programs, strict=True):
            program.wait_until_there()
            program.send(cell.number, cell.target, twice=cell.twice)
            if cell.target == "rank":  # the other one has no signal, and its step ends
                program.wait(lambda ended=program.programs[-1]: not ended.process.is_alive())
                program.go_on()
    finally:
        found = [program.end() for program in programs]
    return found


@pytest.mark.nightly
def test_a_step_that_does_not_end_in_time_is_named_in_one_line(tmp_path):
    cells = [
        Cell(signal.SIGTERM, "alone", "ranks", "step"),
        Cell(signal.SIGTERM, "alone", "ranks", "saving"),
        Cell(signal.SIGTERM, "launch", "starter", "step", 2, twice=True),
        Cell(signal.SIGHUP, "by hand", "rank", "step"),
    ]
    for cell, outcome in zip(cells, late(tmp_path, *cells, CYXTRAIN_GRACE_SECONDS="2"), strict=True):
        code = 128 + cell.number
        where = "the checkpoint of step 3" if cell.moment == "saving" else "step 3, in epoch 1,"
        [line] = outcome.lines("did not end within 1 s of", "nothing was saved")
        assert where in line or cell.moment == "saving", line
        assert (cell.number.name in line, outcome.left, outcome.files) == (True, [], []), outcome.output
        assert set(outcome.codes) == ({1, code} if cell.target == "rank" else {code}), outcome.output


@pytest.mark.nightly
def test_ctrl_c_without_checkpoints_interrupts_a_long_step(tmp_path):
    cell = Cell(signal.SIGINT, "alone", "ranks", "step")
    [outcome] = late(tmp_path, cell, NO_CHECKPOINTS="1", CYXTRAIN_GRACE_SECONDS="1000")
    assert (outcome.codes, outcome.files, outcome.left) == ([130], [], [])
    assert "Traceback" not in outcome.output


# --- workers that die in a stop -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starter", "more"),
    [
        ("alone", {}),
        by_night("by hand", {"STREAM": "1"}),
        by_night("alone", {"STREAM": "1"}),
        by_night("by hand", {}),
        by_night("alone", {"START_METHOD": "spawn"}),
        by_night("alone", {"START_METHOD": "spawn", "STREAM": "1"}),
    ],
)
def test_a_worker_that_dies_before_the_signal_arrives_does_not_lose_the_checkpoint(starter, more, tmp_path):
    program = Program(tmp_path / "fit", starter, "step", 2, **more)
    try:
        program.wait_until_there()
        for rank in range(program.num_ranks):
            for worker in program.workers(rank):
                os.kill(worker, signal.SIGKILL)
        program.send(signal.SIGTERM, "ranks")
        program.go_on()
    finally:
        outcome = program.end()
    cell = Cell(signal.SIGTERM, starter, "ranks", "step", 2)
    (tmp_path / "fit").rename(tmp_path / str(cell))
    assert not problem(cell, outcome, tmp_path), (problem(cell, outcome, tmp_path), outcome.output)


def test_a_worker_that_dies_of_the_signal_after_the_fit_has_stopped_is_no_error(tmp_path):
    cell = Cell(signal.SIGTERM, "alone", "ranks", "step", 2)
    [outcome] = outcomes([cell], tmp_path, WORKERS_DIE_LATE="1")
    assert not problem(cell, outcome, tmp_path), outcome.output


@pytest.mark.parametrize("more", [{}, by_night({"STREAM": "1"}), by_night({"START_METHOD": "spawn"})])
def test_workers_outlive_signals_and_end_with_their_rank(more, tmp_path):
    program = Program(tmp_path / "fit", "alone", "step", 2, **more)
    try:
        program.wait_until_there()
        workers = program.workers()
        for number in SIGNALS:
            for worker in workers:
                os.kill(worker, number)
        program.send(signal.SIGSTOP, "ranks")  # so that it cannot end them
        alive = [worker for worker in workers if worker in program.everything()]
        program.send(signal.SIGKILL, "ranks")
    finally:
        outcome = program.end()
    assert (len(alive), outcome.left, outcome.codes) == (2, [], [137])


def test_handlers_of_the_program_are_not_sent_to_workers():
    with loader_workers.ignoring_signals([signal.SIGTERM]):
        loop = torch_compat.find(torch_compat.WORKER_LOOP)
        assert pickle.loads(pickle.dumps(loop)).args == ((signal.SIGTERM,),)


# --- random kills ---------------------------------------------------------------------------------------------------


def kill_one(draw: random.Random, pids: list[int], number: signal.Signals) -> None:
    """Send a signal to one of these processes, which may have ended."""
    if pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(pids), number)


def goes_on(program: Program) -> bool:
    """Return whether a program gets through two more epochs, and does not end."""
    seen = program.output().count("epoch ")
    wait_until(lambda: not program.is_running() or program.output().count("epoch ") > seen + 1, SECONDS)
    return program.is_running()


def strike(seed: int, folder: Path) -> str:
    """Kill, or ask to stop, a random process at a random moment of a fit; return what is wrong; "": nothing."""
    draw = random.Random(seed)
    starter = draw.choice(["alone", "by hand", "launch", "launch"])
    workers = draw.choice([0, 2])
    more = {"STREAM": "1"} if draw.random() < 0.3 else {}
    program = Program(folder / str(seed), starter, "any", workers, epochs=1_000_000, **more)
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    victim = ""
    try:
        program.wait(lambda: "epoch 2/" in program.output())
        time.sleep(draw.random())
        places: dict[str, list[int]] = {"rank": program.ranks()}
        if workers:
            places["worker"] = program.workers()
        if starter == "launch":
            places |= {"launcher": [program.programs[0].pid], "guard": program.guards()}
        victim = draw.choice(sorted(places))
        kill_one(draw, places[victim], number)
        if (victim, number) == ("worker", signal.SIGKILL):
            # A worker of a stream ends with each epoch, and nobody misses one that would have ended then.
            # At random moments: just after the line of an epoch, its workers have always ended.
            for _ in range(100):
                if not goes_on(program):
                    break
                time.sleep(draw.random())
                kill_one(draw, program.workers(), number)
        ends = (victim, number) not in {
            ("guard", signal.SIGKILL),
            ("guard", signal.SIGTERM),
            ("worker", signal.SIGTERM),
        }
        if not ends:
            seen = program.output().count("epoch ")
            program.wait(lambda: program.output().count("epoch ") > seen)
            program.send(signal.SIGTERM, "starter")
            victim, number = "rank", signal.SIGTERM
    finally:
        outcome = program.end()
    causes = {
        ("rank", signal.SIGTERM): "terminated by SIGTERM",
        ("launcher", signal.SIGTERM): "terminated by SIGTERM",
        ("launcher", signal.SIGKILL): "",  # nobody is left to print
        ("worker", signal.SIGKILL): "DataLoader worker",
        ("rank", signal.SIGKILL): "" if starter == "alone" else "its process ended without an error message",
    }
    cause = causes[victim, number]
    text = " ".join(outcome.output.split())
    wrong = f"left {outcome.left}; " if outcome.left else ""
    wrong += "" if cause in text else f"not named: {cause}; "
    return wrong and f"--- {seed} {starter} {more} {workers} {victim} {number.name} {wrong}{outcome.output[-1500:]}"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_a_process_that_is_killed_at_random_leaves_none_behind_and_is_named(first, tmp_path):
    wrong = list(filter(None, (strike(seed, tmp_path) for seed in range(first, first + 25))))
    assert not wrong, "\n".join(wrong)
