"""Small networks for examples and `configs/`: MLP, CNN and VAE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from cyxtrain.models.registry import register_model


@register_model("mlp")
class MLP(nn.Module):
    """Multi-layer perceptron: linear layers with an activation between them; (n, inputs) to (n, outputs).

    Args:
        inputs: Features per sample; rows of other shapes are flattened.
        outputs: Outputs per sample, such as a score per class.
        hidden: Width of each hidden layer.
        dropout: Dropout probability of hidden layers.
    """

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int] = (128,), dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(inputs, width), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, outputs))

    def forward(self, rows: Tensor) -> Tensor:
        """Return (n, outputs) for rows (n, inputs)."""
        output: Tensor = self.layers(rows)
        return output


@register_model("cnn")
class CNN(nn.Module):
    """3 x 3 convolutions, each followed by 2 x 2 pooling: (n, pixels) to (n, outputs).

    Args:
        image: Channels, height and width; images may be flat rows.
        outputs: Outputs per image, such as a score per class.
        channels: Of each convolution; each halves the image's height and width.
    """

    def __init__(self, image: Sequence[int], outputs: int, channels: Sequence[int] = (32, 64)) -> None:
        super().__init__()
        depth, height, width = image
        halved = 2 ** len(channels)
        if height < halved or width < halved:
            raise ValueError(f"images of {height} x {width} cannot be halved {len(channels)} times")
        layers: list[nn.Module] = []
        for out_channels in channels:
            layers += [nn.Conv2d(depth, out_channels, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            depth = out_channels
        self.image = tuple(image)
        features = depth * (height // halved) * (width // halved)
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, outputs))

    def forward(self, images: Tensor) -> Tensor:
        """Return (n, outputs) for images (n, channels, height, width), or flat rows of them."""
        output: Tensor = self.layers(images.reshape(len(images), *self.image))
        return output


@register_model("vae")
class VAE(nn.Module):
    """A variational autoencoder for features from 0 to 1 (Kingma and Welling, 2014, sections 2.3 and 3).

    Train it without a loss and without targets: its output's "loss" is the mean over samples of the reconstruction's
    binary cross-entropy plus the KL divergence of the latent distribution from a standard normal.

    Args:
        inputs: Features per sample.
        latent: Latent dimensions.
        hidden: Width of the encoder's and decoder's hidden layer.
        divergence_weight: Weight of the KL divergence.
    """

    def __init__(self, inputs: int, latent: int = 8, hidden: int = 128, divergence_weight: float = 1.0) -> None:
        super().__init__()
        self.latent = latent
        self.divergence_weight = divergence_weight
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
