"""What the ranks of test_hostile.py do, each in its own process: they join and train, and measure themselves."""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fitting import adam, make_model, make_rows, outcome
from torch import nn
from worlds import wait_until

import cyxtrain as cx
from cyxtrain.ring.rendezvous import dial, mesh, rendezvous
from cyxtrain.ring.rendezvous.listen import listen
from cyxtrain.ring.schedules.selector import SHORT_BYTES

SECONDS = 60.0
ELEMENTS = 100_003
BUSY_SECONDS = 2.5


class Folder:
    """Where ranks and strangers tell each other how far they are."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def tell(self, name: str, text: str = "") -> None:
        part = self._path / f"{name}.part"
        part.write_text(text)
        part.rename(self._path / name)

    def told(self, name: str) -> bool:
        return (self._path / name).exists()

    def hear(self, name: str) -> str:
        """Waits until it is told."""
        wait_until(lambda: self.told(name), SECONDS)
        return (self._path / name).read_text()


class Lines(logging.Handler):
    """When the ring wrote lines into its log."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((time.monotonic(), record.getMessage()))


def join_and_train(path: str) -> dict[str, Any]:
    """Joins when it may, trains when it may, and says what came of it and what it cost."""
    folder, lines, rank = Folder(path), Lines(), int(os.environ["RANK"])
    log = logging.getLogger("cyxtrain.ring")
    log.addHandler(lines)
    log.propagate = False
    _tell_port(folder, rank)
    _tell_what_is_said(folder, rank)
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        _hold_back(folder)
        folder.hear("come")
    with cx.init(cx.DistributedConfig(timeout_ms=int(1000 * SECONDS))):
        dist.all_reduce(torch.zeros(SHORT_BYTES))  # then memory that ranks have in common is there before strangers are
        before = _descriptors()
        folder.tell(f"joined{rank}")
        folder.hear("train")
        trained = _train(folder)
        began = time.monotonic()
        wait_until(lambda: _descriptors() <= before, 10.0)
        left_seconds = time.monotonic() - began
        watch = next(thread for thread in threading.enumerate() if thread.name == "cyxtrain-monitor")
        threads = threading.active_count()
        assert watch.is_alive()
    memory = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return trained | {
        "lines": lines.found,
        "left_seconds": left_seconds,
        "threads": threads,
        "resident_mb": int(memory["VmRSS"].split()[0]) / 1024,
        "highest_mb": int(memory["VmHWM"].split()[0]) / 1024,
    }


def _tell_port(folder: Folder, rank: int) -> None:
    """Tells strangers where this rank listens."""

    def listen_and_tell(*args: Any) -> Any:
        listener = listen(*args)
        folder.tell(f"port{rank}", str(listener.tcp.getsockname()[1]))
        return listener

    mock.patch.object(rendezvous, "listen", listen_and_tell).start()


def _tell_what_is_said(folder: Folder, rank: int) -> None:
    """Tells strangers what rank 1 says when it is let in for the first time."""
    send = dial._send
    said: list[bytes] = []

    def send_and_tell(sock: Any, data: bytes, **keywords: Any) -> None:
        send(sock, data, **keywords)
        said.append(data)
        if len(said) == 2 and rank == 1:
            folder.tell("recorded", b"".join(said).hex())

    dial._send = send_and_tell


def _hold_back(folder: Folder) -> None:
    """The others open their doors and wait, for as long as strangers want."""
    gather = mesh._Connector.connect_all

    def gather_when_allowed(*args: Any) -> None:
        folder.tell("all are here")
        folder.hear("gather")
        gather(*args)

    mock.patch.object(mesh._Connector, "connect_all", gather_when_allowed).start()


def _train(folder: Folder) -> dict[str, Any]:
    """Fits a model, then reduces for as long as strangers come; all of it has the same bits in every run."""
    model = make_model()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), adam(model))
    history = trainer.fit(*make_rows(300), epochs=5, effective_batch_size=24, verbose=False)
    found = outcome(trainer, history)
    folder.tell(f"fitted{cx.get_rank()}")
    digests = set()
    may_continue = torch.ones(1)
    while may_continue.item():
        generator = torch.Generator().manual_seed(cx.get_rank())
        tensor = torch.randn(ELEMENTS, generator=generator)
        cx.all_reduce(tensor)
        digests.add(hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
        may_continue = torch.tensor([0.0 if folder.told("done") else 1.0])
        cx.all_reduce(may_continue, cx.ReduceOp.MIN)  # whoever sees the end first
    return {"fingerprint": found["fingerprint"], "history": found["history"], "digests": sorted(digests)}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run_out_of_descriptors(path: str) -> dict[str, Any]:
    """Rank 0 runs out of descriptors while strangers come, and says how much its watch had to do meanwhile."""
    folder, lines, rank = Folder(path), Lines(), int(os.environ["RANK"])
    logging.getLogger("cyxtrain.ring").addHandler(lines)
    _tell_port(folder, rank)
    found: dict[str, Any] = {}
    with cx.init():
        if rank == 0:
            found = _without_descriptors(folder, lines)
        folder.hear("refused")
        total = torch.ones(1)
        cx.all_reduce(total)
    return found | {"total": total.item()}


def _without_descriptors(folder: Folder, lines: Lines) -> dict[str, Any]:
    watch = next(thread for thread in threading.enumerate() if thread.name == "cyxtrain-monitor")
    clock = time.pthread_getcpuclockid(watch.ident or 0)
    highest = max(int(entry) for entry in os.listdir("/proc/self/fd"))
    folder.tell("waits")  # the last file that it opens
    spare = [os.dup(0)]
    while spare[-1] <= highest:  # no number is free below the limit
        spare.append(os.dup(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare[-1] + 1, hard))
    try:
        wait_until(lambda: any("cannot take connections" in text for _, text in lines.found))
        began, used = time.monotonic(), time.clock_gettime(clock)
        wait_until(lambda: time.monotonic() > began + BUSY_SECONDS)
        busy = (time.clock_gettime(clock) - used) / (time.monotonic() - began)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in spare:
            os.close(descriptor)
    found = {"busy": busy, "lines": list(lines.found)}
    folder.tell("again")
    return found
