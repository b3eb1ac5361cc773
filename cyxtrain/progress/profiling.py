"""`profile=True`: a trace of some steps, and a table of the time of each part of a step by rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cyxtrain.environment.accelerator import is_accelerator
from cyxtrain.errors import warn
from cyxtrain.progress.step_timer import PARTS
from cyxtrain.world import runtime

_FOLDER = "profile"
# steps before the trace, which do much for the first time; and steps in the trace
_BEFORE, _TRACED = 3, 10


class Profile:
    """The profile of a fit's steps, as a context manager.

    Each rank writes a trace for Perfetto, chrome://tracing or TensorBoard, such as profile/rank-0.pt.trace.json; rank 0
    writes a table, profile/steps.txt.
    """

    def __init__(self, asked: bool | str, device: torch.device) -> None:
        self._folder = Path(asked if isinstance(asked, str) else _FOLDER) if asked else None
        self._seconds: list[dict[str, float]] = []
        self._steps = 0
        self._profiler: torch.profiler.profile | None = None
        if asked:
            on_cpu = {torch.profiler.ProfilerActivity.CPU}
            activities = torch.profiler.supported_activities() if is_accelerator(device) else on_cpu
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
        if runtime.is_master():
            with self._warning():
                self._folder.mkdir(parents=True, exist_ok=True)
                text = "".join(f"{what:<11}{how}\n" for what, how in found)
                (self._folder / "steps.txt").write_text(text, encoding="utf-8")
        return [*found, ("traces", f"{self._folder / 'rank-*.pt.trace.json'}: see https://ui.perfetto.dev")]

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        assert self._folder is not None
        with self._warning():
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"rank-{runtime.get_rank()}.pt.trace.json"))

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            warn(f"the profile could not be written to {self._folder}: {error}")
