"""A convolutional network for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from cyxtrain.models.registry import register_model


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
        for wide in channels:
            layers += [nn.Conv2d(depth, wide, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            depth = wide
        self.image = tuple(image)
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(depth * (height // halved) * (width // halved), outputs)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return (n, outputs) for images (n, channels, height, width), or flat rows of them."""
        output: Tensor = self.layers(images.reshape(len(images), *self.image))
        return output
