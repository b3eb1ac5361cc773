"""Fits on the stand-in for a GPU whose rows come from every kind of data, and the same fits on the CPU."""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from stand_in import fakegpu
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import cyxtrain as cx
from cyxtrain.data.batches.prefetch import Placement, Prefetcher
from cyxtrain.data.batches.rows import Rows

ROWS, BATCH = 80, 8
GPU = f"{fakegpu.NAME}:0"
WRONG = 43
"""The row that `Samples` cannot give."""


class Samples(Dataset[Any]):
    """Draws random numbers for each row; notes which are asked for, and may fail at one."""

    def __init__(self, count: int = ROWS, *, fails: bool = False) -> None:
        self.inputs, self.targets = made(count)
        self.fails = fails
        self.events: list[Any] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.events.append(int(row))
        if self.fails and row == WRONG:
            raise ValueError(f"row {row} is broken")
        return self.inputs[row] + 0.1 * torch.randn(4), self.targets[row]


class Flow(IterableDataset[Any]):
    """Gives rows one after the other, and draws random numbers."""

    def __init__(self, count: int = ROWS) -> None:
        self.inputs, self.targets = made(count)

    def __iter__(self) -> Iterator[Any]:
        for row in range(len(self.inputs)):
            yield self.inputs[row] + torch.rand(1), self.targets[row]


class Turning(Sampler[int]):
    """An order that its own state decides: each pass begins a row later."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from ((row + self.passes) % ROWS for row in range(ROWS))

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


def made(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 255, (count, 4), generator=generator, dtype=torch.uint8), made(count)[1]


def batches(count: int = ROWS) -> Iterator[Any]:
    inputs, targets = made(count)
    for row in range(0, count, BATCH):
        yield inputs[row : row + BATCH] + torch.rand(1), targets[row : row + BATCH]


class Named(nn.Module):
    """Takes two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        difference: Tensor = self.first(first) - self.second(second)
        return difference


def loader(rows: Any, **settings: Any) -> tuple[Any]:
    return (DataLoader(rows, BATCH, **settings),)


def on(device: str, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return rows[0].to(device), rows[1].to(device)


Make = Callable[[str, int], tuple[Any, ...]]
SOURCES: dict[str, Make] = {
    "NumPy arrays": lambda _, count: tuple(each.numpy() for each in made(count)),
    "columns of another order": lambda _, count: (made(count)[0].t().contiguous().t(), made(count)[1]),
    "tensors on the device": lambda device, count: on(device, made(count)),
    "images": lambda _, count: images(count),
    "images on the device": lambda device, count: on(device, images(count)),
    "inputs on the device, targets not": lambda device, count: (images(count)[0].to(device), images(count)[1]),
    "float64 and uint16": lambda _, count: (made(count)[0].double(), made(count)[1].to(torch.uint16)),
    "two inputs": lambda _, count: ({"first": made(count)[0], "second": made(count)[0].flip(0)}, made(count)[1]),
    "TensorDataset": lambda _, count: (TensorDataset(*made(count)),),
    "loader": lambda _, count: loader(Samples(count), shuffle=True),
    "loader that pins": lambda _, count: loader(Samples(count), shuffle=True, pin_memory=True),
    "loader with workers": lambda _, count: loader(Samples(count), num_workers=2),
    "loader with workers that pins": lambda _, count: loader(Samples(count), num_workers=2, pin_memory=True),
    "IterableDataset": lambda _, count: (Flow(count),),
    "IterableDataset with workers": lambda _, count: loader(Flow(count), num_workers=2),
    "function": lambda _, count: (lambda: batches(count),),
}


class StepRecorder(cx.callbacks.Callback):
    """Counts stops of the host from the third step on; notes steps."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.steps == 2:
            fakegpu.start_counting()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == 8:
            fakegpu.stop_counting()


def trainer_on(device: str, name: str = "") -> cx.DistributedTrainer:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 3))
    model = Named() if name == "two inputs" else plain
    return cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.01), device=device)


def fit(trainer: cx.DistributedTrainer, data: tuple[Any, ...], **settings: Any) -> None:
    given = {"epochs": 2, "verbose": False, "check_replicas_every_n_steps": 0, "seed": 3}
    given |= {} if data and isinstance(data[0], DataLoader) else {"batch_size": BATCH}
    trainer.fit(*data, **given | settings)


def stops_by_data() -> dict[str, int]:
    """How often the host waited, by what reads data or brings outputs back; pageable copies wait, too."""
    found = collections.Counter[str]()
    for (kind, place), times in fakegpu.stops.items():
        if place.startswith(("data/", "training/prediction")) and ("SYNC" in kind or "pageable" in kind):
            found[f"{kind} at {place}"] += times
    return dict(found)


def outcome(device: str, name: str) -> dict[str, Any]:
    """A fit, an evaluation and predictions; and what of them stopped the host."""
    trainer, make = trainer_on(device, name), SOURCES[name]
    fakegpu.stops.clear()
    fit(trainer, make(device, ROWS), callbacks=[StepRecorder()])
    in_fit, again = stops_by_data(), []
    for count in (ROWS, 2 * ROWS):
        data = make(device, count)
        with fakegpu.counting():
            evaluation, evaluated = dict(trainer.evaluate(*data)), stops_by_data()
        with fakegpu.counting():
            outputs, predicted = trainer.predict(data[0]), stops_by_data()
        again.append((evaluation, np.asarray(outputs).tobytes().hex(), evaluated, predicted))
    return {
        "bits": bits(trainer.model),
        "numbers": [each[:2] for each in again],
        "in fit": in_fit,
        "one size": list(again[0][2:]),
        "twice the size": list(again[1][2:]),
    }


def bits(model: nn.Module) -> str:
    return torch.cat([each.detach().cpu().flatten() for each in model.parameters()]).numpy().tobytes().hex()


def compare(names: list[str]) -> list[list[Any]]:
    """What differs between the stand-in and the CPU, by name."""
    wrong: list[list[Any]] = []
    with cx.init():
        for name in names:
            found, expected = outcome(GPU, name), outcome("cpu", name)
            wrong += [[name, part] for part in ("bits", "numbers") if found[part] != expected[part]]
            if found["in fit"] or found["one size"] != found["twice the size"]:
                wrong.append([name, found["in fit"], found["one size"], found["twice the size"]])
    return wrong


RESUMED: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "arrays": (lambda: made(ROWS), {"accumulation_steps": 2}),
    "arrays, passes": (lambda: made(ROWS), {"steps_per_epoch": 7, "epochs": 4}),
    "loader": (lambda: loader(Samples(), shuffle=True), {"accumulation_steps": 2}),
    "loader, passes": (lambda: loader(Samples(), sampler=Turning()), {"steps_per_epoch": 7, "epochs": 4}),
    "loader with workers": (lambda: loader(Samples(), num_workers=1), {}),
    "IterableDataset": (lambda: (Flow(),), {"accumulation_steps": 2}),
    "function, passes": (lambda: (batches,), {"steps_per_epoch": 7, "epochs": 4}),
}


def resume_each(folder: str, names: list[str]) -> dict[str, list[str]]:
    """The bits of a fit on the CPU, of the same on the stand-in, and of those that resume its checkpoints on either."""
    with cx.init():
        return {name: _resume_each(name, Path(folder, name)) for name in names}


def _resume_each(name: str, folder: Path) -> list[str]:
    make, settings = RESUMED[name]

    def train(device: str, kept: Path | None = None, path: Path | None = None) -> str:
        trainer = trainer_on(device)
        every = {} if kept is None else {"checkpoint_dir": str(kept), "checkpoint_every_n_steps": 4}
        fit(trainer, make(), resume=path, **every, **settings)
        return bits(trainer.model)

    whole = [train("cpu"), train(GPU, folder)]
    cx.barrier()  # rank 0 has written all
    paths = sorted(folder.glob("*.ckpt"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        whole.append(train("cpu", path=paths[0]))
    if cx.is_master():
        expected = "computed differently: the device was fakegpu and is cpu. Numbers may differ"
        assert any(expected in str(each.message) for each in told)
    return whole + [train(GPU, path=path) for path in paths]


class Notes(nn.Module):
    """Notes in a list when it goes forward and backward."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.events = events

    def forward(self, rows: Tensor) -> Tensor:
        trains = self.training and torch.is_grad_enabled()
        if trains:
            self.events.append("forward")
        scores: Tensor = self.layer(rows)
        if trains:
            scores.register_hook(lambda _: self.events.append("backward"))
        return scores


class Noting(cx.callbacks.Callback):
    """Notes in a list that a step is complete; may stop the fit."""

    def __init__(self, events: list[Any], stop_after: int = 0) -> None:
        self.events, self.stop_after = events, stop_after

    def on_train_begin(self, logs: Any = None) -> None:
        self.events.clear()

    def on_before_optimizer_step(self, batch: int, logs: Any = None) -> None:
        self.events.append("update")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.events.append("end")
        if batch + 1 == self.stop_after:
            self.model.stop_training = True  # type: ignore[assignment]  # PyTorch declares tensors and modules


def events_on(device: str, *, fails: bool = False, stop_after: int = 0) -> list[Any]:
    """What happened in which order, the rows that were asked for, and the error of the fit."""
    rows = Samples(fails=fails)
    model = Notes(rows.events)
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.01), device=device)
    error = ""
    try:
        fit(trainer, loader(rows), epochs=1, callbacks=[Noting(rows.events, stop_after)])
    except ValueError as problem:
        error = "; ".join([str(problem), *getattr(problem, "__notes__", ())])
    shown = [kind for kind, _ in itertools.groupby(rows.events, _kind)]
    return [shown, [each for each in rows.events if isinstance(each, int)], error]


def _kind(event: Any) -> str:
    return event if isinstance(event, str) else "fetch"


def left_of_generator(device: str) -> int:
    """How many batches are left of a generator when a fit on it has been stopped after three steps."""
    given = batches()
    fit(trainer_on(device), (given,), epochs=1, callbacks=[Noting([], stop_after=3)])
    return len(list(given))


def look() -> dict[str, Any]:
    with cx.init():
        devices = ("cpu", GPU)
        return {
            "whole": [events_on(device) for device in devices],
            "broken": [events_on(device, fails=True) for device in devices],
            "stopped": [events_on(device, stop_after=3) for device in devices],
            "left": [left_of_generator(device) for device in devices],
            "copies": look_at_copies(),
        }


def look_at_copies() -> dict[str, list[Any]]:
    """Of rows in different places: tensors copied by the side stream, whether there is an event, hand-overs."""
    device = importlib.import_module(fakegpu.MODULE)
    prefetcher = Prefetcher(Placement(torch.device(GPU), torch.float32, lambda targets, dtype: targets))
    inputs, targets = images(8)
    found = {}
    for name, rows in (
        ("host", Rows(inputs, targets, None)),
        ("device", Rows(inputs.to(GPU), targets.to(GPU), None)),
        ("both", Rows(inputs.to(GPU), targets, None)),
        ("pinned", Rows(inputs.pin_memory(), targets.pin_memory(), None)),
    ):
        device.clear()
        receive = prefetcher.send(rows)
        _, copied, event = cast("functools.partial[Any]", receive).args
        placed = receive()
        assert isinstance(placed.inputs, Tensor)
        assert torch.equal(placed.inputs.cpu(), inputs.float())
        handed_over = device.counts().get("aten::record_stream", 0)
        found[name] = [len(copied), event is not None, handed_over]
    return found
