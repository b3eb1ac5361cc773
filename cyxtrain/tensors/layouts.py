"""Tensors of any layout (expanded, overlapping, sparse, quantised): take apart, rebuild, write in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are in its own memory, to be read and written one by one."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        and not is_wrapper(tensor)
    )


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor is of a subclass that wraps other tensors and has no memory of its own."""
    return getattr(type(tensor), "__tensor_flatten__", None) is not None


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has no overlaps and gaps in memory: anything can be written to it."""
    return is_plain(tensor) and (tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor)))


def kind_of(tensor: Tensor) -> str:
    """Return the kind of a tensor, for messages."""
    if tensor.is_quantized:
        return "quantised"
    if tensor.is_nested:
        return "nested"
    if is_wrapper(tensor):
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


def write(tensor: Tensor, new: Tensor) -> None:
    """Write new contents to a tensor in place, even if several of its elements share memory.

    Args:
        tensor: Not quantised, nested or meta.
        new: Of the same type and layout; elements that share memory must be equal. A plain tensor may get a new shape.
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
