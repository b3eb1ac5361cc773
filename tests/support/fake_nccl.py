"""A stand-in for NCCL: a backend for CPU tensors that waits for a lost rank for ever, unless somebody aborts it.

As NCCL's kernels, its collectives notice neither an error nor the end of another rank; what was aborted leaves wrong
numbers; and to destroy it is to wait for what was begun. It exchanges tensors through the store.
"""

# PyTorch's own annotations of what is overridden here differ from version to version.
# mypy: disable-error-code="override"

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import cyxtrain as cx
from cyxtrain.environment import torch_compat
from cyxtrain.ring.backend import PyTorchGroup  # type: ignore[attr-defined]  # the ring does not export it
from cyxtrain.world import devices, join
from cyxtrain.world.runtime import JoinedWorld

NAME = "fakenccl"
_OPERATIONS: dict[dist.ReduceOp.RedOpType, Callable[[Tensor, int], Tensor]] = {
    dist.ReduceOp.SUM: torch.Tensor.sum,
    dist.ReduceOp.AVG: torch.Tensor.mean,
    dist.ReduceOp.MAX: torch.Tensor.amax,
}


class Named(torch_compat.Backend):  # type: ignore[misc]  # Any: older versions of PyTorch have none
    """What PyTorch from 2.14 on asks for in C++; the calls of Python reach `FakeNCCL` directly."""

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        return NAME

    supports_splitting = supports_shrinking = supports_reconfigure = supports_window = property(lambda _: False)
    _supports_time_estimate = property(lambda _: False)


class FakeNCCL(PyTorchGroup):
    """A process group that is its own backend."""

    _name = NAME
    tells = True
    """Whether a wait that was aborted raises an error, as NCCL's blocking wait does; else it returns wrong numbers."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        super().__init__(store, rank, world_size)
        self._place, self._size, self._store = rank, world_size, store
        self._calls = 0
        self.begun: list[FakeWork] = []
        self.aborted = threading.Event()
        if torch_compat.BACKENDS_HAVE_A_CONSTRUCTOR:
            torch_compat.register_backend(self, Named(rank, world_size), ["cpu"])
        else:
            self._devices = ["cpu"]

    def allreduce(self, tensors: list[Tensor], opts: Any) -> FakeWork:
        reduce = next(reduce for op, reduce in _OPERATIONS.items() if opts.reduceOp == op)
        return self._exchange(tensors[0], lambda parts: tensors[0].copy_(reduce(torch.stack(parts), 0)))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> FakeWork:
        return self._exchange(tensors[0], lambda parts: tensors[0].copy_(parts[opts.rootRank]))

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> FakeWork:
        return self._exchange(tensors[0], lambda parts: torch_compat.copy_all(outputs[0], parts))

    def barrier(self, opts: Any = None) -> FakeWork:
        return self._exchange(torch.zeros(1), lambda parts: None)

    def _exchange(self, tensor: Tensor, finish: Any) -> FakeWork:
        self._calls += 1
        if self.aborted.is_set():
            raise dist.DistBackendError("communicator was aborted")
        keys = [f"{self._calls}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._place], pickle.dumps(tensor.detach().clone()))  # type: ignore[arg-type]  # the stub omits bytes
        self.begun.append(FakeWork(self, keys, finish))
        return self.begun[-1]

    def is_there(self, keys: list[str]) -> bool:
        with contextlib.suppress(dist.DistError):  # its host has ended: this backend does not notice
            return self._store.check(keys)
        return False

    def read(self, keys: list[str]) -> list[Tensor]:
        return [pickle.loads(self._store.get(key)) for key in keys]

    def abort(self) -> None:
        self.aborted.set()

    def shutdown(self) -> None:
        for work in self.begun:
            work.run()
        self._store = dist.HashStore()

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size  # noqa: N815 - PyTorch's names

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        return NAME

    name = _get_backend_name = getBackendName

    def set_timeout(self, timeout: Any) -> None:
        """It waits for ever."""

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass


class FakeWork(dist._Work):
    """A collective on its way."""

    def __init__(self, group: FakeNCCL, keys: list[str], finish: Any) -> None:
        super().__init__()
        self._group, self._keys, self._finish, self._done = group, keys, finish, False

    def run(self) -> None:
        """Waits for all ranks, or the abort."""
        while not self._done and not self._group.aborted.is_set():
            if self._group.is_there(self._keys):
                self._finish(self._group.read(self._keys))
                self._done = True
            time.sleep(0.001)

    def wait(self, timeout: Any = None) -> bool:
        self.run()
        if not self._done and self._group.tells:
            raise dist.DistBackendError("communicator was aborted")
        return True


def _create(options: Any, _: Any) -> FakeNCCL:
    return FakeNCCL(options.store, options.group_rank, options.group_size)


@contextlib.contextmanager
def joined(*, tells: bool) -> Iterator[JoinedWorld]:
    """Within, this process is a rank of a world that takes this backend for NCCL."""
    FakeNCCL.tells = tells
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])

    def make(group: dict[str, Any], *_: object) -> None:
        dist.init_process_group(NAME, **group)

    with (
        mock.patch.object(join, "_require_backend"),
        mock.patch.object(join, "_make_nccl", make),
        mock.patch.object(devices, "check_nccl"),
    ):
        world = cx.init(cx.DistributedConfig(backend="nccl"))
    with world:
        yield world
