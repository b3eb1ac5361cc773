"""The calls of `self.optimize` in a step: all ranks make the same ones, or none goes on.

A rank without rows does not run the step. If there is one, the first rank with rows broadcasts what the step does, in
that step only: each update, the form of each loss, and the end. Ranks that run the step also compare their calls by
signals that travel with the gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from cyxtrain.data.batches.batch import Share
from cyxtrain.errors import CollectiveMismatchError, on_all_ranks
from cyxtrain.optim.optimizers import ONLY
from cyxtrain.training.state import TrainingState
from cyxtrain.world.world import World

CODE_BITS = 8
"""Signals by which ranks compare a call: one for the first of a step, others for the optimizer."""
_END, _UPDATE, _LOSS = range(3)
"""What the leading rank broadcasts: the end; (an update, its optimizer's number, whether it has a closure); (a loss,
whether it is (sum, weight))."""
_CALLED = "called self.optimize"


class UpdateCalls:
    """The calls of the steps of a fit; `names` are those of its optimizers, the same on every rank.

    Attributes:
        number: How many calls there were in the running micro-batch.
    """

    def __init__(self, world: World, state: TrainingState, names: Sequence[str]) -> None:
        self._world = world
        self._state = state
        self._names = names
        self._leader: int | None = None
        self._has_rows = True
        self.number = 0

    def begin(self, share: Share, *, asks: bool) -> None:
        """Begin a step. All ranks call it; `asks`: whether ranks whose data are their own ask who has rows."""
        self.number = 0
        self._has_rows = share.rows > 0
        self._leader = _leader(self._world, share, asks=asks)

    def tell_update(self, name: str, *, has_closure: bool) -> None:
        """Tell the ranks without rows of an update."""
        self._exchange(_UPDATE, self._names.index(name), int(has_closure))

    def tell_end(self) -> None:
        """Tell the ranks without rows that the step makes no more updates."""
        self._exchange(_END)

    def followed(self) -> Iterator[tuple[str, bool]]:
        """Yield (optimizer, whether it has a closure) of each update of the step, on a rank without rows."""
        while True:
            kind, optimizer, has_closure = self._exchange(_END)
            if kind == _END:
                return
            self.number += 1
            yield self._names[optimizer], bool(has_closure)

    def agree_on_weight(self, has_weight: bool) -> bool:
        """Return whether a loss is (sum, weight): a rank without rows learns it from the others."""
        return bool(self._exchange(_LOSS, int(has_weight))[1])

    def signals_of(self, name: str) -> list[float]:
        """Return the running call as bits: their averages over ranks are 0 or 1 if all make the same call."""
        code = self._names.index(name)
        if self.number == 1:
            code += 2 ** (CODE_BITS - 1)
        return [float(code >> bit & 1) for bit in range(CODE_BITS)]

    def check_alike(self, name: str, averages: Sequence[float]) -> None:
        """Raise on all ranks if the `averages` of their `signals_of` show that they have made different calls."""
        num_ranks = self._world.size
        ranks_with_bit = [each * num_ranks for each in averages]
        if any(0.1 < ranks < num_ranks - 0.1 for ranks in ranks_with_bit):
            calls = self._world.gather(self._running(name))
            raise on_all_ranks(_differing(dict(enumerate(calls))))

    def explain(
        self, error: CollectiveMismatchError, collectives: Mapping[str, Sequence[str]]
    ) -> CollectiveMismatchError | None:
        """Return what ranks did that an error of the ring names; None: none of them called `optimize`.

        `collectives`: what such errors call those of each optimizer's updates.
        """
        optimizers = {each: name for name, own in collectives.items() for each in own}
        found: dict[int, str] = {}
        for rank, call in re.findall(r"rank (\d+) is in (\w+ #\d+(?: \(.*?\))?)", str(error)):
            name = next((optimizers[each] for each in optimizers if each in call), None)
            if name is None:
                found[int(rank)] = f"was in {call}"
            elif int(rank) == self._world.rank:
                found[int(rank)] = self._running(name)
            else:
                # How many calls another rank has made is unknown here.
                found[int(rank)] = called(name)
        if any(_CALLED in each for each in found.values()):
            return _differing(found)
        return None

    def _exchange(self, *message: int) -> list[int]:
        """Return what the leading rank says, and compare this rank's message with it, if it runs the step.

        Without a leader, in a step in which all ranks have rows, nothing is sent.
        """
        padded = [*message, 0, 0][:3]
        if self._leader is None:
            return padded
        found: list[int] = self._world.broadcast(torch.tensor(padded, device="cpu"), self._leader).tolist()
        if self._has_rows and found[: len(message)] != [*message]:
            raise _differing({self._leader: self._describe(found), self._world.rank: self._describe(message)})
        return found

    def _describe(self, message: Sequence[int]) -> str:
        """Describe what a rank does, by the message that it broadcasts."""
        if message[0] == _UPDATE:
            return self._running(self._names[message[1]])
        if message[0] == _END:
            return "called it no more"
        return "had a loss of another form, a mean or (sum, weight)"

    def _running(self, name: str) -> str:
        """Describe the running call of `optimize`."""
        return f"{called(name)} as call {self.number} of step {self._state.position.step + 1}"


def called(name: str) -> str:
    """Return "called self.optimize", with the optimizer if there are several."""
    return _CALLED if name == ONLY else f"{_CALLED}(optimizer={name!r})"


def _differing(calls: Mapping[int, str]) -> CollectiveMismatchError:
    """Return the error for ranks that call `optimize` differently; `calls` describes each rank's call."""
    by_rank = sorted(calls.items())
    first, what = by_rank[0]
    rank, other = next((each for each in by_rank if each[1] != what), by_rank[0])
    return CollectiveMismatchError(
        f"train_step does not call self.optimize alike on all ranks: rank {rank} {other}, and rank {first} {what}. All "
        "ranks must make the same calls in the same order: decide by what they share, such as self.step, not by a "
        "rank's own batch, loss or random numbers.",
        rank=rank,
        during="train_step",
    )


def _leader(world: World, share: Share, *, asks: bool) -> int | None:
    """Return the first rank with rows if some rank has none; otherwise None. All ranks call it.

    Where each rank has its own data, the ranks ask each other, if the step makes updates at all.
    """
    if share.count_ranks is not None:
        return 0 if share.count_ranks() < world.size else None
    if not asks:
        return None
    rank = world.rank if share.rows else world.size
    found = torch.tensor([rank, int(share.rows > 0)], device="cpu")
    world.reduce(found, dist.ReduceOp.MIN)
    first_with_rows, all_have_rows = found.tolist()
    return None if all_have_rows else first_with_rows
