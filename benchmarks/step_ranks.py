"""One rank of `ddp_step.py`: trains small models for some steps, and measures a step or its parts."""

from __future__ import annotations

import contextlib
import cProfile
import hashlib
import io
import itertools
import os
import pstats
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import launches
import raw_ranks
import torch
import torch.distributed as dist
from fit_work import make_convnet
from torch import Tensor, nn
from torch.nn import functional

import cyxtrain as cx
from cyxtrain.environment.allocator import keep_freed_memory

_WARM_STEPS = 2
_PROFILED_STEPS = 50
_SHOWN_FUNCTIONS = 20


def make_mlp() -> nn.Module:
    """784-2048-1600-10: 4.9 million parameters."""
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 1600), nn.ReLU(), nn.Linear(1600, 10))


MODELS = {"mlp": make_mlp, "convnet": make_convnet}
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cyxtrain": cx.DistributedDataParallel,
    "pytorch": nn.parallel.DistributedDataParallel,
    "none": lambda model: model,
}


class Training:
    """A model that takes one step after the other on one batch, which is another on each rank.

    Args:
        model: Of `MODELS`.
        batch_size: Samples.
        wrapper: Of `WRAPPERS`.
        meet: Called in every step after backward.
    """

    def __init__(self, model: str, batch_size: int, wrapper: str, meet: Callable[[], object]) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(0)
        self.bare = MODELS[model]()
        self.model = WRAPPERS[wrapper](self.bare)
        self.is_wrapped = wrapper != "none"
        if not self.is_wrapped:
            keep_freed_memory()  # as our wrapper does: a limit must have it, too
        self.meet = meet
        self.optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(rank)
        self.inputs = torch.rand(batch_size, 784, generator=generator)
        self.targets = torch.randint(10, (batch_size,), generator=generator)
        self.digest_at_start = self.digest()
        for _ in range(_WARM_STEPS):
            self.step()

    def forward(self) -> Tensor:
        """Returns the loss of this rank's batch."""
        return functional.cross_entropy(self.model(self.inputs), self.targets)

    def step(self) -> None:
        """What is measured."""
        self.optimizer.zero_grad()
        self.forward().backward()
        self.meet()
        self.optimizer.step()

    def without_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Within, backward averages nothing."""
        return self.model.no_sync() if self.is_wrapped else contextlib.nullcontext()

    def digest(self) -> str:
        """Returns a hash of the parameters."""
        digest = hashlib.sha256()
        for parameter in self.bare.parameters():
            digest.update(parameter.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()


def agree(count: int) -> int:
    """Returns what rank 0 gave."""
    tensor = torch.tensor([count])
    if dist.is_initialized():
        dist.broadcast(tensor, 0)
    return int(tensor.item())


def check_equal(training: Training) -> None:
    """Fails unless steps have changed the parameters, and to the same ones on every rank where they are averaged."""
    own = training.digest()
    if own == training.digest_at_start:
        raise AssertionError("no step changed the parameters")
    if training.is_wrapped:
        mine = torch.tensor(list(bytes.fromhex(own)))
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        if not all(torch.equal(mine, other) for other in everyone):
            raise AssertionError(f"rank {dist.get_rank()}: the parameters differ between ranks")


def meeting(addresses: list[Any] | None) -> Callable[[], object]:
    """Returns a function that waits for all other ranks, over bare sockets; without addresses it does nothing."""
    if addresses is None:
        return lambda: None
    links = raw_ranks.connect(dist.get_rank(), addresses, socket.AF_INET)

    def meet() -> None:
        for _ in addresses[1:]:
            links.ahead.send(b".")
            links.behind.recv(1)

    return meet


def measure(model: str, batch_size: int, wrapper: str, seconds: float, meet: Callable[[], object]) -> dict[str, Any]:
    """Returns the row of one model and batch size."""
    training = Training(model, batch_size, wrapper, meet)
    figures = launches.repeat(training.step, seconds, agree, least=5)
    check_equal(training)
    return {"model": model, "batch_size": batch_size, **figures}


def profile(model: str, batch_size: int, wrapper: str, seconds: float, meet: Callable[[], object]) -> dict[str, Any]:
    """Returns the median seconds of the parts of a step, and what cProfile says of whole steps."""
    training = Training(model, batch_size, wrapper, meet)
    found: list[dict[str, float]] = []
    launches.repeat(lambda: found.append(parts_of_step(training)), seconds, agree, least=5)
    parts = {name: statistics.median(parts[name] for parts in found) for name in found[0]}
    text = functions_of_steps(training)
    check_equal(training)
    return {"parts": parts, "functions": text, "seconds": sum(parts.values())}


def parts_of_step(training: Training) -> dict[str, float]:
    """Returns the seconds of the parts of one step.

    Averaging runs inside backward and beside it. Its price is what backward takes longer with it than without, which
    is why the same batch goes through the model once more, before the step. Waiting for the other ranks is in it.
    """
    clock = time.perf_counter
    training.optimizer.zero_grad()
    with training.without_sync():
        loss = training.forward()
        begin = clock()
        loss.backward()
        alone = clock() - begin
    times = [clock()]
    training.optimizer.zero_grad()
    loss = training.forward()
    times.append(clock())
    loss.backward()
    training.meet()
    times.append(clock())
    training.optimizer.step()
    times.append(clock())
    forward, backward, optimizer = (end - start for start, end in itertools.pairwise(times))
    return {"forward": forward, "backward": alone, "averaging": backward - alone, "optimizer": optimizer}


def functions_of_steps(training: Training) -> str:
    """Returns cProfile's table of the functions in which whole steps spend their time."""
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(_PROFILED_STEPS):
            training.step()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(_SHOWN_FUNCTIONS)
    return text.getvalue()


def main() -> None:
    task = launches.given()
    torch.set_num_threads(1)
    if task["backend"] is not None:
        dist.init_process_group(task["backend"])
        cx.init()  # it takes the group as it is
    measured = profile if task["profile"] else measure
    meet = meeting(task["meet_at"])
    rows = [measured(model, size, task["wrapper"], task["seconds"], meet) for model, size in task["rows"]]
    if task["backend"] is not None:
        cx.finalize()
        dist.destroy_process_group()
    launches.report(rows)
    sys.stdout.flush()
    os._exit(0)  # at the end of Python, PyTorch's own DDP over Gloo now and then aborts


if __name__ == "__main__":
    main()
