"""An optimizer that evaluates the loss twice per step: sharpness-aware minimization (Foret et al., 2021).

Run it alone, or on two ranks:

    python examples/sam.py
    cyxtrain launch -n 2 -- python examples/sam.py

SAM moves the weights to where the loss is highest nearby, and takes the gradient there. `self.optimize` passes a
function of the loss to the optimizer as its closure, with loss and gradients averaged over all ranks: the results are
the same on any number of ranks. Expect a higher test accuracy than with SGD alone, from 100 labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import cyxtrain as cx
from cyxtrain.datasets import load_digits

LABELS, EPOCHS = 100, 60


class SAM(torch.optim.SGD):
    """SGD with the gradient at the worst point within a distance `rho`."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.9, rho: float = 0.5) -> None:
        super().__init__(params, lr, momentum)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        loss = closure()
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        moves = [each.grad * (self.rho / (norm + 1e-12)) for each in parameters]
        for each, move in zip(parameters, moves, strict=True):
            each.add_(move)
        closure()
        for each, move in zip(parameters, moves, strict=True):
            each.sub_(move)
        super().step()
        return loss


class Trainer(cx.DistributedTrainer):
    def train_step(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": self.optimize(lambda: nn.functional.cross_entropy(self.model(x), y))}


def main() -> None:
    (x_train, y_train), (x_test, y_test) = load_digits()
    for name, optimizer in (("SGD", torch.optim.SGD), ("SAM", SAM)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        trainer = Trainer(model, "cross_entropy", optimizer(model.parameters(), lr=0.1, momentum=0.9))
        trainer.fit(x_train[:LABELS], y_train[:LABELS], epochs=EPOCHS, effective_batch_size=50, verbose=False)
        loss, accuracy = trainer.evaluate(x_test, y_test)
        if cx.is_master():
            print(f"{name}: test loss {loss:.3f}, test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    with cx.init():
        main()
