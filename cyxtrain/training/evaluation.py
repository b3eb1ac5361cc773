"""What `evaluate` returns."""

from __future__ import annotations

from collections.abc import Iterator


class Evaluation:
    """Metrics over all rows, the same on every rank: `loss, accuracy = ...`, `.loss`, `["accuracy"]`, `dict(...)`.

    Args:
        metrics: By name, "loss" first, then "accuracy" (NaN where targets are no classes).
    """

    def __init__(self, **metrics: float) -> None:
        self._metrics = metrics

    def __iter__(self) -> Iterator[float]:
        return iter(self._metrics.values())

    def __len__(self) -> int:
        return len(self._metrics)

    def __getitem__(self, key: str | int) -> float:
        return self._metrics[key] if isinstance(key, str) else list(self._metrics.values())[key]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Evaluation):
            return self._metrics == other._metrics
        return list(self) == list(other) if isinstance(other, (tuple, list)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def keys(self) -> list[str]:
        """Returns the names of the metrics."""
        return list(self._metrics)

    @property
    def loss(self) -> float:
        """The loss."""
        return self._metrics["loss"]

    @property
    def accuracy(self) -> float:
        """The share of rows with the right class; NaN where targets are no classes."""
        return self._metrics["accuracy"]

    def __repr__(self) -> str:
        return f"Evaluation({', '.join(f'{name}={value:.6g}' for name, value in self._metrics.items())})"
