"""Feature extraction: a ResNet-18 of torchvision is frozen, batch norm included; only a new last layer is trained.

Run it alone, or on two ranks (`pip install torchvision`):

    python examples/ported/frozen_resnet.py
    cyxtrain launch -n 2 -- python examples/ported/frozen_resnet.py

Batch norm in evaluation mode stays so during `fit`. Nothing is downloaded, so the weights are random; your program
passes `weights="DEFAULT"`. Random features are enough for digits. Expect a test accuracy of about 0.8 in the last
line, the same results on any number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import resnet18

import cyxtrain as cx
from cyxtrain.datasets import load_digits

ROWS = 640


def to_images(rows: Tensor) -> Tensor:
    """Return images of 3 x 32 x 32 for digits of 64 pixels."""
    return functional.interpolate(rows.view(-1, 1, 8, 8), scale_factor=4).expand(-1, 3, -1, -1)


def make_model() -> nn.Module:
    model = resnet18(weights=None)
    model.requires_grad_(False)
    model.fc = nn.Linear(512, 10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def main() -> cx.TrainingHistory:
    (x_train, y_train), (x_test, y_test) = load_digits()
    train, test = to_images(torch.from_numpy(x_train[:ROWS])), to_images(torch.from_numpy(x_test))
    torch.manual_seed(0)
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.Adam(model.fc.parameters(), lr=0.05))
    history = trainer.fit(train, y_train[:ROWS], epochs=4, effective_batch_size=64)
    loss, accuracy = trainer.evaluate(test, y_test)
    if cx.is_master():
        print(f"test loss {loss:.4f}  accuracy {accuracy:.4f}")
    return history


if __name__ == "__main__":
    with cx.init():
        main()
