"""Where the time of a fit's steps goes on this rank: always taken, at two looks at the clock per part."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import torch

from cyxtrain.environment import accelerator
from cyxtrain.world import runtime

PARTS = ("data", "forward", "backward", "communication", "optimizer")
"""What a step consists of: waiting for its batches; the model and the loss; gradients; waiting until those of all ranks
are averaged, and other words between ranks; what is done with them."""
_Item = TypeVar("_Item")


class Part:
    """One part of a step, as a context.

    Args:
        name: Of the part.

    Attributes:
        seconds: That it has taken.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._began

    def each(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Gives items; waiting for the next one belongs to this part."""
        iterator = iter(items)
        while True:
            with self:
                item = next(iterator, None)
            if item is None:
                return
            yield item


class SeenPart(Part):
    """The same for a trace: the device is waited for, and the part has its name there.

    Args:
        name: Of the part.
        device: That computes.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name)
        self._device = device
        self._scope: Any = None

    def __enter__(self) -> None:
        self._scope = torch.profiler.record_function(f"cyxtrain: {self.name}")
        self._scope.__enter__()
        super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if accelerator.is_accelerator(self._device):
            torch.accelerator.synchronize(self._device)
        super().__exit__(kind, error, trace)
        self._scope.__exit__(kind, error, trace)


class StepTimer:
    """The parts of the steps of an epoch.

    Args:
        device: That computes.
        profiles: Whether the parts are seen in a trace; on a GPU its work is then waited for, part by part.
    """

    def __init__(self, device: torch.device, *, profiles: bool) -> None:
        parts = [SeenPart(name, device) if profiles else Part(name) for name in PARTS]
        self.data, self.forward, self.backward, self.communication, self.optimizer = self._parts = parts
        self.steps = 0

    def communicated(self, within: Part, seconds: float) -> None:
        """Notes that a part has waited for other ranks for so long."""
        within.seconds -= seconds
        self.communication.seconds += seconds

    def over_ranks(self) -> list[dict[str, float]]:
        """Returns seconds of each part, over all steps, by rank; the same on every rank. All call it."""
        self._settle_debts()
        own = json.dumps({part.name: part.seconds for part in self._parts})
        return [json.loads(text) for text in runtime.gather_texts(own)]

    def _settle_debts(self) -> None:
        """Take what an accelerator has waited for other ranks out of the parts in which the host waited for it.

        The host may wait for an accelerator in a later part than the one that asked for the collective, which then has
        less than no time left.
        """
        debt = min(self.backward.seconds, 0.0)
        self.backward.seconds -= debt
        for part in (self.optimizer, self.forward, self.data, self.communication):
            paid = min(part.seconds, -debt)
            part.seconds -= paid
            debt += paid
