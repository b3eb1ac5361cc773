"""Two optimizers: a generative adversarial network learns to draw digits (Goodfellow et al., 2014).

Run it alone, or on two ranks:

    python examples/gan.py
    cyxtrain launch -n 2 -- python examples/gan.py

The trainer's `train_step` updates the discriminator, then the generator: `self.optimize` averages the gradients of one
optimizer's parameters over all ranks, and steps. Each rank draws its own noise, so results on several ranks are
similar, not equal. Expect the losses of both, and four new digits, drawn as text. Their pixels have about the mean and
the variance of the digits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import cyxtrain as cx
from cyxtrain.datasets import load_digits

NOISE, EPOCHS, INK = 16, 40, " .:-=+*#%@"


class GAN(cx.DistributedTrainer):
    def train_step(self, batch: Any) -> dict[str, Tensor]:
        (real,) = batch
        generator, discriminator = self.model["generator"], self.model["discriminator"]
        fake = generator(torch.randn(len(real), NOISE))

        scores = discriminator(torch.cat([real, fake.detach()]))
        is_real = torch.cat([torch.full((len(real), 1), 0.9), torch.zeros(len(real), 1)])
        of_discriminator = self.optimize(binary_cross_entropy_with_logits(scores, is_real), "discriminator")

        scores = discriminator(fake)  # gradients flow through the discriminator, and reach the generator alone
        of_generator = self.optimize(binary_cross_entropy_with_logits(scores, torch.ones_like(scores)), "generator")
        return {"discriminator_loss": of_discriminator, "generator_loss": of_generator}


def main() -> None:
    (pictures, _), _ = load_digits()
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "generator": nn.Sequential(
                nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
            ),
            "discriminator": nn.Sequential(
                nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 64), nn.LeakyReLU(0.2),
                nn.Linear(64, 1),
            ),
        }
    )  # fmt: skip
    optimizers = {name: torch.optim.Adam(part.parameters(), 1e-3, betas=(0.5, 0.999)) for name, part in model.items()}
    trainer = GAN(model, optimizers=optimizers)
    history = trainer.fit(torch.from_numpy(pictures), epochs=EPOCHS, effective_batch_size=64, verbose=False)
    if cx.is_master():
        for name in ("discriminator_loss", "generator_loss"):
            print(name, *(f"{loss:.2f}" for loss in history.metrics[name][::8]))
        with torch.no_grad():
            new = model["generator"](torch.randn(200, NOISE))
        for row in new[:4].view(4, 8, 8).transpose(0, 1):
            print("    ".join("".join(2 * INK[int(pixel * 9.99)] for pixel in line) for line in row).rstrip())
        for name, each in (("digits", torch.from_numpy(pictures)), ("new ones", new)):
            print(f"{name}: mean {each.mean():.2f}, variance between pictures {each.var(0).mean():.3f}")


if __name__ == "__main__":
    with cx.init():
        main()
