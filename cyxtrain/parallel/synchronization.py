"""What a rank tells the others with its gradients, and what they tell it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from cyxtrain.ring import MeanWeight


class Synchronization:
    """What a rank sends with the gradients of one step, and what comes back.

    In this order: `DistributedDataParallel.begin_sync` makes it; `watch` each loss before its backward, and before the
    last one `divide_by` the weight of all; the backward that averages gradients sends it; then `factor` and `received`
    tell what has come.

    Args:
        scale: What the gradients are multiplied by, the same on every rank.
        signals: Of this rank, `DistributedDataParallel.num_signals` of them or none, each 0 or 1; they cost nothing.

    Attributes:
        loss: The sum of the losses of this rank's running slice, 0-dim; None: none is watched.
        weight: That of these losses; None: it does not travel.
        factor: By which the averages were multiplied.
        is_sent: Whether gradients were averaged; in a world of one, which has nobody to send to, from the beginning.
        slices_ended: Of how many of this rank's slices the gradients were added up, or averaged.
        has_changed_averages: Whether the step has multiplied the averages: they are checked once more.
        has_shared_buffers: Whether a forward has shared buffers; another one does not share them again, as ranks may
            run different numbers of forwards.
    """

    def __init__(self, scale: float = 1.0, signals: Sequence[float] = ()) -> None:
        self.scale = scale
        self.signals = signals
        self.loss: Tensor | None = None
        self.weight: MeanWeight | None = None
        self.factor: Tensor | float = 1.0
        self.is_sent = False
        self.slices_ended = 0
        self.has_changed_averages = False
        self.has_shared_buffers = False
        self._received: Callable[[], Sequence[float]] = self._nothing_received

    def watch(self, loss: Tensor) -> None:
        """Include a loss of this rank, 0-dim: gradients count as finite only if it is."""
        # With accumulation, the losses of several backwards are summed: what is not finite stays so.
        own = loss.detach()
        self.loss = own if self.loss is None else self.loss + own

    def divide_by(self, weight: Tensor | float, provisional_divisor: float) -> None:
        """Make the averages the gradients of a mean: the sum of all ranks' terms over the sum of their weights.

        Call backward on sum of terms x number of ranks / `provisional_divisor`. All ranks call it, also one without
        terms, if `DistributedDataParallel.carries_weights`.

        Args:
            weight: Of this rank's terms; it travels with the gradients, and an accelerator is not waited for.
            provisional_divisor: A power of two near the sum of weights, the same on every rank: nothing is rounded.
        """
        self.weight = MeanWeight(weight, provisional_divisor)

    def end_slice(self) -> None:
        """Begin the next slice: the loss and the weight of this one are among the gradients."""
        self.loss = None
        self.weight = None
        self.slices_ended += 1

    def complete(self, factor: Tensor | float, received: Callable[[], Sequence[float]]) -> None:
        """Store what has come back; `received` returns the signals."""
        self.factor = factor
        self.is_sent = True
        self.slices_ended += 1
        self._received = received

    @property
    def received(self) -> Sequence[float]:
        """For each signal, a number above 0 if any rank gave it; zeros if nothing is sent. The host waits for it."""
        return self._received()

    def _nothing_received(self) -> Sequence[float]:
        # Ranks must decide alike: this rank's own signals may not be those of the others.
        return [0.0] * len(self.signals)
