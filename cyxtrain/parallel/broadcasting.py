"""What all ranks hold alike: parameters when a module is wrapped, buffers at each training forward.

Ranks compare hashes first, and send only what differs: constant buffers, such as masks, cost 8 bytes each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain import runtime
from cyxtrain.errors import ConfigError, on_all_ranks
from cyxtrain.parallel.hashing import fingerprints
from cyxtrain.parallel.tensor_parts import bytes_of, is_plain, kind_of, parts_of, rebuilt, write

_MESSAGE_BYTES = 25 << 20


def share_tensors(tensors: Sequence[Tensor], names: Callable[[], Sequence[str]], *, rows: int | None = None) -> None:
    """Make tensors equal on all ranks, in place; those that are equal already stay as they are. All ranks call it.

    Cost: an all_gather of 16 bytes per tensor; what differs once in and once out, in messages of up to 25 MiB.

    Args:
        tensors: In the same order on every rank; of any layout and type.
        names: Returns the name of each, for messages.
        rows: None: all take rank 0's. Else rows that this rank has processed since the last call: floating-point
            tensors become the mean over ranks, weighted by them (rank 0's where no rank has any); others rank 0's.
            So does what has another number of elements on another rank, such as a cache of the last batch.

    Raises:
        ConfigError: A tensor differs that cannot be sent, such as a quantised one; on every rank, with its name.
    """
    if not tensors:
        return
    sizes = [tensor.numel() for tensor in tensors]
    own = torch.tensor([rows or 0, *fingerprints(tensors), *sizes], device="cpu")
    group = runtime.cpu_group()
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group)
    found = torch.stack(everyone)
    unequal = (found != found[0]).any(0)[1:].view(2, -1)
    differing, resized = unequal.any(0).nonzero().flatten().tolist(), unequal[1].tolist()
    total = 0 if rows is None else int(found[:, 0].sum())
    plain = [tensors[number] for number in differing if is_plain(tensors[number]) and not resized[number]]
    averaged = [tensor for tensor in plain if total and _is_float(tensor)]
    sent = [tensor for tensor in plain if not (total and _is_float(tensor))]
    for batch in _batches(averaged, lambda tensor: tensor.device):
        _average(batch, (rows or 0) / total)
    for batch in _batches(sent, lambda tensor: (tensor.dtype, tensor.device)):
        _broadcast(batch)
    others = [number for number in differing if not is_plain(tensors[number]) or resized[number]]
    for number in others:
        if parts_of(tensors[number]) is None:
            raise on_all_ranks(_cannot_send(names()[number], tensors[number]))
    if others:
        _broadcast_parts([tensors[number] for number in others], group)


def _cannot_send(name: str, tensor: Tensor) -> ConfigError:
    return ConfigError(
        f"the buffer {name} differs between ranks, and a {kind_of(tensor)} tensor cannot be sent to the others. "
        "Build it alike on every rank, or make it a dense tensor."
    )


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _average(tensors: Sequence[Tensor], share: float) -> None:
    """Make tensors their weighted mean over ranks; `share` is this rank's weight, all weights make up 1."""
    flat = torch.cat([_real(tensor).reshape(-1).to(torch.float64) for tensor in tensors])
    total = flat * share if share else torch.zeros_like(flat)  # 0 times infinity is no number
    dist.all_reduce(total, group=runtime.group_for(total.device))
    for tensor, part in zip(tensors, total.split([_real(tensor).numel() for tensor in tensors]), strict=True):
        mean = part.view(_real(tensor).shape)
        write(tensor, (torch.view_as_complex(mean.clone()) if tensor.is_complex() else mean).to(tensor.dtype))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()


def _broadcast(tensors: Sequence[Tensor]) -> None:
    contents = [bytes_of(tensor) for tensor in tensors]
    flat = torch.cat(contents)
    dist.broadcast(flat, 0, group=runtime.group_for(flat.device))
    if dist.get_rank() == 0:
        return
    for tensor, part in zip(tensors, flat.split([content.numel() for content in contents]), strict=True):
        write(tensor, part.view(tensor.dtype).view(tensor.shape))


def _broadcast_parts(tensors: Sequence[Tensor], group: Any) -> None:
    """Send rank 0's tensors: the shapes of their parts first, which may be others than here."""
    own = [[list(part.shape) for part in parts_of(tensor) or ()] for tensor in tensors]
    shapes = json.loads(runtime.gather_texts(json.dumps(own))[0])
    is_first = dist.get_rank(group) == 0
    for tensor, of_parts in zip(tensors, shapes, strict=True):
        parts = [part.contiguous() for part in parts_of(tensor) or ()]
        if not is_first:
            parts = [part.new_empty(shape) for part, shape in zip(parts, of_parts, strict=True)]
        for part in parts:
            dist.broadcast(bytes_of(part), 0, group=runtime.group_for(part.device))
        if not is_first:
            write(tensor, parts[0] if is_plain(tensor) else rebuilt(tensor.layout, tensor.shape, parts))


def _batches(tensors: Sequence[Tensor], kind: Callable[[Tensor], object]) -> Iterator[list[Tensor]]:
    """Yield tensors of one kind that travel together."""
    kinds: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(kind(tensor), []).append(tensor)
    for alike in kinds.values():
        batch: list[Tensor] = []
        size = 0
        for tensor in alike:
            batch.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= _MESSAGE_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


def tensors_of(module: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return `module.parameters()` and `module.buffers()` as lists, in a quarter of the time: each step needs them."""
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
