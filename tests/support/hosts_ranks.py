"""What the ranks of test_hosts.py do, each in a process on its own host; no pytest here."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from worlds import wait_until

import cyxtrain as cx
from cyxtrain.ring import RingProcessGroup

FOLDER = Path(os.environ.get("TEST_FOLDER", "."))
WARM_UP = 3
"""Collectives before a rank says that it is at work."""


def reduce_until_error(elements: int) -> dict[str, Any]:
    """Calls all_reduce again and again; returns the error that ended it, and when, in seconds of time.monotonic."""
    cx.init()
    tensor = torch.ones(elements)
    try:
        for done in range(10**9):
            if done == WARM_UP:
                say("at work")
            tensor.fill_(1.0)
            cx.all_reduce(tensor)
    except cx.CyxtrainError as error:
        return error.to_facts() | {"at": time.monotonic()}
    raise AssertionError("it never ended")


def idle_until_error(seconds: float) -> dict[str, Any]:
    """Calls nothing; returns the error that its group came to have, and when."""
    cx.init()
    cx.barrier()
    say("at work")
    world = dist.group.WORLD
    assert isinstance(world, RingProcessGroup)
    failure = world.group.failure
    wait_until(lambda: failure.error is not None, seconds)
    at = time.monotonic()
    try:
        cx.barrier()
    except cx.CyxtrainError as error:
        return error.to_facts() | {"at": at}
    raise AssertionError("a group that has failed went on")


def sums(rounds: int, elements: int) -> dict[str, Any]:
    """Returns a hash of the results of so many collectives, and the longest time that one of them took."""
    with cx.init():
        generator = torch.Generator().manual_seed(cx.get_rank())
        digest, longest = hashlib.sha256(), 0.0
        for done in range(rounds):
            tensor = torch.randn(elements, generator=generator)
            begin = time.monotonic()
            cx.all_reduce(tensor, cx.ReduceOp.AVG)
            longest = max(longest, time.monotonic() - begin)
            digest.update(tensor.numpy().tobytes())
            if done == WARM_UP:
                say("at work")
            if done == rounds // 2:
                wait_until((FOLDER / "go on").exists, 60.0)  # so that what happens to it happens before its end
    return {"digest": digest.hexdigest(), "longest": longest}


def fit(epochs: int) -> dict[str, Any]:
    """Trains, and returns every bit of what came out of it."""
    torch.set_num_threads(1)
    with cx.init():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        inputs, targets = torch.randn(301, 8), torch.randint(3, (301,))
        trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1))
        history = trainer.fit(inputs, targets, epochs=epochs, effective_batch_size=32, verbose=False)
        parameters = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return {"parameters": parameters.tolist(), "losses": list(history.train_losses)}


def join(milliseconds: int) -> str:
    """Return why this rank cannot join."""
    try:
        cx.init(cx.DistributedConfig(timeout_ms=milliseconds))
    except cx.RendezvousError as error:
        return str(error)
    return "joined"


def say(what: str) -> None:
    (FOLDER / f"{what} {os.environ['RANK']}").touch()
