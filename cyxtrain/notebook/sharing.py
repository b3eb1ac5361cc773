"""Send objects to other processes of this machine: pickled, with large arrays in shared memory.

Classes and functions of a notebook are sent by value (cloudpickle). Arrays are written once, into a file without a
name, which each receiver maps; memory maps and HDF5 datasets are sent as the name of their file. Parts that both sides
have, such as a trainer's model, are sent by name. So are, from then on, the objects, classes and functions that were
sent: both sides name them by their number in the pickle's memo.

Loading runs whatever code the sender chooses: only messages of `pool.py` and `worker.py` are loaded here, over a
connection that nobody else can reach.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import mmap
import os
import pickle
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from cloudpickle import cloudpickle
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.serialization import config as serialization

from cyxtrain.data.batches.stored import reopening
from cyxtrain.environment import torch_compat
from cyxtrain.environment.regular_files import open_regular

# Smaller arrays are pickled.
_SHARED_BYTES = 4096
# The largest type that PyTorch has of each kind, by NumPy's letters of kinds.
_ITEM_BYTES = {"b": 8, "i": 8, "u": 8, "f": 8, "c": 16}
# Attribute that a learning-rate schedule sets on an optimizer; `LearningRates` sets it again.
_WRAPPED = "step"
CODE = (type, types.FunctionType)
"""Classes and functions: they come back by name as the sender's own, without their attributes."""
_known: ContextVar[Mapping[str, Any]] = ContextVar("known")


@contextlib.contextmanager
def shared_file() -> Iterator[str]:
    """Yield the path of an empty file in memory, which other processes of this user can open meanwhile.

    Processes that have mapped it keep its content. On Linux it has no name: nothing is left of it when its processes
    end, and a container's small /dev/shm does not limit it. Elsewhere it is a temporary file.
    """
    is_unnamed = sys.platform == "linux"
    if is_unnamed:
        number = os.memfd_create("cyxtrain", os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{number}"
    else:
        number, path = tempfile.mkstemp(prefix="cyxtrain-")
    try:
        yield path
    finally:
        os.close(number)
        if not is_unnamed:
            with contextlib.suppress(OSError):  # Windows does not remove a mapped file
                os.unlink(path)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles for another process of this machine."""

    names: Mapping[int, str] = {}
    """Objects that the receiver has: names by id."""
    is_data = False
    """Whether tensors are samples: a small view of a large tensor is then copied, not sent with all of it."""
    storages: Mapping[int, str] = {}
    """Tensors whose memory the receiver has: names by address."""
    sent: dict[str, Any] | None = None
    """Filled with what the receiver has from then on, by name (`_named`)."""

    def dump(self, obj: Any) -> None:
        """Pickle an object."""
        super().dump(obj)
        if self.sent is not None:
            self.sent.update(_named(self.memo.copy().values(), only_code=self.is_data))

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild an object, or what cloudpickle does."""
        if id(obj) in self.names:
            return _known_part, (self.names[id(obj)],)
        if isinstance(obj, np.ndarray):
            return _reduced_array(obj) or super().reducer_override(obj)
        if type(obj) is types.CodeType:
            make, arguments = self.dispatch_table[types.CodeType](obj)
            return _code_of, (make, arguments, obj.co_filename)
        reduced = self._reduced_view(obj) if type(obj) is Tensor else None
        return reduced or reopening(obj) or _reduced(obj) or super().reducer_override(obj)

    def _reduced_view(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """Return how to rebuild a view of memory that the receiver has, or needs little of; otherwise None."""
        name = None
        if self.storages:
            name = self.storages.get(address_of(tensor))
        if name is not None:
            return _part_of_known, (name, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        if self.is_data and tensor.untyped_storage().nbytes() > 2 * tensor.nbytes:
            return _same, (tensor.detach().clone(),)
        return None


def write(
    value: Any,
    path: str,
    known: Mapping[str, Any],
    *,
    is_data: bool = False,
    sent: dict[str, Any] | None = None,
) -> None:
    """Write an object and all that it holds to an empty file.

    `known` is what the receiver has, by name; `Pickler` describes the options. Cost: the bytes of its arrays once,
    except memory maps and HDF5 datasets. Raises any Exception if it holds something that cannot be sent, such as an
    open file.
    """
    pickler = _pickler(known, is_data=is_data, sent=sent)
    # A file that never leaves memory needs no checksum, which PyTorch would compute over all bytes.
    fast = serialization.patch({"save.compute_crc32": False})  # type: ignore[attr-defined]
    with fast, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about arrays that are not writable
        torch.save(value, path, pickle_module=_module(pickler, pickle.Unpickler), pickle_protocol=5)


def read(
    path: str,
    known: Mapping[str, Any],
    *,
    mapped: bool,
    is_data: bool = False,
    sent: dict[str, Any] | None = None,
) -> Any:
    """Return what another process has written, with tensors on the CPU.

    `known` holds the parts that `write` sent by name; `is_data` and `sent` are as for `write`. If `mapped`, arrays stay
    in the file's memory, with changes private to this process; otherwise they are copied.
    """

    class Unpickler(pickle.Unpickler):
        def load(self) -> Any:
            value = super().load()
            if sent is not None:
                sent.update(_named(self.memo.copy().items(), only_code=is_data))
            return value

    with _knowing(known):
        return torch.load(path, "cpu", _module(pickle.Pickler, Unpickler), weights_only=False, mmap=mapped)


def returning(known: Mapping[str, Any]) -> type[Pickler]:
    """Return a pickler, usable many times, for the process that sent what this one has."""
    tensors = {name: part for name, part in known.items() if isinstance(part, Tensor)}
    storages = {address_of(tensor): name for name, tensor in tensors.items() if address_of(tensor)}
    return _pickler(known, storages=storages)


def as_bytes(value: Any, pickler: type[Pickler]) -> bytes:
    """Pickle something small, such as an exception; raise what `write` raises."""
    target = io.BytesIO()
    pickler(target, protocol=5).dump(value)
    return target.getvalue()


def from_bytes(data: bytes, known: Mapping[str, Any] | None = None) -> Any:
    """Return what `as_bytes` was given; raise any Exception if it cannot be rebuilt."""
    with _knowing(known or {}):
        return pickle.loads(data)


def address_of(tensor: Tensor) -> int:
    """Return where a tensor's memory is; 0 if it is not in this process's memory."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return 0
    return tensor.untyped_storage().data_ptr()


def _pickler(known: Mapping[str, Any], **options: Any) -> type[Pickler]:
    names = {id(part): name for name, part in known.items()}
    return type("Pickler", (Pickler,), {"names": names, **options})


def _module(pickler: type, unpickler: type) -> Any:
    """Return what PyTorch accepts as a module like pickle."""
    return types.SimpleNamespace(__name__="pickle", Pickler=pickler, Unpickler=unpickler, load=pickle.load)


@contextlib.contextmanager
def _knowing(known: Mapping[str, Any]) -> Iterator[None]:
    token = _known.set(known)
    try:
        yield
    finally:
        _known.reset(token)


# --- parts that the receiver has -----------------------------------------------------------------------------------


def _known_part(name: str) -> Any:
    return _known.get()[name]


def _part_of_known(
    name: str, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    storage = _known.get()[name].untyped_storage()
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, tuple(size), tuple(stride))


def _named(numbered: Iterable[tuple[int, Any]], *, only_code: bool) -> dict[str, Any]:
    """Return the classes, functions and plain objects of a memo by name: both sides number them alike."""
    if only_code:
        return {f"code {number}": each for number, each in numbered if _is_own_code(each)}
    return {f"object {number}": each for number, each in numbered if _is_own_code(each) or _is_plain(each)}


def _is_own_code(obj: Any) -> bool:
    """Return whether an object is a class or function that is sent by value; others are imported."""
    return isinstance(obj, CODE) and not cloudpickle._should_pickle_by_reference(obj)


def _is_plain(obj: Any) -> bool:
    """Return whether an object has attributes and no pickling code of its own."""
    kind = type(obj)
    ways: tuple[Any, ...] = (kind.__reduce_ex__, kind.__reduce__)
    if ways != (object.__reduce_ex__, object.__reduce__) or kind in copyreg.dispatch_table:
        return False
    return not isinstance(obj, (*CODE, types.ModuleType)) and isinstance(getattr(obj, "__dict__", None), dict)


def _code_of(make: Callable[..., types.CodeType], arguments: tuple[Any, ...], filename: str) -> types.CodeType:
    return make(*arguments).replace(co_filename=filename)  # cloudpickle drops it from 3.1.3 on


# --- objects whose own pickles leave something out -----------------------------------------------------------------


def _reduced(obj: Any) -> tuple[Any, ...] | None:
    """Return how to rebuild an object whose own pickle would lose something; None for any other."""
    if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
        return _bare, (type(obj).__base__,), vars(obj), None, None, _fill_parametrized
    # Pickled by name, it would be looked up in the receiver's own __main__.
    if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
        return _cached, (obj.__wrapped__, obj.cache_parameters())
    if isinstance(obj, torch.optim.Optimizer):  # its own pickle has neither hooks nor further attributes
        return _bare, (type(obj),), {name: value for name, value in vars(obj).items() if name != _WRAPPED}
    if isinstance(obj, Tensor) and obj.is_leaf:
        hooks = torch_compat.hooks_of(obj)
        if any(hooks):
            plain = obj.__reduce_ex__(5)
            assert isinstance(plain, tuple)
            return _with_hooks, (*plain[:2], *hooks)
    return None


def _same(value: Any) -> Any:
    return value


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _bare(kind: Any) -> Any:
    return kind.__new__(kind)


def _fill_parametrized(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Fill a module whose parameters are computed, as by spectral norm; PyTorch refuses to pickle those."""
    vars(module).update(attributes)
    torch_compat.inject_parametrizations(module, [*attributes["_modules"]["parametrizations"]])


def _with_hooks(
    remake: Callable[..., Tensor], arguments: tuple[Any, ...], hooks: Sequence[Any], after: Sequence[Any]
) -> Tensor:
    """Return a tensor with its gradient hooks, which PyTorch's pickle leaves out."""
    tensor = remake(*arguments)
    for hook in hooks:
        tensor.register_hook(hook)
    for hook in after:
        tensor.register_post_accumulate_grad_hook(hook)
    return tensor


# --- arrays --------------------------------------------------------------------------------------------------------


def _reduced_array(array: np.ndarray[Any, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return how to share an array; None if it is pickled."""
    if type(array) is np.memmap:
        place = _place_in_file(array)
        if place is not None:
            return _open_array, place
    dtype = array.dtype
    is_torch_type = dtype.kind in _ITEM_BYTES and dtype.isnative and dtype.itemsize <= _ITEM_BYTES[dtype.kind]
    if type(array) not in (np.ndarray, np.memmap) or not is_torch_type or array.nbytes < _SHARED_BYTES:
        return None
    return _as_array, (torch.from_numpy(np.ascontiguousarray(array)),)  # a view of a large array is copied


def _as_array(tensor: torch.Tensor) -> Any:
    return tensor.numpy()


def _place_in_file(array: np.memmap[Any, Any]) -> tuple[Any, ...] | None:
    """Return (file, offset, bytes, shape, strides, dtype) of a memory map; None if no file holds it."""
    mapping: Any = array
    root = array
    while isinstance(mapping, np.ndarray):
        if isinstance(mapping, np.memmap):
            root = mapping
        mapping = mapping.base
    name = root.filename
    if not isinstance(mapping, mmap.mmap) or name is None or array.dtype.hasobject or array.size == 0:
        return None
    if root.mode == "c":  # its changes are not in the file
        return None
    begins = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    if min(array.strides, default=0) < 0 or not _is_mapped_at(str(name), begins):
        return None
    # A mapping begins at a multiple of the granularity, at or before NumPy's own offset.
    mapping_offset = root.offset - root.offset % mmap.ALLOCATIONGRANULARITY
    offset = mapping_offset + array.__array_interface__["data"][0] - begins
    last_item = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    extent = last_item + array.itemsize
    return os.path.realpath(name), offset, extent, array.shape, array.strides, array.dtype


def _is_mapped_at(name: str, address: int) -> bool:
    """Return whether the file at a path is the one mapped at an address, not a new file of that name."""
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
