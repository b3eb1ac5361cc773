"""A step of your own: a small model learns from a large one (Hinton et al., 2015).

Run it alone, or on two ranks:

    python examples/distillation.py
    cyxtrain launch -n 2 -- python examples/distillation.py

`train_step` adds to the loss of the built-in step how far the student's scores are from the teacher's. The teacher is
frozen and no part of the model that is trained and saved. The student has 200 pictures. Expect it to be better with the
teacher than alone, and the same accuracies on two ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import cyxtrain as cx
from cyxtrain.datasets import load_digits

TEMPERATURE, TAUGHT, PICTURES = 3.0, 2.0, 200
SETTINGS: dict[str, Any] = {"epochs": 40, "effective_batch_size": 50, "verbose": False}


class Distillation(cx.DistributedTrainer):
    """Trains a student on labels and on a teacher's scores."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__(student, "cross_entropy", torch.optim.Adam(student.parameters(), lr=0.005))
        self.teacher = teacher.requires_grad_(False).eval()

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Return the sum of the built-in step's loss and the teacher's."""
        images, _ = batch
        result = super().train_step(batch)
        scores, expected = ((each / TEMPERATURE).log_softmax(1) for each in (result["output"], self.teacher(images)))
        taught = TEMPERATURE**2 * functional.kl_div(scores, expected, reduction="batchmean", log_target=True)
        return {**result, "loss": result["loss"] + TAUGHT * taught, "taught": taught}


def make_student() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    (x_train, y_train), (x_test, y_test) = load_digits()
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    teaching = cx.DistributedTrainer(teacher, "cross_entropy", torch.optim.Adam(teacher.parameters(), lr=0.003))
    teaching.fit(x_train, y_train, epochs=6, effective_batch_size=64, verbose=False)

    student = make_student()
    alone = cx.DistributedTrainer(student, "cross_entropy", torch.optim.Adam(student.parameters(), lr=0.005))
    alone.fit(x_train[:PICTURES], y_train[:PICTURES], **SETTINGS)

    distillation = Distillation(make_student(), teacher)
    history = distillation.fit(x_train[:PICTURES], y_train[:PICTURES], **SETTINGS)

    found = [trainer.evaluate(x_test, y_test).accuracy for trainer in (teaching, alone, distillation)]
    if cx.is_master():
        print("taught", *(f"{loss:.2f}" for loss in history.metrics["taught"][::8]))
        print(f"test accuracy: teacher {found[0]:.4f}  student alone {found[1]:.4f}  with the teacher {found[2]:.4f}")


if __name__ == "__main__":
    with cx.init():
        main()
