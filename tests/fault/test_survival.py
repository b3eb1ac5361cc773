"""What the ring survives, and what it says of what it does not: ranks that are killed, stopped, busy and slow."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import busy_ranks
import faults
import pytest
import survival
import survival_ranks
from launching import noted_pids, runs, started
from markers import by_night, nightly_where
from survival import ACTIVITIES, living, run_alone
from worlds import child_environment

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.skipif(sys.platform != "linux", reason="these ranks get POSIX signals, and ask Linux's /proc"),
]

# --- ranks that are killed ------------------------------------------------------------------------------------------

KILLS = [
    (activity, 2 + turn % 5, turn, "unix" if turn % 3 else "tcp")
    for turn, activity in enumerate([*ACTIVITIES, "in a fit", "in the handshake"])
]
KILLS += [("in a large sum", 4, 100, "unix"), ("in the middle of a chunk", 3, 101, "unix")]
DAILY = (0, 6, 11, 102)
"""The seeds of the kills by day: both transports, and two and three ranks."""
KILLS += [("in a large sum", 2, 102, "unix")]  # with a core for each they wait by progress counters, without by frames


@pytest.fixture(scope="module")
def all_seconds():
    found: list[float] = []
    yield found
    survival.show("survivors that learnt of a kill", found)


@nightly_where(lambda seed: seed not in DAILY)
@pytest.mark.parametrize(("activity", "world_size", "seed", "transport"), KILLS)
def test_every_survivor_of_a_kill_at_any_moment_names_the_rank_within_a_second(
    activity, world_size, seed, transport, tmp_path, all_seconds
):
    all_seconds += survival.seconds_to_learn_of_a_kill(tmp_path / "notes", activity, world_size, seed, transport)


@pytest.mark.parametrize(
    ("makes", "kinds"),
    [
        pytest.param(True, {"PeerLostError", "RendezvousError"}, id="while a group with it is made"),
        by_night(False, {"PeerLostError"}, id="while one waits in a group without it"),
    ],
)
def test_every_survivor_names_the_killed_rank_also_beside_other_groups(makes, kinds, tmp_path):
    killed, outcomes = survival.killed_beside_a_group(tmp_path / "notes", makes)
    for ended in outcomes[:2]:
        assert ended.error is None, ended.traceback
        assert ended.value["type"] in kinds, ended.value
        assert ended.value["rank"] == 2, ended.value
        assert ended.value["at"] - killed < survival.seconds_to_learn(len(outcomes)), ended.value


def test_a_worker_that_outlives_its_rank_does_not_hide_that_the_rank_was_killed(tmp_path):
    killed, outcomes = survival.killed_beside_a_worker(tmp_path / "notes", 3, victim=1)
    for ended in (outcomes[0], outcomes[2]):
        assert ended.error is None, ended.traceback
        assert (ended.value["type"], ended.value["rank"]) == ("PeerLostError", 1)
        assert ended.value["at"] - killed < survival.seconds_to_learn(len(outcomes))


# --- ranks that are stopped, busy or slow: for seconds, so all of these worlds live at the same time ------------------

STOP = [faults.ProcessFault(faults.Stop(2.5), 1, at_call=150)]
SCENARIOS = {
    "stopped for 2.5 s": lambda folder: survival.stopped_at(folder, survival_ranks.reduce_under, STOP, 40),
    "stopped for ever": lambda folder: survival.stopped_for_ever(folder / "notes", 1, False),
    "stopped for ever, idle": lambda folder: survival.stopped_for_ever(folder / "notes", 2, True),
    "all stopped": lambda folder: survival.stopped_again_and_again(folder / "notes", (), 1, 8.0, 0.3),
    "own stop": lambda folder: survival.stopped_in_own_wait(folder / "notes"),
    "slow": lambda folder: run_alone(folder / "x", 4, busy_ranks.wait_for_a_slow_rank, 1, "load_much_data", 5.5, 2),
    "GIL": lambda folder: run_alone(folder / "x", 3, busy_ranks.wait_for_a_slow_rank, 0, "hold_the_gil", 8.0, 2),
}


@pytest.fixture(scope="module")
def scenarios(rank_server, tmp_path_factory):
    """What came of each, or why it failed."""

    folders = {name: tmp_path_factory.mktemp("scenario") for name in SCENARIOS}  # pytest makes one at a time only

    def come_of(name: str):
        try:
            return SCENARIOS[name](folders[name])
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        return dict(zip(SCENARIOS, pool.map(come_of, SCENARIOS), strict=True))


@pytest.fixture
def came_of(scenarios):
    def find(name: str):
        found = scenarios[name]
        if isinstance(found, BaseException):
            raise found
        return found

    return find


@pytest.mark.nightly
def test_a_stop_of_two_and_a_half_seconds_changes_no_bit(came_of):
    quiet, stopped = came_of("stopped for 2.5 s")
    assert stopped == quiet
    assert len(set(quiet)) == 1


@pytest.mark.parametrize(("name", "victim"), [("stopped for ever", 1), ("stopped for ever, idle", 2)])
def test_a_stop_that_does_not_end_is_told_by_all_within_six_seconds_and_by_the_stopped_rank_later(
    name, victim, came_of
):
    stopped, facts = came_of(name)
    for rank, learnt in enumerate(facts):
        assert (learnt["type"], learnt["rank"]) == ("PeerSilentError", victim), learnt
        assert learnt["message"].startswith(f"rank {victim} is suspended (SIGSTOP or Ctrl-Z), and has been for "), (
            learnt
        )
        assert rank == victim or 3.0 < learnt["at"] - stopped < 6.0, learnt
    print(f"seconds from the stop to the error: {[round(found['at'] - stopped, 2) for found in facts]}")


def test_ranks_that_are_all_stopped_at_once_and_continued_go_on(came_of):
    found = came_of("all stopped")
    assert len({turns for turns, _ in found}) == 1
    assert found[0][0] > 1
    assert [len(results) for _, results in found] == [1] * 3
    assert len({results[0] for _, results in found}) == 1


def test_the_time_for_which_a_rank_was_stopped_itself_does_not_count_against_its_deadline(came_of):
    seconds = came_of("own stop")[1]
    assert seconds > 3.0  # its deadline


def test_a_slow_rank_is_warned_about_with_what_it_does_by_who_waits_for_it_and_is_never_shot(came_of):
    received = came_of("slow")
    assert [len(texts) for texts in received] == [0, 0, 2, 0], (
        received
    )  # rank 2 gets from rank 1, the others from others
    for seconds, text in zip((2, 4), received[2], strict=True):
        found = re.fullmatch(
            r"WARNING rank 2 has waited (\d) s for rank 1 in all_reduce #\d \(SUM, float32 \[80000\]\)\. "
            r"It reports: MainThread is at busy_ranks\.py:\d+ in load_much_data; the last collective it called is "
            r"barrier #\d\. It is slow, not lost: the wait ends at the deadline \(collective_timeout_ms\)\.",
            text,
        )
        assert found is not None, text
        assert seconds <= int(found[1]) <= seconds + 1, text


def test_a_rank_that_holds_the_gil_is_waited_for_and_said_not_to_answer(came_of):
    received = came_of("GIL")
    assert [bool(texts) for texts in received] == [False, True, False], received
    assert re.match(r"WARNING rank 1 has waited [567] s for rank 0 in all_reduce #\d ", received[1][0])
    assert "It does not answer: one call in it may hold the GIL." in received[1][0]


# --- errors in a rank's own code ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["a_loss_function", "code_between_calls"])
def test_an_error_in_one_ranks_own_code_is_shown_by_the_others_within_two_seconds(where, tmp_path):
    with living(tmp_path / "notes", 3, busy_ranks.raise_in, str(tmp_path / "notes"), where) as world:
        outcomes = world.outcomes()
    raised = float((tmp_path / "notes" / "at").read_text())
    assert (outcomes[1].kind, outcomes[1].message) == ("ValueError", "the loss is a banana")
    for ended in (outcomes[0], outcomes[2]):
        assert ended.error is None, ended.traceback
        in_fit = where == "a_loss_function"
        kind, verb = ("DistributedTrainingError", "failed") if in_fit else ("PeerLostError", "ended")
        assert (ended.value["type"], ended.value["rank"]) == (kind, 1)
        assert f"rank 1 has {verb}: ValueError: the loss is a banana" in ended.value["message"]
        assert ended.value["at"] - raised < 2.0


@pytest.mark.nightly
def test_the_launcher_shows_the_traceback_of_the_rank_whose_own_code_failed_and_the_others_stop(tmp_path: Path) -> None:
    source = """
        import torch
        import cyxtrain as cx
        cx.init()
        cx.barrier()
        ready()
        if rank == 1:
            wait_for("ready0")
            note("raised", time.monotonic())
            raise ValueError("the loss is a banana")
        try:
            while True:
                cx.all_reduce(torch.ones(100))
        except cx.PeerLostError:
            note("stopped", time.monotonic())
            raise
    """
    with started(tmp_path, 2, source, env=child_environment(PYTHONUNBUFFERED="1")) as launcher:
        _, errors = launcher.communicate(timeout=60.0)
        assert not any(runs(pid) for pid in noted_pids(tmp_path))
    text = errors.decode()
    assert launcher.returncode == 1
    _, _, words = text.partition("rank 1 failed first (exit code 1); its last lines on stderr:\n")
    assert "Traceback (most recent call last):" in words, text
    assert words.endswith("ValueError: the loss is a banana\n"), text
    assert re.search(r"\[rank 0\] .*PeerLostError: rank 1 has ended: ValueError: the loss is a banana", text), text
    raised, stopped = (float((tmp_path / name).read_text()) for name in ("raised", "stopped"))
    assert stopped - raised < 2.0


# --- many lives -----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
def test_fifty_lives_leave_no_descriptor_no_thread_and_no_memory(processes, tmp_path):
    survival.check_many_lives(tmp_path / "notes", processes, lives=50, warm_up=25, most_kib=8192)
