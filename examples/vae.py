"""A model that computes its own loss: a variational autoencoder compresses digits and generates new ones.

Run it alone, or on two ranks:

    python examples/vae.py
    cyxtrain launch -n 2 -- python examples/vae.py

There are no targets, and `loss_fn` is None: the model returns its loss under "loss" (cyxtrain/models/networks.py).
It draws different random numbers on each rank during training, so the results on several ranks are similar, not equal.
Expect three digits, their reconstructions and three new digits, drawn as text; then the squared error per pixel, about
0.034.
"""

from __future__ import annotations

import torch
from torch import Tensor

import cyxtrain as cx
from cyxtrain.datasets import load_digits

INK = " .:-=+*#%@"


def draw(pictures: Tensor) -> None:
    """Print pictures of 8 x 8 pixels, side by side."""
    for row in pictures.view(-1, 8, 8).transpose(0, 1):
        print("    ".join("".join(2 * INK[int(pixel * 9.99)] for pixel in line) for line in row).rstrip())
    print()


def main() -> None:
    (x_train, _), (x_test, _) = load_digits()
    x_train, x_test = torch.from_numpy(x_train), torch.from_numpy(x_test)

    torch.manual_seed(0)
    model = cx.get_model("vae")(inputs=64, latent=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    trainer = cx.DistributedTrainer(model, None, optimizer, scheduler="cosine")
    history = trainer.fit(x_train, epochs=20, effective_batch_size=48, verbose=False)

    # In evaluation mode the model draws no random numbers: it uses the means of the eight numbers of each picture.
    rebuilt = trainer.predict(x_test)["rows"]
    error = (rebuilt - x_test).square().mean()
    error_of_mean = (x_train.mean(0) - x_test).square().mean()
    if cx.is_master():
        print("loss", *(f"{loss:.2f}" for loss in history.train_losses[::4]), f"... {history.train_losses[-1]:.2f}")
        print("three digits, and their reconstructions below:")
        draw(x_test[:3])
        draw(rebuilt[:3])
        print("three new digits:")
        draw(model.sample(3).detach())
        print(f"squared error per pixel: {error:.4f}, of the mean picture {error_of_mean:.4f}")


if __name__ == "__main__":
    with cx.init():
        main()
