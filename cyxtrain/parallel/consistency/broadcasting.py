"""Equal tensors on all ranks: parameters when a module is wrapped, buffers before each step.

Ranks compare hashes first, and send only what differs: constant buffers, such as masks, cost 8 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.environment import torch_compat
from cyxtrain.environment.accelerator import HostCopy, from_host
from cyxtrain.errors import ConfigError, on_all_ranks, shortened, warn
from cyxtrain.parallel.consistency.buffer_kinds import MEAN, kinds_of_buffers
from cyxtrain.tensors.fingerprint import batches, fingerprints
from cyxtrain.tensors.layouts import bytes_of, is_plain, kind_of, parts_of, rebuilt, write
from cyxtrain.world.world import World

_MESSAGE_BYTES = 25 << 20
_COMPARED_STEPS = 2  # before the second step everything differs that steps make differ
_Kinds = Mapping[int, dist.ReduceOp.RedOpType | None]


def share_tensors(
    world: World,
    tensors: Sequence[Tensor],
    names: Callable[[], Sequence[str]],
    *,
    rows: int | None = None,
    kinds: _Kinds | None = None,
) -> dict[int, bool]:
    """Make tensors equal on all ranks, in place, unless they are equal already. All ranks call it.

    Without `rows`, all take rank 0's. With the rows that this rank has processed since the last call, floating-point
    tensors become what `kinds` has, otherwise the mean over ranks, weighted by rows (rank 0's if no rank has any);
    others, and those with another number of elements on some rank, such as a cache of the last batch, become rank 0's.
    Returns the numbers of those that differed, and whether in their elements alone, on every rank. Raises ConfigError
    on every rank, with the name, if a tensor cannot be sent.

    Cost: an all_gather of 16 bytes per tensor; what differs once in and once out, in messages of up to 25 MiB.
    """
    if not tensors:
        return {}
    found = _compared(world, tensors, rows or 0)
    plain: list[Tensor] = []
    others: dict[int, Tensor] = {}
    for number in found.differing:
        tensor = tensors[number]
        if is_plain(tensor) and not found.are_resized[number]:
            plain.append(tensor)
        else:
            others[number] = tensor
    share = None if rows is None else found.share(rows)
    _share(world, plain, share, kinds or {})
    _broadcast_parts(world, others, names)
    return {number: not found.are_resized[number] for number in found.differing}


class _Comparison(NamedTuple):
    """How the tensors of all ranks compare; the same on every rank."""

    differing: list[int]  # numbers of the tensors that are not equal everywhere
    are_resized: list[bool]  # for each tensor, whether its number of elements differs
    total_rows: int  # of all ranks

    def share(self, rows: int) -> float | None:
        """Return the weight of a rank with some rows in a mean over ranks; None: no rank has any."""
        return rows / self.total_rows if self.total_rows else None


def _compared(world: World, tensors: Sequence[Tensor], rows: int) -> _Comparison:
    sizes = [tensor.numel() for tensor in tensors]
    own = torch.tensor([rows, *fingerprints(tensors), *sizes], device="cpu")
    gathered = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(gathered, own, world.cpu_group)
    found = torch.stack(gathered)
    # One row for the fingerprints, one for the sizes.
    unequal = (found != found[0]).any(0)[1:].view(2, -1)
    differing = unequal.any(0).nonzero().flatten()
    return _Comparison(differing.tolist(), unequal[1].tolist(), int(found[:, 0].sum()))


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _share(world: World, tensors: Sequence[Tensor], share: Tensor | float | None, kinds: _Kinds) -> None:
    """Reduce floating-point tensors as in `kinds`, means weighted by `share` (None: none); others become rank 0's."""
    alike: dict[dist.ReduceOp.RedOpType | None, list[Tensor]] = {}
    for tensor in tensors:
        operation = None
        if share is not None and _is_float(tensor):
            operation = kinds.get(id(tensor), MEAN)
        alike.setdefault(operation, []).append(tensor)
    if share is not None:
        for batch in _batches(alike.pop(MEAN, []), lambda tensor: tensor.device):
            _average(world, batch, share)
    for batch in _batches(alike.pop(None, []), lambda tensor: (tensor.dtype, tensor.device)):
        _broadcast(world, batch)
    for other, found in alike.items():
        for tensor in found:
            reduced = tensor.detach().clone()
            dist.all_reduce(reduced, other, group=world.group_for(tensor.device))
            write(tensor, reduced)


def _average(world: World, tensors: Sequence[Tensor], share: Tensor | float) -> None:
    """Set tensors to their weighted mean over ranks; the weights `share` of all ranks sum to 1."""
    parts = [_real(tensor).reshape(-1) for tensor in tensors]
    total = _weighted(_flat_in_double(parts), share)
    dist.all_reduce(total, group=world.group_for(total.device))
    means = total.split([part.numel() for part in parts])
    are_simple = all(tensor.is_contiguous() and not tensor.is_complex() for tensor in tensors)
    if are_simple and not total.is_cpu:
        # In one operation on an accelerator; `data`, as in `write`.
        torch_compat.copy_all(
            [tensor.data for tensor in tensors],
            [mean.view(tensor.shape) for tensor, mean in zip(tensors, means, strict=True)],
        )
        return
    for tensor, part in zip(tensors, means, strict=True):
        mean = part.view(_real(tensor).shape)
        if tensor.is_complex():
            mean = torch.view_as_complex(mean.clone())
        write(tensor, mean.to(tensor.dtype))


def _flat_in_double(parts: list[Tensor]) -> Tensor:
    are_alike = all(part.dtype is parts[0].dtype for part in parts)
    if are_alike:
        # One conversion of all takes less time than one for each.
        return torch.cat(parts).double()
    return torch.cat([part.double() for part in parts])


def _weighted(flat: Tensor, share: Tensor | float) -> Tensor:
    """Return a vector times a share; zeros if that is 0, as 0 times infinity is NaN."""
    if isinstance(share, Tensor):
        return (flat * share).masked_fill_(share == 0, 0.0)
    return flat * share if share else torch.zeros_like(flat)


def _real(tensor: Tensor) -> Tensor:
    own = tensor.detach()
    return torch.view_as_real(own.resolve_conj()) if tensor.is_complex() else own


def _broadcast(world: World, tensors: Sequence[Tensor]) -> None:
    contents = [bytes_of(tensor) for tensor in tensors]
    flat = torch.cat(contents)
    dist.broadcast(flat, 0, group=world.group_for(flat.device))
    if world.is_first:
        return
    for tensor, part in zip(tensors, flat.split([content.numel() for content in contents]), strict=True):
        write(tensor, part.view(tensor.dtype).view(tensor.shape))


def _broadcast_parts(world: World, tensors: Mapping[int, Tensor], names: Callable[[], Sequence[str]]) -> None:
    """Send rank 0's tensors, given by number: the shapes of their parts first, which may differ from this rank's."""
    if not tensors:
        return
    shapes_here = []
    for number, tensor in tensors.items():
        parts_here = parts_of(tensor)
        if parts_here is None:
            error = ConfigError(
                f"the buffer {names()[number]} differs between ranks, and a {kind_of(tensor)} tensor cannot be sent to "
                "the others. Build it alike on every rank, or make it a dense tensor."
            )
            raise on_all_ranks(error)
        shapes_here.append([list(part.shape) for part in parts_here])
    shapes = world.gather_json(shapes_here)[0]
    _broadcast_in_shapes(world, [*tensors.values()], shapes)


def _broadcast_in_shapes(world: World, tensors: Sequence[Tensor], shapes: Sequence[Sequence[Sequence[int]]]) -> None:
    """Send rank 0's tensors, whose parts have these shapes there."""
    for tensor, of_parts in zip(tensors, shapes, strict=True):
        parts = [part.contiguous() for part in parts_of(tensor) or ()]
        if not world.is_first:
            parts = [part.new_empty(shape) for part, shape in zip(parts, of_parts, strict=True)]
        for part in parts:
            dist.broadcast(bytes_of(part), 0, group=world.group_for(part.device))
        if not world.is_first:
            received = parts[0] if is_plain(tensor) else rebuilt(tensor.layout, tensor.shape, parts)
            write(tensor, received)


def _batches(tensors: Sequence[Tensor], kind: Callable[[Tensor], object]) -> Iterator[list[Tensor]]:
    """Yield tensors of one kind that are sent together."""
    kinds: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(kind(tensor), []).append(tensor)
    for alike in kinds.values():
        yield from batches(alike, _MESSAGE_BYTES, lambda tensor: tensor.numel() * tensor.element_size())


class SharedBuffers:
    """The buffers of a module, made the same on all ranks before each step.

    On CPUs ranks compare them all, and send what differs. On an accelerator that would stop the host in each step: if
    only running statistics, such as batch norm's, have differed in the first steps, they alone are shared, uncompared.
    A rank that changes another buffer signals it; the others read that one step later, and all compare from then on.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._steps_to_compare = _COMPARED_STEPS
        self._compares = False
        self._noted: list[tuple[int, float]] = []
        self._kinds: _Kinds = {}
        self._changes: HostCopy | None = None
        self._has_warned = False

    def share(self, world: World, buffers: Sequence[Tensor], names: Callable[[], Sequence[str]], rows: int) -> None:
        """Compare all buffers, and make them equal, as `share_tensors`; warn once of means that may be wrong."""
        self._note(buffers)
        differing = share_tensors(world, buffers, names, rows=rows, kinds=self._kinds)
        self._changes = None
        self._compares |= not all(self._is_statistic(buffers[number]) for number in differing)
        unknown = [number for number in differing if id(buffers[number]) not in self._kinds]
        averaged = [number for number in unknown if differing[number] and _is_float(buffers[number])]
        if averaged and rows and world.is_first:
            self._warn_of_means([names()[number] for number in averaged], buffers[averaged[0]].shape)

    def _warn_of_means(self, averaged: Sequence[str], shape: Sequence[int]) -> None:
        """Warn once of buffers that nobody has declared as means; `shape`: of the first one."""
        if self._has_warned:
            return
        self._has_warned = True
        first, *others = averaged
        too = f", as did {shortened(others)}" if others else ""
        warn(
            f"the buffer {first}, of shape {tuple(shape)}, differs between ranks and became their mean{too}. If "
            "it is a mean over samples, name it in its module's attribute averaged_buffers, a tuple; with "
            "averaged_buffers = (), ranks take rank 0's values. If it has one row per sample, such as a carried "
            "hidden state, keep it in a plain attribute. If it keeps samples, such as a memory bank, write those "
            "of all ranks to it: cx.all_gather_with_grad."
        )

    def share_before_step(
        self, world: World, buffers: Sequence[Tensor], names: Callable[[], Sequence[str]], rows: int
    ) -> None:
        """Make buffers equal before the first forward of a step. All ranks call it, and decide alike."""
        device = buffers[0].device
        if self._changes is not None:
            self._compares |= self._changes.read()[1].item() > 0
        if device.type == "cpu" or self._steps_to_compare or self._compares:
            self._steps_to_compare = max(self._steps_to_compare - 1, 0)
            self.share(world, buffers, names, rows)
            return
        before = self._noted
        self._note(buffers)
        own = from_host([rows, self._noted != before], device, torch.float64)
        joined = own.clone()
        dist.all_reduce(joined, group=world.group)
        self._changes = HostCopy(joined)
        # Without a row on any rank, rank 0's statistics count alone.
        share_without_rows = 1.0 if world.is_first else 0.0
        share = torch.where(joined[0] > 0, own[0] / joined[0], share_without_rows)
        _share(world, [*filter(self._is_statistic, buffers)], share, self._kinds)

    def _is_statistic(self, buffer: Tensor) -> bool:
        return self._kinds.get(id(buffer)) == MEAN

    def _note(self, buffers: Sequence[Tensor]) -> None:
        """Note the kinds of buffers, and the versions of all but running statistics, which each forward changes."""
        if [id(buffer) for buffer in buffers] != [number for number, _ in self._noted]:
            self._kinds = kinds_of_buffers(self._module)
        self._noted = [(id(each), self._noted_version(each)) for each in buffers]

    def _noted_version(self, buffer: Tensor) -> float:
        return 0 if self._is_statistic(buffer) else torch_compat.version_of(buffer)


def tensors_of(module: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return `module.parameters()` and `module.buffers()` as lists, in a quarter of the time."""
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    _collect_tensors(module, parameters, buffers, set())
    return [*parameters.values()], [*buffers.values()]


def _collect_tensors(
    module: nn.Module, parameters: dict[int, nn.Parameter], buffers: dict[int, Tensor], seen: set[nn.Module]
) -> None:
    seen.add(module)
    for parameter in module._parameters.values():
        if parameter is not None:
            parameters[id(parameter)] = parameter
    for buffer in module._buffers.values():
        if buffer is not None:
            buffers[id(buffer)] = buffer
    for inner in module._modules.values():
        if inner is not None and inner not in seen:
            _collect_tensors(inner, parameters, buffers, seen)
