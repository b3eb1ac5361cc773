"""The time of each part of a fit's steps on this rank, with two clock reads per part; with `profile=True` a trace."""

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
# steps before the trace, which do much for the first time; and steps in the trace
_BEFORE, _TRACED = 3, 10


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

    def over_ranks(self, world: World) -> list[dict[str, float]]:
        """Return the seconds of each part, over all steps, by rank; collective."""
        self._settle_debts()
        return world.gather_json({part.name: part.seconds for part in self._parts})

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


class Profile:
    """The profile of a fit's steps, as a context manager: each rank writes a trace, rank 0 the table steps.txt."""

    def __init__(self, asked: bool | str, device: torch.device, world: World) -> None:
        self._world = world
        folder = Path(local_path("fit.profile", asked if isinstance(asked, str) else _FOLDER))
        self._folder = folder.absolute() if asked else None
        self._seconds: list[dict[str, float]] = []
        self._steps = 0
        self._profiler: torch.profiler.profile | None = None
        if asked:
            on_cpu = {torch.profiler.ProfilerActivity.CPU}
            activities = torch.profiler.supported_activities() if accelerator.is_accelerator(device) else on_cpu
            schedule = torch.profiler.schedule(wait=_BEFORE - 1, warmup=1, active=_TRACED, repeat=1)
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
        before = self._seconds or [dict.fromkeys(PARTS, 0.0)] * len(ranks)
        self._seconds = [
            {name: had[name] + has[name] for name in PARTS} for had, has in zip(before, ranks, strict=True)
        ]
        self._steps += steps

    def facts(self) -> list[tuple[str, str]]:
        """Return (name, description): milliseconds per step of each part, by rank; rank 0 writes them to a file."""
        if self._folder is None or not self._steps:
            return []
        found = [("profile", "  ".join(f"{name:>13}" for name in PARTS) + "  (ms per step)")]
        for rank, parts in enumerate(self._seconds):
            found.append((f"rank {rank}", "  ".join(f"{1000 * parts[name] / self._steps:>13.3f}" for name in PARTS)))
        if self._world.is_first:
            with self._warning():
                text = "".join(f"{what:<11}{how}\n" for what, how in found)
                with replacing(self._folder / "steps.txt", "profile") as file:
                    file.write(text.encode())
        return [*found, ("traces", f"{self._folder / 'rank-*.pt.trace.json'}: see https://ui.perfetto.dev")]

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        assert self._folder is not None
        with self._warning():
            self._folder.mkdir(parents=True, exist_ok=True)
            trace = self._folder / f"rank-{self._world.rank}.pt.trace.json"
            trace.unlink(missing_ok=True)  # a link is not followed
            profiler.export_chrome_trace(str(trace))

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            warn(f"the profile could not be written to {self._folder}: {error}")
