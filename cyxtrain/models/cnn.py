"""Convolutions for small pictures."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from cyxtrain.models.registry import register_model


@register_model("cnn")
class CNN(nn.Module):
    """Convolutions of 3 x 3, each followed by pooling that halves the picture: (n, pixels) to (n, outputs).

    Args:
        image: Channels, height and width; rows may be flat, as the digits are.
        outputs: Numbers for each picture, such as a score per class.
        channels: Of each convolution; both sides of the picture must be halved so often.
    """

    def __init__(self, image: Sequence[int], outputs: int, channels: Sequence[int] = (32, 64)) -> None:
        super().__init__()
        depth, height, width = image
        halved = 2 ** len(channels)
        if height < halved or width < halved:
            raise ValueError(f"pictures of {height} x {width} cannot be halved {len(channels)} times")
        layers: list[nn.Module] = []
        for wide in channels:
            layers += [nn.Conv2d(depth, wide, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            depth = wide
        self.image = tuple(image)
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(depth * (height // halved) * (width // halved), outputs)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """Returns (n, outputs) for pictures (n, channels, height, width), or the same flat."""
        output: Tensor = self.layers(pictures.reshape(len(pictures), *self.image))
        return output
