"""The GAN with Lightning.

Run it alone, or on two ranks (`pip install lightning`):

    python examples/side_by_side/gan_lightning.py
    torchrun --nproc-per-node 2 examples/side_by_side/gan_lightning.py

Expect all eight clusters in the last line.
"""

from __future__ import annotations

import os

import lightning
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
from torch import Tensor
from torch.utils.data import DataLoader


class GAN(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = make_generator(), make_discriminator()

    def training_step(self, batch: list[Tensor]) -> None:
        real, noise = batch
        d_optimizer, g_optimizer = self.optimizers()
        fake = self.generator(noise)
        d_loss = discriminator_loss(self.discriminator, real, fake.detach())
        d_optimizer.zero_grad()
        self.manual_backward(d_loss)
        d_optimizer.step()
        self.toggle_optimizer(g_optimizer)
        g_loss = generator_loss(self.discriminator, fake)
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)
        g_optimizer.step()
        self.untoggle_optimizer(g_optimizer)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.discriminator.parameters(), RATES["discriminator"], BETAS),
            torch.optim.Adam(self.generator.parameters(), RATES["generator"], BETAS),
        ]


def main() -> None:
    lightning.seed_everything(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    loader = DataLoader(PointsAndNoise(4096), batch_size=BATCH_SIZE // ranks, shuffle=True)
    module = GAN()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp_find_unused_parameters_true" if ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        print(quality(module.generator))


if __name__ == "__main__":
    main()
