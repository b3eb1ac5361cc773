"""Small models and data, and what a training comes to: the same words for one process and for every rank."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from kept_worlds import close_worlds, run_kept
from rank_processes import values
from torch import Tensor, nn

import cyxtrain as cx

Floats = npt.NDArray[np.float64]
FEATURES, CLASSES = 4, 3
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def make_rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns X (count, 4), float32, and y (count,), classes 0 to 2."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def make_model(dtype: str = "float32", outputs: int = CLASSES) -> nn.Sequential:
    """Returns the same small network at every call; tanh, so that no rounding decides about a kink."""
    with seeded():
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, outputs))
    return model.to(DTYPES[dtype])


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """The same random numbers within, whatever came before; the generator is handed back."""
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        yield


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3)


def flat(tensors: Iterable[Tensor]) -> Floats:
    """Returns tensors as one vector."""
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).numpy()


def fingerprint(model: nn.Module) -> str:
    """Returns a hash of every bit of the parameters and buffers."""
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def outcome(trainer: cx.DistributedTrainer, history: cx.TrainingHistory) -> dict[str, Any]:
    """Returns what a fit came to, without the times."""
    return {
        "parameters": flat([*trainer.model.parameters(), *trainer.model.buffers()]),
        "fingerprint": fingerprint(trainer.model),
        "history": [history.train_losses, history.train_accuracies, history.val_losses, history.val_accuracies],
    }


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Makes this process a world of one, with one thread, as the ranks have: the very same arithmetic."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with cx.init(cx.DistributedConfig(rank=0, world_size=1)):
            yield
    finally:
        torch.set_num_threads(threads)


def run_world(world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 60.0) -> list[Any]:
    """Calls `function(*arguments)` as every rank of a world, in real processes; returns what each returned, by rank.

    The function stands at the top of its module. Tensors do not travel well between processes: return NumPy arrays.
    """
    return values(run_kept(world_size, function, *arguments, seconds=seconds))


def run_new_world(world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 60.0) -> list[Any]:
    """As `run_world`, in processes that have run nothing before: those that resume a fit, say."""
    close_worlds()
    return run_world(world_size, function, *arguments, seconds=seconds)


def everywhere(world_size: int, function: Any, *arguments: Any) -> list[Any]:
    """Calls a function on every rank, as `run_world` does; alone in this process."""
    if world_size > 1:
        return run_world(world_size, function, *arguments)
    with one_process():
        return [function(*arguments)]


class Trace(cx.callbacks.Callback):
    """Notes with which rate of the first group each step is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.trainer.optimizer.param_groups[0]["lr"]))


def keep_only(folder: Path, step: int) -> None:
    """Removes all checkpoints of a folder but the one of a step."""
    for path in folder.glob("*.ckpt"):
        if path.name != f"step-{step:08d}.ckpt":
            path.unlink()


class SaveAt(cx.callbacks.Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, path: str | Path, step: int) -> None:
        super().__init__()
        self.path, self.at = path, step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.trainer.step == self.at:
            self.trainer.save_checkpoint(self.path)
