"""Regression: continuous targets instead of classes, with metrics, validation and predictions.

Run it alone, or on two ranks:

    python examples/regression.py
    cyxtrain launch -n 2 -- python examples/regression.py

The data are synthetic: four inputs, one output, and noise that no model can predict, 0.08 on average. Expect a mean
absolute error (mae) of about 0.1 on new samples and an r2 of about 0.98 in the last line: the same results on any
number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import cyxtrain as cx

NOISE = 0.1


def make_data(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the same data on every rank, because the generator has the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 4, generator=generator) * 2 - 1
    y = torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]  # the fourth input has no effect
    return x, y + NOISE * torch.randn(rows, 1, generator=generator)


def main() -> None:
    x, y = make_data(2000, seed=0)
    x_test, y_test = make_data(500, seed=1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))  # (n, 1) like y; fit refuses (n,)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = cx.DistributedTrainer(model, nn.MSELoss(), optimizer, metrics=["mae", "r2"], scheduler="cosine")

    # Use the last fifth of the samples for validation.
    history = trainer.fit(x, y, epochs=30, effective_batch_size=50, validation_split=0.2, verbose=False)
    measured = trainer.evaluate(x_test, y_test)  # the loss, then the metrics: a regression has no accuracy
    predicted = trainer.predict(x_test)  # all rows in order, on every rank

    if cx.is_master():
        for epoch in (1, 10, 20, 30):
            numbers = {name: values[epoch - 1] for name, values in history.history.items()}
            print(f"epoch {epoch:2}", *(f" {name} {value:.4f}" for name, value in numbers.items()))
        print("predicted, and true:")
        for guess, truth in zip(predicted[:3], y_test[:3], strict=True):
            print(f"{guess.item():7.3f} {truth.item():7.3f}")
        print(f"test mae {measured['mae']:.4f}  r2 {measured['r2']:.4f}")


if __name__ == "__main__":
    with cx.init():
        main()
