"""The price of a world of one: `fit` on one rank against the best hand-written loop with the same optimizer.

    python benchmarks/fit_one_rank.py [--pairs 9] [--json results.json]

Both train the same model on the same synthetic data, shaped like MNIST, in the same order, one after the other in
turn; the figure is the median of the ratios of samples per second, fit / loop, above 1 where fit is faster. The
bare loop gathers by index, steps by the fused optimizer and does nothing else; the other also sums loss and accuracy,
as fit does. Final weights are compared: all three do the same arithmetic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from fit_work import BATCH, LEARNING_RATE, make_convnet, make_data, make_mlp
from torch import Tensor, nn
from torch.nn import functional

import cyxtrain as cx
from cyxtrain.data.sampler import DistributedSampler

ROWS, EPOCHS, SEED = 20_000, 3, 42


def train_by_hand(model: nn.Module, data: tuple[Tensor, Tensor], *, metrics: bool) -> None:
    """The best loop that we know how to write: no DataLoader, no .item(), the fused optimizer."""
    inputs, targets = data
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True)
    sampler = DistributedSampler(ROWS, seed=SEED, rank=0, world_size=1)
    loss_sum = torch.zeros((), dtype=torch.float64)
    correct = torch.zeros((), dtype=torch.int64)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        order = torch.from_numpy(sampler.global_indices().copy())
        for rows in order.split(BATCH):
            batch, wanted = inputs.index_select(0, rows), targets.index_select(0, rows)
            optimizer.zero_grad()
            output = model(batch)
            loss = functional.cross_entropy(output, wanted)
            loss.backward()
            optimizer.step()
            if metrics:
                loss_sum += loss.detach() * len(rows)
                correct += (output.argmax(1) == wanted).sum()


def train_by_fit(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    """The same by `fit`."""
    adam = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), adam, device="cpu")
    trainer.fit(*data, cx.DistributedTrainingConfig(epochs=EPOCHS, batch_size=BATCH, seed=SEED, verbose=False))


def seconds_of(train: Callable[[nn.Module], None], make: Callable[[], nn.Module]) -> tuple[float, Tensor]:
    """Returns how long a training took, and its final weights in one vector."""
    torch.manual_seed(0)
    model = make()
    began = time.perf_counter()
    train(model)
    seconds = time.perf_counter() - began
    return seconds, torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def compare(make: Callable[[], nn.Module], pairs: int) -> dict[str, float]:
    """Returns the medians for one model."""
    data = make_data(ROWS)
    ways: dict[str, Callable[[nn.Module], None]] = {
        "bare loop": lambda model: train_by_hand(model, data, metrics=False),
        "loop with metrics": lambda model: train_by_hand(model, data, metrics=True),
        "fit": lambda model: train_by_fit(model, data),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    weights: dict[str, Tensor] = {}
    for pair in range(pairs + 1):
        # In turn, and in another order each time; the first round warms up.
        names = list(ways) if pair % 2 else list(ways)[::-1]
        for name in names:
            took, weights[name] = seconds_of(ways[name], make)
            if pair:
                seconds[name].append(took)
    assert all(torch.allclose(weights["fit"], other, atol=1e-6) for other in weights.values())
    figures = {f"{name}, samples/s": ROWS * EPOCHS / statistics.median(times) for name, times in seconds.items()}
    for name in ("bare loop", "loop with metrics"):
        ratios = [loop / fit for loop, fit in zip(seconds[name], seconds["fit"], strict=True)]
        figures[f"fit / {name}"] = statistics.median(ratios)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cx.init()
    results = {
        "MLP 784-256-10": compare(lambda: make_mlp(256), arguments.pairs),
        "convnet": compare(make_convnet, arguments.pairs),
    }
    for model, figures in results.items():
        print(model)
        for name, value in figures.items():
            print(f"  {name:<32}{value:>12,.3f}" if "/ " in name else f"  {name:<32}{value:>12,.0f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
