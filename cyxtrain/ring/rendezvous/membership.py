"""Which ranks have joined, and why joining failed if it did, in keys of the ranks' common store.

A rank polls the store, because one that waits in PyTorch's client cannot be told of a failure.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from torch.distributed import Store

from cyxtrain.config import RingOptions
from cyxtrain.errors import CyxtrainError, RendezvousError, error_from_facts, reported
from cyxtrain.ring.rendezvous.record import RankRecord, cannot_join_error, check_alive, check_not_exited, foreign_error
from cyxtrain.ring.rendezvous.store_client import StoreClient, StoreLostError
from cyxtrain.ring.wire.frames import FrameError, json_object
from cyxtrain.ring.wire.link import POLL_SECONDS, Deadline

_READERS_SECONDS = 0.3
"""How long the end of a store waits for ranks to read or report the cause."""
EXAMINE_SECONDS = 0.5
"""How often a waiting rank checks whether the others are alive, and whether its record is still at the store."""
PeerFailure = Callable[[float], "CyxtrainError | None"]
"""Returns the error if another group of this world has lost a rank; waits for it at most so many seconds."""


class RankTakenError(RendezvousError):
    """Another process has this rank."""

    holder: RankRecord | None = None  # its record, if it has written one
    first: RankRecord | None = None  # the record of its rank 0


class Membership:
    """One rank's view of a group while it forms; groups may form repeatedly at the same store.

    It uses the secret, the group's name and `is_restarted` of the `options`. If a launcher has restarted this rank,
    another process that has the rank is the previous one, and the store may be the previous rank 0's: both end soon.
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
        numbers = [str(global_rank) for place, global_rank in enumerate(global_ranks) if global_rank != place]
        group = f"{generation} {' '.join(numbers)} {options.group_name}"
        self.store = StoreClient(store, f"rank {global_ranks[rank]}", deadline, options.secret_bytes, group)
        self._rank = rank
        self._global_rank = global_ranks[rank]
        self._global_ranks = global_ranks
        self._world_size = len(global_ranks)
        self._peer_failure = peer_failure
        self._options = options
        self._life = 0
        """How often this rank has claimed its place at this store, this time included; part of every key."""
        self._own = RankRecord(self._world_size)
        self._records: dict[int, RankRecord] = {}
        self._is_registered = False
        self._has_reported = False
        self._examine_deadline = Deadline(0.0)

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Claim this rank, and report any failure within to the others."""
        try:
            self.claim()
            yield
        except CyxtrainError as error:
            if self.store.lost:
                # Rank 0 may have left, and the store with it, because another group lost a rank.
                failure = self._peer_failure(_READERS_SECONDS)
                if failure is not None:
                    raise failure.again() from error
            self.report_failure(error)
            raise
        except BaseException as error:  # such as Ctrl-C: the others must not wait
            self.report_failure(cannot_join_error(self._global_rank, error))
            raise

    def claim(self) -> None:
        """Claim this rank: from now on the others can be told of a failure.

        Raises RankTakenError if another process has this rank, and StoreLostError.
        """
        key = f"claims/{self._rank}"
        token = self._own.token
        while not self._life:
            if self.deadline.passed():
                raise RendezvousError(
                    f"rank {self._global_rank} could not claim its place at the store within "
                    f"{self.deadline.seconds:g} s: another program keeps writing there. Choose another MASTER_PORT, "
                    "the same on every rank.",
                    rank=self._global_rank,
                )
            before = self.store.get(key)
            last_life, holder = _parse_claim(before)
            if last_life and holder != token:
                error = self._taken_error(last_life)
                if self._options.is_restarted:
                    self._await_previous_store_end()
                raise error
            if self.store.replace(key, before, f"{last_life + 1} {token}"):
                self._life = last_life + 1
        self._delete_old_keys()

    def _await_previous_store_end(self) -> None:
        """Wait until the previous rank 0 has ended, which raises StoreLostError, or until the deadline."""
        while not self.deadline.passed():
            self.store.has("claims/0")
            time.sleep(POLL_SECONDS)

    def _delete_old_keys(self) -> None:
        old_life = self._life - 2  # nobody reads keys older than the last life, and the store may exist for ever
        if old_life < 1:
            return
        for kind in ("entry", "heard"):
            self.store.delete(f"{old_life}/{kind}/{self._rank}")
        if self._rank == 0:
            self.store.delete(f"{old_life}/verdict")

    def register(self, record: RankRecord) -> None:
        """Write the record of this rank for the others to read."""
        self._own = record
        self.store.set(self._key(f"entry/{self._rank}"), record.to_json())
        self._is_registered = True

    def await_all(self) -> list[RankRecord]:
        """Wait until all ranks have registered; return their records, by rank.

        Raises RendezvousError if ranks are missing at the deadline or incompatible, or one of them has failed.
        """
        if not self.deadline.poll_until(self._all_have_registered):
            raise self._missing_error()
        return [self._records[rank] for rank in range(self._world_size)]

    def _all_have_registered(self) -> bool:
        self.check()
        self._read_records()
        missing = self._missing()
        check_not_exited([self._global_ranks[rank] for rank in missing], self._world_size)
        return not missing

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank not in self._records]

    def check(self) -> None:
        """Raise the error that has made joining fail, if any.

        Another rank has reported it, or its process has ended, or another group of this world has lost a rank.
        """
        with self._store_of_rank_0():
            verdict = self.store.get(self._key("verdict"))
            if verdict is not None:
                self._raise_verdict(verdict)
            refusal = self.store.refusal()
            if refusal:
                time.sleep(_READERS_SECONDS)  # for others of the refused world, which are about to connect
                raise RendezvousError(refusal, rank=0)
        self.check_groups()
        if self._examine_deadline.passed():  # not at each poll: asking about every other process takes time
            self._rewrite()
            self._examine_deadline = Deadline(EXAMINE_SECONDS)
            check_alive(self._own, {self._global_ranks[rank]: record for rank, record in self._records.items()})

    def check_groups(self) -> None:
        """Raise the error of another group of this world that has lost a rank."""
        failure = self._peer_failure(0.0)
        if failure is not None:
            raise failure.again()

    def report_failure(self, error: CyxtrainError) -> None:
        """Report why this rank cannot join; the first report counts."""
        if self._has_reported or not self._life or self.store.lost:  # if lost, the others notice it themselves
            return
        self._has_reported = True
        facts = error.to_facts() | {"type": RendezvousError.__name__, "message": reported(error, self._global_rank)}
        with contextlib.suppress(RendezvousError):
            self.store.set_first(self._key("verdict"), json.dumps(facts))
            if self._global_rank == 0:
                self._await_readers()

    def _await_readers(self) -> None:
        """Let the other ranks read the cause before the store ends with rank 0."""
        # All that have registered: this rank may not have read every record, and one of them may be the cause.
        registered = self._count_others("entry")
        Deadline(_READERS_SECONDS).poll_until(lambda: self._count_others("heard") >= registered)

    def _count_others(self, kind: str) -> int:
        """Return how many ranks, besides rank 0, have written a key of this kind."""
        return sum(self.store.has(self._key(f"{kind}/{rank}")) for rank in range(1, self._world_size))

    def _raise_verdict(self, verdict: bytes) -> NoReturn:
        self.store.set(self._key(f"heard/{self._rank}"), "yes")
        try:
            raise error_from_facts(json_object(verdict))
        except FrameError as error:
            raise foreign_error(error) from None

    def _key(self, name: str) -> str:
        return f"{self._life}/{name}"

    def _read_records(self) -> None:
        with self._store_of_rank_0():
            for rank in self._missing():
                self._read_record(rank)

    def _read_record(self, rank: int) -> None:
        record = self._record_of(rank, self._life)
        if record is None:
            return
        global_rank = self._global_ranks[rank]
        reason = record.why_incompatible(global_rank, self._own, self._global_rank)
        if reason:
            raise RendezvousError(reason, rank=global_rank)
        self._records[rank] = record

    def _record_of(self, rank: int, life: int) -> RankRecord | None:
        text = self.store.get(f"{life}/entry/{rank}")
        return None if text is None else RankRecord.from_json(text)

    def _rewrite(self) -> None:
        """Write the record again if another program has deleted or replaced it at a store of PyTorch."""
        if not self._is_registered:
            return
        key = self._key(f"entry/{self._rank}")
        text = self._own.to_json()
        with self._store_of_rank_0():
            if self.store.get(key) != text.encode():
                self.store.set(key, text)

    def _taken_error(self, life: int) -> RankTakenError:
        """Return the error for a rank that another process has claimed for that life."""
        holder = self._record_of(self._rank, life)
        first = self._record_of(0, life)
        who = "another process"
        if holder is not None and holder.host:
            who += f" at {holder.host}"
        if holder is not None and holder.process.pid:
            who += f" (pid {holder.process.pid})"
        error = RankTakenError(
            f"rank {self._global_rank} is taken: {who} has joined as rank {self._global_rank} already, and keeps its "
            "place. Give every process its own RANK; if that process is left from an earlier run, end it and start "
            "all ranks again.",
            rank=self._global_rank,
        )
        error.holder = holder
        error.first = first
        return error

    def _missing_error(self) -> RendezvousError:
        missing = self._missing()
        missing_ranks = ", ".join(f"rank {self._global_ranks[rank]}" for rank in missing)
        unauthenticated = self._unauthenticated(missing)
        if unauthenticated:
            is_set = "is not" if self._options.secret is None else "is"
            hint = (
                f"A process that claimed to be rank {self._global_ranks[unauthenticated[0]]} did not know the secret "
                f"of this run: CYXTRAIN_SECRET {is_set} set on rank {self._global_rank}, and must be the same on every "
                "rank; no other run may use this MASTER_PORT."
            )
        else:
            hint = (
                f"Look at the output of {missing_ranks}, or start it, with the MASTER_ADDR and MASTER_PORT of the "
                "others; timeout_ms (DISTRIBUTED_TIMEOUT_MS) sets how long they wait."
            )
        return RendezvousError(
            f"{missing_ranks} of a world of {self._world_size} did not join before the deadline: joining timed out "
            f"after {self.deadline.seconds:.3g} s. {hint}",
            rank=self._global_ranks[missing[0]],
        )

    def _unauthenticated(self, missing: list[int]) -> list[int]:
        """Return the missing ranks that a process without the secret has claimed to be."""
        refused: list[int] = []
        with contextlib.suppress(RendezvousError):
            refused = self.store.unauthenticated()
        forged = self.store.forged
        return [rank for rank in missing if rank in refused or self._key(f"entry/{rank}") in forged]

    @contextlib.contextmanager
    def _store_of_rank_0(self) -> Iterator[None]:
        """Raise RendezvousError if the store is lost after rank 0 has registered: no other will replace it."""
        try:
            yield
        except StoreLostError as error:
            if 0 not in self._records:
                raise
            raise RendezvousError(str(error), rank=0) from error


def await_all_ranks(store: Store, rank: int, world_size: int, deadline: Deadline, options: RingOptions) -> None:
    """Wait until all ranks of a world have joined, for backends whose errors do not name missing ranks.

    Raises RendezvousError with the ranks that are missing at the deadline.
    """
    membership = Membership(store, rank, range(world_size), deadline, options)
    with membership.joining():
        membership.register(RankRecord(world_size))
        membership.await_all()


def _parse_claim(claim: bytes | None) -> tuple[int, str]:
    """Return how often processes have claimed a rank, and the token of the last of them; 0: never."""
    life, _, token = (claim or b"0").decode("ascii", "replace").partition(" ")
    if not life.isdecimal():
        return 0, ""
    return int(life), token
