"""Imbalanced classes: accuracy is misleading, class_weight helps, and other metrics show it.

Run it alone, or on two ranks:

    python examples/imbalanced.py
    cyxtrain launch -n 2 -- python examples/imbalanced.py

The data are synthetic: one sample in thirty belongs to the rare class, and is hard to distinguish from the others. A
model that always answers "no" is right in 97 % of the samples and finds nothing. Expect a model with equal weights that
has about that accuracy and finds one rare sample in six, and one with class_weight that has a lower accuracy (82 %) and
finds three of four: recall 0.16 and 0.76.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import cyxtrain as cx


def make_data(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points of two classes; the cloud of the rare one is next to the other's and overlaps it."""
    generator = torch.Generator().manual_seed(seed)
    y = (torch.arange(rows) % 30 == 0).float()[:, None]
    return torch.randn(rows, 8, generator=generator) + 0.7 * y, y


def main() -> None:
    x, y = make_data(3000, seed=0)
    x_test, y_test = make_data(1500, seed=1)
    rare = y.mean().item()

    results = {}
    for name, class_weight in {"equal weights": None, "class_weight": {0: 0.5 / (1 - rare), 1: 0.5 / rare}}.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))  # the loss applies the sigmoid
        trainer = cx.DistributedTrainer(
            model,
            nn.BCEWithLogitsLoss(),
            torch.optim.Adam(model.parameters(), lr=0.003),
            metrics=["precision", "recall", "f1", "average_precision"],
        )
        # Both classes get the same total weight: each sample of the rare class weighs 15, each other sample 0.5.
        trainer.fit(x, y, epochs=10, effective_batch_size=100, class_weight=class_weight, verbose=False)
        results[name] = trainer.evaluate(x_test, y_test)

    if cx.is_master():
        print(f"{'always no':<14}  accuracy {1 - y_test.mean():.4f}  recall 0.0000")
        for name, measured in results.items():
            numbers = (f"{metric} {value:.4f}" for metric, value in dict(measured).items() if metric != "loss")
            print(f"{name:<14}", *numbers, sep="  ")
        # average_precision measures how well samples are ranked, independently of the threshold between yes and no.
        print("recall:", *(f"{measured['recall']:.4f} with {name}" for name, measured in results.items()))


if __name__ == "__main__":
    with cx.init():
        main()
