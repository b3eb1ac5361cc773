"""Who keeps the others waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cyxtrain.callbacks.callback import Callback, Logs
from cyxtrain.callbacks.monitored_value import require_float
from cyxtrain.config.settings import require
from cyxtrain.errors import warn
from cyxtrain.world import runtime

_WORDS = {"data": "waits for data", "compute": "computes"}
_COMPUTE = ("forward", "backward", "optimizer")


class SlowRankMonitor(Callback):
    """Says after an epoch which rank keeps the others waiting, and by what: it waits for data, or it computes.

    Where no rank does, and all of them communicate for more than half of a step, it says that. What was said after the
    epoch before is not said again.

    Args:
        threshold: Times as long as the others, on average, a rank must take for a step to be called slow.

    Attributes:
        slow: (epoch, counted from 0; rank, or None where all communicate; "data", "compute" or "communication"), for
            each epoch in which there was something to say; the same on every rank.

    Raises:
        ConfigError: The threshold is not above 1.
    """

    def __init__(self, threshold: float = 1.25) -> None:
        require_float("SlowRankMonitor", "threshold", threshold)
        require(threshold > 1, f"SlowRankMonitor.threshold must be above 1, got {threshold!r}.")
        self.threshold = threshold
        self.slow: list[tuple[int, int | None, str]] = []

    def state_dict(self) -> dict[str, Any]:
        """Returns what there was to say."""
        return {"slow": list(self.slow)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what there was to say."""
        self.slow = [(epoch, rank, why) for epoch, rank, why in state["slow"]]

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Looks at the times of all ranks, which the fit knows anyway."""
        ranks = self.trainer.step_seconds
        if len(ranks) < 2:
            return
        rank, why = slow_rank(ranks, self.threshold)
        if not why:
            return
        is_news = (epoch - 1, rank, why) not in self.slow[-1:]
        self.slow.append((epoch, rank, why))
        if is_news and runtime.is_master():
            warn(f"epoch {epoch + 1}: {_say(ranks, rank, why)}")


def slow_rank(ranks: Sequence[dict[str, float]], threshold: float) -> tuple[int | None, str]:
    """Returns (rank, why) of the one that keeps the others waiting; (None, "communication"); or (None, "").

    Args:
        ranks: Seconds of each part of a step, by rank; two or more.
        threshold: As `SlowRankMonitor`.
    """
    own = [_own(parts) for parts in ranks]
    rank = max(range(len(ranks)), key=own.__getitem__)
    others = [parts for other, parts in enumerate(ranks) if other != rank]
    if own[rank] > threshold * _mean([_own(parts) for parts in others]):
        more = {
            "data": ranks[rank]["data"] - _mean([parts["data"] for parts in others]),
            "compute": _compute(ranks[rank]) - _mean([_compute(parts) for parts in others]),
        }
        return rank, max(more, key=more.__getitem__)
    everyone = all(parts["communication"] > _own(parts) for parts in ranks)
    return None, "communication" if everyone else ""


def _say(ranks: Sequence[dict[str, float]], rank: int | None, why: str) -> str:
    if rank is None:
        part = min(parts["communication"] / (parts["communication"] + _own(parts)) for parts in ranks)
        return (
            f"no rank is slow; all of them communicate for {100 * part:.0f} % of a step or more. Larger batches, "
            "accumulation_steps or DDPConfig(compression=) make it less."
        )
    others = [parts for other, parts in enumerate(ranks) if other != rank]
    mine, theirs = ranks[rank], 1000 * _mean([_own(parts) for parts in others])
    of_it = 1000 * (mine["data"] if why == "data" else _compute(mine))
    return (
        f"rank {rank} is slow: it takes {1000 * _own(mine):.1f} ms for a step, the others {theirs:.1f} ms, and wait "
        f"for it. It {_WORDS[why]} ({of_it:.1f} ms)."
    )


def _compute(parts: dict[str, float]) -> float:
    return sum(parts[name] for name in _COMPUTE)


def _own(parts: dict[str, float]) -> float:
    """Returns what a rank takes by itself, without the others."""
    return parts["data"] + _compute(parts)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
