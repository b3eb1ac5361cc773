"""Tensors of any form (expanded, overlapping, sparse, quantised): compared, taken apart, and written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from cyxtrain.ring import memory_of

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers are elements in memory, which can be read and written one by one."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        and not _is_wrapper(tensor)
    )


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor is a class of somebody else's that has other tensors inside and no memory of its own."""
    return getattr(type(tensor), "__tensor_flatten__", None) is not None


def is_dense(tensor: Tensor) -> bool:
    """Return whether each element has a place of its own in memory, without gaps: anything can be written to it."""
    return is_plain(tensor) and (tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor)))


def kind_of(tensor: Tensor) -> str:
    """Return what a tensor is, in a word, for messages."""
    if tensor.is_quantized:
        return "quantised"
    if tensor.is_nested:
        return "nested"
    if _is_wrapper(tensor):
        return type(tensor).__name__
    return "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")


def parts_of(tensor: Tensor) -> list[Tensor] | None:
    """Return the dense tensors that a sparse one is made of, in canonical order; of a plain one, itself.

    None: it cannot be taken apart (quantised, nested, without memory).
    """
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
    """Return a sparse tensor out of parts as `parts_of` gives them.

    Args:
        layout: Of the tensor.
        shape: Of the tensor.
        parts: Dense tensors.
        checked: Whether the parts are looked at: those of a file are, those of a tensor need not be.

    Raises:
        RuntimeError: They are checked, and do not make a tensor.
    """
    values = parts[-1]
    # PyTorch warns unless it is told whether to check.
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
    """Return the bytes of a plain tensor, in one dimension; its own memory where that is in order.

    NCCL carries bytes, and not every type: no int16, and no unsigned integers of more than a byte.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def fingerprint(tensor: Tensor) -> int:
    """Return a hash of all that a tensor holds, 63 bits; equal for equal tensors. Cost: its bytes are read once."""
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
    """Return the tensors, and a text, that say all of a tensor that cannot be taken apart and put together again."""
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
    """Give a tensor other numbers in place, also where several of its elements share memory.

    Args:
        tensor: Of any form but a quantised, nested or meta one.
        new: Of the same type and layout; where elements share memory, theirs are the same number. A plain tensor takes
            over another shape, too.
    """
    if not is_plain(tensor):
        new = new.to(tensor.device)
        with torch.no_grad():
            if tensor.layout is not torch.sparse_coo and tensor.values().shape != new.values().shape:
                tensor.resize_as_sparse_(new)  # copy_ wants as many numbers
            tensor.copy_(new)
        return
    with torch.inference_mode(tensor.is_inference()):  # what was made in this mode can be written to there alone
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
