"""Gradient accumulation: four micro-batches give the same step as one large batch, with less memory.

Run it alone, or on two ranks:

    python examples/accumulation.py
    cyxtrain launch -n 2 -- python examples/accumulation.py

`fit` trains the same model with batches of 96 samples at once and in four parts. Then a custom loop does the same for
one step. Expect parameters that agree up to rounding (about 1e-16, because they are float64), and `equal: True` at the
end.
"""

from __future__ import annotations

import torch
from torch import nn

import cyxtrain as cx
from cyxtrain.datasets import load_digits

BATCH_SIZE = 96  # samples of a step, over all ranks
PARTS = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).double()


def difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((own - their).abs().max().item() for own, their in pairs)


def by_fit(x: torch.Tensor, y: torch.Tensor, accumulation_steps: int) -> nn.Module:
    model = make_model()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    config = cx.DistributedTrainingConfig(epochs=3, effective_batch_size=BATCH_SIZE, verbose=False)
    trainer.fit(x, y, config, accumulation_steps=accumulation_steps)
    return model


def by_hand(x: torch.Tensor, y: torch.Tensor, parts: int) -> nn.Module:
    """Take one step with this rank's samples of the first batch."""
    model = make_model()
    ddp = cx.DistributedDataParallel(model)
    rows = slice(cx.get_rank(), BATCH_SIZE, cx.get_world_size())
    *first, last = zip(x[rows].chunk(parts), y[rows].chunk(parts), strict=True)
    with ddp.no_sync():  # gradients are only added up locally: nothing is sent
        for x_part, y_part in first:
            (nn.functional.cross_entropy(ddp(x_part), y_part) / parts).backward()
    # The last backward averages the accumulated gradients: ranks communicate once per step, for any number of parts.
    (nn.functional.cross_entropy(ddp(last[0]), last[1]) / parts).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model


def main() -> None:
    (x_train, y_train), _ = load_digits()
    x, y = torch.from_numpy(x_train).double(), torch.from_numpy(y_train)
    fitted = difference(by_fit(x, y, 1), by_fit(x, y, PARTS))
    stepped = difference(by_hand(x, y, 1), by_hand(x, y, PARTS))
    if cx.is_master():
        print(f"largest difference after 45 steps of fit: {fitted:.0e}")
        print(f"largest difference after a step by hand:  {stepped:.0e}")
        print(f"equal: {max(fitted, stepped) < 1e-12}")


if __name__ == "__main__":
    with cx.init():
        main()
