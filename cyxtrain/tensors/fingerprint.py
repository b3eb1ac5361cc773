"""Hashes of tensors' contents, on the CPU and on accelerators.

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
from cyxtrain.tensors.layouts import is_plain, is_wrapper, parts_of

_PIECE = 1 << 20  # elements at once: 16 bytes of temporary memory for each
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15


def fingerprint(tensor: Tensor) -> int:
    """Return a hash of a tensor's contents, 63 bits; equal for equal tensors on any device."""
    if tensor.is_cpu and is_plain(tensor) and tensor.is_contiguous() and not tensor.is_complex():  # in each step
        return xxhash.xxh3_64_intdigest(memory_of(tensor)) >> 1
    parts = parts_of(tensor)
    label = ""
    if parts is None:
        parts, label = _content_of(tensor.detach())
    digest = xxhash.xxh3_64(label.encode())
    for part in parts:
        if not is_plain(part):
            digest.update(fingerprint(part).to_bytes(8, "little"))
        elif part.numel():
            content = part.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            digest.update(memory_of(content))
    return digest.intdigest() >> 1


def _content_of(tensor: Tensor) -> tuple[list[Tensor], str]:
    """Return the tensors and the label that identify a tensor without parts."""
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return [tensor.int_repr()], f"{tensor.dtype} {tensor.q_scale()} {tensor.q_zero_point()}"
        return [tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()], str(tensor.dtype)
    if is_wrapper(tensor):
        inner: Any = tensor
        return [getattr(inner, name) for name in inner.__tensor_flatten__()[0]], ""
    if tensor.is_nested:
        return list(tensor.unbind()), ""
    if tensor.is_meta:
        return [], ""
    return [tensor.to_dense()], ""


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return a hash of each tensor, 63 bits; equal for equal tensors on the same type of device.

    Cost: the bytes are read once; for all tensors on an accelerator the host waits once, for 8 bytes each.
    """
    far = [tensor for tensor in tensors if not tensor.is_cpu and is_plain(tensor)]
    if len({tensor.device for tensor in far}) != 1:
        return [fingerprint(tensor) for tensor in tensors]
    hashes = dict(zip(map(id, far), _hashes_on_device(far), strict=True))
    for tensor in tensors:
        if id(tensor) not in hashes:
            hashes[id(tensor)] = fingerprint(tensor)
    return [hashes[id(tensor)] for tensor in tensors]


def _hashes_on_device(tensors: Sequence[Tensor]) -> list[int]:
    pieces_of_each = [_integers(tensor).split(_PIECE) for tensor in tensors]
    # Small pieces are summed together: each alone would take as long as a kernel starts.
    sums = [_sums(batch) for batch in batches(itertools.chain(*pieces_of_each), _PIECE, Tensor.numel)]
    found = iter(HostCopy(torch.cat(sums)).read().tolist())
    return [_joined([next(found) for _ in pieces]) for pieces in pieces_of_each]


def _joined(sums: Sequence[int]) -> int:
    """Return the hash of a tensor from the sums of its pieces, which depends on their order."""
    weighted = (each * pow(_ODD, number, 2**64) for number, each in enumerate(sums))
    return sum(weighted) % 2**64 >> 1


def _integers(tensor: Tensor) -> Tensor:
    """Return the bits of each element, in one dimension."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def batches(tensors: Iterable[Tensor], limit: int, size_of: Callable[[Tensor], int]) -> Iterator[list[Tensor]]:
    """Yield tensors in order, in lists that reach a limit."""
    batch: list[Tensor] = []
    size = 0
    for tensor in tensors:
        batch.append(tensor)
        size += size_of(tensor)
        if size >= limit:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _sums(batch: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of each piece, on the device."""
    device = batch[0].device
    weights = _weights(device)
    sizes = [piece.numel() for piece in batch]
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
