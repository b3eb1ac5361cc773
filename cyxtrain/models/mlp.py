"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from cyxtrain.models.registry import register_model


@register_model("mlp")
class MLP(nn.Module):
    """Multi-layer perceptron: linear layers with an activation between them; (n, inputs) to (n, outputs).

    Args:
        inputs: Features per row; rows of other shapes are flattened.
        outputs: Outputs per row, such as a score per class.
        hidden: Width of each hidden layer.
        dropout: Dropout probability of hidden layers.
    """

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int] = (128,), dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(inputs, width), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, outputs))

    def forward(self, rows: Tensor) -> Tensor:
        """Return (n, outputs) for rows (n, inputs)."""
        output: Tensor = self.layers(rows)
        return output
