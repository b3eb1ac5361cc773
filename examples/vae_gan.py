"""Three optimizers: a variational autoencoder with a discriminator that judges its pictures (Larsen et al., 2016).

Run it alone, or on two ranks:

    python examples/vae_gan.py
    cyxtrain launch -n 2 -- python examples/vae_gan.py

A step updates encoder, decoder and discriminator, each by its own loss. The first two losses share a graph, which
`retain_graph=True` keeps. Each rank draws its own noise, so results on several ranks are similar, not equal. Expect
three losses, then the squared error per pixel of reconstructions, far below the error of the mean picture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import cyxtrain as cx
from cyxtrain.datasets import load_digits

LATENT, EPOCHS = 8, 20


class VAEGAN(cx.DistributedTrainer):
    def train_step(self, batch: Any) -> dict[str, Tensor]:
        (real,) = batch
        parts = self.model
        mean, log_variance = parts["encoder"](real).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        rebuilt = parts["decoder"](code)
        scores = parts["discriminator"](rebuilt)

        divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1).mean()
        error = 20 * (real - rebuilt).square().sum(1).mean()
        fools = binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
        losses = {
            "encoder_loss": self.optimize(error + divergence, "encoder", retain_graph=True),
            "decoder_loss": self.optimize(error + fools, "decoder"),
        }
        scores = parts["discriminator"](torch.cat([real, rebuilt.detach()]))
        is_real = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        losses["discriminator_loss"] = self.optimize(binary_cross_entropy_with_logits(scores, is_real), "discriminator")
        return losses

    def predict_step(self, batch: Any) -> Tensor:
        (pictures,) = batch
        rebuilt: Tensor = self.model["decoder"](self.model["encoder"](pictures)[:, :LATENT])
        return rebuilt


def perceptron(inputs: int, outputs: int, *last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, outputs), *last)


def main() -> None:
    (x_train, _), (x_test, _) = load_digits()
    torch.manual_seed(0)
    parts = {
        "encoder": perceptron(64, 2 * LATENT),
        "decoder": perceptron(LATENT, 64, nn.Sigmoid()),
        "discriminator": perceptron(64, 1),
    }
    optimizers = {name: torch.optim.Adam(part.parameters(), 2e-3) for name, part in parts.items()}
    trainer = VAEGAN(nn.ModuleDict(parts), optimizers=optimizers, schedulers={"encoder": "cosine", "decoder": "cosine"})
    history = trainer.fit(torch.from_numpy(x_train), epochs=EPOCHS, effective_batch_size=48, verbose=False)
    error = ((trainer.predict(torch.from_numpy(x_test)).numpy() - x_test) ** 2).mean()
    if cx.is_master():
        for part in parts:
            print(f"{part}_loss", *(f"{loss:.2f}" for loss in history.metrics[f"{part}_loss"][::4]))
        print(
            f"squared error per pixel: {error:.4f}, of the mean picture {((x_train.mean(0) - x_test) ** 2).mean():.4f}"
        )


if __name__ == "__main__":
    with cx.init():
        main()
