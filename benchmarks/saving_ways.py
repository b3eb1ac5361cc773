"""The ways in which `checkpoint.py` has the same state saved: ours, PyTorch's, and what a machine can do at best.

    writer              cyxtrain's Writer: a copy into buffers that it has, then written beside the training
    writer-first        the same with a Writer that is new, and has no buffers yet
    write-checkpoint    cyxtrain's write_checkpoint: written and synchronised, while training waits
    torch-save          torch.save: written, while training waits; the disk has it some time later
    torch-save-fsync    the same and fsync
    dcp                 torch.distributed.checkpoint.save, which synchronises by default
    dcp-async           torch.distributed.checkpoint.async_save: a copy, then written beside the training
    dcp-async-kept      the same with a stager that is kept, and has its buffers
    bare                the limit: a copy into one buffer, and that one written and synchronised beside the training

Ours give one file, renamed when it is whole, in which every byte has a checksum. PyTorch's have CRC-32s that its reader
does not look at; bare has no names, and nothing else.
"""

from __future__ import annotations

import abc
import contextlib
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn import functional

from cyxtrain.checkpoint.checkpoint_file import CheckpointState, read_checkpoint, write_checkpoint
from cyxtrain.checkpoint.folder import CheckpointFolder
from cyxtrain.checkpoint.format.optimizer_state import optimizer_state_by_name
from cyxtrain.checkpoint.writer import Writer

_LAYERS, _ROWS = 8, 16
_NAME = "state"


class Training:
    """A model in training: square layers, of which parameters and Adam's state have about so many bytes.

    Args:
        megabytes: Of 10^6 bytes.
    """

    def __init__(self, megabytes: float) -> None:
        torch.manual_seed(0)
        width = max(1, round(math.sqrt(megabytes * 1e6 / (_LAYERS * 3 * 4))))  # a weight, and two averages of Adam's
        layers = [part for _ in range(_LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self._inputs, self._targets = torch.randn(2, _ROWS, width)
        self.step()

    def step(self) -> None:
        """Changes every tensor of the state."""
        self.optimizer.zero_grad()
        functional.mse_loss(self.model(self._inputs), self._targets).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that are to be saved, by name; they change with the next step."""
        return named(self.model.state_dict(), optimizer_state_by_name(self.optimizer, self.model)[0])


def named(model: Mapping[str, Tensor], optimizer: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors of a model and, by parameter name, of an optimizer under one name each."""
    return {**model, **{f"{name}/{key}": value for name, own in optimizer.items() for key, value in own.items()}}


Wait = Callable[[], object]
"""Waits for the files, and raises what went wrong."""


class Way(abc.ABC):
    """A way to save what is trained, and to read it.

    Args:
        training: What is trained.
        folder: For files, with nothing in it whenever `save` is called.
        at_end: Ends what is still at work then.
    """

    def __init__(self, training: Training, folder: Path, at_end: contextlib.ExitStack) -> None:
        self.training = training
        self.folder = folder
        self.at_end = at_end

    @abc.abstractmethod
    def save(self, done: Callable[[], None]) -> Wait:
        """Saves the state; the training may change it as soon as this returns.

        Args:
            done: Called in any thread when the files are complete.
        """

    @abc.abstractmethod
    def load(self) -> dict[str, Tensor]:
        """Returns what was saved, as `Training.state` does, in separate memory."""


class _OurWriter(Way):
    """`cyxtrain.checkpoint.writer.Writer`: one for all saves, with its buffers."""

    _writer: Writer | None = None

    def save(self, done: Callable[[], None]) -> Wait:
        if self._writer is None:
            self._writer = Writer(CheckpointFolder(self.folder))
            self.at_end.callback(self._writer.close)
        return _write(self._writer, self.training, done)

    def load(self) -> dict[str, Tensor]:
        return _read_ours(CheckpointFolder(self.folder).file(_NAME))


class _OurFirstWriter(Way):
    """The same, but each save has a new one."""

    def save(self, done: Callable[[], None]) -> Wait:
        writer = Writer(CheckpointFolder(self.folder))
        wait = _write(writer, self.training, done)

        def wait_and_close() -> None:
            try:
                wait()
            finally:
                writer.close()

        return wait_and_close

    def load(self) -> dict[str, Tensor]:
        return _read_ours(CheckpointFolder(self.folder).file(_NAME))


class _OurFile(Way):
    """`cyxtrain.checkpoint.checkpoint_file.write_checkpoint`."""

    def save(self, done: Callable[[], None]) -> Wait:
        write_checkpoint(self.folder / _NAME, _our_state(self.training))
        done()
        return _nothing

    def load(self) -> dict[str, Tensor]:
        return _read_ours(self.folder / _NAME)


class _TorchSave(Way):
    """`torch.save`."""

    synchronises = False

    def save(self, done: Callable[[], None]) -> Wait:
        state = {"model": self.training.model.state_dict(), "optimizer": self.training.optimizer.state_dict()}
        with open(self.folder / _NAME, "wb") as file:
            torch.save(state, file)
            if self.synchronises:
                file.flush()
                os.fsync(file.fileno())
        done()
        return _nothing

    def load(self) -> dict[str, Tensor]:
        found = torch.load(self.folder / _NAME, weights_only=True)
        names = [name for name, _ in self.training.model.named_parameters()]
        return named(found["model"], {names[index]: own for index, own in found["optimizer"]["state"].items()})


class _TorchSaveFsync(_TorchSave):
    """The same, and fsync."""

    synchronises = True


class _Dcp(Way):
    """`torch.distributed.checkpoint.save`."""

    def save(self, done: Callable[[], None]) -> Wait:
        dcp.save(_dcp_state(self.training), checkpoint_id=self.folder)
        done()
        return _nothing

    def load(self) -> dict[str, Tensor]:
        return _read_dcp(self.folder, self.training)


class _DcpAsync(Way):
    """`torch.distributed.checkpoint.async_save`."""

    stager: DefaultStager | None = None

    def save(self, done: Callable[[], None]) -> Wait:
        saving = dcp.async_save(_dcp_state(self.training), checkpoint_id=self.folder, async_stager=self.stager)
        assert isinstance(saving, Future)  # the copy has been made
        saving.add_done_callback(lambda _: done())
        return saving.result

    def load(self) -> dict[str, Tensor]:
        return _read_dcp(self.folder, self.training)


class _DcpAsyncKept(_DcpAsync):
    """The same with one stager for all saves, made as it is where none is given; nothing in it needs a GPU."""

    def __init__(self, training: Training, folder: Path, at_end: contextlib.ExitStack) -> None:
        super().__init__(training, folder, at_end)
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        at_end.callback(self.stager.close)


class _Bare(Way):
    """One copy, one write, one fsync: what others add is theirs."""

    def __init__(self, training: Training, folder: Path, at_end: contextlib.ExitStack) -> None:
        super().__init__(training, folder, at_end)
        self._shapes = {name: value.shape for name, value in training.state().items()}
        self._buffer = torch.empty(sum(shape.numel() for shape in self._shapes.values()))
        self._views = self._apart(self._buffer)
        self._pool = at_end.enter_context(ThreadPoolExecutor(1))

    def save(self, done: Callable[[], None]) -> Wait:
        for name, value in self.training.state().items():
            self._views[name].copy_(value)

        def write() -> None:
            with open(self.folder / _NAME, "wb") as file:
                file.write(self._buffer.numpy().data)
                file.flush()
                os.fsync(file.fileno())
            done()

        return self._pool.submit(write).result

    def load(self) -> dict[str, Tensor]:
        return self._apart(torch.from_numpy(np.fromfile(self.folder / _NAME, dtype=np.float32)))

    def _apart(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


def _nothing() -> None:
    """All is done already."""


def _our_state(training: Training) -> CheckpointState:
    """Returns what ours are given; its tensors are the live ones."""
    return CheckpointState(training.model.state_dict(), *optimizer_state_by_name(training.optimizer, training.model))


def _write(writer: Writer, training: Training, done: Callable[[], None]) -> Wait:
    writer.write(_NAME, _our_state(training), done)

    def wait() -> None:
        problem = writer.wait()
        if problem is not None:
            raise problem

    return wait


def _read_ours(path: Path) -> dict[str, Tensor]:
    state = read_checkpoint(path)
    return named(state.model, state.optimizer)


def _dcp_state(training: Training) -> dict[str, Any]:
    """Returns what PyTorch's are given, made as their documentation shows; its tensors are the live ones."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer}


def _read_dcp(folder: Path, training: Training) -> dict[str, Tensor]:
    live = _dcp_state(training)
    # It reads into tensors that are there.
    model = {name: torch.zeros_like(value) for name, value in live["model"].items()}
    optimizer = {
        name: {key: torch.zeros_like(value) for key, value in own.items()}
        for name, own in live["optimizer"]["state"].items()
    }
    dcp.load({"model": model, "optimizer": {"state": optimizer}}, checkpoint_id=folder)
    return named(model, optimizer)


WAYS: dict[str, type[Way]] = {
    "writer": _OurWriter,
    "writer-first": _OurFirstWriter,
    "write-checkpoint": _OurFile,
    "torch-save": _TorchSave,
    "torch-save-fsync": _TorchSaveFsync,
    "dcp": _Dcp,
    "dcp-async": _DcpAsync,
    "dcp-async-kept": _DcpAsyncKept,
    "bare": _Bare,
}
