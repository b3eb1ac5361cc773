"""Tensors as safetensors stores them: each memory once, no overlaps, dtypes that every version has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from cyxtrain.errors import CheckpointError
from cyxtrain.tensors.layouts import is_plain, kind_of, parts_of, rebuilt

# Dtypes that some supported version of safetensors lacks are stored as others of the same width, bit for bit, in files
# of every version.
_STAND_INS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
    torch.complex32: torch.float16,  # complex numbers get another dimension of real and imaginary part
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
# names of the safetensors format
_NAMES_IN_FILES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_ALIGNMENT_BYTES = 8
Copy = Callable[[str, torch.Tensor], torch.Tensor]


def _unprefixed(constant: torch.dtype | torch.layout) -> str:
    return str(constant).removeprefix("torch.")


_STAND_IN_NAMES = {_unprefixed(dtype): dtype for dtype in _STAND_INS}
_SPARSE_LAYOUTS = {
    _unprefixed(layout): layout
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}


@dataclass(frozen=True)
class TensorLayout:
    """What a safetensors file cannot express about its tensors, in JSON types."""

    # all names, in the order of the dictionary; for a sparse tensor, the names of its parts
    order: list[str]
    # names of tied tensors, each with the name under which its memory is stored
    aliases: dict[str, str]
    # stored names whose dtype differs from the file's, such as "complex128"
    dtypes: dict[str, str]
    # names of sparse tensors, each with its layout, such as "sparse_csr", and shape; parts are named "name#0" and so on
    sparse: dict[str, tuple[str, list[int]]] = field(default_factory=dict)


def encode_tensors(
    tensors: Mapping[str, torch.Tensor], what: str, copy: Copy | None = None
) -> tuple[dict[str, torch.Tensor], TensorLayout]:
    """Return tensors to store, and the layout that restores the given ones.

    Tensors with the same memory, shape and strides are stored once. Those that overlap otherwise, or are not
    contiguous, are copied; no others, unless `copy` makes a contiguous copy on the CPU of each, given its name. Sparse
    ones are stored as indices and values. `what` is their owner, for messages.
    """
    strided, sparse = _with_parts_of_sparse(tensors)
    plain = {name: _plain(tensor, name, what) for name, tensor in strided.items()}
    layout = TensorLayout(order=list(plain), aliases=tied_names(plain), dtypes={}, sparse=sparse)
    stored: dict[str, torch.Tensor] = {}
    spans: dict[object, list[tuple[int, int]]] = {}
    for name, tensor in plain.items():
        if name in layout.aliases:
            continue
        if tensor.dtype in _STAND_INS:
            layout.dtypes[name] = _unprefixed(tensor.dtype)
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(_STAND_INS[tensor.dtype])
        if copy is not None:
            stored[name] = copy(name, tensor)
        else:
            stored[name] = _own_memory(tensor, spans)
    return stored, layout


def _with_parts_of_sparse(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, list[int]]]]:
    """Return tensors with each sparse one replaced by its parts, and the layouts and shapes of these."""
    strided: dict[str, torch.Tensor] = {}
    sparse = {}
    for name, tensor in tensors.items():
        parts = None if is_plain(tensor) else parts_of(tensor)
        if parts is None:
            strided[name] = tensor
            continue
        sparse[name] = (_unprefixed(tensor.layout), list(tensor.shape))
        for number, part in enumerate(parts):
            strided[f"{name}#{number}"] = part
    return strided, sparse


def tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names whose tensor is the memory of an earlier one, with the first name of that memory."""
    first_names: dict[object, str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        # Empty tensors all have the same address, and tensors on the meta device have none.
        if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
            continue
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        kept = first_names.setdefault(memory, name)
        if kept != name:
            aliases[name] = kept
    return aliases


def decode_tensors(stored: Mapping[str, torch.Tensor], layout: TensorLayout) -> dict[str, torch.Tensor]:
    """Return the tensors that `encode_tensors` was given; tied ones are one object under two names."""
    expected = set(layout.order) - set(layout.aliases)
    if expected != set(stored):
        raise ValueError(f"the tensors {sorted(expected ^ set(stored))} are only in the file or only in its list")
    tensors = dict(stored)
    for name, type_name in layout.dtypes.items():
        dtype = _STAND_IN_NAMES[type_name]
        if dtype.is_complex:
            tensors[name] = torch.view_as_complex(tensors[name])
        else:
            tensors[name] = tensors[name].view(dtype)
    strided = {name: tensors[layout.aliases.get(name, name)] for name in layout.order}
    return _with_sparse(strided, layout.sparse)


def _with_sparse(
    tensors: Mapping[str, torch.Tensor], sparse: Mapping[str, tuple[str, list[int]]]
) -> dict[str, torch.Tensor]:
    """Return tensors with each sparse one in place of its parts."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        whole, _, number = name.rpartition("#")
        if whole not in sparse:
            found[name] = tensor
        elif number == "0":
            kind, shape = sparse[whole]
            count = 2 if kind == "sparse_coo" else 3
            parts = [tensors[f"{whole}#{each}"] for each in range(count)]
            found[whole] = rebuilt(_SPARSE_LAYOUTS[kind], shape, parts, checked=True)
    return found


def safetensors_parts(stored: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
    """Return the parts of a safetensors file: its header, then each tensor's memory, not copied on a CPU.

    The library's `save` makes two copies of everything, and holds the GIL all the while.
    Source: https://github.com/huggingface/safetensors#format.
    """
    # The widest dtypes first: every tensor is aligned, so that readers can map the file.
    ordered = sorted(stored.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {}
    parts: list[bytes | memoryview] = []
    end = 0
    for name, tensor in ordered:
        begin = end
        end = begin + tensor.numel() * tensor.element_size()
        dtype = _NAMES_IN_FILES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        if begin != end:
            parts.append(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT_BYTES)
    return [len(encoded).to_bytes(8, "little") + encoded, *parts]


def _plain(tensor: torch.Tensor, name: str, what: str) -> torch.Tensor:
    """Return a tensor without graph, conjugation or negation; refuse what a file cannot hold."""
    if name == "__metadata__":
        raise CheckpointError(f"The {what} has a tensor named '__metadata__', which safetensors reserves: rename it.")
    if not is_plain(tensor):
        raise CheckpointError(
            f"'{name}' of the {what} is a {kind_of(tensor)} tensor, which a file cannot hold. Make it a dense tensor, "
            "or keep it out of the state."
        )
    return tensor.detach().resolve_conj().resolve_neg()


def _own_memory(tensor: torch.Tensor, spans: dict[object, list[tuple[int, int]]]) -> torch.Tensor:
    """Return a contiguous tensor that shares no byte with earlier ones; `spans` lists these by storage."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    if not tensor.numel():
        return tensor
    start = tensor.data_ptr()
    end = start + tensor.numel() * tensor.element_size()
    taken = spans.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), [])
    if any(start < other_end and other_start < end for other_start, other_end in taken):
        return tensor.clone()
    taken.append((start, end))
    return tensor
