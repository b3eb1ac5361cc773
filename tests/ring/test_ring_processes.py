"""The ring between real processes: PyTorch's own interface, large tensors, groups and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time

import pytest
import ring_ranks
import unchanged
from forked_programs import ForkedProgram
from rank_processes import environment, run_ranks, values
from worlds import free_port, start_processes, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="these ranks get POSIX signals")

CASES = [
    "the_environment_alone_makes_a_world",
    "every_collective_on_objects_works",
    "all_reduce_is_right_at_every_size",
]
IN_PAIRS = ["a_world_can_be_left_and_made_again"]
IN_THREES = ["parts_of_the_world_are_groups_of_their_own"]


@pytest.fixture(scope="module")
def pair(rank_server, tmp_path_factory):
    """What went wrong in each case, on each of two ranks."""
    ports = " ".join(str(free_port()) for _ in range(3))
    folder = str(tmp_path_factory.mktemp("pair"))
    cases = "ring_ranks", [*CASES, *IN_PAIRS], folder
    return values(run_ranks(2, unchanged.run_cases, *cases, seconds=100.0, MORE_PORTS=ports))


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
def test_on_more_ranks(world_size, tmp_path):
    for found in values(run_ranks(world_size, unchanged.run_cases, "ring_ranks", CASES, str(tmp_path), seconds=110.0)):
        assert found == dict.fromkeys(CASES)


INTERRUPTED = "import json, ring_ranks\nprint(json.dumps(ring_ranks.wait_until_interrupted()))\n"


@pytest.mark.usefixtures("rank_server")
def test_ctrl_c_in_a_collective_reaches_the_others_with_its_cause(tmp_path):
    script, port = tmp_path / "rank.py", free_port()
    script.write_text(INTERRUPTED)
    variables = [environment(rank, 2, port) for rank in range(2)]
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(ForkedProgram([str(script)], tmp_path, each)) for each in variables]
        wait_until(lambda: len(list(tmp_path.glob("busy?"))) == 2)
        sent = time.monotonic()
        os.kill(ranks[1].pid, signal.SIGINT)
        waiting, interrupted = [rank.wait() for rank in ranks]
    assert interrupted.returncode == -signal.SIGINT, interrupted.stderr
    assert "KeyboardInterrupt" in interrupted.stderr
    found = json.loads(waiting.stdout)
    assert (found["type"], found["rank"]) == ("PeerLostError", 1)
    # The signal may come just before the barrier begins; then the end of the program tells.
    cause = r"rank 1 (was interrupted in barrier #2 by|has ended:.*) KeyboardInterrupt"
    assert re.search(cause, found["message"])
    assert found["during"] == "message (float32 [10], tag 0)"
    assert found["at"] - sent < 1.0
