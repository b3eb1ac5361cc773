"""Whole fits on the stand-in for a GPU and on the CPU: what each comes to, and how often it stops the host.

`fits` is called in processes that have the device. All of a world's fits share its processes: a launch takes seconds.
"""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fitting import fingerprint, seeded
from stand_in import fakegpu
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import cyxtrain as cx
from cyxtrain.optim.optimizers import can_fuse

STEPS, BATCH, FEATURES, CLASSES = 24, 8, 16, 10
"""Of an epoch on one rank; rows of a step on each rank."""
FIRST, LAST = 4, 20
"""The steps between which host stops are counted: what happens once per fit or epoch is not in the hot loop."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A fit.

    Attributes:
        data: "arrays", "arrays on the device", "bytes on the device", "dataset", "tensor dataset", "stream", "by name".
        model: "plain", "batch norm", "dropout", "bfloat16", "own loss", or "own step": a teacher adds to the loss.
        loss: A name, or "class weights".
        optimizer: A name.
        ignored: Every seventh target is -100.
        compression: Of gradients, on several ranks.
        callbacks: Names in `cx.callbacks`.
        settings: More of `fit`.
        then: What is done after it: "evaluate and predict", "resume".
        close: 0: the same bits on both devices; else how far losses may be apart, relatively: the CPU has other kernels
            in 16 bits, and a weight that the host knows is divided by at another place.
    """

    data: str = "arrays"
    model: str = "plain"
    loss: str = "cross_entropy"
    optimizer: str = "adamw"
    ignored: bool = False
    compression: str | None = None
    callbacks: tuple[str, ...] = ()
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    then: str = ""
    close: float = 0.0


CASES = {
    "arrays": Case(then="evaluate and predict"),
    "dataset": Case("dataset", then="evaluate and predict"),
    "tensor dataset": Case("tensor dataset"),
    "stream": Case("stream", settings={"steps_per_epoch": STEPS}),
    "by name": Case("by name"),
    "arrays on the device": Case("arrays on the device"),
    "bytes on the device": Case("bytes on the device"),
    "ignored targets": Case(ignored=True),
    "class weights": Case(loss="class weights"),
    "class weights, ignored targets": Case(loss="class weights", ignored=True, close=1e-6),
    "own loss": Case(model="own loss"),
    "mean squared error": Case(loss="mse"),
    "own step": Case(model="own step", then="evaluate and predict"),
    "own step, ignored targets": Case("dataset", model="own step", ignored=True, close=1e-6),
    "accumulation": Case(settings={"accumulation_steps": 2}),
    "accumulation, ignored targets": Case("dataset", ignored=True, settings={"accumulation_steps": 2}),
    "clip_norm": Case(settings={"clip_norm": 0.5}),
    "clip_value": Case(settings={"clip_value": 0.01}),
    "clip_adaptive": Case(settings={"clip_adaptive": 0.01}),
    "batch norm": Case(model="batch norm", then="evaluate and predict"),
    "dropout": Case(model="dropout"),
    "adam": Case(optimizer="adam"),
    "sgd": Case(optimizer="sgd"),
    "rmsprop": Case(optimizer="rmsprop"),
    "adagrad": Case(optimizer="adagrad"),
    "adam not fused": Case(optimizer="adam", settings={"fused_optimizer": False}),
    "EMA": Case(callbacks=("EMA", "GradientNormMonitor")),
    "validation": Case(settings={"validation_split": 0.25, "epochs": 2}),
    "metrics": Case(settings={"validation_split": 0.25}),
    "bf16": Case(settings={"precision": "bf16"}, close=1e-2),
    "fp16": Case(settings={"precision": "fp16"}, close=1e-2),
    "bfloat16 parameters": Case(model="bfloat16", optimizer="sgd", close=1e-2),
    "skipped rows": Case("arrays with NaN", settings={"on_nonfinite": "skip"}),
    "checkpoints": Case(model="dropout", settings={"checkpoint_every_n_steps": 20, "epochs": 2}, then="resume"),
    "fp16 compression": Case(compression="fp16"),
    "bf16 compression": Case(compression="bf16"),
    "powersgd": Case(compression="powersgd", close=1e-5),
}


class OwnDataset(Dataset[Any]):
    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Stream(IterableDataset[Any]):
    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.inputs, self.targets, strict=True))


class OwnLoss(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(inputs), targets)


class Taught(cx.DistributedTrainer):
    """Adds to the loss of the built-in step how far outputs are from those of a teacher, which it holds."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.teacher = make_model(CASES["arrays"]).requires_grad_(False)

    def train_step(self, batch: Any) -> Any:
        result = super().train_step(batch)
        distance = nn.functional.mse_loss(result["output"], self.teacher(batch[0]))
        return {**result, "loss": result["loss"] + distance, "distance": distance}


class CountStops(cx.callbacks.Callback):
    """Counts what stops the host in the steps between FIRST and LAST of the first epoch, or of as many as there are."""

    steps = LAST - FIRST

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        last = min(LAST, self.params["steps"] - 1)
        if batch == FIRST and self.trainer.epoch == 0:
            self.steps = last - FIRST
            fakegpu.start_counting()
        if batch == last:
            fakegpu.stop_counting()


def make_data(case: Case, device: str) -> tuple[Any, ...]:
    count = STEPS * BATCH * cx.get_world_size()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, FEATURES, generator=generator)
    targets = torch.randint(0, CLASSES, (count,), generator=generator)
    if case.ignored:
        targets[::7] = -100
    if case.loss == "mse":
        targets = torch.nn.functional.one_hot(targets, CLASSES).float()
    kind = case.data
    if kind == "arrays with NaN":
        inputs[100] = torch.nan
    if kind == "bytes on the device":
        inputs = torch.randint(0, 255, (count, FEATURES), generator=generator, dtype=torch.uint8)
    if kind.endswith("on the device"):
        inputs, targets = inputs.to(device), targets.to(device)
    if kind == "dataset":
        return (DataLoader(OwnDataset(inputs, targets), batch_size=BATCH, shuffle=True),)
    if kind == "tensor dataset":
        return (DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, shuffle=True),)
    if kind == "stream":
        return (DataLoader(Stream(inputs, targets), batch_size=BATCH),)
    if kind == "by name":
        return {"inputs": inputs, "targets": targets}, targets
    return inputs, targets


def make_model(case: Case) -> nn.Module:
    with seeded():
        between: dict[str, list[nn.Module]] = {"batch norm": [nn.BatchNorm1d(32)], "dropout": [nn.Dropout(0.2)]}
        layers = [nn.Linear(FEATURES, 32), *between.get(case.model, []), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()]
        model: nn.Module = nn.Sequential(*layers, nn.Linear(32, CLASSES))
    if case.model == "own loss" or case.data == "by name":
        model = OwnLoss(model)
    return model.to(torch.bfloat16) if case.model == "bfloat16" else model


def make_trainer(case: Case, device: str) -> cx.DistributedTrainer:
    loss: Any = case.loss
    if loss == "class weights":
        loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, CLASSES))
    if case.model == "own loss" or case.data == "by name":
        loss = None
    kind = Taught if case.model == "own step" else cx.DistributedTrainer
    return kind(
        make_model(case),
        loss,
        case.optimizer,
        device=device,
        metrics=["f1", "top_3"] if case is CASES["metrics"] else None,
        ddp_config=cx.DDPConfig(bucket_size_mb=0.002, compression=case.compression),
    )


def fuses(case: Case, device: str) -> bool:
    """Returns whether the optimizer of a case steps by a fused kernel on a device, where its user has not decided."""
    trainer = make_trainer(case, device)
    trainer.model.to(device)
    return can_fuse(trainer.optimizer, "auto")


def run_case(name: str, device: str) -> dict[str, Any]:
    """Trains as one of CASES says; returns JSON types."""
    case = CASES[name]
    data = make_data(case, device)
    if case.model == "own loss":
        data = ({"inputs": data[0], "targets": data[1]}, data[1])
    settings: dict[str, Any] = {"epochs": 1, "batch_size": BATCH, "verbose": False}
    if len(data) == 1:
        del settings["batch_size"]
    folder = Path(f"{name}-{device.partition(':')[0]}")
    settings |= {"checkpoint_dir": str(folder)} | case.settings
    if device == "cpu" and not fuses(case, fakegpu.NAME):
        settings = {"fused_optimizer": False} | settings  # the same kernels on both
    counting = CountStops()
    callbacks = [counting, *(getattr(cx.callbacks, each)() for each in case.callbacks)]
    fakegpu.stops.clear()
    torch.manual_seed(2)
    trainer = make_trainer(case, device)
    history = trainer.fit(*data, callbacks=callbacks, **settings)
    stops = {f"{kind} {place}": count / counting.steps for (kind, place), count in fakegpu.stops.items()}
    found: dict[str, Any] = {
        "devices": sorted({each.device.type for each in (*trainer.model.parameters(), *trainer.model.buffers())}),
        "losses": [*history.train_losses, *history.val_losses],
        "stops": stops,
        "bits": [fingerprint(trainer.model.cpu())],
    }
    if case.then == "evaluate and predict":
        evaluation = trainer.evaluate(*data)
        found["losses"] += [evaluation.loss, evaluation.accuracy, float(trainer.predict(data[0]).float().sum())]
    if case.then == "resume":
        cx.barrier()  # rank 0 has written them all
        for path in sorted(folder.glob("*.ckpt")):
            torch.manual_seed(2)
            trainer = make_trainer(case, device)
            trainer.fit(*data, **settings, resume=str(path))
            found["bits"].append(fingerprint(trainer.model.cpu()))
    return found


def fits(names: list[str], devices: list[str], backend: str = "cpu:gloo,fakegpu:fakenccl") -> dict[str, dict[str, Any]]:
    """Runs cases on each of some devices, in one world; by case and device what it came to, or its error.

    Args:
        names: Of CASES.
        devices: As `DistributedTrainer` takes them.
        backend: Of the process group that cyxtrain adopts; "ring": it makes its own.
    """
    found: dict[str, dict[str, Any]] = {}
    if backend != "ring":
        dist.init_process_group(backend)
    with cx.init():
        for name in names:
            found[name] = {}
            for device in devices:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        found[name][device] = run_case(name, device)
                except Exception:
                    found[name][device] = {"error": traceback.format_exc()}
        if backend != "ring":
            cx.barrier()  # Gloo's threads have let go of tensors: one that does so as Python ends, ends it by SIGABRT
    if backend != "ring":
        dist.destroy_process_group()
    return found
