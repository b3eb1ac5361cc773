"""What the ring survives, at length: 200 kills, 20 stops, minutes of waiting, a thousand lives."""

from __future__ import annotations

import itertools
import random
import re
import sys

import busy_ranks
import faults
import pytest
import survival
import survival_ranks
from survival import ACTIVITIES, run_alone

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="these ranks get POSIX signals, and ask Linux's /proc"),
]
KILLS_OF_A_KIND = 5
TRANSPORTS = ["unix", "tcp"]


@pytest.fixture(scope="module")
def all_seconds():
    found: dict[str, list[float]] = {activity: [] for activity in ACTIVITIES}
    yield found
    for activity, seconds in found.items():
        survival.show(f"survivors of a kill {activity}", seconds)
    survival.show("survivors of all kills", list(itertools.chain(*found.values())))


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("activity", ACTIVITIES)
def test_every_survivor_of_200_kills_names_the_rank_within_a_second(activity, world_size, tmp_path, all_seconds):
    for seed in range(KILLS_OF_A_KIND):
        all_seconds[activity] += survival.seconds_to_learn_of_a_kill(
            tmp_path / f"notes{seed}", activity, world_size, 1000 + seed, TRANSPORTS[seed % 2]
        )


@pytest.mark.parametrize("seed", range(20))
def test_20_stops_of_two_and_a_half_seconds_change_no_bit(seed, tmp_path):
    draw = random.Random(seed)
    victim = draw.randrange(3)
    if seed % 2:
        fault = faults.ProcessFault(faults.Stop(2.5), victim, at_collective=draw.randrange(1, 40))
        quiet, stopped = survival.stopped_at(tmp_path, survival_ranks.fit_under, [fault])
    else:
        fault = faults.ProcessFault(faults.Stop(2.5), victim, at_call=draw.randrange(1, 300))
        quiet, stopped = survival.stopped_at(tmp_path, survival_ranks.reduce_under, [fault], 40)
    assert stopped == quiet, fault
    assert all(found == quiet[0] for found in quiet)


@pytest.mark.parametrize(("ranks", "times", "seconds", "gap_seconds"), [((1,), 4, 2.5, 0.3), ((0, 2), 3, 2.5, 0.3)])
def test_stops_with_short_gaps_change_no_bit(ranks, times, seconds, gap_seconds, tmp_path):
    found = survival.stopped_again_and_again(tmp_path / "notes", ranks, times, seconds, gap_seconds)
    assert len({turns for turns, _ in found}) == 1
    assert [len(results) for _, results in found] == [1] * 3
    assert len({results[0] for _, results in found}) == 1


@pytest.mark.parametrize("how", busy_ranks.HOLDERS)
def test_a_gil_that_one_call_holds_for_eight_seconds_raises_nothing(how, tmp_path):
    held = run_alone(tmp_path / "notes", 3, busy_ranks.wait_for_a_held_gil, how, 9.0, seconds=120.0)
    print(f"{how}: {held[1]:.1f} s")
    assert held[1] >= 8.0


@pytest.mark.parametrize("how", ["load_much_data", "hold_the_gil"])
def test_after_thirty_seconds_a_slow_rank_is_warned_about_once(how, tmp_path):
    received = run_alone(tmp_path / "notes", 3, busy_ranks.wait_for_a_slow_rank, 1, how, 37.0, None)
    assert [len(texts) for texts in received] == [0, 0, 1], received
    assert re.match(r"WARNING rank 2 has waited 3[0-5] s for rank 1 in all_reduce #\d+ ", received[2][0])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_thousand_lives_leave_no_descriptor_no_thread_and_no_memory(processes, tmp_path):
    # The first 1,000 fill what is bounded, about 4 MiB in all; after them a life costs less than half a KiB.
    survival.check_many_lives(tmp_path / "notes", processes, lives=3000, warm_up=1000, most_kib=1024, seconds=800.0)
