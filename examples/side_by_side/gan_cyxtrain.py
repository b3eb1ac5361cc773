"""A GAN with Cyxtrain: a custom training step with two optimizers, to compare with Lightning and Accelerate.

Run it alone, or on two ranks:

    python examples/side_by_side/gan_cyxtrain.py
    cyxtrain launch -n 2 -- python examples/side_by_side/gan_cyxtrain.py

`self.optimize` computes the gradients of one optimizer's parameters, averages them over the ranks and takes a step.
Expect all eight clusters in the last line; on several ranks the losses of the first epochs are the same,
and later ones similar, because a GAN amplifies rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from gan_task import (
    BATCH_SIZE,
    BETAS,
    EPOCHS,
    RATES,
    PointsAndNoise,
    discriminator_loss,
    generator_loss,
    make_discriminator,
    make_generator,
    quality,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import cyxtrain as cx


class GAN(cx.DistributedTrainer):
    def train_step(self, batch: Any) -> dict[str, Tensor]:
        real, noise = batch
        generator, discriminator = self.model["generator"], self.model["discriminator"]
        fake = generator(noise)
        d_loss = discriminator_loss(discriminator, real, fake.detach())
        self.optimize(d_loss, "discriminator")
        g_loss = generator_loss(discriminator, fake)
        self.optimize(g_loss, "generator")
        return {"d_loss": d_loss, "g_loss": g_loss}


def main() -> cx.TrainingHistory:
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": make_generator(), "discriminator": make_discriminator()})
    optimizers = {name: torch.optim.Adam(model[name].parameters(), rate, BETAS) for name, rate in RATES.items()}
    trainer = GAN(model, optimizers=optimizers)
    loader = DataLoader(PointsAndNoise(4096), batch_size=BATCH_SIZE, shuffle=True)
    history = trainer.fit(loader, epochs=EPOCHS, effective_batch_size=BATCH_SIZE)
    if cx.is_master():
        print(quality(model["generator"]))
    return history


if __name__ == "__main__":
    with cx.init():
        main()
