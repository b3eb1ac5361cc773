"""The fits that `golden_losses.py` compares: each prints hexadecimal losses and a hash of the weights it ends with.

A rank of a world runs it, in the checkout that PYTHONPATH names: only public names, so that old checkouts run it too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cyxtrain as cx

_GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(203, 20, generator=_GENERATOR), torch.randint(0, 4, (203,), generator=_GENERATOR)
R = torch.randn(203, 3, generator=_GENERATOR)
IMAGES, KINDS = torch.randn(53, 3, 8, 8, generator=_GENERATOR), torch.randint(0, 4, (53,), generator=_GENERATOR)
MASKED = torch.where(torch.rand(203, generator=_GENERATOR) < 0.4, -100, Y)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Dropout(0.1), nn.Linear(300, 4))


def regression() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3))


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


class Centered(nn.Module):
    """Keeps a mean of its outputs, which the next forward and the user read."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 3)
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        if self.training:
            with torch.no_grad():
                self.center.mul_(0.9).add_(0.1 * found.mean(0))
        return found - self.center


class OwnLoss(nn.Module):
    """Returns its loss as a sum and what it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        scores = self.layer(x)
        counted = (y >= 0).sum()
        return {"loss": (functional.cross_entropy(scores, y, reduction="sum"), counted), "scores": scores}


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X[:90], R[:90], strict=True))


class ReadsBuffers(cx.callbacks.Callback):
    """Logs what buffers hold after each step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        found = [buffer for buffer in self.trainer.model.buffers() if buffer.is_floating_point()]
        self.trainer.log("buffers", sum(float(buffer.double().sum()) for buffer in found))


def masked_pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    counts = (target > -0.5).float()
    return ((output - target).square() * counts).sum(), counts.sum()


def own_step(trainer: Any, batch: Any) -> Any:
    inputs, targets = batch
    output = trainer.model(inputs)
    trainer.log("largest", output.detach().max(), reduce="max")
    return {"loss": (output - targets).square().mean(), "output": output, "size": output.detach().abs().mean()}


def step_of_a_pair(trainer: Any, batch: Any) -> Any:
    inputs, targets = batch
    return {"loss": masked_pair(trainer.model(inputs), targets)}


def two_updates(trainer: Any, batch: Any) -> Any:
    inputs, targets = batch
    first = trainer.optimize((trainer.model(inputs) - targets).square().mean(), "first")
    second = trainer.optimize((trainer.model(inputs) - targets).abs().mean(), "last")
    return {"first": first, "second": second}


def updates_of_pairs(trainer: Any, batch: Any) -> Any:
    inputs, targets = batch
    return {"loss": trainer.optimize(masked_pair(trainer.model(inputs), targets))}


def line_search(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe")


def by_layer(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    layers = list(model.children())
    return {
        "first": torch.optim.SGD(layers[0].parameters(), 0.1, momentum=0.9),
        "last": torch.optim.Adam(layers[-1].parameters(), 1e-2),
    }


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the first 16 digits of a hash of all bytes."""
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()[:16]


def state_of(model: nn.Module) -> str:
    return digest([*model.parameters(), *model.buffers()])


def numbers(values: Iterable[Any]) -> list[str]:
    return [float(value).hex() for value in values]


def history_of(history: Any) -> list[Any]:
    return [numbers(history.train_losses), {name: numbers(found) for name, found in sorted(history.metrics.items())}]


def fitted(
    make: Callable[[], nn.Module],
    loss: Any,
    optimizer: Any,
    *data: Any,
    of_trainer: dict[str, Any] | None = None,
    evaluates: Sequence[Any] | None = None,
    **settings: Any,
) -> list[Any]:
    """Return what one fit comes to; it is evaluated on its own data, unless others are given."""
    torch.manual_seed(1)
    model, keywords = make(), dict(of_trainer or {})
    if optimizer is by_layer:
        keywords["optimizers"] = by_layer(model)
    else:
        keywords["optimizer"] = optimizer
    trainer = cx.DistributedTrainer(model, loss, **keywords)
    history = trainer.fit(*data, verbose=False, **settings)
    evaluated = trainer.evaluate(*(data if evaluates is None else evaluates))
    return [*history_of(history), numbers(value for value in evaluated if value is not None), state_of(model)]


def resumed() -> list[Any]:
    """Stops in the middle of an epoch, and continues in a new trainer."""
    folder = os.environ["GOLDEN_FOLDER"]
    settings: dict[str, Any] = {"checkpoint_dir": folder, "checkpoint_every_n_steps": 3, "batch_size": 16}
    found = []
    for length in ({"max_steps": 3}, {"epochs": 3, "resume": "auto"}):
        torch.manual_seed(1)
        average = cx.callbacks.EMA(0.9)
        trainer = cx.DistributedTrainer(mlp(), CROSS_ENTROPY, "adam", scheduler="cosine", callbacks=[average])
        history = trainer.fit(X, Y, verbose=False, **settings, **length)
        found += [*history_of(history), state_of(trainer.model)]
    return found


def in_batches() -> list[Any]:
    torch.manual_seed(1)
    trainer = cx.DistributedTrainer(mlp(), CROSS_ENTROPY, "adam")
    losses = [trainer.train_on_batch(X[first : first + 50], MASKED[first : first + 50])[0] for first in (0, 50, 100)]
    return [numbers(losses), state_of(trainer.model)]


def in_16_bits() -> list[Any]:
    torch.manual_seed(1)
    trainer = cx.DistributedAMPTrainer(regression(), loss_fn=masked_pair, optimizer="sgd", accumulation_steps=2)
    first = 40 * cx.get_rank()
    losses = [trainer.training_step((X[first : first + 5 * step], R[first : first + 5 * step])) for step in range(1, 5)]
    return [numbers(losses), state_of(trainer.model)]


def by_hand(compression: str | None) -> list[Any]:
    torch.manual_seed(1)
    ddp = cx.DistributedDataParallel(regression(), cx.DDPConfig(compression=compression))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    losses = []
    for step in range(5):
        first = 20 * step + 7 * cx.get_rank()
        rows = slice(first, first + 20)
        optimizer.zero_grad()
        loss = (ddp(X[rows]) - R[rows]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [numbers(losses), state_of(ddp.module)]


def reduced(count: int) -> list[Any]:
    values = torch.randn(count, generator=torch.Generator().manual_seed(cx.get_rank()))
    cx.all_reduce(values)
    return [digest([values])]


CROSS_ENTROPY, SQUARED = nn.CrossEntropyLoss(), nn.MSELoss()
CLASS_WEIGHTS = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4]))
FITS: dict[str, Callable[[], list[Any]]] = {
    "mlp": lambda: fitted(mlp, CROSS_ENTROPY, "adam", X, Y, epochs=3, batch_size=32),
    "class weights": lambda: fitted(
        mlp, CLASS_WEIGHTS, "adamw", X, Y, epochs=2, batch_size=16, clip_norm=1.0, accumulation_steps=2
    ),
    "regression": lambda: fitted(regression, SQUARED, "sgd", X, R, epochs=3, batch_size=50, clip_value=0.1),
    "convnet": lambda: fitted(
        convnet, CROSS_ENTROPY, "sgd", IMAGES, KINDS, epochs=2, batch_size=8, validation_split=0.2
    ),
    "bf16": lambda: fitted(regression, SQUARED, "adam", X, R, epochs=2, batch_size=32, precision="bf16"),
    "fp16": lambda: fitted(regression, SQUARED, "adam", X, R, epochs=2, batch_size=32, precision="fp16"),
    "sum": lambda: fitted(regression, nn.MSELoss(reduction="sum"), "adam", X, R, epochs=2, batch_size=32),
    "masked": lambda: fitted(mlp, CROSS_ENTROPY, "adam", X, MASKED, epochs=2, batch_size=16, clip_norm=1.0),
    "masked pair": lambda: fitted(regression, masked_pair, "sgd", X, R, epochs=2, batch_size=16, clip_adaptive=0.05),
    "masked fp16": lambda: fitted(
        regression, masked_pair, "adam", X, R, epochs=2, batch_size=16, precision="fp16", accumulation_steps=3
    ),
    "own loss": lambda: fitted(OwnLoss, None, "adam", {"x": X, "y": MASKED}, epochs=2, batch_size=16),
    "sample weights": lambda: fitted(
        mlp, CROSS_ENTROPY, "adam", X, Y, epochs=2, batch_size=16, sample_weight=X[:, 0].abs()
    ),
    "own step": lambda: fitted(
        regression, SQUARED, "adam", X, R, epochs=2, batch_size=16, of_trainer={"train_step": own_step}
    ),
    "step of a pair": lambda: fitted(
        regression, SQUARED, "adam", X, R, epochs=2, batch_size=16, of_trainer={"train_step": step_of_a_pair}
    ),
    "two updates": lambda: fitted(
        regression,
        SQUARED,
        by_layer,
        X,
        R,
        epochs=2,
        batch_size=16,
        clip_norm=0.5,
        of_trainer={"train_step": two_updates},
    ),
    "updates of pairs": lambda: fitted(
        regression, SQUARED, "adam", X, R, epochs=2, batch_size=16, of_trainer={"train_step": updates_of_pairs}
    ),
    "several optimizers": lambda: fitted(
        regression, SQUARED, by_layer, X, R, epochs=2, batch_size=16, clip_norm={"first": 0.1}
    ),
    "LBFGS": lambda: fitted(regression, SQUARED, line_search, X, R, epochs=2, batch_size=50),
    "loader": lambda: fitted(
        mlp,
        CROSS_ENTROPY,
        "adam",
        DataLoader(TensorDataset(X, Y), shuffle=True, batch_size=16),
        epochs=2,
        evaluates=(X, Y),
    ),
    "stream": lambda: fitted(
        regression, SQUARED, "adam", DataLoader(Stream(), batch_size=8), epochs=2, sharded_data=False, evaluates=(X, R)
    ),
    "EMA": lambda: fitted(
        convnet,
        CROSS_ENTROPY,
        "adam",
        IMAGES,
        KINDS,
        IMAGES,
        KINDS,
        epochs=2,
        batch_size=8,
        callbacks=[cx.callbacks.EMA(0.9)],
        evaluates=(IMAGES, KINDS),
    ),
    "buffers": lambda: fitted(
        convnet, CROSS_ENTROPY, "sgd", IMAGES, KINDS, epochs=2, batch_size=8, callbacks=[ReadsBuffers()]
    ),
    "own buffer": lambda: fitted(Centered, SQUARED, "sgd", X, R, epochs=2, batch_size=16, callbacks=[ReadsBuffers()]),
    "metrics": lambda: fitted(
        mlp,
        CROSS_ENTROPY,
        "adam",
        X,
        Y,
        X,
        Y,
        epochs=2,
        batch_size=16,
        validate_every_n_steps=2,
        evaluates=(X, Y),
        of_trainer={"metrics": ["f1", "auc", "top_2", "matthews"]},
    ),
    "metrics of numbers": lambda: fitted(
        regression, SQUARED, "adam", X, R, epochs=2, batch_size=16, of_trainer={"metrics": ["mae", "r2", "pearson"]}
    ),
    "resumed": resumed,
    "in batches": in_batches,
    "in 16 bits": in_16_bits,
    **{f"DDP {each}": partial(by_hand, each) for each in (None, "fp16", "powersgd")},
    **{f"all_reduce {each}": partial(reduced, each) for each in (1, 7, 1000, 70_000, 400_000)},
}


def main() -> None:
    cx.init()
    for name, run in FITS.items():
        found = run()
        if cx.is_master():
            print([name, *found], flush=True)
    cx.finalize()


if __name__ == "__main__":
    main()
