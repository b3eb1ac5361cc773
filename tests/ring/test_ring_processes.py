"""The ring between real processes: PyTorch's own interface, large tensors, and ranks that are killed."""

from __future__ import annotations

import re
import signal
import sys
import time

import pytest
import ring_ranks
from rank_processes import run_ranks, values
from worlds import free_port, start_processes, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="these ranks get POSIX signals")

CASES = [
    "the_environment_alone_makes_a_world",
    "every_collective_works_under_its_public_name",
    "every_collective_on_objects_works",
    "messages_work_under_their_public_names",
    "all_reduce_is_right_at_every_size",
]
IN_PAIRS = ["pytorchs_own_ddp_trains_as_over_gloo", "a_world_can_be_left_and_made_again"]
IN_THREES = ["parts_of_the_world_are_groups_of_their_own"]


@pytest.fixture(scope="module")
def pair(rank_server):
    """What went wrong in each case, on each of two ranks."""
    ports = " ".join(str(free_port()) for _ in range(3))
    return values(run_ranks(2, ring_ranks.run_cases, [*CASES, *IN_PAIRS], seconds=100.0, MORE_PORTS=ports))


@pytest.fixture(scope="module")
def three():
    """The same on three ranks, and what a fourth process was told, that came as a rank which was there already."""
    variables = {"SECOND_PORT": str(free_port())}
    arguments = [*CASES, *IN_THREES]
    with start_processes(3, ring_ranks.join_as_a_rank_that_may_be_taken, arguments, env=variables) as world:
        world.start(1, 3, variables)
        results = world.results(100.0)
    assert [result.returncode for result in results] == [0] * 4, [result.stderr for result in results]
    refused = [result.value for result in results if isinstance(result.value, str)]
    return [result.value for result in results if isinstance(result.value, dict)], refused


@pytest.mark.parametrize("case", CASES + IN_PAIRS)
def test_on_two_ranks(case, pair):
    for found in pair:
        assert found[case] is None, found[case]


@pytest.mark.nightly  # threads do the same by day
@pytest.mark.parametrize("case", CASES + IN_THREES)
def test_on_three_ranks(case, three):
    for found in three[0]:
        assert found[case] is None, found[case]


@pytest.mark.nightly
def test_a_process_that_comes_as_a_rank_that_is_taken_is_refused_and_harms_nobody(three):
    found, refused = three
    assert len(found) == 3
    assert len(refused) == 1
    assert "rank 1 is taken" in refused[0]


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [4, 5])
@pytest.mark.usefixtures("rank_server")
def test_on_more_ranks(world_size):
    for found in values(run_ranks(world_size, ring_ranks.run_cases, CASES, seconds=110.0)):
        assert found == dict.fromkeys(CASES)


@pytest.mark.nightly  # test_survival.py shows it by day, in training
@pytest.mark.parametrize("target", [ring_ranks.reduce_for_ever, ring_ranks.wait_for_a_rank_that_dies])
def test_every_survivor_names_a_killed_rank_within_a_second(target):
    with start_processes(4, target) as world:
        wait_until(lambda: len(list(world.folder.glob("busy?"))) == 4, 60.0)
        killed = time.monotonic()
        world.process(3).send_signal(signal.SIGKILL)
        (world.folder / "killed").touch()
        results = world.results(30.0)
    assert [result.returncode for result in results] == [0, 0, 0, -signal.SIGKILL], [r.stderr for r in results]
    seconds = [result.value["at"] - killed for result in results[:3]]
    print(f"seconds from the kill to the error: {', '.join(f'{s:.3f}' for s in seconds)}")
    for result in results[:3]:
        assert result.value["type"] == "PeerLostError"
        assert result.value["rank"] == 3
        assert result.value["message"].startswith("rank 3 ")
        assert result.value["during"].startswith("all_reduce #")
    assert max(seconds) < 1.0


def test_ctrl_c_in_a_collective_reaches_the_others_with_its_cause():
    with start_processes(2, ring_ranks.wait_until_interrupted) as world:
        wait_until(lambda: len(list(world.folder.glob("busy?"))) == 2, 60.0)
        sent = time.monotonic()
        world.process(1).send_signal(signal.SIGINT)
        waiting, interrupted = world.results(30.0)
    assert interrupted.returncode == -signal.SIGINT, interrupted.stderr
    assert "KeyboardInterrupt" in interrupted.stderr
    assert (waiting.value["type"], waiting.value["rank"]) == ("PeerLostError", 1)
    # The signal may come just before the barrier begins; then the end of the program tells.
    cause = r"rank 1 (was interrupted in barrier #2 by|has ended:) KeyboardInterrupt"
    assert re.search(cause, waiting.value["message"])
    assert waiting.value["during"] == "message (float32 [10], tag 0)"
    assert waiting.value["at"] - sent < 1.0
