"""The same fits on a stand-in for a GPU and on the CPU: what they leave behind, and how often the host stops."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from stand_in import fakegpu
from torch import Tensor, nn

import cyxtrain as cx

DEVICE = f"{fakegpu.NAME}:0"
FEATURES, CLASSES, BATCH, STEPS = 16, 10, 16, 12
MARK = 777.0
OPTIMIZERS: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "plain sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "rmsprop": torch.optim.RMSprop,
}
NAN = {"row": 3 * BATCH + 5, "warmup_steps": 6}
"""The data of step 4 are bad, on the second of two ranks."""
SMALL: dict[str, Any] = {"bucket_size_mb": 0.001}
QUICK: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in ("adam", "adamw", "sgd", "plain sgd")},
    "several buckets": {"ddp": SMALL},
    "copied gradients": {"ddp": {"gradient_as_bucket_view": False}},
    "16 bits travel": {"ddp": {"compression": "fp16"}},
    "clip_norm": {"clip_norm": 1.0},
    "clip_value": {"clip_value": 0.1},
    "accumulation": {"accumulation_steps": 2, "effective_batch_size": None, "batch_size": 4},
    "a schedule": {"warmup_steps": 6},
}
"""Fits in which the host need not stop for what a step has come to."""
OTHERS: dict[str, dict[str, Any]] = {
    "a rank without rows": {"tail": 1, "ddp": SMALL},
    "buffers": {"model": "Running"},
    "rmsprop": {"optimizer": "rmsprop"},
    "fp16": {"precision": "fp16"},
    "logs": {"reads": True},
    "NaN": {**NAN, "model": "Running"},
    "NaN, one group of two": {**NAN, "groups": 2},
    "NaN in the first step": {"row": 5},
    "NaN in the first step with momentum": {"row": 5, "optimizer": "sgd"},
    "NaN with momentum": {**NAN, "optimizer": "sgd"},
    "NaN in the last step": {"row": (STEPS - 1) * BATCH + 5, "warmup_steps": 20, "model": "Running"},
    "NaN, not fused": {**NAN, "optimizer": "rmsprop"},
    "NaN before a checkpoint": {**NAN, "checkpoint_every_n_steps": 2, "model": "Running"},
    "NaN before replicas are checked": {**NAN, "check_replicas_every_n_steps": 4},
    "NaN before numbers are shown": {**NAN, "log_every_n_steps": 4},
    "NaN before a validation": {**NAN, "validate_every_n_steps": 4, "model": "Running"},
    "validations": {"validate_every_n_steps": 5, "model": "Running"},
    "NaN, skipped": {**NAN, "on_nonfinite": "skip", "model": "Running"},
    "NaN ends the fit": {**NAN, "ends": True, "model": "Running"},
    "NaN and a hook before the step": {**NAN, "watches": True},
    "checkpoints": {"checkpoint_every_n_steps": 5},
    "unused on one rank": {"row": 3 * BATCH + 5, "value": MARK, "model": "Skipping"},
    "unused on one rank, allowed": {
        "row": 3 * BATCH + 5,
        "value": MARK,
        "model": "Skipping",
        "ddp": {"find_unused_parameters": True},
    },
}


class Plain(nn.Module):
    """A network without buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(FEATURES, 32), nn.Linear(32, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.last(torch.relu(self.first(rows)))
        return output


class Running(Plain):
    """One with a running mean, which both devices calculate alike."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * rows[0])
        return super().forward(rows - 0.1 * self.mean)


class Skipping(Plain):
    """One that leaves a layer out where a row is marked."""

    def forward(self, rows: Tensor) -> Tensor:
        if bool((rows[:, 0] == MARK).any().item()):
            output: Tensor = self.last(torch.cat([rows, rows], 1) / MARK)
            return output
        return super().forward(rows)


class StepRecorder(cx.callbacks.Callback):
    """Counts the host's stops from step 6 on; reads logs, asks for the end, or fails, as it is told."""

    def __init__(self, *, reads: bool, stops_at: int | None, fails_at: int | None) -> None:
        self.reads, self.stops_at, self.fails_at = reads, stops_at, fails_at
        self.losses: list[float] = []
        self.stops: dict[str, int] = {}

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 5:
            fakegpu.start_counting()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.reads:
            self.losses.append(logs["loss"])
        if batch == self.stops_at and cx.get_rank() == cx.get_world_size() - 1:
            self.trainer.stop_training = True
        if batch == self.fails_at:
            raise KeyError("on purpose")
        if batch == STEPS - 2:
            fakegpu.stop_counting()
            self.stops = {f"{kind} {place}": count for (kind, place), count in fakegpu.stops.items()}


class BeforeStep(cx.callbacks.Callback):
    """Sees gradients that are finite, on the first rank alone."""

    def on_before_optimizer_step(self, batch: int, logs: Any = None) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def rows(count: int, row: int | None, value: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(count, FEATURES, generator=generator), torch.arange(count) % CLASSES
    if row is not None:
        inputs[row, 0] = value
    return inputs, targets


def fit(
    device: str,
    optimizer: str = "adamw",
    *,
    model: str = "Plain",
    row: int | None = None,
    value: float = math.nan,
    tail: int = 0,
    groups: int = 1,
    ddp: dict[str, Any] | None = None,
    reads: bool = False,
    ends: bool = False,
    watches: bool = False,
    stops_at: int | None = None,
    fails_at: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Fits an epoch; returns all that is left then, and how often the host stopped in a few steps, by place."""
    net: Plain = {"Plain": Plain, "Running": Running, "Skipping": Skipping}[model]()
    parameters: list[Any] = [*net.parameters()]
    if groups == 2:
        parameters = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}]
    watch = StepRecorder(reads=reads, stops_at=stops_at, fails_at=fails_at)
    callbacks: list[Any] = [watch, *([cx.callbacks.TerminateOnNaN()] if ends else [])]
    callbacks += [BeforeStep()] if watches and cx.is_master() else []
    trainer = cx.DistributedTrainer(
        net, "cross_entropy", OPTIMIZERS[optimizer](parameters), device=device, ddp_config=cx.DDPConfig(**(ddp or {}))
    )
    folder = f"{device}-{len(os.listdir())}-{cx.get_rank()}"
    given = {"epochs": 1, "effective_batch_size": BATCH, "shuffle": False, "verbose": False, "checkpoint_dir": folder}
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            inputs, targets = rows(STEPS * BATCH + tail, row, value)
            if settings.get("validate_every_n_steps"):
                given["validation_data"] = rows(20, None, value)
            trainer.fit(inputs, targets, callbacks=callbacks, **{**given, **settings})
        except (cx.CyxtrainError, KeyError) as found:
            error = f"{type(found).__name__}: {found}"
    fakegpu.stop_counting()
    state = trainer.optimizer.state_dict()["state"]
    return {
        "error": error,
        # The first fit on a device of a new kind warns of it.
        "warnings": [str(each.message) for each in caught if "never been tested" not in str(each.message)],
        "parameters": digest(net.parameters()),
        "buffers": digest(net.buffers()),
        "state": [len(state), digest(each for own in state.values() for each in own.values() if torch.is_tensor(each))],
        "rates": [
            [group["lr"] for group in trainer.optimizer.param_groups],
            trainer._state.rates["optimizer"].state_dict(),
        ],
        "position": {**vars(trainer._state.position)},
        "losses": [trainer.history.train_losses, watch.losses, trainer.history.validations],
        "checkpoints": sorted(os.listdir(folder)) if os.path.isdir(folder) else [],
        "stops": watch.stops,
    }


def fit_each(cases: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns, for each case, what is left on the stand-in, and on the CPU."""
    with cx.init():
        torch.set_num_threads(1)
        return {name: [fit(device, **case) for device in (DEVICE, "cpu")] for name, case in cases.items()}


def loop(device: str, *, marks: bool) -> dict[str, Any]:
    """Takes eight steps with DistributedDataParallel, in the fourth of which the last rank may leave out a layer."""
    net = (Skipping() if marks else Plain()).to(device)
    ddp = cx.DistributedDataParallel(net, **SMALL)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    marked = 3 * 8 if marks and cx.get_rank() == cx.get_world_size() - 1 else None
    inputs, targets = (each.to(device).split(8) for each in rows(8 * 8, marked, MARK))
    error, steps = "", 0
    fakegpu.start_counting()
    try:
        for own, answers in zip(inputs, targets, strict=True):
            steps += 1
            nn.functional.cross_entropy(ddp(own), answers).backward()
            optimizer.step()
            optimizer.zero_grad()
    except cx.DistributedTrainingError as found:
        error = str(found).partition(": ")[0]
    fakegpu.stop_counting()
    stops = {f"{kind} {place}": count for (kind, place), count in fakegpu.stops.items()}
    ddp.close()
    return {"parameters": digest(net.parameters()), "steps": steps, "error": error, "stops": stops}


def loop_each() -> list[dict[str, Any]]:
    with cx.init():
        torch.set_num_threads(1)
        return [loop(device, marks=marks) for marks in (False, True) for device in (DEVICE, "cpu")]
