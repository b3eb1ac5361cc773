"""The time of each part of a fit's steps on this rank, by two clock reads; with `profile`, a trace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from cyxtrain.checkpoint.files import replacing
from cyxtrain.environment import accelerator
from cyxtrain.environment.regular_files import local_path
from cyxtrain.errors import warn
from cyxtrain.world.world import World

# Waiting for batches; model and loss; gradients; waiting for other ranks; the update.
PARTS = ("data", "forward", "backward", "communication", "optimizer")
_Item = TypeVar("_Item")

_FOLDER = "profile"
_STEPS_BEFORE_TRACE = 3  # they do much for the first time
_TRACED_STEPS = 10


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
                item = next(iterator, None)  # no item is None
            if item is None:
                return
            yield item


class TracedPart(Part):
    """A part of a step with its name in the trace; it includes the device's work."""

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
    """The parts of an epoch's steps; if it profiles, they are in the trace, and each waits for a GPU."""

    def __init__(self, device: torch.device, *, profiles: bool) -> None:
        self._parts: list[Part] = [Part(name) for name in PARTS]
        if profiles:
            self._parts = [TracedPart(name, device) for name in PARTS]
        self.data, self.forward, self.backward, self.communication, self.optimizer = self._parts
        self.steps = 0

    def communicated(self, within: Part, seconds: float) -> None:
        """Move time that a part waited for other ranks to communication."""
        within.seconds -= seconds
        self.communication.seconds += seconds

    def over_ranks(self, world: World) -> list[dict[str, float]]:
        """Return the seconds of each part, over all steps, by rank; collective."""
        self._settle_debts()
        return world.gather_json({part.name: part.seconds for part in self._parts})

    def _settle_debts(self) -> None:
        """Subtract an accelerator's communication from the parts in which the host waited for it.

        The host may wait in a later part than backward, which started the collective: its time is then negative.
        """
        debt = max(-self.backward.seconds, 0.0)
        self.backward.seconds += debt
        for part in (self.optimizer, self.forward, self.data, self.communication):
            paid = min(part.seconds, debt)
            part.seconds -= paid
            debt -= paid


class Profile:
    """A profile of steps, as a context manager: each rank writes a trace, rank 0 the table steps.txt."""

    def __init__(self, asked: bool | str, device: torch.device, world: World) -> None:
        self._world = world
        name = asked if isinstance(asked, str) else _FOLDER
        folder = Path(local_path("fit.profile", name))
        self._folder = folder.absolute() if asked else None
        self._seconds: list[dict[str, float]] = []
        self._steps = 0
        self._profiler: torch.profiler.profile | None = None
        if asked:
            activities = {torch.profiler.ProfilerActivity.CPU}
            if accelerator.is_accelerator(device):
                activities = torch.profiler.supported_activities()
            schedule = torch.profiler.schedule(wait=_STEPS_BEFORE_TRACE - 1, warmup=1, active=_TRACED_STEPS, repeat=1)
            self._profiler = torch.profiler.profile(
                activities=activities, schedule=schedule, on_trace_ready=self._write_trace
            )

    def __enter__(self) -> Profile:
        if self._profiler is not None:
            self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profiler is not None:
            self._profiler.__exit__(*error)

    def step(self) -> None:
        """Count a step."""
        if self._profiler is not None:
            self._profiler.step()

    def add(self, ranks: Sequence[dict[str, float]], steps: int) -> None:
        """Add the seconds of each part of an epoch's steps, by rank."""
        if not self._seconds:
            self._seconds = [dict.fromkeys(PARTS, 0.0) for _ in ranks]
        for total, epoch in zip(self._seconds, ranks, strict=True):
            for name in PARTS:
                total[name] += epoch[name]
        self._steps += steps

    def facts(self) -> list[tuple[str, str]]:
        """Return (name, description) for the header, milliseconds per step by part; rank 0 writes a file."""
        if self._folder is None or not self._steps:
            return []
        head = "  ".join(f"{name:>13}" for name in PARTS)
        found = [("profile", f"{head}  (ms per step)")]
        for rank, seconds in enumerate(self._seconds):
            milliseconds = [1000 * seconds[name] / self._steps for name in PARTS]
            found.append((f"rank {rank}", "  ".join(f"{number:>13.3f}" for number in milliseconds)))
        if self._world.is_first:
            with self._warning():
                table = "".join(f"{name:<11}{cells}\n" for name, cells in found)
                with replacing(self._folder / "steps.txt", "profile") as file:
                    file.write(table.encode())
        return [*found, ("traces", f"{self._folder / 'rank-*.pt.trace.json'}: see https://ui.perfetto.dev")]

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        assert self._folder is not None
        with self._warning():
            self._folder.mkdir(parents=True, exist_ok=True)
            trace = self._folder / f"rank-{self._world.rank}.pt.trace.json"
            trace.unlink(missing_ok=True)  # so that a link is replaced, not followed
            profiler.export_chrome_trace(str(trace))

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            warn(f"the profile could not be written to {self._folder}: {error}")
