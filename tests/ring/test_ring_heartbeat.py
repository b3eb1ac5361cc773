"""Who counts as gone: by the kernel's word where there is one, by heartbeats where there is none."""

from __future__ import annotations

import pytest

from cyxtrain.environment.processes import Process, State
from cyxtrain.errors import PeerLostError, PeerSilentError
from cyxtrain.ring.monitoring import heartbeat as pulse_module
from cyxtrain.ring.monitoring.heartbeat import GONE_SECONDS, STOPPED_SECONDS, Heartbeat

OWN = Process("here", 1, 10)
THERE = {1: Process("elsewhere", 2, 20), 2: Process("", 3, 30)}
HERE = {5: Process("here", 4, 40), 7: Process("here", 5, 50)}


@pytest.fixture
def kernel(monkeypatch):
    """What the kernel says of the processes of this machine, to be set by a test."""
    says = dict.fromkeys(HERE.values(), State.ALIVE)

    def state_of(process, asking):
        assert asking == OWN
        return says.get(process)

    monkeypatch.setattr(pulse_module, "state_of", state_of)
    return says


def test_the_operating_system_is_asked_at_most_twice_a_second_however_frequent_heartbeats_are(monkeypatch):
    asked = []
    monkeypatch.setattr(pulse_module, "state_of", lambda process, asking: asked.append(process))
    pulse = Heartbeat(OWN, HERE, 100.0, 0.0)
    for tick in range(1000):
        assert pulse.examine(tick / 100) is None
    assert asked == [*HERE.values()] * 20


# --- heartbeats -----------------------------------------------------------------------------------------------------


def test_a_rank_elsewhere_may_be_silent_for_the_timeout_and_no_longer(kernel):
    pulse = Heartbeat(OWN, THERE, 30.0, 100.0)
    pulse.received(1, 125.0)
    assert pulse.examine(129.9) is None
    error = pulse.examine(130.0)
    assert isinstance(error, PeerSilentError)
    assert error.rank == 2
    assert "rank 2 is connected and has sent nothing for 30.0 s" in str(error)
    assert "CYXTRAIN_HEARTBEAT_TIMEOUT_MS" in str(error)


def test_a_rank_that_says_something_now_and_then_lives(kernel):
    pulse = Heartbeat(OWN, THERE, 1.0, 0.0)
    for tenth in range(1000):
        for peer in THERE:
            if tenth % 9 == peer:
                pulse.received(peer, tenth / 10)
        assert pulse.examine(tenth / 10) is None


def test_a_rank_that_has_left_may_be_silent(kernel):
    pulse = Heartbeat(OWN, THERE, 1.0, 0.0)
    pulse.forget(1)
    pulse.forget(1)
    pulse.received(2, 5.0)
    assert pulse.examine(5.5) is None
    assert pulse.examine(6.0).rank == 2


def test_what_a_rank_here_says_does_not_matter_while_the_kernel_says_that_it_runs(kernel):
    """A GIL that is held for long keeps heartbeats from being sent: that is no stop."""
    pulse = Heartbeat(OWN, HERE, 1.0, 0.0)
    for second in range(1000):
        assert pulse.examine(float(second)) is None


# --- the kernel's word ----------------------------------------------------------------------------------------------


def test_a_rank_here_that_has_ended_is_lost_when_its_goodbye_had_time_to_be_read(kernel):
    pulse = Heartbeat(OWN, HERE, 30.0, 0.0)
    kernel[HERE[7]] = State.GONE
    assert pulse.examine(1.0) is None
    assert pulse.examine(0.9 + GONE_SECONDS) is None
    error = pulse.examine(1.0 + GONE_SECONDS)
    assert isinstance(error, PeerLostError)
    assert error.rank == 7
    assert "rank 7 died" in str(error)


def test_a_rank_here_that_has_ended_after_a_goodbye_is_not_lost(kernel):
    pulse = Heartbeat(OWN, HERE, 30.0, 0.0)
    kernel[HERE[7]] = State.GONE
    assert pulse.examine(1.0) is None
    pulse.forget(7)
    assert pulse.examine(100.0) is None


def test_a_rank_here_that_is_stopped_is_silent_after_four_seconds(kernel):
    pulse = Heartbeat(OWN, HERE, 30.0, 0.0)
    assert pulse.examine(10.0) is None
    kernel[HERE[5]] = State.STOPPED
    for second in (11.0, 12.0, 13.0, 14.0):
        assert pulse.examine(second) is None
    error = pulse.examine(15.0)
    assert isinstance(error, PeerSilentError)
    assert error.rank == 5
    assert "rank 5 is suspended (SIGSTOP or Ctrl-Z), and has been for 4.0 s" in str(error)
    assert "process 4" in str(error)


def test_a_stop_of_three_seconds_never_ends_a_group_and_one_of_six_always_does(kernel):
    """Looked at once a second: whenever the stop begins in between."""
    for tenth in range(10):
        for seconds, ends in ((3.0, False), (6.0, True)):
            pulse = Heartbeat(OWN, HERE, 30.0, 0.0)
            stops = 10.0 + tenth / 10
            errors = []
            for look in range(30):
                stopped = stops <= look < stops + seconds
                kernel[HERE[5]] = State.STOPPED if stopped else State.ALIVE
                errors.append(pulse.examine(float(look)))
            assert any(errors) is ends
            kernel[HERE[5]] = State.ALIVE


@pytest.mark.parametrize("sign", ["the kernel says so", "it says something"])
def test_a_rank_that_goes_on_has_its_four_seconds_anew(kernel, sign):
    pulse = Heartbeat(OWN, HERE, 30.0, 0.0)
    kernel[HERE[5]] = State.STOPPED
    assert pulse.examine(1.0) is None
    if sign == "it says something":
        pulse.received(5, 4.0)
    else:
        kernel[HERE[5]] = State.ALIVE
        assert pulse.examine(4.0) is None
        kernel[HERE[5]] = State.STOPPED
    assert pulse.examine(5.5) is None
    assert pulse.examine(5.5 + STOPPED_SECONDS - 0.1) is None
    assert pulse.examine(5.5 + STOPPED_SECONDS) is not None


# --- this process itself --------------------------------------------------------------------------------------------


def test_the_time_for_which_this_process_was_stopped_counts_for_nobody(kernel):
    pulse = Heartbeat(OWN, THERE | HERE, 10.0, 0.0)
    kernel[HERE[5]] = State.STOPPED
    assert pulse.examine(1.0) is None
    pulse.discount_pause(600.0, 603.0)
    assert pulse.examine(603.0) is None  # heartbeats of 3 s ago, a stop of 2 s
    assert pulse.examine(604.9) is None
    assert pulse.examine(605.0).rank == 5
    kernel[HERE[5]] = State.ALIVE
    assert pulse.examine(609.9) is None
    assert pulse.examine(610.0).rank in THERE


def test_a_clock_never_runs_ahead(kernel):
    pulse = Heartbeat(OWN, THERE, 10.0, 0.0)
    pulse.received(1, 599.0)
    pulse.received(2, 599.0)
    pulse.discount_pause(500.0, 600.0)
    assert pulse.examine(609.9) is None
    assert pulse.examine(610.0) is not None
