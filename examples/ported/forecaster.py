"""A forecaster: a GRU reads two weeks of a time series and predicts the next day.

Run it alone, or on two ranks:

    python examples/ported/forecaster.py
    cyxtrain launch -n 2 -- python examples/ported/forecaster.py

The series is synthetic: a week's rhythm, a slow trend and noise. The last fifth of the windows is validation data, so
the model never sees the future. Expect a mean absolute error of about 0.09 in the last line, where repeating the value
of last week has 0.11: the same results on any number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import cyxtrain as cx

WINDOW, DAYS = 14, 1200


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(1, 32, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, window: Tensor) -> Tensor:
        """Return the next value (n, 1) after each window (n, days, 1)."""
        _, last = self.memory(window)
        return self.head(last[-1])


def make_windows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    day = torch.arange(float(DAYS))
    series = torch.sin(day * 2 * torch.pi / 7) + 0.5 * torch.sin(day / 150)
    series += 0.1 * torch.randn(DAYS, generator=generator)
    windows = series.unfold(0, WINDOW + 1, 1).unsqueeze(-1)
    return windows[:, :-1], windows[:, -1]


def main() -> cx.TrainingHistory:
    x, y = make_windows()
    torch.manual_seed(0)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = cx.DistributedTrainer(model, "mse", optimizer, metrics=["mae"], scheduler="cosine")
    history = trainer.fit(x, y, epochs=15, effective_batch_size=64, validation_split=0.2, clip_norm=1.0)

    test = slice(-len(x) // 5, None)
    measured = trainer.evaluate(x[test], y[test])
    last_week = (x[test][:, -7] - y[test]).abs().mean()
    if cx.is_master():
        print(f"mean absolute error: {measured['mae']:.4f}, of last week's value: {last_week:.4f}")
    return history


if __name__ == "__main__":
    with cx.init():
        main()
