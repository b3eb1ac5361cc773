"""A variational autoencoder whose noise comes with the data, so that it is the same on any number of ranks.

Run it alone, or on two ranks:

    python examples/ported/vae.py
    cyxtrain launch -n 2 -- python examples/ported/vae.py

What a model draws depends on the rank; what a dataset draws for a sample depends only on the seed, the epoch and the
sample's position. So this dataset draws the noise of the latent numbers (`examples/vae.py` draws it in the model). The
model computes its own loss; "reconstruction" and "kl" appear in the history, too. Expect a squared error per pixel of
about 0.04 in the last line: the same results on any number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import cyxtrain as cx
from cyxtrain.datasets import load_digits

LATENT = 8


class NoisyDigits(Dataset[dict[str, Tensor]]):
    """Digits, each with new noise in each epoch."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "noise": torch.randn(LATENT)}


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())

    def forward(self, image: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
        mean, log_variance = self.encoder(image).chunk(2, dim=1)
        latent = mean if noise is None else mean + (log_variance / 2).exp() * noise
        rebuilt = self.decoder(latent)
        reconstruction = functional.mse_loss(rebuilt, image, reduction="none").sum(1).mean()
        kl = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1).mean()
        return {"loss": reconstruction + 0.05 * kl, "reconstruction": reconstruction, "kl": kl, "rebuilt": rebuilt}


def main() -> cx.TrainingHistory:
    (x_train, _), (x_test, _) = load_digits()
    train, test = torch.from_numpy(x_train), torch.from_numpy(x_test)
    torch.manual_seed(0)
    model = VAE()
    trainer = cx.DistributedTrainer(model, None, torch.optim.Adam(model.parameters(), lr=0.003))
    loader = DataLoader(NoisyDigits(train), batch_size=64, shuffle=True)
    history = trainer.fit(loader, DataLoader(NoisyDigits(test), batch_size=64), epochs=8, effective_batch_size=64)

    error = (trainer.predict(test)["rebuilt"] - test).square().mean()
    if cx.is_master():
        print(f"squared error per pixel: {error:.4f}")
    return history


if __name__ == "__main__":
    with cx.init():
        main()
