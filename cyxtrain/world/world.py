"""Who takes part in a call: a value that is passed as an argument."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cyxtrain.environment.accelerator import is_accelerator
from cyxtrain.errors import CollectiveMismatchError, on_all_ranks

SAME_CALL = "the check that all ranks make the same call"
"""The `during` of its errors."""
_LEAVES = "leaves the world (its program, or the with block of init, has ended; or it calls finalize)"


@dataclasses.dataclass(frozen=True, eq=False)
class World:
    """The ranks that take part in a call, as one of them sees them.

    All of them make the same calls, in one order. A rank by itself is a world of one: its methods send nothing.

    Attributes:
        rank: This process's number, from 0.
        size: How many ranks there are.
        group: Carries gradients, and the tensors of accelerators; None: this world sends nothing.
        cpu_group: Carries small agreements: the same group, or a ring next to NCCL.
        cpu_tensors: Carries other tensors of the CPU: one of these two.
        local_rank: This process's number on its machine.
        members: The launcher's number of each rank, which errors name.
        generation: How many worlds this process has joined before.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    cpu_group: Any = None
    cpu_tensors: Any = None
    local_rank: int = 0
    members: tuple[int, ...] = (0,)
    generation: int = 0

    @property
    def number(self) -> int:
        """The launcher's number of this process, which errors name."""
        return self.members[self.rank]

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that shows and writes."""
        return self.rank == 0

    @property
    def sends_nothing(self) -> bool:
        """Whether this is a rank by itself, which has no process group."""
        return self.group is None

    @property
    def _has_others(self) -> bool:
        # `count_steps` describes a world that nobody has joined: it has ranks, and no group.
        return self.size > 1 and self.group is not None

    def alone(self) -> World:
        """Return the world of this rank by itself."""
        return World(local_rank=self.local_rank, members=(self.number,), generation=self.generation)

    def group_for(self, device: torch.device) -> Any:
        """Return the group that carries the tensors of a device."""
        return self.cpu_tensors if device.type == "cpu" else self.group

    def device_of_sums(self, device: torch.device) -> torch.device:
        """Return where sums over ranks are computed: an accelerator, unless the ring carries them. Ask once."""
        if is_accelerator(device) and (self.size == 1 or dist.get_backend(self.group) != "ring"):
            return device
        return torch.device("cpu")

    def reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a small tensor over ranks, in place, and return it; one on a CPU by the group of agreements."""
        if self._has_others:
            group = self.cpu_group if values.is_cpu else self.group
            dist.all_reduce(values, operation, group=group)
        return values

    def broadcast(self, values: Tensor, source: int = 0) -> Tensor:
        """Overwrite a small tensor of the CPU with a rank's tensor, and return it."""
        if self._has_others:
            dist.broadcast(values, source, group=self.cpu_group)
        return values

    def gather(self, text: str) -> list[str]:
        """Return the string of every rank, by rank: so that ranks can compare.

        Cost: two all_gathers; 8 bytes, then the longest string, of each rank.
        """
        if not self._has_others:
            return [text]
        # surrogatepass: names of files that are not UTF-8 have lone surrogates.
        content = text.encode("utf-8", "surrogatepass")
        # device: a small agreement uses a CPU group, also if the program sets another default device.
        own_length = torch.tensor([len(content)], device="cpu")
        lengths = [torch.zeros_like(own_length) for _ in range(self.size)]
        dist.all_gather(lengths, own_length, group=self.cpu_group)
        sizes = [int(length) for length in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        if content:  # frombuffer refuses empty buffers
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        contents = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(contents, padded, group=self.cpu_group)
        received = [found[:size].numpy().tobytes() for found, size in zip(contents, sizes, strict=True)]
        return [each.decode("utf-8", "surrogatepass") for each in received]

    def gather_json(self, value: Any) -> list[Any]:
        """Return a JSON value of every rank, by rank. Cost: as `gather`."""
        return [json.loads(text) for text in self.gather(json.dumps(value))]

    def check_same_call(self, call: str, *, works_alone: bool = False) -> bool:
        """Check that all ranks are about to make the same call; False: rank 0 makes its call alone.

        It does if the call works alone and all others wait in one other call. They check again, until they agree.

        Cost: as `gather`.
        """
        while True:
            announced = self.gather_json([call, works_alone])
            calls = [name for name, _ in announced]
            if len(set(calls)) == 1:
                return True
            _, first_works_alone = announced[0]
            others_wait_together = len(set(calls[1:])) == 1
            if not (first_works_alone and others_wait_together):
                raise on_all_ranks(_mismatch(calls))
            if self.is_first:
                return False


def _mismatch(calls: list[str]) -> CollectiveMismatchError:
    other = next(rank for rank, name in enumerate(calls) if name != calls[0])
    return CollectiveMismatchError(
        f"rank 0 {_verb(calls[0])} and rank {other} {_verb(calls[other])}: all ranks must make the same calls. "
        "evaluate, predict and save_checkpoint work on rank 0 alone, while the others wait in another call.",
        rank=other,
        during=SAME_CALL,
    )


def _verb(call: str) -> str:
    return _LEAVES if call == "finalize" else f"calls {call}"
