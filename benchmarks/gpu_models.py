"""The models of gpu_vs_loop.py: GPT-2 and ResNet-50 as their papers have them, and random rows to train them on.

Sources: Radford et al., Language Models are Unsupervised Multitask Learners (2019); He et al., Deep Residual Learning
for Image Recognition (2015), with the stride in the 3 x 3 convolution, as everybody trains it now.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns (rows, tokens, width) for the same."""
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.mlp(self.norm_2(x))


class GPT2(nn.Module):
    """GPT-2, which returns its loss; 124 million parameters by default."""

    def __init__(
        self, vocabulary: int = 50304, tokens: int = 1024, layers: int = 12, heads: int = 12, width: int = 768
    ) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of the next tokens, for both (rows, tokens)."""
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, with a way around them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.layers = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        around = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.around: nn.Module = around if stride != 1 or before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Returns (rows, 4 * width, height / stride, width / stride)."""
        return functional.relu(self.layers(x) + self.around(x), inplace=True)


def make_resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Sequential:
    """Returns ResNet-50, or a smaller one: (rows, 3, height, width) to (rows, classes)."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    before = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(Bottleneck(before, width << stage, 2 if stage and number == 0 else 1))
            before = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


@dataclasses.dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        make: The model.
        optimizer: Of the model's parameters, as PyTorch builds it; both ways step it by the fused kernel.
        rows: (count) to the inputs, by name for a model that returns its loss, and the targets or None.
        batch_size: Rows of a step on each rank.
        tokens: Of a row; 0: it has none.
    """

    make: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    rows: Callable[[int], tuple[Any, Tensor | None]]
    batch_size: int
    tokens: int = 0


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 6e-4, (0.9, 0.95), weight_decay=0.1)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=1e-4)


def _tokens(vocabulary: int, tokens: int) -> Callable[[int], tuple[Any, None]]:
    def rows(count: int) -> tuple[Any, None]:
        ids = torch.randint(vocabulary, (count, tokens + 1), generator=torch.Generator().manual_seed(0))
        return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}, None

    return rows


def _images(size: int, classes: int) -> Callable[[int], tuple[Any, Tensor]]:
    def rows(count: int) -> tuple[Any, Tensor]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(count, 3, size, size, generator=generator)
        return images, torch.randint(classes, (count,), generator=generator)

    return rows


WORKS = {
    "gpt2": Work(GPT2, _adamw, _tokens(50257, 1024), 8, 1024),
    "resnet50": Work(make_resnet, _sgd, _images(224, 1000), 64),
}
TINY = {
    "gpt2": Work(lambda: GPT2(256, 32, 2, 2, 32), _adamw, _tokens(256, 32), 2, 32),
    "resnet50": Work(lambda: make_resnet((1, 1, 1, 1), 8, 10), _sgd, _images(32, 10), 2),
}
"""The same in seconds on CPUs."""
