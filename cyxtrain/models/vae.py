"""A model that computes its own loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from cyxtrain.models.registry import register_model


@register_model("vae")
class VAE(nn.Module):
    """A variational autoencoder of rows with numbers from 0 to 1 (Kingma and Welling, 2014, sections 2.3 and 3).

    Train it without a loss and without targets: its output's "loss" is the mean over rows of the reconstruction's
    binary cross-entropy and the divergence of the latent numbers from a normal distribution.

    Args:
        inputs: Numbers of a row.
        latent: Numbers that a row is squeezed into.
        hidden: Width of the hidden layers on both sides.
        divergence_weight: How much the divergence counts.
    """

    def __init__(self, inputs: int, latent: int = 8, hidden: int = 128, divergence_weight: float = 1.0) -> None:
        super().__init__()
        self.latent, self.divergence_weight = latent, divergence_weight
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, inputs))

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns, of rows (n, ...), "loss" (a number), "rows" (n, inputs) as reconstructed, and "mean" (n, latent).

        In evaluation nothing is drawn: each row's latent numbers are their means.
        """
        mean, log_variance = self.encoder(rows).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        scores = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        missed = functional.binary_cross_entropy_with_logits(scores, rows.flatten(1), reduction="none").sum(1)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        loss = (missed + self.divergence_weight * divergence).mean()
        return {"loss": loss, "rows": scores.sigmoid(), "mean": mean}

    def sample(self, count: int) -> Tensor:
        """Returns new rows, (count, inputs)."""
        device = next(self.parameters()).device
        rows: Tensor = self.decoder(torch.randn(count, self.latent, device=device)).sigmoid()
        return rows
