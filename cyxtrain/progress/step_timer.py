"""The time of each part of a fit's steps on this rank; always measured, with two clock reads per part."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from cyxtrain.environment import accelerator
from cyxtrain.world import runtime

# Waiting for batches; model and loss; gradients; waiting for other ranks; the update.
PARTS = ("data", "forward", "backward", "communication", "optimizer")
_Item = TypeVar("_Item")


class Part:
    """One part of a step, as a context manager; `seconds` is its total time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        self.seconds += time.perf_counter() - self._began

    def each(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield items; waiting for the next one belongs to this part."""
        iterator = iter(items)
        while True:
            with self:
                item = next(iterator, None)
            if item is None:
                return
            yield item


class SeenPart(Part):
    """A part of a trace: waits for the device, and has its name in the trace."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name)
        self._device = device
        self._scope: Any = None

    def __enter__(self) -> None:
        self._scope = torch.profiler.record_function(f"cyxtrain: {self.name}")
        self._scope.__enter__()
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if accelerator.is_accelerator(self._device):
            torch.accelerator.synchronize(self._device)
        super().__exit__(*error)
        self._scope.__exit__(*error)


class StepTimer:
    """The parts of an epoch's steps; if it profiles, they are in the trace, and a GPU is waited for after each."""

    def __init__(self, device: torch.device, *, profiles: bool) -> None:
        parts = [SeenPart(name, device) if profiles else Part(name) for name in PARTS]
        self.data, self.forward, self.backward, self.communication, self.optimizer = self._parts = parts
        self.steps = 0

    def communicated(self, within: Part, seconds: float) -> None:
        """Move time that a part waited for other ranks to communication."""
        within.seconds -= seconds
        self.communication.seconds += seconds

    def over_ranks(self) -> list[dict[str, float]]:
        """Return the seconds of each part, over all steps, by rank; collective."""
        self._settle_debts()
        own = json.dumps({part.name: part.seconds for part in self._parts})
        return [json.loads(text) for text in runtime.gather_texts(own)]

    def _settle_debts(self) -> None:
        """Subtract an accelerator's communication from the parts in which the host waited for it.

        The host may wait in a later part than the one that started the collective, whose time is then negative.
        """
        debt = min(self.backward.seconds, 0.0)
        self.backward.seconds -= debt
        for part in (self.optimizer, self.forward, self.data, self.communication):
            paid = min(part.seconds, -debt)
            part.seconds -= paid
            debt += paid
