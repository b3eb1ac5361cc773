"""A group is followed by one of the ranks that are left: by the directory that they keep, without a store."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import ring_ranks
import torch
import torch.distributed as dist
from meetings import meet
from rank_processes import run_ranks, values
from ring_values import error_of
from worlds import run_threads, wait_until

from cyxtrain.config import RingOptions
from cyxtrain.errors import CollectiveMismatchError, ConfigError, CyxtrainError, PeerLostError, RendezvousError
from cyxtrain.ring import RingProcessGroup
from cyxtrain.ring.rendezvous.directory import Directory
from cyxtrain.ring.rendezvous.handshake import Role
from cyxtrain.ring.rendezvous.mesh import _Connector
from cyxtrain.ring.rendezvous.record import RankRecord
from cyxtrain.ring.wire.frames import Control, control_frame

KEEPING = RingOptions(secret="the secret of this run", keeps_listening=True)
TEN_SECONDS = timedelta(seconds=10)


def follow(group: RingProcessGroup, lost: set[int], timeout: timedelta = TEN_SECONDS) -> None:
    """Replace the group by one without the lost ranks."""
    group.replace_group(group.group.next_generation(group.group.directory.without(lost), timeout))


def reduced(group: RingProcessGroup, count: int = 3) -> float:
    """Return the sum over the ranks of 2 to the power of the launcher's number, which tells who took part."""
    tensor = torch.full((count,), 2.0 ** group.group.global_rank(group.rank()))
    group.allreduce([tensor]).wait()
    assert torch.equal(tensor, tensor[:1].expand(count))
    return tensor[0].item()


def early_callers(group: RingProcessGroup) -> int:
    """Return how many members of the next generation wait for this rank."""
    listeners = group.group.engine.mesh.listeners
    assert listeners is not None
    assert listeners.acceptor is not None
    return sum(stranger.is_early for stranger in [*listeners.acceptor._strangers.values()])


# --- directories ----------------------------------------------------------------------------------------------------


def test_a_directory_without_ranks_is_of_the_next_generation_and_keeps_the_launchers_numbers():
    records = tuple(RankRecord(4, host=f"10.0.0.{rank}", run="5f" * (rank == 0)) for rank in range(4))
    first = Directory(records, (0, 1, 2, 3), 0, "5f", b"secret")
    second = first.without({0, 2})
    assert second.global_ranks == (1, 3)
    assert [record.host for record in second.records] == ["10.0.0.1", "10.0.0.3"]
    assert {record.world_size for record in second.records} == {2}
    assert (second.generation, second.run, second.secret) == (1, "5f", b"secret")
    third = second.without({3})
    assert (third.global_ranks, third.generation) == ((1,), 2)
    assert first.global_ranks == (0, 1, 2, 3)
    assert "secret" not in repr(first).replace("has_secret", "")


# --- groups that follow ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_ranks_that_are_left_reduce_over_the_next_generation(lost, transport):
    def rank_main(group: RingProcessGroup) -> Any:
        whole = reduced(group)
        if group.rank() == lost:
            return whole, None
        follow(group, {lost})
        few, many = reduced(group), reduced(group, 300_000)
        assert few == many
        return whole, (group.rank(), group.size(), group.transport, few)

    found = run_threads(3, rank_main, options=RingOptions(keeps_listening=True, transport=transport))
    assert [whole for whole, _ in found] == [7.0] * 3
    left = [after for _, after in found if after is not None]
    kind = "unix" if transport == "auto" else "tcp"
    assert left == [(0, 2, kind, 7.0 - 2.0**lost), (1, 2, kind, 7.0 - 2.0**lost)]


def test_ranks_continue_after_an_error_that_has_ended_their_group():
    def rank_main(group: RingProcessGroup) -> Any:
        if group.rank() == 1:
            group.fail("its program failed")
            return None
        error = error_of(lambda: group.barrier().wait())
        follow(group, {error.rank})
        return type(error), error.rank, reduced(group)

    zero, _, two = run_threads(3, rank_main, options=KEEPING)
    assert zero == two == (PeerLostError, 1, 5.0)


def test_generations_follow_each_other_down_to_a_world_of_one():
    def rank_main(group: RingProcessGroup) -> list[float]:
        found = [reduced(group)]
        for lost in (1, 0, 3):
            if group.group.global_rank(group.rank()) == lost:
                return found
            follow(group, {lost})
            found.append(reduced(group))
        assert group.transport == "none"
        return found

    found = run_threads(4, rank_main, options=KEEPING)
    assert found == [[15.0, 13.0], [15.0], [15.0, 13.0, 12.0, 4.0], [15.0, 13.0, 12.0]]


def test_a_rank_that_is_still_in_the_old_generation_lets_its_callers_wait():
    def rank_main(group: RingProcessGroup) -> float:
        if group.rank() == 1:
            wait_until(lambda: early_callers(group))
        if group.rank() > 0:
            follow(group, {0})
        return reduced(group) if group.size() == 2 else 0.0

    assert run_threads(3, rank_main, options=KEEPING) == [0.0, 6.0, 6.0]


def test_a_rank_that_leaves_for_good_refuses_the_callers_that_wait():
    def rank_main(group: RingProcessGroup) -> str:
        if group.rank() == 1:
            wait_until(lambda: early_callers(group))
            group.shutdown()
        return str(error_of(lambda: follow(group, {0}))) if group.rank() == 2 else ""

    refused = run_threads(3, rank_main, options=KEEPING)[2]
    assert refused.startswith("rank 1 at @cyxtrain-")
    assert refused.endswith("refused rank 2: it has left and does not begin the next generation.")


def test_errors_of_a_later_generation_name_the_launchers_ranks():
    def rank_main(group: RingProcessGroup) -> Any:
        if group.rank() == 0:
            return None
        follow(group, {0})
        return error_of(lambda: group.allreduce([torch.zeros(1 + group.rank())]).wait())

    _, one, two = run_threads(3, rank_main, options=KEEPING)
    for error in (one, two):
        assert isinstance(error, CollectiveMismatchError)
        assert "rank 1 is in all_reduce #1 (SUM, float32 [1], generation 1)" in str(error)
        assert "rank 2 is in all_reduce #1 (SUM, float32 [2], generation 1)" in str(error)


# --- generations that do not begin ----------------------------------------------------------------------------------


def test_who_does_not_come_is_named_to_all_who_may_try_again_without_it():
    """Rank 1 hears over its connection with rank 0 what that one waited for: its own deadline is far."""

    def rank_main(group: RingProcessGroup) -> Any:
        rank = group.rank()
        if rank > 1:
            done.wait(20)
            return None
        directory = group.group.directory.without({3})
        seconds = 0.4 if rank == 0 else 20.0
        error = error_of(lambda: group.group.next_generation(directory, timedelta(seconds=seconds)))
        group.replace_group(group.group.next_generation(directory.without({2}), TEN_SECONDS))
        found = str(error), group.group.directory.generation, reduced(group)
        both.wait(20)
        done.set()
        return found

    done, both = threading.Event(), threading.Barrier(2)
    zero, one, *_ = run_threads(4, rank_main, options=KEEPING)
    assert "Joining timed out after 0.4 s: rank 2 did not connect to rank 0 at 127.0.0.1:" in zero[0]
    assert one[0] == f"{zero[0]} (reported by rank 0)"
    assert zero[1:] == one[1:] == (2, 3.0)


def test_a_cause_that_arrives_in_two_segments_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gives up first. Rank 1, whose own deadline is far, has only their connection to hear why."""

    def send_in_two_segments(connector: Any, error: CyxtrainError) -> None:
        frame = control_frame(Control.ABORT, error.to_facts(), connector._mesh.checksums)
        for sock in connector._mesh.sockets[Role.CONTROL].values():
            with contextlib.suppress(OSError):  # rank 0 has closed it
                sock.send(frame[:20])
                time.sleep(0.2)
                sock.send(frame[20:])

    def rank_main(group: RingProcessGroup) -> str:
        rank = group.rank()
        if rank == 2:
            told.wait(20)
            return ""
        directory = group.group.directory.without(set())
        seconds = 0.4 if rank == 0 else 5.0
        error = error_of(lambda: group.group.next_generation(directory, timedelta(seconds=seconds)))
        if both.wait(20) == 0:
            told.set()
        return str(error)

    monkeypatch.setattr(_Connector, "_send_abort", send_in_two_segments)
    told, both = threading.Event(), threading.Barrier(2)
    zero, one, _ = run_threads(3, rank_main, options=KEEPING)
    assert zero.startswith("Joining timed out after 0.4 s: rank 2 did not connect to rank 0 at 127.0.0.1:")
    assert one == f"{zero} (reported by rank 0)"


def test_ranks_that_leave_out_different_ranks_are_all_told():
    """Rank 1 takes rank 2, which comes, for rank 3, which it expects."""

    def rank_main(group: RingProcessGroup) -> Any:
        rank = group.rank()
        if rank == 3:
            ended.wait(20)
            return None
        error = error_of(lambda: follow(group, {2} if rank == 1 else {3}))
        if all_three.wait(20) == 0:
            ended.set()
        return error

    ended, all_three = threading.Event(), threading.Barrier(3)
    for error in run_threads(4, rank_main, options=KEEPING)[:3]:
        assert isinstance(error, RendezvousError)
        assert "begin generation 1 of their group with different ranks: all must leave out the same." in str(error)


@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param({0: {3}, 1: {2, 3}}, id="fewer ranks"),
        pytest.param({0: {1}, 3: {1, 2}}, id="the caller has the number of another rank"),
        pytest.param({0: {1}, 2: {1}, 3: {0, 1}}, id="the caller reaches another rank than it wants"),
    ],
)
def test_ranks_that_leave_out_more_or_fewer_ranks_are_all_told_at_once(left_out: dict[int, set[int]]) -> None:
    """Nobody is blamed: the two number their ranks differently."""

    def rank_main(group: RingProcessGroup) -> Any:
        rank = group.rank()
        if rank not in left_out:
            ended.wait(20)
            return None
        error = error_of(lambda: follow(group, left_out[rank]))
        if together.wait(20) == 0:
            ended.set()
        return error

    ended, together = threading.Event(), threading.Barrier(len(left_out))
    found = run_threads(4, rank_main, options=KEEPING)
    for rank in left_out:
        assert isinstance(found[rank], RendezvousError)
        assert "and another rank begin generation 1 of their group with different ranks" in str(found[rank])


def test_a_directory_of_the_same_generation_is_refused_before_anything_changes() -> None:
    def rank_main(group: RingProcessGroup) -> Any:
        same = group.group.directory
        error = error_of(lambda: group.group.next_generation(same, TEN_SECONDS))
        return str(error), reduced(group)

    for text, total in run_threads(2, rank_main, options=KEEPING):
        assert "a group of generation 0 cannot follow one of generation 0" in text
        assert total == 3.0


def test_a_group_that_keeps_no_listener_has_no_next_generation():
    def rank_main(group: RingProcessGroup) -> str:
        error = error_of(lambda: follow(group, {0})) if group.rank() else None
        group.barrier().wait()  # nothing has changed
        return str(error)

    found = run_threads(2, rank_main)[1]
    assert found.startswith("rank 1 cannot begin generation 1 with ranks (1,)")
    assert "keeps_listening=True" in found


# --- groups that are not replaced -----------------------------------------------------------------------------------


def test_a_group_is_not_replaced_while_a_collective_runs_nor_by_one_that_does_not_follow():
    """Rank 1 comes to the second collective when rank 0, whose thread waits there, has been refused."""
    store, refused = dist.HashStore(), threading.Event()

    def rank_main(group: RingProcessGroup) -> Any:
        following = meet(store, group.rank(), 2, 10.0, generation=1)
        same = error_of(lambda: group.replace_group(group.group))
        running = None
        if group.rank() == 0:
            old = group.group
            waiting = threading.Thread(target=lambda: group.barrier().wait())
            waiting.start()
            wait_until(lambda: old.engine.sequence == 1)
            running = error_of(lambda: group.replace_group(following.group))
            assert group.group is old
            refused.set()
            waiting.join(10)
        else:
            refused.wait(10)
            group.barrier().wait()
        group.replace_group(following.group)
        return same, running, reduced(group)

    for rank, (same, running, total) in enumerate(run_threads(2, rank_main)):
        assert isinstance(same, ConfigError)
        assert "a group of generation 0 cannot follow one of generation 0" in str(same)
        assert total == 3.0
        if rank == 0:
            assert isinstance(running, CyxtrainError)
            assert str(running).startswith("rank 0 cannot replace its group while a collective of it runs: ")


# --- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rank_server")
def test_processes_continue_when_rank_0_has_left_with_the_store():
    zero, one, two = values(run_ranks(3, ring_ranks.continue_without_rank_0, seconds=60.0))
    assert zero == {"sum": 7.0}
    for rank, found in enumerate((one, two)):
        assert found["left"].startswith("rank 0 has left"), found["left"]
        assert (found["rank"], found["size"], found["world"]) == (rank, 2, [rank, 2, [1, 2]])
        assert found["sums"] == [6.0, 6.0]
        assert found["gathered"] == [1, 2]
        assert found["functional"] == 3.0
        assert found["gradient"] == 1.5  # by DistributedDataParallel of PyTorch, in C++
        assert "rank 1 is in all_reduce" in found["mismatch"]
        assert "rank 2 is in all_reduce" in found["mismatch"]
        assert found["threads"] == found["threads of three"]
        assert found["descriptors"] < found["descriptors of three"]
        assert found["left behind"] == [0, 0]
