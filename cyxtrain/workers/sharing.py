"""Objects on their way to other processes of this machine: pickled, their arrays in memory that all of them map.

Where something is sent, classes and functions of a notebook go along as they are (cloudpickle), and what the arrays
hold is written once, into a file without a name; each receiver maps it. Memory maps go by the name of their file. Parts
that both sides have already, such as a trainer's model, go by name and stay what they are.

Loading runs whatever the sender wants: only what `pool.py` and `worker.py` send each other is loaded here, over a
channel on which both have proved who they are.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.serialization import config as serialization

_SHARED_BYTES = 4096
"""Smaller arrays go with the rest."""
_KINDS = "biufc"
"""Of NumPy's dtypes: those that PyTorch has."""
_known: ContextVar[Mapping[str, Any]] = ContextVar("known")


class SharedFile:
    """A file in memory that other processes of this user open by its path, until it is closed.

    On Linux it has no name, so that nothing is left of it however its processes end, and a container's small /dev/shm
    does not limit it; elsewhere it is a temporary file.

    Attributes:
        path: Where others open it.
    """

    def __init__(self) -> None:
        self._is_closed = False
        if sys.platform == "linux":
            self._file = os.memfd_create("cyxtrain", os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self.path = tempfile.mkstemp(prefix="cyxtrain-")

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.path,)  # what others are given of it

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Closes it; who has mapped it keeps what it holds."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._file)
        if sys.platform != "linux":
            with contextlib.suppress(OSError):  # Windows does not remove what is still mapped
                os.unlink(self.path)


def write(value: Any, file: SharedFile, known: Mapping[str, Any], *, is_data: bool = False) -> None:
    """Writes an object and all that it holds.

    Cost: the bytes of its arrays once, but for memory maps.

    Args:
        value: Anything.
        file: Empty.
        known: What the receiver has already, by name.
        is_data: Whether tensors are rows: then a view of a large one goes without what it does not show.

    Raises:
        Exception: It holds what cannot be sent, such as an open file.
    """
    names = {id(part): name for name, part in known.items()}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            """Says how an object is to be made anew; NotImplemented: as always."""
            if id(obj) in names:
                return _known_part, (names[id(obj)],)
            if isinstance(obj, np.ndarray):
                return _reduced_array(obj) or super().reducer_override(obj)
            if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
                return _bare, (type(obj).__base__,), vars(obj), None, None, _fill_parametrized
            if is_data and type(obj) is torch.Tensor and obj.untyped_storage().nbytes() > 2 * obj.nbytes:
                return _same, (obj.detach().clone(),)
            return super().reducer_override(obj)

    fast = serialization.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]
    with fast, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arrays that are not to be written to
        torch.save(value, file.path, pickle_module=_module(Pickler), pickle_protocol=5)


def read(path: str, known: Mapping[str, Any], *, mapped: bool) -> Any:
    """Returns what another process has written; its tensors are on the CPU.

    Args:
        path: Of the file.
        known: What stands for the names that were given there.
        mapped: Whether arrays stay in the memory of the file; what is written to them is this process's own. Else
            they are copies.
    """
    token = _known.set(known)
    try:
        return torch.load(path, "cpu", _module(pickle.Pickler), weights_only=False, mmap=mapped)
    finally:
        _known.reset(token)


def as_bytes(value: Any) -> bytes:
    """Returns something small, such as an exception, pickled with its class.

    Raises:
        Exception: As `write`.
    """
    found: bytes = cloudpickle.dumps(value)
    return found


def from_bytes(data: bytes) -> Any:
    """Returns what `as_bytes` was given.

    Raises:
        Exception: It cannot be made anew from what it has said of itself.
    """
    return pickle.loads(data)


def _module(pickler: type) -> Any:
    """Returns what PyTorch takes for a module like pickle."""
    return types.SimpleNamespace(__name__="pickle", Pickler=pickler, Unpickler=pickle.Unpickler, load=pickle.load)


def _known_part(name: str) -> Any:
    return _known.get()[name]


def _bare(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _fill_parametrized(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Makes a module one whose parameters are calculated, as spectral norm does; PyTorch refuses to pickle those."""
    vars(module).update(attributes)
    parametrize._inject_new_class(module)
    for name in attributes["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)


def _same(value: Any) -> Any:
    return value


def _reduced_array(array: np.ndarray[Any, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Returns how an array comes to be in another process without being pickled; None: it is pickled."""
    if type(array) is np.memmap and (place := _place_in_file(array)) is not None:
        return _open_array, place
    kind, size = array.dtype.kind, array.dtype.itemsize
    shared = kind in _KINDS and array.dtype.isnative and size <= (16 if kind == "c" else 8)
    if type(array) not in (np.ndarray, np.memmap) or not shared or array.nbytes < _SHARED_BYTES:
        return None
    # What is not in one piece may lie in much that nobody wants.
    return _as_array, (torch.from_numpy(np.ascontiguousarray(array)),)


def _as_array(tensor: torch.Tensor) -> Any:
    return tensor.numpy()


def _place_in_file(array: np.memmap[Any, Any]) -> tuple[Any, ...] | None:
    """Returns (file, offset, bytes, shape, strides, dtype) of a memory map; None where its file does not have it."""
    mapping: Any = array
    root = array
    while isinstance(mapping, np.ndarray):
        root = mapping if isinstance(mapping, np.memmap) else root
        mapping = mapping.base
    name, private = root.filename, root.mode == "c"
    if not isinstance(mapping, mmap.mmap) or name is None or private or not Path(name).is_file():
        return None
    if min(array.strides, default=0) < 0 or array.dtype.hasobject or array.size == 0:
        return None
    begins = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    skipped = root.offset - root.offset % mmap.ALLOCATIONGRANULARITY
    offset = skipped + array.__array_interface__["data"][0] - begins
    extent = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize
    return str(Path(name).resolve()), offset, extent, array.shape, array.strides, array.dtype


def _open_array(
    name: str, offset: int, extent: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    whole = np.memmap(name, np.uint8, "c", offset, (extent,))
    found: np.ndarray[Any, Any] = np.ndarray(shape, dtype, whole.data, 0, strides).view(np.memmap)
    return found
