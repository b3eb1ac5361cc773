"""Which ranks are here, as they say at the store that they share; and if one fails while all meet, why.

It asks the store again and again instead of waiting there: whoever waits in PyTorch's client cannot be told of a
failure meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence

from torch.distributed import Store

from cyxtrain.errors import CyxtrainError, RendezvousError, error_from_facts, reported
from cyxtrain.ring.monitoring.group_registry import GroupRegistry
from cyxtrain.ring.monitoring.process_state import State, state_of
from cyxtrain.ring.rendezvous.record import RankRecord, misfit, not_ours
from cyxtrain.ring.rendezvous.store_client import StoreClient, StoreLostError, root_of
from cyxtrain.ring.wire.frames import FrameError, json_object
from cyxtrain.ring.wire.link import Deadline

LOOK_SECONDS = 0.05
"""How often a rank that waits looks whether the meeting has failed."""
_SHORTEST_NAP_SECONDS = 0.001
_HEARERS_SECONDS = 0.3
"""For how long the end of a store waits for those who want to know why, and these for who says so."""

_CHECK_WRITTEN_SECONDS = 0.5
"""How often a rank that waits looks whether what it has written is still there."""

_MET = b"all have met"


class RankTakenError(RendezvousError):
    """Another process is this rank.

    Attributes:
        holder: What it said of itself; None where it did not say.
        first: What its rank 0 said of itself.
    """

    holder: RankRecord | None = None
    first: RankRecord | None = None


class Membership:
    """One rank's part in a roll call.

    Ranks may meet at the same store again, each as often as the others.

    Args:
        store: Shared by all ranks, with keys of its own for this group.
        rank: This rank.
        names: By rank, how errors call it: its rank in the world.
        deadline: When to give up; the first rank that gives up ends it for all.
        siblings: The other groups of the same world; None: there are none.
        waits_for_next_store: Whether a launcher has started this rank again. Where another process is this rank, it is
            the one of before, and rank 0's of before has the store: both are about to end.
        secret: Of the run; None: there is none.
        generation: Of the group.

    Attributes:
        board: The store.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Sequence[int],
        deadline: Deadline,
        siblings: GroupRegistry | None = None,
        *,
        waits_for_next_store: bool = False,
        secret: bytes | None = None,
        generation: int = 0,
    ) -> None:
        self.deadline = deadline
        group = f"{generation} {' '.join(map(str, names))}"
        self.board = StoreClient(store, f"rank {names[rank]}", deadline, secret, group)
        self._rank = rank
        self._names = names
        self._unproven: Mapping[int, int] = getattr(root_of(store), "unproven", {})
        self._siblings = siblings or GroupRegistry()
        self._has_secret = secret is not None
        self._waits = waits_for_next_store
        self._life = 0
        self._told = False
        self._own = RankRecord(len(names))
        self._here: dict[int, RankRecord] = {}
        self._written: dict[str, str] = {}
        self._check_written = Deadline(0.0)

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Takes this rank as `claim` does, tells the others if what follows fails, and lets go of the store."""
        try:
            self.claim()
            yield
        except CyxtrainError as error:
            # Rank 0 may have left, and the store with it, because another group lost a rank.
            loss = self._siblings.await_loss(_HEARERS_SECONDS) if self.board.lost else None
            if loss is not None:
                raise loss.again() from error
            self.tell(error)
            raise
        except BaseException as error:  # Ctrl-C, say: the others must not wait
            # Only its name: the text of an error can hold what is nobody's business.
            name = self._names[self._rank]
            reason = f"rank {name} cannot join: {type(error).__name__}. Look at its output."
            self.tell(RendezvousError(reason, rank=name))
            raise
        finally:
            self.board.close()

    def claim(self) -> None:
        """Takes this rank: from now on the others can be told of a failure.

        Raises:
            RankTakenError: Another process is this rank.
            StoreLostError: The store has gone.
        """
        key, token = f"claims/{self._rank}", self._own.token
        while not self._life:
            if self.deadline.passed():
                name = self._names[self._rank]
                raise RendezvousError(
                    f"rank {name} could not take its place at the store within {self.deadline.seconds:g} s: somebody "
                    "writes there all the time. Choose another MASTER_PORT, the same on every rank.",
                    rank=name,
                )
            before = self.board.get(key)
            last, holder = _life_of(before)
            if last and holder != token:
                error = self._taken(last)
                self._await_end_of_store()
                raise error
            if self.board.replace(key, before, f"{last + 1} {token}"):
                self._life = last + 1
        if self._life > 2:  # nobody is in the meeting before the last any more, and the store may live for ever
            for kind in ("entry", "met", "heard"):
                self.board.delete(f"{self._life - 2}/{kind}/{self._rank}")
            if self._rank == 0:
                self.board.delete(f"{self._life - 2}/verdict")

    def answer(self, entry: RankRecord) -> None:
        """Says that this rank is here.

        Raises:
            StoreLostError: The store has gone.
        """
        self._own = entry
        self._write(self._entry_key(self._rank), entry.to_json())

    def table(self) -> list[RankRecord]:
        """Waits until all ranks have answered, and returns what they said, by rank.

        Raises:
            RendezvousError: Ranks are missing at the deadline, or do not fit together; or one of them has failed.
        """
        nap_seconds = naps()
        while True:
            self.look()
            self._read_entries()
            if len(self._here) == len(self._names):
                return [self._here[rank] for rank in range(len(self._names))]
            if self.deadline.passed():
                raise self._missing()
            time.sleep(next(nap_seconds))

    def look(self) -> None:
        """Looks whether the meeting has failed.

        Raises:
            RendezvousError: Another rank has said why it failed, or its process has ended.
            PeerLostError, PeerSilentError: Another group of this world has lost a rank.
        """
        with self._reaching_the_store():
            verdict = self.board.get(self._key("verdict"))
            if verdict is not None:
                self._hear(verdict)
            self._write_again()
        loss = self._siblings.loss(time.monotonic())
        if loss is not None:
            raise loss.again()
        for rank, entry in self._here.items():
            if state_of(entry.process, self._own.process) is State.GONE:
                raise ended(self._names[rank])

    def tell(self, error: CyxtrainError) -> bool:
        """Tells all ranks that this one cannot join, and why; the first to do so is believed.

        Returns:
            Whether the meeting has failed; False: all had met before, and whoever ends since may do so.
        """
        if self._told:
            return True
        self._told = True
        name = self._names[self._rank]
        facts = error.to_facts() | {"type": RendezvousError.__name__, "message": reported(error, name)}
        if not self._life or self.board.lost:  # the others will notice that by themselves
            return True
        with contextlib.suppress(RendezvousError):
            if self.board.set_first(self._key("verdict"), json.dumps(facts)) == _MET:
                return False
            if name == 0:
                self._await_hearers()
        return True

    def met(self) -> None:
        """Says that this rank is connected with all others."""
        with self._reaching_the_store():
            self._write(self._key(f"met/{self._rank}"), "yes")

    def all_met(self) -> bool:
        """Returns whether all ranks are connected with all others: on every rank, or on none.

        Raises:
            RendezvousError: A rank that was connected has failed before all were.
        """
        with self._reaching_the_store():
            # A rank that has seen it may have left, and cannot write again what somebody deletes.
            if self.board.get(self._key("verdict")) == _MET:
                return True
            if not self.board.has(*(self._key(f"met/{rank}") for rank in range(len(self._names)))):
                return False
            self._hear(self.board.set_first(self._key("verdict"), _MET.decode()))
            return True

    def unmet(self) -> list[int]:
        """Returns which ranks, by name, are not connected with all others."""
        with self._reaching_the_store():
            return [name for rank, name in enumerate(self._names) if not self.board.has(self._key(f"met/{rank}"))]

    def _await_hearers(self) -> None:
        """The store may end with rank 0: the others shall read there first why."""
        # Also those whose entry this rank has not read, or was the cause.
        others = sum(self.board.has(self._entry_key(rank)) for rank in range(1, len(self._names)))
        patience = Deadline(_HEARERS_SECONDS)
        ranks = range(1, len(self._names))
        while not patience.passed() and sum(self.board.has(self._key(f"heard/{rank}")) for rank in ranks) < others:
            time.sleep(_SHORTEST_NAP_SECONDS)

    def _hear(self, verdict: bytes) -> None:
        """Raises the failure of the meeting, if that is its verdict."""
        if verdict != _MET:
            self.board.set(self._key(f"heard/{self._rank}"), "yes")
            raise _failure(verdict)

    def _key(self, name: str) -> str:
        return f"{self._life}/{name}"

    def _entry_key(self, rank: int) -> str:
        return self._key(f"entry/{rank}")

    def _read_entries(self) -> None:
        with self._reaching_the_store():
            for rank in range(len(self._names)):
                entry = None if rank in self._here else self._entry_of(rank)
                if entry is not None:
                    self._check_fits(self._names[rank], entry)
                    self._here[rank] = entry

    def _entry_of(self, rank: int) -> RankRecord | None:
        """Returns what a rank has said of itself; None: nothing yet."""
        text = self.board.get(self._entry_key(rank))
        return None if text is None else RankRecord.from_json(text)

    def _check_fits(self, name: int, entry: RankRecord) -> None:
        reason = misfit(name, entry, self._names[self._rank], self._own)
        if reason:
            raise RendezvousError(reason, rank=name)

    def _write(self, key: str, value: str) -> None:
        self._written[key] = value
        self.board.set(key, value)

    def _write_again(self) -> None:
        """Writes again what somebody has deleted or replaced: at a store of PyTorch's anybody can."""
        if not self._check_written.passed():
            return
        self._check_written = Deadline(_CHECK_WRITTEN_SECONDS)
        for key, value in self._written.items():
            if self.board.get(key) != value.encode():
                self.board.set(key, value)

    def _taken(self, life: int) -> RankTakenError:
        """Returns the error for a rank that another process is; this process itself may come again."""
        self._life = life  # the meeting of that other process, in which this one has no say
        holder, first = self._entry_of(self._rank), self._entry_of(0)
        self._life = 0
        name = self._names[self._rank]
        who = "another process" if holder is None or not holder.host else f"another process at {holder.host}"
        pid = "" if holder is None or not holder.process.pid else f" (pid {holder.process.pid})"
        error = RankTakenError(
            f"rank {name} is taken: {who}{pid} has joined as rank {name} already, and is not disturbed. Give every "
            "process a RANK of its own; where that one is left from an earlier run, end it and start all ranks anew.",
            rank=name,
        )
        error.holder, error.first = holder, first
        return error

    def _await_end_of_store(self) -> None:
        """Waits until the store has gone, where that is to be expected; at most until the deadline.

        Raises:
            StoreLostError: It has.
        """
        while self._waits and not self.deadline.passed():
            self.board.has("claims/0")
            time.sleep(LOOK_SECONDS)

    def _missing(self) -> RendezvousError:
        missing = [rank for rank in range(len(self._names)) if rank not in self._here]
        names = ", ".join(f"rank {self._names[rank]}" for rank in missing)
        unproven = [
            self._names[rank]
            for rank in missing
            if self._unproven.get(rank) or self._entry_key(rank) in self.board.forged
        ]
        hint = (
            f"Somebody came as rank {unproven[0]} and did not know the secret of this run: CYXTRAIN_SECRET "
            f"{'is' if self._has_secret else 'is not'} set on rank {self._names[self._rank]}, and must be the same on "
            "every rank; no other run may use this MASTER_PORT."
            if unproven
            else f"Look at the output of {names}, or start it, with the MASTER_ADDR and MASTER_PORT of the others; "
            "timeout_ms (DISTRIBUTED_TIMEOUT_MS) sets how long they wait."
        )
        return RendezvousError(
            f"{names} of a world of {len(self._names)} did not come before the deadline: joining timed out after "
            f"{self.deadline.seconds:.3g} s. {hint}",
            rank=self._names[missing[0]],
        )

    @contextlib.contextmanager
    def _reaching_the_store(self) -> Iterator[None]:
        """Where rank 0 was here in this very meeting, no other store will open in the place of one that has gone."""
        try:
            yield
        except StoreLostError as error:
            if 0 not in self._here:
                raise
            raise RendezvousError(str(error), rank=0) from error


def naps() -> Iterator[float]:
    """Yields for how many seconds to wait before the next look: what is late already may be late for long."""
    seconds = _SHORTEST_NAP_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, LOOK_SECONDS)


def ended(name: int) -> RendezvousError:
    """Returns the error for a rank that has ended without a word while the ranks were meeting."""
    return RendezvousError(
        f"rank {name} is lost: its process ended while the ranks were meeting (killed, or out of memory?). "
        f"Look at the output of rank {name}, and start all ranks again.",
        rank=name,
    )


def _life_of(claim: bytes | None) -> tuple[int, str]:
    """Returns (how often a process has claimed a rank, its token); 0 times: nobody has."""
    life, _, token = (claim or b"0").decode("ascii", "replace").partition(" ")
    return (int(life), token) if life.isdecimal() else (0, "")


def _failure(text: bytes) -> CyxtrainError:
    """Returns the error that a rank has told."""
    try:
        return error_from_facts(json_object(text))
    except FrameError as error:
        return not_ours(error)
