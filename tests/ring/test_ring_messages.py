"""send and recv: in any order, of any size, from any thread, and beside collectives."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest
import torch
from markers import by_night
from ring_values import DTYPES, all_reduce, error_of, made, same
from worlds import join_threads, run_threads, wait_until

from cyxtrain.errors import CollectiveMismatchError, CollectiveTimeoutError, ConfigError, PeerLostError
from cyxtrain.ring import messages
from cyxtrain.ring.wire.frames import HEADER_BYTES, Kind, Operation, dtype_code, expected_header

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
LARGE = 3_000_017  # elements: more than the kernel keeps for a connection


def other(group):
    return 1 - group.rank()


def test_a_message_of_every_dtype_arrives_as_it_was():
    def rank_main(group):
        for number, dtype in enumerate(DTYPES):
            for count in (0, 1, 1037):
                if group.rank() == 0:
                    group.send([made(dtype, count, 0)], 1, number).wait()
                else:
                    tensor = torch.empty(count, dtype=dtype)
                    group.recv([tensor], 0, number).wait()
                    assert same(tensor, made(dtype, count, 0)), (dtype, count)

    run_threads(2, rank_main)


def test_strided_tensors_are_sent_and_received():
    def rank_main(group):
        if group.rank() == 0:
            group.send([torch.arange(12.0).view(3, 4).t()], 1).wait()
            return None
        target = torch.zeros(3, 4).t()
        work = group.recv([target], 0)
        work.wait()
        return target.tolist()

    assert run_threads(2, rank_main)[1] == torch.arange(12.0).view(3, 4).t().tolist()


@pytest.mark.parametrize("first", ["send", by_night("recv")])
def test_both_ranks_may_begin_with_the_same_side_of_a_large_exchange(first):
    def rank_main(group):
        ours, theirs = made(torch.float32, LARGE, group.rank()), torch.empty(LARGE)
        calls = {"send": lambda: group.send([ours], other(group)), "recv": lambda: group.recv([theirs], other(group))}
        works = [calls.pop(first)(), *(call() for call in calls.values())]
        for work in works:
            work.wait()
        assert same(theirs, made(torch.float32, LARGE, other(group)))

    run_threads(2, rank_main)


def test_tags_choose_the_message_whatever_came_first():
    def rank_main(group):
        if group.rank() == 0:
            works = [
                group.send([torch.full((count,), float(tag))], 1, tag) for tag, count in enumerate((LARGE, 5, 0, 5))
            ]
            for work in works:
                work.wait()
            return None
        last, second, third, large = torch.empty(5), torch.empty(5), torch.empty(0), torch.empty(LARGE)
        group.recv([last], 0, 3).wait()
        group.recv([second], 0, 1).wait()
        group.recv([third], 0, 2).wait()
        group.recv([large], 0, 0).wait()
        assert bool((large == 0).all())
        return last.tolist() + second.tolist()

    assert run_threads(2, rank_main)[1] == [3.0] * 5 + [1.0] * 5


def test_messages_with_the_same_tag_arrive_in_the_order_in_which_they_were_sent():
    def rank_main(group):
        values = range(50)
        if group.rank() == 0:
            for value in values:
                group.send([torch.tensor([value])], 1)
            group.barrier()
            for value in values:
                group.send([torch.tensor([value])], 1).wait()
            return None
        early = [torch.empty(1, dtype=torch.int64) for _ in values]
        works = [group.recv([tensor], 0) for tensor in early[:20]]
        group.barrier()
        works += [group.recv([tensor], 0) for tensor in early[20:]]
        late = [torch.empty(1, dtype=torch.int64) for _ in values]
        works += [group.recv([tensor], 0) for tensor in late]
        for work in reversed(works):
            work.wait()
        return [int(tensor) for tensor in early + late]

    assert run_threads(2, rank_main)[1] == [*range(50), *range(50)]


def test_what_was_sent_before_anybody_asked_is_kept():
    def rank_main(group):
        if group.rank() == 0:
            work = group.send([torch.arange(5.0)], 1, 7)
            group.barrier()
            work.wait()
            return None
        group.barrier()
        tensor = torch.empty(5)
        group.recv([tensor], 0, 7).wait()
        return tensor.tolist()

    assert run_threads(2, rank_main)[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_recv_from_any_source_says_who_sent_also_when_the_others_have_left():
    def rank_main(group):
        if group.rank() > 0:
            group.send([torch.full((3,), float(group.rank()))], 0, 4).wait()
            return None  # and leaves, while rank 0 still waits for others
        came = {}
        for _ in range(1, group.size()):
            tensor = torch.empty(3)
            work = group.recv_anysource([tensor], 4)
            work.wait()
            assert work.source_rank() == work._source_rank() == tensor[0]
            came[work.source_rank()] = tensor.tolist()
        return came

    assert run_threads(4, rank_main)[0] == {rank: [float(rank)] * 3 for rank in (1, 2, 3)}


def test_recv_from_any_source_ends_when_nobody_is_left_who_could_send():
    def rank_main(group):
        if group.rank() == 0:
            return error_of(lambda: group.recv_anysource([torch.empty(3)]).wait())
        return None

    error = run_threads(3, rank_main)[0]
    assert isinstance(error, CollectiveMismatchError)
    assert "has left" in str(error)
    assert error.during == "message (float32 [3], tag 0)"


def test_a_recv_from_any_source_that_goes_on_with_one_rank_does_not_disturb_the_others():
    def rank_main(group):
        if group.rank() > 0:
            group.send([torch.full((LARGE,), float(group.rank()))], 0).wait()
            group.recv([torch.empty(1)], 0).wait()
            return
        tensors = [torch.empty(LARGE) for _ in range(3)]
        works = [group.recv_anysource([tensor]) for tensor in tensors]
        for work in works:
            work.wait()
        assert sorted(work.source_rank() for work in works) == [1, 2, 3]
        for work, tensor in zip(works, tensors, strict=True):
            assert bool((tensor == work.source_rank()).all())
        for rank in (1, 2, 3):
            group.send([torch.zeros(1)], rank).wait()

    run_threads(4, rank_main)


def test_messages_in_flight_do_not_disturb_collectives():
    def rank_main(group):
        ours, theirs = made(torch.float32, LARGE, group.rank()), torch.empty(LARGE)
        works = [group.send([ours], other(group)), group.recv([theirs], other(group))]
        sums = [all_reduce(group, torch.ones(size)) for size in (1, 100, 1_000_000)]
        group.barrier()
        for work in works:
            work.wait()
        assert all(bool((total == 2).all()) for total in sums)
        assert same(theirs, made(torch.float32, LARGE, other(group)))

    run_threads(2, rank_main)


def test_a_rank_that_waits_in_a_collective_still_sends_what_the_other_needs_before_it_comes():
    def rank_main(group):
        if group.rank() == 0:
            work = group.send([made(torch.float32, LARGE, 0)], 1)
            group.barrier()
            work.wait()
            return
        tensor = torch.empty(LARGE)
        group.recv([tensor], 0).wait()
        group.barrier()
        assert same(tensor, made(torch.float32, LARGE, 0))

    run_threads(2, rank_main)


def test_a_rank_that_waits_in_a_collective_still_takes_what_the_other_must_send_before_it_comes():
    def rank_main(group):
        if group.rank() == 1:
            group.send([made(torch.float32, LARGE, 1)], 0).wait()
            group.barrier()
            return
        tensor = torch.empty(LARGE)
        work = group.recv([tensor], 1)
        group.barrier()
        work.wait()
        assert same(tensor, made(torch.float32, LARGE, 1))

    run_threads(2, rank_main)


def test_no_message_goes_to_any_rank_or_to_one_beyond_the_group():
    def rank_main(group):
        for rank in (messages.ANY_SOURCE, 2):
            with pytest.raises(ConfigError, match=f"rank {rank} is not in this group of 2"):
                group.send([torch.ones(1)], rank)

    run_threads(2, rank_main)


def test_a_thread_wakes_when_another_has_moved_its_message_just_before_it_fell_asleep(monkeypatch):
    def fall_asleep_late(sleeper, *arguments):
        drowsy.set()
        moved.wait(10)
        sleep(sleeper, *arguments)

    def rank_main(group):
        if group.rank() == 1:
            drowsy.wait(10)
            group.send([torch.ones(1)], 0).wait()
            ended.wait(10)  # leaving would wake it too
            return
        work = group.recv([torch.zeros(1)], 1)
        waiting = threading.Thread(target=work.wait)
        waiting.start()
        drowsy.wait(10)
        wait_until(work.is_completed)
        moved.set()
        waiting.join(5)
        assert not waiting.is_alive()
        ended.set()

    sleep = messages._Sleeper.sleep
    drowsy, moved, ended = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(messages._Sleeper, "sleep", fall_asleep_late)
    run_threads(2, rank_main)


def test_threads_of_a_rank_wait_for_different_messages_beside_a_collective():
    turns, tags = 100, (1, 2, 3)

    def rank_main(group):
        def talk(tag):
            for turn in range(turns):
                if (group.rank() + tag) % 2:
                    group.send([torch.full((tag,), float(turn))], other(group), tag).wait()
                else:
                    tensor = torch.empty(tag)
                    group.recv([tensor], other(group), tag).wait()
                    wrong.extend([] if tensor.tolist() == [float(turn)] * tag else [(tag, turn)])
            ended.append(tag)

        wrong, ended = [], []
        threads = [threading.Thread(target=talk, args=(tag,), name=f"tag {tag}") for tag in tags]
        threads.append(threading.Thread(target=lambda: [all_reduce(group, torch.ones(3)) for _ in range(turns)]))
        join_threads(threads, 20.0)
        assert wrong == []
        assert sorted(ended) == list(tags)

    run_threads(2, rank_main)


def test_a_message_lives_on_when_nobody_holds_its_work_or_its_tensor():
    def rank_main(group):
        if group.rank() == 0:
            group.send([made(torch.float32, LARGE, 5)], 1)  # far more than leaves at once
            gc.collect()
            scribbles = [torch.full((LARGE,), -1.0) for _ in range(3)]
            group.recv([torch.empty(1)], 1).wait()
            del scribbles
            return
        tensor = torch.empty(LARGE)
        group.recv([tensor], 0).wait()
        group.send([torch.zeros(1)], 0).wait()
        assert same(tensor, made(torch.float32, LARGE, 5))

    run_threads(2, rank_main)


def test_a_work_moves_when_it_is_asked_and_knows_its_source_in_the_end():
    def rank_main(group):
        if group.rank() == 0:
            group.barrier()
            group.send([torch.ones(2)], 1).wait()
            return
        tensor = torch.zeros(2, 2)[:, 0]
        work = group.recv_anysource([tensor])
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match=r"wait\(\) first"):
            work.source_rank()
        group.barrier()
        while not work.is_completed():
            pass
        assert work.is_success()
        assert tensor.tolist() == [1.0, 1.0]
        assert work.get_future().wait()[0].tolist() == [1.0, 1.0]
        assert work.wait()
        assert work.source_rank() == 0

    run_threads(2, rank_main)


def test_a_message_that_never_comes_ends_at_the_deadline_and_names_the_rank():
    def rank_main(group):
        if group.rank() == 0:
            return error_of(lambda: group.recv([torch.empty(3)], 1, 9).wait(timedelta(seconds=0.2)))
        return error_of(lambda: all_reduce(group, torch.ones(1)))

    errors = run_threads(2, rank_main)
    assert [type(error) for error in errors] == [CollectiveTimeoutError] * 2
    assert "rank 0 timed out in message (float32 [3], tag 9): it waited for rank 1 until its timeout of" in str(
        errors[0]
    )
    assert (errors[0].rank, errors[0].during) == (1, "message (float32 [3], tag 9)")
    assert errors[1].during == "all_reduce #1 (SUM, float32 [1])"
    assert "(reported by rank 0)" in str(errors[1])


@pytest.mark.parametrize(
    ("sent", "wanted", "names"),
    [
        (torch.zeros(3), torch.zeros(4), ["float32 [3]", "float32 [4]"]),
        (torch.zeros(3), torch.zeros(3).int(), ["float32 [3]", "int32 [3]"]),
    ],
    ids=["length", "dtype"],
)
@pytest.mark.parametrize("early", [True, False])
def test_a_message_that_does_not_fit_its_recv_is_an_error_on_both_sides(sent, wanted, names, early):
    def rank_main(group):
        if group.rank() == 0:
            if not early:
                group.barrier()
            # The other side may have said so before send itself is done.
            return error_of(lambda: [group.send([sent], 1), group.barrier(), group.barrier()])
        works = [] if early else [group.recv([wanted], 0)]
        # The message may arrive while this side still waits in the barrier, which raises the error then.
        return error_of(lambda: [group.barrier(), *(work.wait() for work in works or [group.recv([wanted], 0)])])

    errors = run_threads(2, rank_main)
    for error in errors:
        assert isinstance(error, CollectiveMismatchError)
        assert all(name in str(error) for name in names), str(error)
        assert error.rank == 0
        assert error.during is not None


def forged_header(operation, payload_bytes):
    return expected_header(operation.identity(), payload_bytes).ljust(HEADER_BYTES, b"\0")


def forged(**fields):
    made_up = {"kind": Kind.MESSAGE, "sequence": 0, "dtype": dtype_code(torch.uint8), "shape": (8,), "root": 5}
    return Operation(**(made_up | fields))


HOSTILE = {
    "other bytes": (bytes(300), "not a frame"),
    "more bytes than its shape has": (forged_header(forged(), 2**40), f"announces {2**40} bytes"),
    "more than there is memory": (forged_header(forged(shape=(2**62,)), 2**62), "no memory to keep them"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_header_allocates_nothing_and_ends_the_group(what):
    data, message = HOSTILE[what]

    def rank_main(group):
        if group.rank() == 0:
            return error_of(lambda: group.recv([torch.empty(3)], 1).wait())
        group.group.engine.mailbox._links[0].send(data)
        return error_of(lambda: group.recv([torch.empty(3)], 0).wait())

    errors = run_threads(2, rank_main)
    assert [(type(error), error.rank) for error in errors] == [(PeerLostError, 1)] * 2
    assert message in str(errors[0])
