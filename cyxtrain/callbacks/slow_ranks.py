"""Find the rank that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.callbacks.monitored_value import require_float
from cyxtrain.config.settings import require
from cyxtrain.errors import warn
from cyxtrain.world import runtime

_COMPUTE = ("forward", "backward", "optimizer")


class SlowRankMonitor(Callback):
    """Warn after an epoch which rank is slow, and whether it waits for data or computes longer.

    If no rank is slow and all spend more than half of a step communicating, it warns of that. It does not repeat the
    previous epoch's warning.

    Args:
        threshold: How many times longer than the others' average a rank's step must take to be slow.

    Attributes:
        slow: (epoch, from 0; rank, or None if all communicate; "data", "compute" or "communication"), for each epoch
            with a finding; the same on every rank.

    Raises:
        ConfigError: The threshold is not above 1.
    """

    def __init__(self, threshold: float = 1.25) -> None:
        require_float("SlowRankMonitor", "threshold", threshold)
        require(threshold > 1, f"SlowRankMonitor.threshold must be above 1, got {threshold!r}.")
        self.threshold = threshold
        self.slow: list[tuple[int, int | None, str]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the findings."""
        return {"slow": list(self.slow)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the findings."""
        self.slow = [(epoch, rank, why) for epoch, rank, why in state["slow"]]

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Compare the step times of all ranks, which the fit has measured."""
        ranks = self.trainer.step_seconds
        rank, why = slow_rank(ranks, self.threshold) if len(ranks) > 1 else (None, "")
        if why:
            is_new = (epoch - 1, rank, why) not in self.slow[-1:]
            self.slow.append((epoch, rank, why))
            if is_new and runtime.is_master():
                warn(f"epoch {epoch + 1}: {_describe(ranks, rank, why)}")


def slow_rank(ranks: Sequence[dict[str, float]], threshold: float) -> tuple[int | None, str]:
    """Return (slow rank, "data" or "compute"), (None, "communication") or (None, "").

    Args:
        ranks: Seconds of each part of a step, by rank; two or more.
        threshold: As in `SlowRankMonitor`.
    """
    own = [_own(parts) for parts in ranks]
    rank = max(range(len(ranks)), key=own.__getitem__)
    if own[rank] > threshold * _others_mean(own, rank):
        data, compute = [parts["data"] for parts in ranks], [_compute(parts) for parts in ranks]
        is_data = data[rank] - _others_mean(data, rank) >= compute[rank] - _others_mean(compute, rank)
        return rank, "data" if is_data else "compute"
    everyone = all(parts["communication"] > _own(parts) for parts in ranks)
    return None, "communication" if everyone else ""


def _describe(ranks: Sequence[dict[str, float]], rank: int | None, why: str) -> str:
    if rank is None:
        share = min(parts["communication"] / (parts["communication"] + _own(parts)) for parts in ranks)
        return (
            f"no rank is slow; all spend at least {100 * share:.0f} % of a step communicating. Larger batches, "
            "accumulation_steps or DDPConfig(compression=) reduce it."
        )
    own = [1000 * _own(parts) for parts in ranks]
    seconds = ranks[rank]["data"] if why == "data" else _compute(ranks[rank])
    return (
        f"rank {rank} is slow: its step takes {own[rank]:.1f} ms, the others' {_others_mean(own, rank):.1f} ms, and "
        f"they wait for it. It {'waits for data' if why == 'data' else 'computes'} for {1000 * seconds:.1f} ms."
    )


def _compute(parts: dict[str, float]) -> float:
    return sum(parts[name] for name in _COMPUTE)


def _own(parts: dict[str, float]) -> float:
    """Return the time without communication."""
    return parts["data"] + _compute(parts)


def _others_mean(values: Sequence[float], rank: int) -> float:
    return (sum(values) - values[rank]) / (len(values) - 1)
