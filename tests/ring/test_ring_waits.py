"""Who holds all up, and when somebody says so: the slow rank is named, by those who wait for it directly."""

from __future__ import annotations

import pytest

from cyxtrain.ring.monitoring.wait_graph import WARN_SECONDS, WaitGraph

THREAD = 1  # which of this rank's threads waits
WHAT = "all_reduce #7 (SUM, float32 [3])"


def waiting(rank=0, peer=1, sequence=7, since=100.0):
    waits = WaitGraph(rank)
    waits.begin(THREAD, sequence, peer, WHAT, since)
    return waits


# --- whom to blame --------------------------------------------------------------------------------------------------


def test_who_waits_for_nobody_is_to_blame():
    assert waiting().find_straggler(7, 1) == 1


def test_the_last_of_a_chain_is_to_blame():
    waits = waiting()
    waits.peer_waits(1, 7, 2)
    assert waits.find_straggler(7, 1) == 2
    waits.peer_waits(2, 7, 3)
    assert waits.find_straggler(7, 1) == 3
    assert waits.find_straggler(7, 2) == 3


@pytest.mark.parametrize("circle", [{1: 0}, {1: 2, 2: 0}, {1: 2, 2: 1}, {1: 1}], ids=str)
def test_in_a_circle_the_next_one_is_as_good_as_any(circle):
    waits = waiting()
    for other, peer in circle.items():
        waits.peer_waits(other, 7, peer)
    assert waits.find_straggler(7, 1) == 1


def test_what_was_said_of_another_collective_is_over():
    waits = waiting()
    waits.peer_waits(1, 6, 2)
    assert waits.find_straggler(7, 1) == 1
    waits.peer_waits(1, 7, 2)
    waits.peer_waits(2, 6, 3)
    assert waits.find_straggler(7, 1) == 2


# --- questions ------------------------------------------------------------------------------------------------------


def test_the_slow_rank_is_asked_after_thirty_seconds_once():
    waits = waiting()
    assert waits.question(100.0 + WARN_SECONDS - 0.1) is None
    assert waits.question(100.0 + WARN_SECONDS) == 1
    assert waits.question(200.0) is None


def test_nobody_is_asked_where_nobody_waits():
    waits = WaitGraph(0)
    assert waits.question(1000.0) is None
    waits.begin(THREAD, 7, 1, WHAT, 100.0)
    waits.end(THREAD)
    assert waits.question(1000.0) is None
    assert waits.unanswered(1000.0) is None
    assert waits.answered(1, "something", 1000.0) is None


def test_only_those_ask_who_wait_for_the_slow_rank_directly():
    waits = waiting()
    waits.peer_waits(1, 7, 2)
    assert waits.question(200.0) is None
    waits.peer_waits(1, 8, 2)  # it has come on, and is now slow itself
    assert waits.question(201.0) == 1


# --- warnings -------------------------------------------------------------------------------------------------------


def test_the_warning_says_who_waits_for_whom_for_how_long_and_what_that_one_does():
    waits = waiting()
    assert waits.question(130.0) == 1
    warning = waits.answered(1, "MainThread is at load.py:12 in read", 130.5)
    assert warning == (
        f"rank 0 has waited 30 s for rank 1 in {WHAT}. It reports: MainThread is at load.py:12 in read. "
        "It is slow, not lost: the wait ends at the deadline (collective_timeout_ms)."
    )


def test_a_rank_that_does_not_answer_is_warned_about_after_three_seconds():
    waits = waiting()
    assert waits.unanswered(1000.0) is None  # it was not asked
    assert waits.question(130.0) == 1
    assert waits.unanswered(132.9) is None
    warning = waits.unanswered(133.0)
    assert "rank 0 has waited 33 s for rank 1" in warning
    assert "It does not answer" in warning
    assert waits.unanswered(140.0) is None
    assert waits.answered(1, "too late", 140.0) is None


def test_warnings_come_after_30_60_120_and_so_on_seconds():
    waits, warned = waiting(since=0.0), []
    for second in range(1000):
        if waits.question(float(second)) is not None:
            assert waits.answered(1, "sleeping", float(second)) is not None
            warned.append(second)
    assert warned == [30, 60, 120, 240, 480, 960]


def test_the_next_wait_has_its_thirty_seconds_anew():
    waits = waiting()
    assert waits.question(130.0) == 1
    waits.begin(THREAD, 8, 2, WHAT, 131.0)
    assert waits.answered(1, "the answer of before", 131.5) is None
    assert waits.unanswered(150.0) is None
    assert waits.question(160.9) is None
    assert waits.question(161.0) == 2


def test_only_the_answer_of_the_rank_that_was_asked_counts():
    waits = waiting()
    assert waits.question(130.0) == 1
    assert waits.answered(2, "nothing", 130.5) is None
    assert waits.answered(1, "something", 130.5) is not None
