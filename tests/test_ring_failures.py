"""What goes wrong: every rank learns it, soon, and is told which rank, in which operation, and what to do."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from worlds import join_threads, run_threads, wait_until

from cyxtrain.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CyxtrainError,
    PeerLostError,
    RendezvousError,
)
from cyxtrain.ring import RingProcessGroup, mailbox, process_group, rendezvous, watch
from cyxtrain.ring import group as group_module
from cyxtrain.ring.door import HELLO, Identity, Role
from cyxtrain.ring.frames import Kind, Operation, Reduction, control_frame, dtype_code, header

Op = dist.ReduceOp
WORLDS = pytest.mark.parametrize("world_size", [2, 3, 4])
LARGE = 2_000_003


def options(kind, **fields):
    made_options = kind()
    for name, value in fields.items():
        setattr(made_options, name, value)
    return made_options


def reduce_all(shape=(3,), dtype=torch.float32, op=Op.SUM):
    return lambda group: group.allreduce([torch.zeros(shape, dtype=dtype)], options(dist.AllreduceOptions, reduceOp=op))


def broadcast(src=0, shape=(3,)):
    return lambda group: group.broadcast([torch.zeros(shape)], options(dist.BroadcastOptions, rootRank=src))


def reduce(dst):
    return lambda group: group.reduce([torch.zeros(3)], options(dist.ReduceOptions, rootRank=dst))


def gather_all(shape=(3,)):
    return lambda group: group.allgather([[torch.zeros(shape) for _ in range(group.size())]], [torch.zeros(shape)])


def exchange(rows):
    return lambda group: group.all_to_all_single(
        torch.zeros(rows * group.size()), torch.zeros(rows * group.size()), [], []
    )


def barrier(group):
    return group.barrier()


def in_turn(*calls):
    return lambda group: [call(group) for call in calls]


def error_of(call):
    with pytest.raises(CyxtrainError) as caught:
        call()
    return caught.value


# --- different calls ------------------------------------------------------------------------------------------------

MISMATCHES = {
    "shape": (
        reduce_all((3,)),
        reduce_all((4,)),
        "all_reduce #1 (SUM, float32 [3])",
        "all_reduce #1 (SUM, float32 [4])",
    ),
    "shape of as many elements": (reduce_all((2, 3)), reduce_all((3, 2)), "[2, 3]", "[3, 2]"),
    "shape, large": (reduce_all((LARGE,)), reduce_all((LARGE + 1,)), f"[{LARGE}]", f"[{LARGE + 1}]"),
    "nothing and something": (reduce_all((0,)), reduce_all((LARGE,)), "[0]", f"[{LARGE}]"),
    "dtype": (reduce_all(dtype=torch.int32), reduce_all(), "(SUM, int32 [3])", "(SUM, float32 [3])"),
    "reduction": (reduce_all(op=Op.MAX), reduce_all(), "(MAX, float32 [3])", "(SUM, float32 [3])"),
    "operation": (reduce_all(), barrier, "all_reduce #1", "barrier #1"),
    "operation, large": (broadcast(0, (LARGE,)), reduce_all((LARGE,)), "broadcast #1", "all_reduce #1"),
    "operation of the same shape": (gather_all(), reduce_all(), "all_gather #1", "all_reduce #1"),
    "src": (broadcast(0), broadcast(1), "(float32 [3], src 0)", "(float32 [3], src 1)"),
    "dst": (reduce(1), reduce(0), "dst 1", "dst 0"),
    "order": (in_turn(reduce_all(), barrier), in_turn(barrier, reduce_all()), "all_reduce #1", "barrier #1"),
    "one call more": (in_turn(barrier, reduce_all()), reduce_all(), "barrier #1", "all_reduce #1"),
    "sizes of parts": (exchange(2), exchange(3), "all_to_all #1 (float32)", "with other sizes"),
}


@WORLDS
@pytest.mark.parametrize("what", MISMATCHES)
def test_different_calls_are_an_error_on_every_rank_within_a_second_that_shows_both(what, world_size):
    odd, even, odd_name, even_name = MISMATCHES[what]
    began = threading.Barrier(world_size)

    def rank_main(group):
        began.wait()
        start = time.monotonic()
        error = error_of(lambda: (odd if group.rank() == world_size - 1 else even)(group))
        return error, time.monotonic() - start

    for rank, (error, seconds) in enumerate(run_threads(world_size, rank_main)):
        assert isinstance(error, CollectiveMismatchError)
        assert odd_name in str(error)
        assert even_name in str(error)
        assert "Every rank must make the same calls" in str(error)
        assert (odd_name if rank == world_size - 1 else even_name) in f"{error.during} with other sizes"
        assert error.rank in range(world_size)
        assert seconds < 1.0


@WORLDS
def test_a_rank_that_leaves_early_is_named_to_all_who_still_need_it(world_size):
    def rank_main(group):
        group.barrier()
        group.barrier()
        if group.rank() == world_size - 1:
            return None
        start = time.monotonic()
        error = error_of(lambda: reduce_all()(group))
        return error, time.monotonic() - start

    for found in run_threads(world_size, rank_main)[:-1]:
        error, seconds = found
        assert isinstance(error, CollectiveMismatchError)
        assert (error.rank, error.during) == (world_size - 1, "all_reduce #3 (SUM, float32 [3])")
        assert f"rank {world_size - 1} has left" in str(error)
        assert "after 2 collectives" in str(error)
        assert seconds < 1.0


def test_ranks_that_leave_in_any_order_after_the_same_calls_leave_in_peace():
    def rank_main(group):
        for _ in range(3):
            reduce_all((LARGE,))(group)

    for _ in range(3):
        run_threads(4, rank_main)


def test_the_first_error_is_raised_again_by_whatever_comes_later():
    def rank_main(group):
        first = error_of(lambda: reduce_all((3 + group.rank(),))(group))
        later = [
            lambda: group.barrier(),
            lambda: group.send([torch.zeros(1)], 1 - group.rank()),
            lambda: group.recv([torch.zeros(1)], 1 - group.rank()),
            lambda: group.all_gather_single(torch.zeros(2), torch.zeros(1)),
        ]
        for call in later:
            error = error_of(call)
            assert (type(error), error.rank) == (type(first), first.rank)
            assert str(first).split(" This rank")[0] in str(error)
        assert error_of(barrier_of(group)).during == "barrier #2"

    def barrier_of(group):
        return lambda: group.barrier()

    run_threads(2, rank_main)


def test_a_rank_that_was_not_waiting_hears_of_the_error_at_its_next_call():
    def rank_main(group):
        if group.rank() < 2:
            error = error_of(lambda: reduce_all((3 + group.rank(),))(group))
            told.set()
            return error
        told.wait(10)
        wait_until(lambda: group._group._ring.watch.failure is not None)
        return error_of(lambda: group.barrier())

    told = threading.Event()
    errors = run_threads(4, rank_main)
    assert [type(error) for error in errors] == [CollectiveMismatchError] * 4
    assert all("[3]" in str(error) and "[4]" in str(error) for error in errors)
    assert errors[3].during == "barrier #1"
    assert "(reported by rank " in str(errors[3])


# --- too late -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_a_collective_that_takes_too_long_names_the_rank_that_holds_all_up(world_size):
    absent = world_size - 1

    def rank_main(group):
        group.set_timeout(timedelta(seconds=0.4))
        if group.rank() == absent:
            ended.wait(10)
            wait_until(lambda: group._group._ring.watch.failure is not None)
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
        assert f"waited for rank {absent} in all_reduce #1 (SUM, float32 [3]) until the deadline" in str(error)
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
        link = group._group._ring.links[0]
        operation = Operation(Kind.ALL_REDUCE, 1, Reduction.SUM, dtype_code(torch.float32), (5000,))
        link.send(header(operation.identity(), 10000))
        with contextlib.suppress(Exception):
            while group._group._ring.watch.failure is None:
                link.send(b"x")
                time.sleep(0.001)
        return None

    options_with_deadline = options(dist.AllreduceOptions, timeout=timedelta(seconds=0.2))
    assert isinstance(run_threads(2, rank_main)[0], CollectiveTimeoutError)


# --- the end of a rank ----------------------------------------------------------------------------------------------


@WORLDS
def test_an_interrupted_rank_is_named_to_the_others(world_size, monkeypatch):
    def interrupting(reduction, flat, scratch):
        combine = combiner(reduction, flat, scratch)
        if threading.current_thread().name != "rank 1":
            return combine

        def interrupt(first, end):
            raise KeyboardInterrupt

        return interrupt

    def rank_main(group):
        if group.rank() != 1:
            return error_of(lambda: reduce_all((LARGE,))(group))
        with pytest.raises(KeyboardInterrupt):
            reduce_all((LARGE,))(group)
        return error_of(lambda: group.barrier())

    combiner = group_module.combiner
    monkeypatch.setattr(group_module, "combiner", interrupting)
    for error in run_threads(world_size, rank_main):
        assert (type(error), error.rank) == (PeerLostError, 1)
        assert f"rank 1 was interrupted in all_reduce #1 (SUM, float32 [{LARGE}]) by KeyboardInterrupt" in str(error)
        assert error.during is not None


def test_an_interruption_while_a_message_moves_ends_the_group_too(monkeypatch):
    def interrupting(identity, payload_bytes):
        if threading.current_thread().name == "rank 1":
            raise KeyboardInterrupt
        return header(identity, payload_bytes)

    def rank_main(group):
        if group.rank() == 1:
            with pytest.raises(KeyboardInterrupt):
                group.send([torch.zeros(1)], 0)
        return error_of(lambda: group.recv([torch.zeros(1)], 1 - group.rank()).wait())

    monkeypatch.setattr(mailbox, "header", interrupting)
    for error in run_threads(2, rank_main):
        assert (type(error), error.rank) == (PeerLostError, 1)
        assert "rank 1 was interrupted in a message by KeyboardInterrupt" in str(error)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_can_no_longer_hear_the_others_says_so_instead_of_waiting(monkeypatch):
    def broken(data):
        raise ZeroDivisionError

    def rank_main(group):
        if group.rank() == 1:
            group._group._ring.watch.tell_waiting(1, 0)
        return error_of(lambda: group.recv([torch.zeros(1)], 1 - group.rank()).wait())

    monkeypatch.setattr(watch, "decode_control_header", broken)
    errors = run_threads(2, rank_main)
    assert "rank 0 can no longer hear the others (ZeroDivisionError())" in str(errors[0])


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
            process_group._leave(weakref.ref(group._group))
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
        wait_until(lambda: group._group._sequence == 1)
        group.shutdown()
        waiting.join(10)
        return errors[0]

    for error in run_threads(2, rank_main):
        assert (type(error), error.rank) == (PeerLostError, 0)
        assert "it left in the middle of a collective" in str(error)


def test_leaving_while_another_thread_waits_for_a_message_ends_that_wait():
    def rank_main(group):
        if group.rank() == 1:
            ended.wait(10)
            return None
        errors = []
        waiting = threading.Thread(target=lambda: errors.append(error_of(group.recv([torch.zeros(1)], 1).wait)))
        waiting.start()
        wait_until(lambda: group._group._ring.mailbox._asleep)
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
            group._group._ring.watch._controls[0].send(b"GET / HTTP/1.0\r\n\r\n")
        return error_of(lambda: group.recv([torch.zeros(1)], 1 - group.rank()).wait())

    for error in run_threads(2, rank_main):
        assert (type(error), error.rank) == (PeerLostError, 1)
        assert "rank 1 said what is no frame" in str(error)


def test_a_goodbye_that_counts_in_words_is_refused():
    def rank_main(group):
        if group.rank() == 1:
            group._group._ring.watch._controls[0].send(control_frame(2, {"collectives": "many"}))
        return error_of(lambda: group.recv([torch.zeros(1)], 1 - group.rank()).wait())

    assert [type(error) for error in run_threads(2, rank_main)] == [PeerLostError] * 2


def test_in_a_part_of_the_world_errors_name_the_ranks_of_the_world():
    def rank_main(world):
        group = RingProcessGroup(store, world.rank(), 2, timedelta(seconds=5), names=[4, 7])
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


# --- meeting --------------------------------------------------------------------------------------------------------


def meet(store, rank, world_size, seconds=5.0, **fields):
    return RingProcessGroup(store, rank, world_size, timedelta(seconds=seconds), **fields)


def errors_of_meeting(store, ranks, world_size, seconds):
    """Returns how each rank's meeting ended, and after how many seconds."""
    found = {}

    def run(rank):
        start = time.monotonic()
        error = error_of(lambda: meet(store, rank, world_size, seconds))
        found[rank] = error, time.monotonic() - start

    join_threads([threading.Thread(target=run, args=(rank,)) for rank in ranks], 20.0)
    return [found[rank] for rank in ranks]


def test_ranks_that_do_not_come_are_named_at_the_deadline():
    for error, seconds in errors_of_meeting(dist.HashStore(), [0, 2], 4, 0.4):
        assert isinstance(error, RendezvousError)
        assert str(error).startswith("rank 1, rank 3 of a world of 4 did not come before the deadline")
        assert "DISTRIBUTED_TIMEOUT_MS" in str(error)
        assert error.rank == 1
        assert seconds < 0.4 + 0.5


def test_a_rank_that_publishes_itself_and_does_not_connect_is_named():
    store = dist.HashStore()
    store.set("1/address/1", json.dumps({"host": "127.0.0.1", "port": 1, "world_size": 2}))
    [(error, _)] = errors_of_meeting(store, [0], 2, 0.3)
    assert isinstance(error, RendezvousError)
    assert "rank 1 did not connect to rank 0 before the deadline" in str(error)


def test_a_rank_that_is_taken_is_refused_at_once_and_harms_nobody(monkeypatch):
    def rank_main(group):
        group.barrier()
        if group.rank() == 0:
            with monkeypatch.context() as another_process:
                another_process.setattr(rendezvous, "_PROCESS", "another")
                start = time.monotonic()
                refused.append(error_of(lambda: meet(store, 1, 2)))
                refused.append(time.monotonic() - start)
        reduce_all()(group)

    store, refused = dist.HashStore(), []
    run_threads(2, rank_main, store=store)
    error, seconds = refused
    assert isinstance(error, RendezvousError)
    assert "rank 1 is taken" in str(error)
    assert error.rank == 1
    assert seconds < 1.0


def test_ranks_may_meet_again_at_the_same_store():
    store = dist.HashStore()
    for _ in range(3):
        run_threads(3, lambda group: reduce_all()(group) and None, store=store)


def test_another_world_size_is_refused_on_both_sides_within_a_second():
    store, found = dist.HashStore(), {}

    def run(rank, world_size):
        start = time.monotonic()
        found[rank] = error_of(lambda: meet(store, rank, world_size)), time.monotonic() - start

    join_threads([threading.Thread(target=run, args=arguments) for arguments in ((0, 2), (1, 3))], 10.0)
    for rank, (error, seconds) in found.items():
        assert isinstance(error, RendezvousError)
        assert error.rank == 1 - rank
        assert "a world of 2" in str(error)
        assert "a world of 3" in str(error)
        assert "WORLD_SIZE" in str(error)
        assert seconds < 1.0


def test_a_rank_that_cannot_be_reached_is_named_with_the_cause():
    store = dist.HashStore()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store.set("1/address/0", json.dumps({"host": "127.0.0.1", "port": free.getsockname()[1], "world_size": 2}))
        store.set("1/run", "00" * 16)
        [(error, _)] = errors_of_meeting(store, [1], 2, 2.0)
    assert isinstance(error, RendezvousError)
    assert str(error).startswith("rank 1 cannot reach rank 0 at 127.0.0.1:")
    assert "Connection refused" in str(error)
    assert error.rank == 0


def test_a_listener_of_another_program_is_not_taken_for_a_rank():
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.set("1/address/0", json.dumps({"host": "127.0.0.1", "port": server.getsockname()[1], "world_size": 2}))
        store.set("1/run", "00" * 16)

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request, and more of it\r\n")
                connection.recv(1000)

        threading.Thread(target=answer, daemon=True).start()
        [(error, _)] = errors_of_meeting(store, [1], 2, 5.0)
    assert isinstance(error, RendezvousError)
    assert "rank 0 at 127.0.0.1:" in str(error)
    assert "the answer came from a process of another run" in str(error)


def test_strangers_at_the_door_do_not_hurt():
    store, groups, strangers = dist.HashStore(), {}, []
    store.set("1/address/1", json.dumps({"host": "127.0.0.1", "port": 1, "world_size": 2}))  # rank 0 opens the door
    first = threading.Thread(target=lambda: groups.update({0: meet(store, 0, 2, 20.0)}), daemon=True)
    first.start()
    try:
        store.wait(["1/run", "1/address/0"])
        address = json.loads(store.get("1/address/0"))
        run = bytes.fromhex(store.get("1/run").decode())
        others = [
            b"",  # silent
            b"GET / HTTP/1.0\r\n\r\n" * 20,
            Identity(run, 0, 1, (0, 1)).hello(Role.CONTROL)[:20],  # half of it
            Identity(bytes(16), 0, 1, (0, 1)).hello(Role.CONTROL),  # another run
            Identity(run, 1, 1, (0, 1)).hello(Role.CONTROL),  # another generation
            Identity(run, 0, 1, (0, 1, 2)).hello(Role.CONTROL),  # another world size
            Identity(run, 0, 9, (0, 1)).hello(Role.CONTROL),  # a rank that is not there
            HELLO.pack(b"CX", 1, 77, 0, 1, 2, run),  # a connection for nothing
            HELLO.pack(b"CX", 99, Role.CONTROL, 0, 1, 2, run),  # another version
        ]
        for words in others * 40:
            stranger = socket.create_connection((address["host"], address["port"]))
            strangers.append(stranger)
            with contextlib.suppress(OSError):
                stranger.sendall(words)
        groups[1] = meet(store, 1, 2, 20.0)
        first.join(20)
        assert set(groups) == {0, 1}
        threads = [threading.Thread(target=reduce_all(), args=(group,)) for group in groups.values()]
        join_threads(threads, 20.0)
    finally:
        for stranger in strangers:
            stranger.close()
        threads = [threading.Thread(target=group.shutdown) for group in groups.values()]
        join_threads(threads, 20.0)


@pytest.mark.usefixtures("pipe_of_pytorchs_stores")
def test_a_store_that_ends_while_ranks_meet_is_said_to_have_ended():
    server = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, 2, False, wait_for_workers=False)
    found = []
    waiting = threading.Thread(target=lambda: found.append(error_of(lambda: meet(client, 1, 2, 20.0))), daemon=True)
    waiting.start()
    server.wait(["1/process/1"])
    del server
    waiting.join(10)
    assert isinstance(found[0], rendezvous.StoreLostError)
    assert str(found[0]).startswith("rank 1 lost the store")
