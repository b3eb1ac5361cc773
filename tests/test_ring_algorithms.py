"""The schedules, without sockets: all ranks in lockstep, on a network that holds nothing back.

A send happens only together with its receive, so a schedule that comes through here needs no buffer anywhere.
"""

from __future__ import annotations

import itertools

import pytest

from cyxtrain.ring import algorithms
from cyxtrain.ring.algorithms import Then, chunks

RANKS = range(1, 9)


def everywhere(check):
    """Runs a check of (world_size, count) for many counts, in one test per number of ranks."""

    def test(world_size):
        for count in sorted({0, 1, world_size - 1, world_size, world_size + 1, 17, 1000}):
            check(world_size, count)

    test.__name__ = check.__name__
    return pytest.mark.parametrize("world_size", RANKS)(test)


def own(rank, count):
    """The elements that a rank brings: each says whose it is, and where it was."""
    return [((rank,), position) for position in range(count)]


def summed(order, count, start=0):
    return [(tuple(order), position) for position in range(start, start + count)]


def ring_order(chunk, world_size):
    """Who is summed one after the other in a chunk: from the next rank on, and its own rank last."""
    return [(chunk + 1 + step) % world_size for step in range(world_size)]


class Lockstep:
    """Runs the schedules of all ranks, and sees to it that each send meets its receive."""

    def __init__(self, schedules, sources, targets=None):
        self.schedules = schedules
        self.sources = sources
        self.targets = sources if targets is None else targets
        self.heard = [{rank} for rank in range(len(schedules))]
        self._told = [set(known) for known in self.heard]
        self._next = [0] * len(schedules)
        self._open = [self._begin(rank) for rank in range(len(schedules))]

    def run(self):
        while any(open_parts is not None for open_parts in self._open):
            matches = [
                (rank, step.send_to)
                for rank, step in enumerate(map(self._current, range(len(self.schedules))))
                if step is not None and "send" in self._open[rank] and self._receives_from(step.send_to, rank)
            ]
            assert matches, "the ranks wait for each other"
            for sender, receiver in matches:
                self._move(sender, receiver)
        return self

    def _begin(self, rank):
        """Returns which halves of the rank's next transfer are to be done; None: it has come to its end."""
        step = self._current(rank)
        if step is None:
            return None
        if step.send_to is not None and step.receive_from is not None and self.sources is self.targets:
            assert step.send[1] <= step.receive[0] or step.receive[1] <= step.send[0], "it sends what it receives"
        self._told[rank] = set(self.heard[rank])
        parts = {"send"} if step.send_to is not None else set()
        return parts | ({"receive"} if step.receive_from is not None else set())

    def _current(self, rank):
        done = self._next[rank] >= len(self.schedules[rank])
        return None if done else self.schedules[rank][self._next[rank]]

    def _receives_from(self, rank, sender):
        step = self._current(rank)
        return step is not None and "receive" in self._open[rank] and step.receive_from == sender

    def _move(self, sender, receiver):
        send, receive = self._current(sender), self._current(receiver)
        payload = self.sources[sender][slice(*send.send)]
        start, end = receive.receive
        assert len(payload) == send.send[1] - send.send[0] == end - start
        target = self.targets[receiver]
        if receive.then is Then.COMBINE:
            payload = [(came[0] + here[0], here[1]) for came, here in zip(payload, target[start:end], strict=True)]
        target[start:end] = payload
        self.heard[receiver] |= self._told[sender]
        for rank, part in ((sender, "send"), (receiver, "receive")):
            self._open[rank].discard(part)
        for rank in {sender, receiver}:
            if not self._open[rank]:
                self._next[rank] += 1
                self._open[rank] = self._begin(rank)

    def all_heard(self):
        return all(len(known) == len(self.schedules) for known in self.heard)


@everywhere
def test_chunks_cover_everything_in_order_and_evenly(world_size, count):
    spans = chunks(count, world_size)
    assert [position for span in spans for position in range(*span)] == list(range(count))
    lengths = [end - start for start, end in spans]
    assert max(lengths) - min(lengths) <= 1


@everywhere
def test_all_reduce_sums_every_chunk_along_the_ring_and_gives_it_to_all(world_size, count):
    spans = chunks(count, world_size)
    buffers = [own(rank, count) for rank in range(world_size)]
    reducing = [algorithms.reduce_scatter(rank, world_size, spans) for rank in range(world_size)]
    gathering = [algorithms.all_gather(rank, world_size, spans, range(world_size)) for rank in range(world_size)]
    assert Lockstep([a + b for a, b in zip(reducing, gathering, strict=True)], buffers).run().all_heard()
    expected = [
        element
        for chunk, (start, end) in enumerate(spans)
        for element in summed(ring_order(chunk, world_size), end - start, start)
    ]
    assert buffers == [expected] * world_size


@everywhere
def test_reduce_scatter_leaves_each_rank_its_chunk(world_size, count):
    spans = chunks(count, world_size)
    buffers = [own(rank, count) for rank in range(world_size)]
    schedules = [algorithms.reduce_scatter(rank, world_size, spans) for rank in range(world_size)]
    assert Lockstep(schedules, buffers).run().all_heard()
    for rank, (start, end) in enumerate(spans):
        assert buffers[rank][start:end] == summed(ring_order(rank, world_size), end - start, start)


@everywhere
def test_all_gather_brings_every_span_to_all(world_size, count):
    spans = [(rank * count, (rank + 1) * count) for rank in range(world_size)]
    buffers = [[None] * (world_size * count) for _ in range(world_size)]
    for rank, (start, end) in enumerate(spans):
        buffers[rank][start:end] = own(rank, count)
    schedules = [algorithms.all_gather(rank, world_size, spans, range(world_size)) for rank in range(world_size)]
    assert Lockstep(schedules, buffers).run().all_heard()
    assert buffers == [[element for rank in range(world_size) for element in own(rank, count)]] * world_size


@everywhere
def test_broadcast_copies_the_buffer_of_any_rank_to_all(world_size, count):
    for src, segments in itertools.product(range(world_size), (1, 2, 20)):
        segment = max(1, count // segments)
        buffers = [own(rank, count) for rank in range(world_size)]
        schedules = [
            algorithms.broadcast(rank, world_size, count, src, segment, range(world_size)) for rank in range(world_size)
        ]
        assert Lockstep(schedules, buffers).run().all_heard()
        assert buffers == [own(src, count)] * world_size


@everywhere
def test_gather_brings_every_source_to_one_rank_and_leaves_the_others_alone(world_size, count):
    spans = [(rank * count, (rank + 1) * count) for rank in range(world_size)]
    for dst in range(world_size):
        sources = [own(rank, count) for rank in range(world_size)]
        targets = [[None] * (world_size * count) for _ in range(world_size)]
        schedules = [algorithms.gather(rank, world_size, spans, dst, (0, count)) for rank in range(world_size)]
        assert Lockstep(schedules, sources, targets).run().all_heard()
        for rank in range(world_size):
            came = [own(other, count) if rank == dst != other else [None] * count for other in range(world_size)]
            assert targets[rank] == [element for part in came for element in part]


@everywhere
def test_scatter_brings_each_rank_its_part(world_size, count):
    spans = [(rank * count, (rank + 1) * count) for rank in range(world_size)]
    for src in range(world_size):
        sources = [own(rank, world_size * count) for rank in range(world_size)]
        targets = [[None] * count for _ in range(world_size)]
        schedules = [algorithms.scatter(rank, world_size, spans, src, (0, count)) for rank in range(world_size)]
        assert Lockstep(schedules, sources, targets).run().all_heard()
        for rank in range(world_size):
            expected = [None] * count if rank == src else own(src, world_size * count)[slice(*spans[rank])]
            assert targets[rank] == expected


@pytest.mark.parametrize("world_size", RANKS)
def test_all_to_all_brings_parts_of_any_size_to_where_they_belong(world_size):
    sizes = [[(3 * sender + 5 * receiver) % 4 for receiver in range(world_size)] for sender in range(world_size)]
    send = [spans_of(sizes[rank]) for rank in range(world_size)]
    receive = [spans_of([sizes[sender][rank] for sender in range(world_size)]) for rank in range(world_size)]
    sources = [own(rank, sum(sizes[rank])) for rank in range(world_size)]
    targets = [[None] * receive[rank][-1][1] for rank in range(world_size)]
    schedules = [algorithms.all_to_all(rank, world_size, send[rank], receive[rank]) for rank in range(world_size)]
    assert Lockstep(schedules, sources, targets).run().all_heard()
    for rank in range(world_size):
        for sender in range(world_size):
            expected = own(sender, 100)[slice(*send[sender][rank])]
            found = targets[rank][slice(*receive[rank][sender])]
            assert found == ([None] * len(expected) if sender == rank else expected)


def spans_of(lengths):
    return [(sum(lengths[:index]), sum(lengths[: index + 1])) for index in range(len(lengths))]


@pytest.mark.parametrize("world_size", RANKS)
def test_agreement_ends_when_every_rank_has_heard_of_every_other(world_size):
    schedules = [algorithms.agreement(rank, world_size) for rank in range(world_size)]
    assert Lockstep(schedules, [[] for _ in range(world_size)]).run().all_heard()
    assert {len(schedule) for schedule in schedules} == {(world_size - 1).bit_length()}


@everywhere
def test_the_costs_are_what_the_docstrings_say(world_size, count):
    spans = chunks(count, world_size)
    for rank in range(world_size):
        schedule = algorithms.reduce_scatter(rank, world_size, spans)
        assert len(schedule) == world_size - 1
        assert sum(end - start for _, (start, end), *_ in schedule) == count - (spans[rank][1] - spans[rank][0])


@pytest.mark.parametrize("world_size", RANKS)
def test_every_schedule_first_speaks_to_the_next_rank_and_hears_the_previous(world_size):
    """So that ranks in different collectives meet in their first frame."""
    if world_size == 1:
        return
    spans = chunks(100, world_size)
    for rank in range(world_size):
        firsts = {
            (step.send_to, step.receive_from)
            for step in (
                algorithms.agreement(rank, world_size)[0],
                algorithms.reduce_scatter(rank, world_size, spans)[0],
                algorithms.all_gather(rank, world_size, spans, range(world_size))[0],
                algorithms.broadcast(rank, world_size, 100, 0, 10, range(world_size))[0],
                algorithms.gather(rank, world_size, spans, 0, (0, 1))[0],
                algorithms.scatter(rank, world_size, spans, 0, (0, 1))[0],
                algorithms.all_to_all(rank, world_size, spans, spans)[0],
            )
        }
        assert firsts == {((rank + 1) % world_size, (rank - 1) % world_size)}
