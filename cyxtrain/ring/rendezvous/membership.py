"""Which ranks have joined, and why joining failed if it did: all of it at the store that the ranks share.

It polls the store instead of waiting there: a rank that waits in PyTorch's client cannot be told of a failure.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence

from torch.distributed import Store

from cyxtrain.config import RingOptions
from cyxtrain.errors import CyxtrainError, RendezvousError, error_from_facts, reported
from cyxtrain.ring.rendezvous.record import RankRecord, cannot_join, foreign_value, refuse_ended, refuse_exited
from cyxtrain.ring.rendezvous.store_client import StoreClient, StoreLostError
from cyxtrain.ring.wire.frames import FrameError, json_object
from cyxtrain.ring.wire.link import POLL_SECONDS, Deadline

_READERS_SECONDS = 0.3
"""How long the end of a store waits for ranks to read or report the cause."""
EXAMINE_SECONDS = 0.5
"""How often a waiting rank asks whether the others are alive, and whether what it has written is still there."""
PeerFailure = Callable[[float], "CyxtrainError | None"]
"""Waits at most so many seconds, and returns the error if another group of this world has lost a rank."""


class RankTakenError(RendezvousError):
    """Another process is this rank."""

    holder: RankRecord | None = None  # its record, if it has written one
    first: RankRecord | None = None  # the record of its rank 0


class Membership:
    """One rank's view of a group that forms; groups may form at the same store again and again.

    Of the `options` it takes the secret, the name of the group, and whether a launcher has restarted this rank. If
    another process is this rank then, it is the previous one, and the store may be that of the previous rank 0: both
    end soon.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        global_ranks: Sequence[int],
        deadline: Deadline,
        options: RingOptions | None = None,
        peer_failure: PeerFailure = lambda seconds: None,
        generation: int = 0,
    ) -> None:
        options = options or RingOptions()
        self.deadline = deadline
        # Not the size of a world: ranks that disagree about it must be able to read each other's records.
        names = " ".join(str(name) for place, name in enumerate(global_ranks) if name != place)
        group = f"{generation} {names} {options.group_name}"
        self.store = StoreClient(store, f"rank {global_ranks[rank]}", deadline, options.secret_bytes, group)
        self._rank = rank
        self._global_ranks = global_ranks
        self._peer_failure = peer_failure
        self._options = options
        self._life = 0
        """How often this rank has claimed its place at this store; part of every key."""
        self._own = RankRecord(len(global_ranks))
        self._records: dict[int, RankRecord] = {}
        self._is_registered = False
        self._has_reported = False
        self._examine_deadline = Deadline(0.0)

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Claim this rank, and report to the others what fails within."""
        name = self._global_ranks[self._rank]
        try:
            self.claim()
            yield
        except CyxtrainError as error:
            # Rank 0 may have left, and the store with it, because another group lost a rank.
            failure = self._peer_failure(_READERS_SECONDS) if self.store.lost else None
            if failure is not None:
                raise failure.again() from error
            self.report_failure(error)
            raise
        except BaseException as error:  # Ctrl-C, say: the others must not wait
            self.report_failure(cannot_join(name, error))
            raise

    def claim(self) -> None:
        """Claim this rank: from now on the others can be told of a failure.

        Raises RankTakenError if another process is this rank, and StoreLostError.
        """
        key, token = f"claims/{self._rank}", self._own.token
        while not self._life:
            if self.deadline.passed():
                name = self._global_ranks[self._rank]
                raise RendezvousError(
                    f"rank {name} could not claim its place at the store within {self.deadline.seconds:g} s: another "
                    "program keeps writing there. Choose another MASTER_PORT, the same on every rank.",
                    rank=name,
                )
            before = self.store.get(key)
            last, holder = _parse_claim(before)
            if last and holder != token:
                error = self._taken(last)
                while self._options.is_restarted and not self.deadline.passed():
                    self.store.has("claims/0")  # raises StoreLostError when the previous rank 0 has ended
                    time.sleep(POLL_SECONDS)
                raise error
            if self.store.replace(key, before, f"{last + 1} {token}"):
                self._life = last + 1
        if self._life > 2:  # nobody reads what is older than the last life, and the store may exist for ever
            for kind in ("entry", "heard"):
                self.store.delete(f"{self._life - 2}/{kind}/{self._rank}")
            if self._rank == 0:
                self.store.delete(f"{self._life - 2}/verdict")

    def register(self, record: RankRecord) -> None:
        """Write the record of this rank for the others to read."""
        self._own = record
        self.store.set(self._key(f"entry/{self._rank}"), record.to_json())
        self._is_registered = True

    def await_all(self) -> list[RankRecord]:
        """Wait until all ranks have registered; return their records, by rank.

        Raises RendezvousError if ranks are missing at the deadline or incompatible, or one of them has failed.
        """

        def all_have_registered() -> bool:
            self.check()
            self._read_records()
            missing = {name for rank, name in enumerate(self._global_ranks) if rank not in self._records}
            refuse_exited(missing, len(self._global_ranks))
            return len(self._records) == len(self._global_ranks)

        if not self.deadline.poll_until(all_have_registered):
            raise self._missing()
        return [self._records[rank] for rank in range(len(self._global_ranks))]

    def check(self) -> None:
        """Raise the error because of which joining has failed, if it has.

        Another rank has reported it, or its process has ended, or another group of this world has lost a rank.
        """
        with self._store_of_rank_0():
            verdict = self.store.get(self._key("verdict"))
            if verdict is not None:
                self._apply(verdict)
            refusal = self.store.refusal()
            if refusal:
                time.sleep(_READERS_SECONDS)  # others of that world are about to connect: they are told too
                raise RendezvousError(refusal, rank=0)
        self.check_groups()
        if self._examine_deadline.passed():
            self._rewrite()
            self._examine_deadline = Deadline(EXAMINE_SECONDS)
            refuse_ended(self._own, {self._global_ranks[rank]: record for rank, record in self._records.items()})

    def check_groups(self) -> None:
        """Raise the error of another group of this world that has lost a rank."""
        failure = self._peer_failure(0.0)
        if failure is not None:
            raise failure.again()

    def report_failure(self, error: CyxtrainError) -> None:
        """Report why this rank cannot join; the first report counts."""
        name = self._global_ranks[self._rank]
        facts = error.to_facts() | {"type": RendezvousError.__name__, "message": reported(error, name)}
        if self._has_reported or not self._life or self.store.lost:  # then the others will notice by themselves
            return
        self._has_reported = True
        with contextlib.suppress(RendezvousError):
            self.store.set_first(self._key("verdict"), json.dumps(facts))
            if name == 0:
                self._await_readers()

    def _await_readers(self) -> None:
        """Let the other ranks read the cause before the store ends with rank 0."""
        ranks = range(1, len(self._global_ranks))
        # Also those whose record this rank has not read, or that is the cause.
        others = sum(self.store.has(self._key(f"entry/{rank}")) for rank in ranks)
        patience = Deadline(_READERS_SECONDS)
        patience.poll_until(lambda: sum(self.store.has(self._key(f"heard/{rank}")) for rank in ranks) >= others)

    def _apply(self, verdict: bytes) -> None:
        self.store.set(self._key(f"heard/{self._rank}"), "yes")
        try:
            raise error_from_facts(json_object(verdict))
        except FrameError as error:
            raise foreign_value(error) from None

    def _key(self, name: str) -> str:
        return f"{self._life}/{name}"

    def _read_records(self) -> None:
        with self._store_of_rank_0():
            for rank in range(len(self._global_ranks)):
                record = None if rank in self._records else self._record_of(rank)
                if record is not None:
                    name, own_name = self._global_ranks[rank], self._global_ranks[self._rank]
                    reason = record.why_incompatible(name, self._own, own_name)
                    if reason:
                        raise RendezvousError(reason, rank=self._global_ranks[rank])
                    self._records[rank] = record

    def _record_of(self, rank: int) -> RankRecord | None:
        text = self.store.get(self._key(f"entry/{rank}"))
        return None if text is None else RankRecord.from_json(text)

    def _rewrite(self) -> None:
        """Write the record again if another program has deleted or replaced it: anybody can at a store of PyTorch."""
        with self._store_of_rank_0():
            key, text = self._key(f"entry/{self._rank}"), self._own.to_json()
            if self._is_registered and self.store.get(key) != text.encode():
                self.store.set(key, text)

    def _taken(self, life: int) -> RankTakenError:
        """Return the error for a rank that another process is; this process itself may claim it again."""
        self._life = life  # of the group of that process
        holder, first = self._record_of(self._rank), self._record_of(0)
        self._life = 0
        name = self._global_ranks[self._rank]
        who = "another process" if holder is None or not holder.host else f"another process at {holder.host}"
        pid = "" if holder is None or not holder.process.pid else f" (pid {holder.process.pid})"
        error = RankTakenError(
            f"rank {name} is taken: {who}{pid} has joined as rank {name} already, and keeps its place. Give every "
            "process its own RANK; if that process is left from an earlier run, end it and start all ranks again.",
            rank=name,
        )
        error.holder, error.first = holder, first
        return error

    def _missing(self) -> RendezvousError:
        missing = [rank for rank in range(len(self._global_ranks)) if rank not in self._records]
        missing_ranks = ", ".join(f"rank {self._global_ranks[rank]}" for rank in missing)
        refused: list[int] = []
        with contextlib.suppress(RendezvousError):
            refused = self.store.unauthenticated()
        unauthenticated = [
            self._global_ranks[rank]
            for rank in missing
            if rank in refused or self._key(f"entry/{rank}") in self.store.forged
        ]
        is_set = "is not" if self._options.secret is None else "is"
        hint = (
            f"A process that claimed to be rank {unauthenticated[0]} did not know the secret of this run: "
            f"CYXTRAIN_SECRET {is_set} set on rank {self._global_ranks[self._rank]}, and must be the same on every "
            "rank; no other run may use this MASTER_PORT."
            if unauthenticated
            else f"Look at the output of {missing_ranks}, or start it, with the MASTER_ADDR and MASTER_PORT of the "
            "others; timeout_ms (DISTRIBUTED_TIMEOUT_MS) sets how long they wait."
        )
        return RendezvousError(
            f"{missing_ranks} of a world of {len(self._global_ranks)} did not join before the deadline: joining timed "
            f"out after {self.deadline.seconds:.3g} s. {hint}",
            rank=self._global_ranks[missing[0]],
        )

    @contextlib.contextmanager
    def _store_of_rank_0(self) -> Iterator[None]:
        """Once rank 0 has registered in this life, no other store will replace one that is lost."""
        try:
            yield
        except StoreLostError as error:
            if 0 not in self._records:
                raise
            raise RendezvousError(str(error), rank=0) from error


def await_all_ranks(store: Store, rank: int, world_size: int, deadline: Deadline, options: RingOptions) -> None:
    """Wait until all ranks of a world are there; raise RendezvousError with those that are missing at the deadline.

    For backends whose own errors do not name them.
    """
    membership = Membership(store, rank, range(world_size), deadline, options)
    with membership.joining():
        membership.register(RankRecord(world_size))
        membership.await_all()


def _parse_claim(claim: bytes | None) -> tuple[int, str]:
    """Return (how often processes have claimed a rank, the token of the last); 0 times: never."""
    life, _, token = (claim or b"0").decode("ascii", "replace").partition(" ")
    return (int(life), token) if life.isdecimal() else (0, "")
