"""Objects on their way to other processes of this machine: pickled, their arrays in memory that all of them map.

Where something is sent, classes and functions of a notebook go along as they are (cloudpickle), and what the arrays
hold is written once, into a file without a name; each receiver maps it. Memory maps go by the name of their file. Parts
that both sides have already, such as a trainer's model, go by name and stay what they are; so do, on the way back, the
classes and functions that had been sent.

Loading runs whatever the sender wants: only what `pool.py` and `worker.py` send each other is loaded here, over a
connection that nobody else has.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import mmap
import os
import pickle
import secrets
import sys
import tempfile
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from cloudpickle import cloudpickle
from torch.utils.serialization import config as serialization

from cyxtrain.environment.regular_files import open_regular
from cyxtrain.notebook import reducers

_SHARED_BYTES = 4096
"""Smaller arrays go with the rest."""
_KINDS = "biufc"
"""Of NumPy's dtypes: those that PyTorch has."""
_known: ContextVar[Mapping[str, Any]] = ContextVar("known")
_objects: ContextVar[dict[str, Any]] = ContextVar("objects")
_TAG = "_cyxtrain_tag"
"""Attribute by which a function is known when it comes back."""
_here = secrets.token_hex(4)
_tags = itertools.count()
_functions: weakref.WeakValueDictionary[str, types.FunctionType] = weakref.WeakValueDictionary()


class SharedFile:
    """A file in memory that other processes of this user open by its path, until it is closed.

    On Linux it has no name, so that nothing is left of it however its processes end, and a container's small /dev/shm
    does not limit it; elsewhere it is a temporary file. It is pickled as its path.

    Attributes:
        path: Where others open it.
    """

    def __init__(self) -> None:
        self._is_closed = True
        if sys.platform == "linux":
            self._file = os.memfd_create("cyxtrain", os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self.path = tempfile.mkstemp(prefix="cyxtrain-")
        self._is_closed = False

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.path,)

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


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what another process shall have."""

    names: Mapping[int, str] = {}
    """What the receiver has already: names by id."""
    is_data = False
    """Whether tensors are rows: then a view of a large one goes without what it does not show."""
    storages: Mapping[int, str] = {}
    """Tensors whose memory the receiver has already: names by address."""
    objects: dict[str, Any] | None = None
    """Where objects that are sent are noted by name, so that what becomes of each can be told of it; None: nowhere."""
    returns = False
    """Whether this goes back to who has sent the classes and functions that are here."""

    def reducer_override(self, obj: Any) -> Any:
        """Says how an object is to be made anew."""
        if id(obj) in self.names:
            return _known_part, (self.names[id(obj)],)
        if isinstance(obj, np.ndarray):
            return _reduced_array(obj) or super().reducer_override(obj)
        if type(obj) is types.CodeType:
            make, arguments = self.dispatch_table[types.CodeType](obj)
            return _code_of, (make, arguments, obj.co_filename)
        if isinstance(obj, type) and self.returns and (key := cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)):
            return _class_of, (key,)
        if type(obj) is types.FunctionType and not cloudpickle._should_pickle_by_reference(obj):
            tag = _tag_of(obj) if self.returns else _tagged(obj)
            if self.returns and tag:
                _functions.setdefault(tag, obj)
                return _function_of, (tag,)
            return super().reducer_override(obj)
        if type(obj) is torch.Tensor and self.storages and (name := self.storages.get(address_of(obj))):
            return _part_of_known, (name, obj.dtype, obj.size(), obj.stride(), obj.storage_offset())
        if self.is_data and type(obj) is torch.Tensor and obj.untyped_storage().nbytes() > 2 * obj.nbytes:
            return reducers.same, (obj.detach().clone(),)
        reduced = reducers.reduced(obj)
        if reduced is None and self.objects is not None and reducers.is_plain(obj):
            return self._noted(obj, self.objects)
        return reduced or super().reducer_override(obj)

    def _noted(self, obj: Any, objects: dict[str, Any]) -> tuple[Any, ...]:
        name = f"object {len(objects)}"
        objects[name] = obj
        _, arguments, *rest = obj.__reduce_ex__(5)
        return _noted_object, (name, *arguments), *rest


def write(
    value: Any,
    file: SharedFile,
    known: Mapping[str, Any],
    *,
    is_data: bool = False,
    returns: bool = False,
    objects: dict[str, Any] | None = None,
) -> None:
    """Writes an object and all that it holds.

    Cost: the bytes of its arrays once, but for memory maps.

    Args:
        value: Anything.
        file: Empty.
        known: What the receiver has already, by name.
        is_data: As in `Pickler`.
        returns: As in `Pickler`.
        objects: As in `Pickler`.

    Raises:
        Exception: It holds what cannot be sent, such as an open file.
    """
    options = {"names": _by_id(known), "is_data": is_data, "returns": returns, "objects": objects}
    pickler = type("Pickler", (Pickler,), options)
    fast = serialization.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]
    with fast, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arrays that are not to be written to
        torch.save(value, file.path, pickle_module=_module(pickler), pickle_protocol=5)


def read(path: str, known: Mapping[str, Any], *, mapped: bool, objects: dict[str, Any] | None = None) -> Any:
    """Returns what another process has written; its tensors are on the CPU.

    Args:
        path: Of the file.
        known: What stands for the names that were given there.
        mapped: Whether arrays stay in the memory of the file; what is written to them is this process's own. Else
            they are copies.
        objects: Takes those that were noted there, by name.
    """
    with _knowing(known):
        token = _objects.set({} if objects is None else objects)
        try:
            return _load(path, mapped=mapped)
        finally:
            _objects.reset(token)


def _load(path: str, *, mapped: bool) -> Any:
    return torch.load(path, "cpu", _module(pickle.Pickler), weights_only=False, mmap=mapped)


def returning(known: Mapping[str, Any]) -> type[Pickler]:
    """Returns what pickles for who has sent what this process has; it may be used many times."""
    tensors = {name: part for name, part in known.items() if isinstance(part, torch.Tensor)}
    storages = {address_of(tensor): name for name, tensor in tensors.items() if address_of(tensor)}
    return type("Pickler", (Pickler,), {"names": _by_id(known), "storages": storages, "returns": True})


def as_bytes(value: Any, pickler: type[Pickler]) -> bytes:
    """Returns something small, such as an exception.

    Raises:
        Exception: As `write`.
    """
    target = io.BytesIO()
    pickler(target, protocol=5).dump(value)
    return target.getvalue()


def from_bytes(data: bytes, known: Mapping[str, Any] | None = None) -> Any:
    """Returns what `as_bytes` was given.

    Raises:
        Exception: It cannot be made anew from what it has said of itself.
    """
    with _knowing(known or {}):
        return pickle.loads(data)


def _by_id(known: Mapping[str, Any]) -> dict[int, str]:
    return {id(part): name for name, part in known.items()}


@contextlib.contextmanager
def _knowing(known: Mapping[str, Any]) -> Iterator[None]:
    token = _known.set(known)
    try:
        yield
    finally:
        _known.reset(token)


def _module(pickler: type) -> Any:
    """Returns what PyTorch takes for a module like pickle."""
    return types.SimpleNamespace(__name__="pickle", Pickler=pickler, Unpickler=pickle.Unpickler, load=pickle.load)


def address_of(tensor: torch.Tensor) -> int:
    """Returns where a tensor's memory is; 0: it has none here."""
    on_cpu = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return tensor.untyped_storage().data_ptr() if on_cpu else 0


def _noted_object(name: str, kind: Any, *arguments: Any) -> Any:
    found = _objects.get()[name] = kind.__new__(kind, *arguments)
    return found


def _known_part(name: str) -> Any:
    return _known.get()[name]


def _part_of_known(
    name: str, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    storage = _known.get()[name].untyped_storage()
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, tuple(size), tuple(stride))


def _tagged(function: types.FunctionType) -> str:
    """Gives a function a tag by which it will be known."""
    tag = _tag_of(function)
    if not tag or _functions.get(tag) is not function:
        code = function.__code__
        tag = f"{_here} {next(_tags)} {code.co_name} {code.co_firstlineno}"
        vars(function)[_TAG] = tag
        _functions[tag] = function
    return tag


def _tag_of(function: types.FunctionType) -> str:
    """Returns the tag of a function, "" where it has none: a wrapper has that of what it wraps, which is another."""
    tag, code = str(vars(function).get(_TAG, "")), function.__code__
    return tag if tag.endswith(f" {code.co_name} {code.co_firstlineno}") else ""


def _function_of(tag: str) -> types.FunctionType:
    return _functions[tag]


def _code_of(make: Callable[..., types.CodeType], arguments: tuple[Any, ...], filename: str) -> types.CodeType:
    """Returns code that knows where it is from: from 3.1.3 on cloudpickle forgets it, and a traceback has no lines."""
    return make(*arguments).replace(co_filename=filename)


def _class_of(key: str) -> type:
    found: type = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[key]
    return found


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
    if not isinstance(mapping, mmap.mmap) or name is None or private or array.dtype.hasobject or array.size == 0:
        return None
    begins = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    if min(array.strides, default=0) < 0 or not _is_still(str(name), begins):
        return None
    skipped = root.offset - root.offset % mmap.ALLOCATIONGRANULARITY
    offset = skipped + array.__array_interface__["data"][0] - begins
    extent = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize
    return os.path.realpath(name), offset, extent, array.shape, array.strides, array.dtype


def _is_still(name: str, address: int) -> bool:
    """Returns whether a path leads to the file that is mapped at an address, and to no other one of its name."""
    try:
        inode = os.stat(name).st_ino
        if sys.platform != "linux":
            return True
        with open("/proc/self/maps") as maps:
            return any(line.startswith(f"{address:x}-") and int(line.split()[4]) == inode for line in maps)
    except OSError:
        return False


def _open_array(
    name: str, offset: int, extent: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    with open_regular(name) as file:
        whole = np.memmap(file, np.uint8, "c", offset, (extent,))
    found: np.ndarray[Any, Any] = np.ndarray(shape, dtype, whole.data, 0, strides).view(np.memmap)
    return found
