"""The contract of the collectives: one case, and what one rank needs to go through it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from contract_values import FILLER, LAYOUTS, NUMBERS, filled, given, wrong_bits, wrong_numbers
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of all ranks.

    Attributes:
        collective: A key of `COLLECTIVES`.
        dtype: Of the tensors.
        reduction: A name of `ReduceOp`; "": nothing is calculated.
        layout: A key of `LAYOUTS`.
        count: The first dimension of what each rank brings or gets.
        root: The one, where one stands against many.
        async_op: Asked for, and then waited for.
    """

    collective: str
    dtype: torch.dtype
    reduction: str
    layout: str
    count: int
    root: int = 0
    async_op: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what each rank brings or gets."""
        return () if self.layout == "0-dim" else (self.count, *LAYOUTS[self.layout].dimensions)

    def __str__(self) -> str:
        words = [self.collective, str(self.dtype).removeprefix("torch."), self.reduction, self.layout]
        more = f"root {self.root}{', async_op' if self.async_op else ''}"
        return f"{' '.join(filter(None, words))} {list(self.shape)} ({more})"


class Setting:
    """A case as one rank sees it: makes its tensors, and notes what is wrong with them afterwards.

    Args:
        case: What is called.
        rank: This one.
        world_size: How many there are.
        device: Where the tensors are.
        ours: The backend is ours, which promises more than PyTorch documents.
    """

    def __init__(self, case: Case, rank: int, world_size: int, device: str = "cpu", ours: bool = True) -> None:
        self.case, self.rank, self.size, self.device, self.ours = case, rank, world_size, device, ours
        self.root, self.ranks = case.root, range(world_size)
        self.wrong: list[str] = []
        self._layout = LAYOUTS[case.layout]
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._rooms: list[Tensor] = []

    @property
    def op(self) -> Any:
        return getattr(dist.ReduceOp, self.case.reduction)

    def given(self, rank: int, part: int = 0, shape: tuple[int, ...] | None = None) -> Tensor:
        """What a rank brings, on the CPU and plain; `part`: for whom, or which of several."""
        shape = self.case.shape if shape is None else shape
        # Negating makes a signalling NaN quiet.
        kind = self.case.reduction or (NUMBERS if self.case.layout in ("conj", "neg") else "")
        numbers = given(self.case.dtype, math.prod(shape), kind, rank, part).view(shape)
        return numbers[:, :1].expand(shape) if self.case.layout == "expanded" else numbers

    def everyones(self, part: int = 0, shape: tuple[int, ...] | None = None) -> list[Tensor]:
        return [self.given(rank, part, shape) for rank in self.ranks]

    def in_place(self, part: int = 0) -> Tensor:
        """What this rank brings, in the layout of the case, for the result to come into."""
        return self.room().copy_(self.given(self.rank, part))

    def input(self, values: Tensor) -> Tensor:
        """A tensor in the layout of the case that is only read."""
        if self.case.layout == "expanded":
            tensor = values[:, :1].clone().to(self.device).expand(values.shape)
        else:
            tensor = self.room(tuple(values.shape)).copy_(values)
        self._inputs.append((tensor, values))
        return tensor

    def room(self, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor in the layout of the case to receive into."""
        shape = self.case.shape if shape is None else shape
        view = self._layout.view(shape, self.case.dtype) if shape else filled(shape, self.case.dtype)
        if self.device != "cpu":
            whole = view.new_empty(0).set_(view.untyped_storage()).to(self.device)
            view = whole.as_strided(view.shape, view.stride(), view.storage_offset())
        self._rooms.append(view)
        return view

    @property
    def joined(self) -> tuple[int, ...]:
        """The shape of what all ranks have, one after the other."""
        return (self.size * self.case.count, *self.case.shape[1:])

    def share(self, tensor: Tensor, rank: int) -> Tensor:
        """The part of a joined tensor that is a rank's; of the shape of the case."""
        return tensor[rank * self.case.count : (rank + 1) * self.case.count].view(self.case.shape)

    def wait(self, work: Any) -> None:
        if not self.case.async_op:
            self.wrong.extend([] if work is None else ["returned something, though async_op is False"])
            return
        work.wait()
        # Gloo says so of some.
        if self.ours and isinstance(work, dist.Work) and not work.is_completed():
            self.wrong.append("the work says after wait() that it is not completed")

    def moved(self, found: Tensor, must: Tensor) -> None:
        """Notes where not every bit is as it was."""
        self._note(wrong_bits(found.cpu(), must))

    def reduced(self, found: Tensor, brought: list[Tensor]) -> None:
        """Notes where the numbers of all ranks have not been combined."""
        self._note(wrong_numbers(found.detach().cpu().resolve_conj().resolve_neg(), brought, self.case.reduction))

    def check_the_rest(self) -> None:
        """Notes what was written beside a tensor, and into one that is only read."""
        for tensor, values in self._inputs:
            self._note(wrong_bits(tensor.cpu(), values) and "an input was changed")
        for room in self._rooms:
            storage = torch.empty(0, dtype=torch.uint8, device=room.device).set_(room.untyped_storage()).cpu()
            rows = storage.view(-1, room.element_size())
            beside = torch.ones(len(rows), dtype=torch.bool)
            beside[torch.arange(len(rows)).as_strided(room.shape, room.stride(), room.storage_offset())] = False
            self._note("" if bool((rows[beside] == FILLER).all()) else "something was written beside a tensor")

    def _note(self, wrong: str) -> None:
        self.wrong.extend(filter(None, [wrong]))
