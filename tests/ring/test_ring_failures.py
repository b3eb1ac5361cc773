"""What goes wrong: every rank learns it, soon, and is told which rank, in which operation, and what to do."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from markers import by_night
from ring_values import LARGE, WORLDS, broadcast, error_of, options, reduce_all
from worlds import run_threads, wait_until

from cyxtrain.errors import CollectiveTimeoutError, DamagedFrameError, PeerLostError
from cyxtrain.ring import RingProcessGroup, backend
from cyxtrain.ring.monitoring import monitor
from cyxtrain.ring.monitoring.failure import GroupFailure
from cyxtrain.ring.schedules import reduction
from cyxtrain.ring.schedules.kernels import Combiner, Reduction
from cyxtrain.ring.wire.frames import HEADER_BYTES, Kind, Operation, control_frame, dtype_code, expected_header
from cyxtrain.ring.wire.link import Link

# --- too late -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, by_night(3), by_night(4), by_night(5)])
def test_a_collective_that_takes_too_long_names_the_rank_that_holds_all_up(world_size):
    absent = world_size - 1

    def rank_main(group):
        group.set_timeout(timedelta(seconds=0.4))
        if group.rank() == absent:
            ended.wait(10)
            wait_until(lambda: group.group.failure.error is not None)
            return error_of(lambda: group.barrier())
        # Who comes first runs out of time first, although it waits for a rank that itself waits.
        wait_until(lambda: came == list(range(absent - 1, group.rank(), -1)))
        came.append(group.rank())
        try:
            return error_of(lambda: reduce_all()(group))
        finally:
            ended.set()

    came, ended = [], threading.Event()
    errors = run_threads(world_size, rank_main)
    for rank, error in enumerate(errors):
        assert isinstance(error, CollectiveTimeoutError)
        assert error.rank == absent
        assert (
            f"timed out in all_reduce #1 (SUM, float32 [3]): it waited for rank {absent} until its timeout of"
            in str(error)
        )
        assert "collective_timeout_ms" in str(error)
        assert error.during == ("barrier #1" if rank == absent else "all_reduce #1 (SUM, float32 [3])")


def test_a_call_may_bring_a_deadline_of_its_own():
    def rank_main(group):
        if group.rank() == 1:
            ended.wait(10)
            return None
        start = time.monotonic()
        error = error_of(lambda: group.barrier(options(dist.BarrierOptions, timeout=timedelta(seconds=0.2))))
        ended.set()
        return error, time.monotonic() - start

    ended = threading.Event()
    error, seconds = run_threads(2, rank_main)[0]
    assert isinstance(error, CollectiveTimeoutError)
    assert seconds < 2.0


def test_a_peer_that_trickles_does_not_move_the_deadline():
    def rank_main(group):
        if group.rank() == 0:
            return error_of(lambda: group.allreduce([torch.zeros(5000)], options_with_deadline))
        link = group.group.engine.links[0]
        operation = Operation(Kind.ALL_REDUCE, 1, Reduction.SUM, dtype_code(torch.float32), (5000,))
        link.send(expected_header(operation.identity(), 20000).ljust(HEADER_BYTES, b"\0"))
        with contextlib.suppress(Exception):
            while group.group.failure.error is None:
                link.send(b"x")
                time.sleep(0.001)
        return None

    options_with_deadline = options(dist.AllreduceOptions, timeout=timedelta(seconds=0.2))
    assert isinstance(run_threads(2, rank_main)[0], CollectiveTimeoutError)


# --- the failure as a value -----------------------------------------------------------------------------------------


def test_a_call_raises_a_copy_of_the_error_of_its_group_that_names_the_call():
    failure = GroupFailure()
    failure.store(PeerLostError("rank 1 died.", rank=1))
    assert not failure.is_raised
    for call in ("barrier #3", "barrier #4"):
        error = failure.call_error(call)
        assert (str(error), error.during) == (f"rank 1 died. This rank was in {call}.", call)
        assert failure.is_raised
    assert str(failure.error) == "rank 1 died."


def test_to_read_the_error_of_a_group_is_not_to_raise_it():
    def rank_main(group):
        if group.rank() == 1:
            group.fail("it had enough")
            return None
        wait_until(lambda: backend.failure_of(group) is not None)
        before = backend.raised_failure_of(group)
        error = error_of(lambda: group.barrier())
        return before, backend.raised_failure_of(group), backend.failure_of(group), error

    before, after, stored, error = run_threads(2, rank_main)[0]
    assert before is None
    assert after is stored
    assert str(error) == f"{stored}. This rank was in barrier #1."


# --- the end of a rank ----------------------------------------------------------------------------------------------


@WORLDS
def test_an_interrupted_rank_is_named_to_the_others(world_size, monkeypatch, cores):
    def interrupting(*args, **keywords):
        if threading.current_thread().name == "rank 1":
            raise KeyboardInterrupt
        combine(*args, **keywords)

    def rank_main(group):
        if group.rank() != 1:
            return error_of(lambda: reduce_all((LARGE,))(group))
        with pytest.raises(KeyboardInterrupt):
            reduce_all((LARGE,))(group)
        return error_of(lambda: group.barrier())

    combine = Combiner.combine
    monkeypatch.setattr(Combiner, "combine", interrupting)
    for error in run_threads(world_size, rank_main):
        assert (type(error), error.rank) == (PeerLostError, 1)
        assert f"rank 1 was interrupted in all_reduce #1 (SUM, float32 [{LARGE}]) by KeyboardInterrupt" in str(error)
        assert error.during is not None


@WORLDS
def test_an_interruption_between_the_halves_of_a_collective_ends_the_group_too(world_size, monkeypatch, cores):
    def interrupting(flat, divisor):
        if threading.current_thread().name == "rank 1":
            raise KeyboardInterrupt
        divide(flat, divisor)

    def rank_main(group):
        tensor, options = torch.ones(LARGE), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG
        if group.rank() != 1:
            return error_of(lambda: group.allreduce([tensor], options))
        with pytest.raises(KeyboardInterrupt):
            group.allreduce([tensor], options)
        return error_of(lambda: group.barrier())

    divide = reduction.divide
    monkeypatch.setattr(reduction, "divide", interrupting)
    for error in run_threads(world_size, rank_main):
        assert (type(error), error.rank) == (PeerLostError, 1)
        assert "rank 1 was interrupted in all_reduce #1" in str(error)


def test_an_interruption_while_a_message_moves_ends_the_group_too(monkeypatch):
    def interrupting(link, data):
        if threading.current_thread().name == "rank 1":
            raise KeyboardInterrupt
        return send(link, data)

    def rank_main(group):
        if group.rank() == 1:
            with pytest.raises(KeyboardInterrupt):
                group.send([torch.zeros(1)], 0)
        return error_of(lambda: group.recv([torch.zeros(1)], 1 - group.rank()).wait())

    send = Link.send
    monkeypatch.setattr(Link, "send", interrupting)
    for error in run_threads(2, rank_main):
        assert (type(error), error.rank) == (PeerLostError, 1)
        assert "rank 1 was interrupted in a message by KeyboardInterrupt" in str(error)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_can_no_longer_hear_the_others_says_so_instead_of_waiting(monkeypatch):
    def broken(received, checksums):
        raise ZeroDivisionError

    def rank_main(group):
        return error_of(lambda: group.recv([torch.zeros(1)], 1 - group.rank()).wait())

    monkeypatch.setattr(monitor, "take_control_frame", broken)
    errors = run_threads(2, rank_main)
    assert "can no longer receive control frames (ZeroDivisionError())" in str(errors[0])


def test_an_error_in_the_own_code_of_a_rank_reaches_the_others_who_wait():
    def rank_main(group):
        if group.rank() == 2:
            group.fail("ValueError: no such file")
            return error_of(lambda: group.barrier())
        return error_of(lambda: reduce_all()(group))

    for error in run_threads(4, rank_main):
        assert (type(error), error.rank) == (PeerLostError, 2)
        assert "rank 2 has ended: ValueError: no such file" in str(error)


def test_a_program_that_ends_because_of_an_error_tells_it_when_it_leaves(monkeypatch):
    def rank_main(group):
        if group.rank() == 0:
            return error_of(lambda: group.barrier())
        with monkeypatch.context() as dying:
            dying.setattr(sys, "last_value", ValueError("no such file"), raising=False)
            backend._leave(weakref.ref(group._group))
        return None

    error = run_threads(2, rank_main)[0]
    assert (type(error), error.rank) == (PeerLostError, 1)
    assert "rank 1 has ended: ValueError: no such file" in str(error)


def test_abort_ends_everything_that_waits_on_every_rank():
    def rank_main(group):
        if group.rank() == 0:
            waiting = threading.Thread(target=lambda: errors.append(error_of(lambda: group.barrier())))
            waiting.start()
            group.abort()
            waiting.join(10)
            return None
        return error_of(lambda: group.recv([torch.zeros(1)], 0).wait())

    errors = []
    errors += [error for error in run_threads(3, rank_main) if error is not None]
    assert [(type(error), error.rank) for error in errors] == [(PeerLostError, 0)] * 3


def test_leaving_while_another_thread_waits_in_a_collective_ends_that_wait():
    def rank_main(group):
        if group.rank() == 1:
            return error_of(lambda: group.recv([torch.zeros(1)], 0).wait())
        errors = []
        waiting = threading.Thread(target=lambda: errors.append(error_of(lambda: group.barrier())))
        waiting.start()
        wait_until(lambda: group.group.engine.sequence == 1)
        group.shutdown()
        waiting.join(10)
        return errors[0]

    for error in run_threads(2, rank_main):
        assert (type(error), error.rank) == (PeerLostError, 0)
        assert "it left while another of its threads was in a collective" in str(error)


def test_leaving_while_another_thread_waits_for_a_message_ends_that_wait():
    def rank_main(group):
        if group.rank() == 1:
            ended.wait(10)
            return None
        errors = []
        waiting = threading.Thread(target=lambda: errors.append(error_of(group.recv([torch.zeros(1)], 1).wait)))
        waiting.start()
        wait_until(lambda: group.group.engine.mailbox._asleep)
        group.shutdown()
        waiting.join(10)
        ended.set()
        return errors[0]

    ended = threading.Event()
    error = run_threads(2, rank_main)[0]
    assert "rank 0 has left this group" in str(error)
    assert error.during == "message (float32 [1], tag 0)"


def test_what_is_no_control_frame_ends_the_group_and_names_who_sent_it():
    def rank_main(group):
        if group.rank() == 1:
            group.group.engine.monitor._controls[0].send(b"GET / HTTP/1.0\r\n\r\n" * 2)
        return error_of(lambda: group.recv([torch.zeros(1)], 1 - group.rank()).wait())

    for error in run_threads(2, rank_main):
        assert (type(error), error.rank) == (DamagedFrameError, 1)
        assert "data from rank 1 to rank 0 was corrupted in transit" in str(error)


def test_a_goodbye_that_counts_in_words_is_refused():
    def rank_main(group):
        if group.rank() == 1:
            monitor = group.group.engine.monitor
            monitor._controls[0].send(control_frame(2, {"collectives": "many"}, monitor._checksums))
        return error_of(lambda: group.recv([torch.zeros(1)], 1 - group.rank()).wait())

    assert [type(error) for error in run_threads(2, rank_main)] == [PeerLostError] * 2


def test_in_a_part_of_the_world_errors_name_the_ranks_of_the_world():
    def rank_main(world):
        group = RingProcessGroup(store, world.rank(), 2, timedelta(seconds=5), global_ranks=[4, 7])
        try:
            if world.rank() == 1:
                return error_of(lambda: broadcast(0)(group))
            return error_of(lambda: broadcast(1)(group))
        finally:
            group.shutdown()

    store = dist.HashStore()
    zero, one = run_threads(2, rank_main)
    for error in (zero, one):
        assert error.rank in (4, 7)
        assert "rank 4 is in broadcast #1 (float32 [3], src 7)" in str(error)
        assert "rank 7 is in broadcast #1 (float32 [3], src 4)" in str(error)
