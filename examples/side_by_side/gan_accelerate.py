"""The GAN with Accelerate.

Run it alone, or on two ranks (`pip install accelerate`):

    python examples/side_by_side/gan_accelerate.py
    torchrun --nproc-per-node 2 examples/side_by_side/gan_accelerate.py

Expect all eight clusters in the last line.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
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
from torch.utils.data import DataLoader


def main() -> None:
    accelerator = Accelerator(cpu=True, split_batches=True)
    set_seed(0)
    generator, discriminator = make_generator(), make_discriminator()
    g_optimizer = torch.optim.Adam(generator.parameters(), RATES["generator"], BETAS)
    d_optimizer = torch.optim.Adam(discriminator.parameters(), RATES["discriminator"], BETAS)
    loader = DataLoader(PointsAndNoise(4096), batch_size=BATCH_SIZE, shuffle=True)
    generator, discriminator, g_optimizer, d_optimizer, loader = accelerator.prepare(
        generator, discriminator, g_optimizer, d_optimizer, loader
    )
    for epoch in range(EPOCHS):
        totals = torch.zeros(2)
        for real, noise in loader:
            fake = generator(noise)
            d_optimizer.zero_grad()
            d_loss = discriminator_loss(discriminator, real, fake.detach())
            accelerator.backward(d_loss)
            d_optimizer.step()
            g_optimizer.zero_grad()
            discriminator.requires_grad_(False)
            g_loss = generator_loss(accelerator.unwrap_model(discriminator), fake)
            accelerator.backward(g_loss)
            discriminator.requires_grad_(True)
            g_optimizer.step()
            totals += accelerator.reduce(torch.stack([d_loss, g_loss]).detach(), "mean")
        d_mean, g_mean = (totals / len(loader)).tolist()
        accelerator.print(f"epoch {epoch}  d_loss {d_mean:.4f}  g_loss {g_mean:.4f}")
    accelerator.print(quality(accelerator.unwrap_model(generator)))


if __name__ == "__main__":
    main()
