"""Tensors of any layout (expanded, overlapping, sparse, quantised): take apart, write in place, hash.

The hash of a tensor on an accelerator is the sum of its elements' bits, as integers, times odd numbers that look
random, modulo 2^64. If one element differs, the hash always does; if several do, almost always.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from cyxtrain.environment.accelerator import HostCopy
from cyxtrain.ring import memory_of

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_PIECE = 1 << 20  # elements at once: 16 bytes of temporary memory for each
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are in its own memory, to be read and written one by one."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        and not _is_wrapper(tensor)
    )


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor is a subclass that wraps other tensors and has no memory of its own."""
    return getattr(type(tensor), "__tensor_flatten__", None) is not None


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is without overlaps and gaps in memory: anything can be written to it."""
    return is_plain(tensor) and (tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor)))


def kind_of(tensor: Tensor) -> str:
    """Return the kind of a tensor in a word, for messages."""
    if tensor.is_quantized:
        return "quantised"
    if tensor.is_nested:
        return "nested"
    if _is_wrapper(tensor):
        return type(tensor).__name__
    return "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")


def parts_of(tensor: Tensor) -> list[Tensor] | None:
    """Return the dense parts of a sparse tensor, in canonical order; a plain one itself; otherwise None."""
    tensor = tensor.detach()
    if is_plain(tensor):
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in _BY_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in _BY_COLUMNS:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def rebuilt(
    layout: torch.layout, shape: torch.Size | list[int], parts: Sequence[Tensor], *, checked: bool = False
) -> Tensor:
    """Return a sparse tensor of parts from `parts_of`; if `checked`, malformed ones raise RuntimeError."""
    values = parts[-1]
    # PyTorch warns unless check_invariants is set.
    if layout is torch.sparse_coo:
        indices = parts[0]
        return torch.sparse_coo_tensor(
            indices, values, shape, device=values.device, is_coalesced=True, check_invariants=checked
        )
    outer, inner = parts[:2]
    return torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=layout, device=values.device, check_invariants=checked
    )


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a plain tensor's bytes, its own memory if contiguous: NCCL lacks types such as int16."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def fingerprint(tensor: Tensor) -> int:
    """Return a hash of a tensor's contents, 63 bits; equal for equal tensors on any device."""
    if tensor.is_cpu and is_plain(tensor) and tensor.is_contiguous() and not tensor.is_complex():  # in each step
        return xxhash.xxh3_64_intdigest(memory_of(tensor)) >> 1
    parts, text = parts_of(tensor), ""
    if parts is None:
        parts, text = _content_of(tensor.detach())
    digest = xxhash.xxh3_64(text.encode())
    for part in parts:
        if not is_plain(part):
            digest.update(fingerprint(part).to_bytes(8, "little"))
        elif part.numel():
            content = part.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            digest.update(memory_of(content))
    return digest.intdigest() >> 1


def _content_of(tensor: Tensor) -> tuple[list[Tensor], str]:
    """Return the tensors and the text that identify a tensor without parts."""
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return [tensor.int_repr()], f"{tensor.dtype} {tensor.q_scale()} {tensor.q_zero_point()}"
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return [tensor.int_repr(), scales, zeros], str(tensor.dtype)
    if _is_wrapper(tensor):
        inner: Any = tensor
        return [getattr(inner, name) for name in inner.__tensor_flatten__()[0]], ""
    if tensor.is_nested:
        return list(tensor.unbind()), ""
    return [] if tensor.is_meta else [tensor.to_dense()], ""


def write(tensor: Tensor, new: Tensor) -> None:
    """Write new contents to a tensor in place, even if several of its elements share memory.

    Args:
        tensor: Not quantised, nested or meta.
        new: Of the same type and layout; elements that share memory must be equal. A plain tensor takes another shape.
    """
    if not is_plain(tensor):
        new = new.to(tensor.device)
        with torch.no_grad():
            if tensor.layout is not torch.sparse_coo and tensor.values().shape != new.values().shape:
                tensor.resize_as_sparse_(new)  # copy_ wants as many numbers
            tensor.copy_(new)
        return
    with torch.inference_mode(tensor.is_inference()):  # a tensor made in this mode can be written to only there
        # data: a buffer that autograd saved in an earlier forward may be written to between backwards.
        if tensor.shape == new.shape:
            _write_elements(tensor.data, new)
        else:
            tensor.data = new.to(tensor.device, copy=True)


def _write_elements(target: Tensor, new: Tensor) -> None:
    if is_dense(target):
        target.copy_(new)
        return
    offsets = torch.zeros((), dtype=torch.int64, device=target.device)
    for size, stride in zip(target.shape, target.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size, device=target.device) * stride
    if target.numel():
        memory = target.as_strided((int(offsets.max()) + 1,), (1,))
        memory[offsets.reshape(-1)] = new.reshape(-1).to(target.dtype)


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return a hash of each tensor, 63 bits; equal for equal tensors on the same type of device.

    Cost: the bytes are read once; for all tensors on an accelerator the host waits once, for 8 bytes each.
    """
    far = [tensor for tensor in tensors if not tensor.is_cpu and is_plain(tensor)]
    if len({tensor.device for tensor in far}) != 1:
        return [fingerprint(tensor) for tensor in tensors]
    by_id = dict(zip(map(id, far), _hashes_on_device(far), strict=True))
    return [by_id[id(tensor)] if id(tensor) in by_id else fingerprint(tensor) for tensor in tensors]


def _hashes_on_device(tensors: Sequence[Tensor]) -> list[int]:
    flat = [_integers(tensor).split(_PIECE) for tensor in tensors]
    # Small pieces are summed together: each alone would take as long as a kernel starts.
    sums = [_sums(batch) for batch in batches(itertools.chain(*flat), _PIECE, Tensor.numel)]
    found = iter(HostCopy(torch.cat(sums)).read().tolist() if sums else ())
    return [_joined([next(found) for _ in pieces]) for pieces in flat]


def _joined(sums: Sequence[int]) -> int:
    return sum(each * pow(_ODD, number, 2**64) for number, each in enumerate(sums)) % 2**64 >> 1


def _integers(tensor: Tensor) -> Tensor:
    """Return the bits of each element, in one dimension."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def batches(tensors: Iterable[Tensor], limit: int, size_of: Callable[[Tensor], int]) -> Iterator[list[Tensor]]:
    """Yield tensors in order, as many together as reach a limit."""
    batch: list[Tensor] = []
    size = 0
    for tensor in tensors:
        batch.append(tensor)
        size += size_of(tensor)
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _sums(batch: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of each piece, on the device."""
    device, sizes = batch[0].device, [piece.numel() for piece in batch]
    weights = _weights(device)
    if len(batch) == 1:
        return (batch[0] * weights[: sizes[0]]).sum().reshape(1)
    products = torch.cat(list(batch)) * torch.cat([weights[:size] for size in sizes])
    ends = torch.tensor([0, *itertools.accumulate(sizes)], device="cpu", pin_memory=True)
    sums = torch.cat([products.new_zeros(1), products.cumsum(0)])
    return sums.index_select(0, ends.to(device, non_blocking=True)).diff()


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Return the factors of elements, the same in every version of PyTorch and NumPy."""
    random = np.random.PCG64(0).random_raw(_PIECE).view(np.int64)
    with torch.inference_mode(False):
        return torch.from_numpy(random | 1).to(device)
