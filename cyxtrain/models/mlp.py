"""Linear layers with something bent between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from cyxtrain.models.registry import register_model


@register_model("mlp")
class MLP(nn.Module):
    """A multi-layer perceptron: (n, inputs) to (n, outputs); rows of other shapes are flattened.

    Args:
        inputs: Numbers of a row.
        outputs: Numbers for each row, such as a score per class.
        hidden: Width of each hidden layer.
        dropout: Share of a hidden layer's numbers that are left out in training.
    """

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int] = (128,), dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(inputs, width), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, outputs))

    def forward(self, rows: Tensor) -> Tensor:
        """Returns (n, outputs) for rows (n, inputs)."""
        output: Tensor = self.layers(rows)
        return output
