"""A variational autoencoder: a model that computes its own loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from cyxtrain.models.registry import register_model


@register_model("vae")
class VAE(nn.Module):
    """A variational autoencoder for features from 0 to 1 (Kingma and Welling, 2014, sections 2.3 and 3).

    Train it without a loss and without targets: its output's "loss" is the mean over rows of the reconstruction's
    binary cross-entropy plus the KL divergence of the latent distribution from a standard normal.

    Args:
        inputs: Features per row.
        latent: Latent dimensions.
        hidden: Width of the encoder's and decoder's hidden layer.
        divergence_weight: Weight of the KL divergence.
    """

    def __init__(self, inputs: int, latent: int = 8, hidden: int = 128, divergence_weight: float = 1.0) -> None:
        super().__init__()
        self.latent, self.divergence_weight = latent, divergence_weight
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, inputs))

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        """Return "loss", reconstructed "rows" (n, inputs) and latent "mean" (n, latent) for rows (n, ...).

        In evaluation mode nothing is sampled: the latent values are the means.
        """
        mean, log_variance = self.encoder(rows).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        scores = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        missed = functional.binary_cross_entropy_with_logits(scores, rows.flatten(1), reduction="none").sum(1)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        loss = (missed + self.divergence_weight * divergence).mean()
        return {"loss": loss, "rows": scores.sigmoid(), "mean": mean}

    def sample(self, count: int) -> Tensor:
        """Return new rows, (count, inputs)."""
        device = next(self.parameters()).device
        rows: Tensor = self.decoder(torch.randn(count, self.latent, device=device)).sigmoid()
        return rows
