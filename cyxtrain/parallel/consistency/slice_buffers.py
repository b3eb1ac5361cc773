"""Buffers of a step in slices: each slice begins with those of the step, and what they change is joined at its end.

The result depends on the slices alone, not on the ranks that compute them. Running statistics, as other floating-point
buffers, become the mean over slices, weighted by rows and added up in float64 by the tree of slices. What is declared
otherwise (`buffer_kinds.py`), and integers, become those of slice 0, which always has rows. What no slice has changed,
bit for bit, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.environment import torch_compat
from cyxtrain.parallel.consistency.broadcasting import share_tensors
from cyxtrain.parallel.consistency.buffer_kinds import MEAN, kinds_of_buffers
from cyxtrain.tensors.layouts import bytes_of, is_plain, write
from cyxtrain.world.slices import Slices, additions_after
from cyxtrain.world.world import World

_EXTREMES = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)


class SliceBuffers:
    """The buffers of a module in one step.

    Args:
        module: The model.
        slices: Those of this rank.
        add_up: Adds up this rank's rows of float64 over all ranks, in the order of the tree.
    """

    def __init__(self, module: nn.Module, slices: Slices, add_up: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self._slices = slices
        self._add_up = add_up
        self._owners = _owners_of(module)
        self._buffers = [buffer for _, _, buffer in self._owners]
        kinds = kinds_of_buffers(module)
        self._kinds = [kinds.get(id(buffer), MEAN) for buffer in self._buffers]
        self._before = [buffer.detach().clone() for buffer in self._buffers]
        self._of_first: dict[int, Tensor] = {}  # what slice 0 has changed, on the rank that has it
        self._extremes: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}

    def end_slice(self, number: int, rows: int) -> None:
        """Take what a slice of so many rows has changed, and put back what it began with."""
        if not self._buffers:
            return
        changes = torch.zeros(len(self._buffers), dtype=torch.float64, device="cpu")
        means: list[Tensor] = []
        for place, (now, before) in enumerate(zip(self._now(), self._before, strict=True)):
            is_changed = not _is_same(now, before)
            changes[place] = is_changed
            if self._is_mean(place):
                means.append(_weighted(now if now.shape == before.shape else before, rows).cpu())
            elif is_changed:
                self._keep(place, number, now)
        self._sums[number] = torch.cat([changes, *means])
        for into, source in additions_after(number, self._slices):
            self._sums[into] += self._sums.pop(source)
        self._put_back()

    def _now(self) -> list[Tensor]:
        """Return the buffers as a forward has left them, which may have replaced or removed some."""
        found = [torch_compat.own_buffers(owner).get(name) for owner, name, _ in self._owners]
        return [before if now is None else now for now, before in zip(found, self._before, strict=True)]

    def _put_back(self) -> None:
        for (owner, name, buffer), before in zip(self._owners, self._before, strict=True):
            setattr(owner, name, buffer)
            if not _is_same(buffer, before):
                write(buffer, before)

    def _is_mean(self, place: int) -> bool:
        before = self._before[place]
        is_float = before.is_floating_point() or before.is_complex()
        return is_float and is_plain(before) and self._kinds[place] == MEAN

    def _keep(self, place: int, number: int, now: Tensor) -> None:
        kind = self._kinds[place]
        own = now.detach().clone()
        if kind in _EXTREMES:
            choose = torch.minimum if kind == dist.ReduceOp.MIN else torch.maximum
            self._extremes[place] = choose(self._extremes.get(place, own), own)
        elif number == 0:
            self._of_first[place] = own

    def end_step(self, world: World, rows: int) -> None:
        """Give the buffers what the slices of all ranks, of so many rows together, make of them. All ranks call it."""
        if not self._buffers:
            return
        total = self._add_up([*self._sums.values()])
        count = len(self._buffers)
        means = total[count:]
        others: list[int] = []
        for place, changes in enumerate(total[:count].tolist()):
            buffer = self._buffers[place]
            is_mean = self._is_mean(place)
            if is_mean:
                elements = _real(buffer).numel()
                own = means[:elements]
                means = means[elements:]
                if changes:
                    write(buffer, _shaped(own / rows, buffer))
            elif changes:
                others.append(place)
        self._share(world, others)

    def _share(self, world: World, places: Sequence[int]) -> None:
        """Make the buffers at places, which are no means, the same on all ranks."""
        firsts: list[Tensor] = []
        for place in places:
            buffer = self._buffers[place]
            kind = self._kinds[place]
            if kind in _EXTREMES:
                found = self._extremes.get(place, self._before[place]).clone()
                if world.size > 1:
                    dist.all_reduce(found, kind, group=world.group_for(found.device))
                write(buffer, found)
                continue
            if place in self._of_first:
                write(buffer, self._of_first[place])
            firsts.append(buffer)
        if world.size > 1 and firsts:
            names = [name for _, name, _ in self._owners]
            share_tensors(world, firsts, lambda: [names[place] for place in places])


def _owners_of(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return (owner, name, buffer) of each buffer, once."""
    found: dict[int, tuple[nn.Module, str, Tensor]] = {}
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            found.setdefault(id(buffer), (owner, name, buffer))
    return [*found.values()]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    if one is other:
        return True
    if not is_plain(one) or not is_plain(other):
        return False
    return one.shape == other.shape and torch.equal(bytes_of(one), bytes_of(other))


def _real(tensor: Tensor) -> Tensor:
    own = tensor.detach()
    return torch.view_as_real(own.resolve_conj()) if own.is_complex() else own


def _weighted(tensor: Tensor, rows: int) -> Tensor:
    """Return the numbers of a tensor times a number of rows, as a vector; zeros of none, as 0 times infinity is NaN."""
    flat = _real(tensor).reshape(-1).double()
    return flat * rows if rows else torch.zeros_like(flat)


def _shaped(numbers: Tensor, like: Tensor) -> Tensor:
    """Return numbers of `_real` in the shape and type of a tensor."""
    shaped = numbers.view(_real(like).shape)
    if like.is_complex():
        shaped = torch.view_as_complex(shaped.contiguous())
    return shaped.to(like.device, like.dtype)
