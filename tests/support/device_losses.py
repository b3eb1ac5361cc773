"""Fits whose losses count on a device, and how often the host waits for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from fitting import CLASSES, FEATURES, fingerprint, make_model, make_rows, seeded
from stand_in import fakegpu
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import cyxtrain as cx
from cyxtrain.metrics.loss import Loss
from cyxtrain.metrics.weighting import BatchLoss
from cyxtrain.optim.clipping import multiply_gradients
from cyxtrain.progress.display import Display, displays_by

ROWS, BATCH, IGNORED = 320, 8, -100
STEPS = ROWS // BATCH
OURS = (
    "step.py",
    "loss.py",
    "weighting.py",
    "sums.py",
    "num_items.py",
    "clipping.py",
    "metric.py",
    "named_metrics.py",
    "display.py",
)
ONCE_PER_EPOCH = 4
"""Stops: sums of an epoch and metrics are fetched when it is over."""
CLASS_WEIGHTS = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 1.7]))


class Rows(Dataset[Any]):
    """A data set whose targets nobody has seen before training: some may be ignored."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> Any:
        return self.inputs[row], self.targets[row]


class Heads(nn.Module):
    """Two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.body, self.a, self.b = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x).tanh()
        return {"a": self.a(hidden), "b": self.b(hidden)}


class OwnLoss(nn.Module):
    """Divides its loss as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = self.model(x)
        if num_items_in_batch is None:
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}
        return {"loss": functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch}


def pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (sum, weight), by way of a mean that is 0 / 0 if nothing counts."""
    count = (target != IGNORED).sum()
    return functional.cross_entropy(output, target) * count, count


def pair_of_numbers(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return functional.cross_entropy(output, target, reduction="sum"), len(target)


def some_ignored(empty: int = BATCH) -> tuple[Tensor, Tensor]:
    """Returns rows, some of which do not count; in the third batch none does, or the first ones do not."""
    inputs, targets = make_rows(ROWS)
    targets[::5] = IGNORED
    targets[2 * BATCH : 2 * BATCH + empty] = IGNORED
    return inputs, targets


def loader() -> tuple[Any]:
    return (DataLoader(Rows(*some_ignored()), BATCH),)


def by_head() -> tuple[Any, Any]:
    inputs, targets = make_rows(ROWS)
    return inputs, {"a": torch.where(torch.arange(ROWS) % 5 == 0, IGNORED, targets), "b": targets}


def named() -> tuple[Any]:
    inputs, targets = some_ignored(BATCH // 2)  # a micro-batch, or a rank, has none that counts
    return ({"x": inputs, "labels": targets},)


Case = tuple[Callable[[], nn.Module], Any, Callable[[], tuple[Any, ...]], dict[str, Any]]
TWO = {"a": "cross_entropy", "b": CLASS_WEIGHTS}
CASES: dict[str, Case] = {
    "a loader": (make_model, "cross_entropy", loader, {}),
    "ignored rows": (make_model, "cross_entropy", some_ignored, {}),
    "ignored rows, accumulated": (make_model, "cross_entropy", some_ignored, {"accumulation_steps": 2}),
    "class weights": (make_model, CLASS_WEIGHTS, functools.partial(make_rows, ROWS), {}),
    "weights of rows": (make_model, "cross_entropy", some_ignored, {"sample_weight": torch.linspace(0.5, 2, ROWS)}),
    "several losses": (Heads, TWO, by_head, {}),
    "several losses, accumulated": (Heads, TWO, by_head, {"accumulation_steps": 2}),
    "number of items": (OwnLoss, None, named, {}),
    "number of items, accumulated": (OwnLoss, None, named, {"accumulation_steps": 2}),
    "a pair of numbers": (make_model, pair_of_numbers, functools.partial(make_rows, ROWS), {}),
    "adaptive clipping": (make_model, "cross_entropy", loader, {"clip_adaptive": 0.01}),
    "scaled, 16 bits": (make_model, "cross_entropy", loader, {"precision": "fp16"}),
    "metrics": (make_model, "cross_entropy", functools.partial(make_rows, ROWS), {"metrics": ["top_2", "mine"]}),
    "a pair": (make_model, pair, some_ignored, {}),
}


class Counting(cx.callbacks.Callback):
    """Counts what stops the host while steps are taken."""

    def on_train_begin(self, logs: Any = None) -> None:
        fakegpu.start_counting()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        fakegpu.stop_counting()


def mine(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(1) == target).sum(), len(target)


def fit(name: str, device: str) -> tuple[str, dict[str, Any]]:
    """Returns (bits of the model, numbers of the epoch)."""
    make, loss_fn, data, settings = CASES[name]
    settings = {"effective_batch_size": BATCH, "epochs": 1, "shuffle": False, "verbose": False, **settings}
    metrics = [mine if each == "mine" else each for each in settings.pop("metrics", [])]
    optimizer = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
    trainer = cx.DistributedTrainer(make(), loss_fn, optimizer, device=device, metrics=metrics)
    history = trainer.fit(*data(), callbacks=[Counting()], check_replicas_every_n_steps=0, **settings)
    return fingerprint(trainer.model.cpu()), {key: values[-1] for key, values in history.history.items()}


def fit_on_both(names: list[str]) -> dict[str, Any]:
    """Returns, of each case, (whether CPU and device agree to the bit, with what the stops of our files are)."""
    found = {}
    with cx.init():
        for name in names:
            wanted = fit(name, "cpu")
            ours = fit(name, f"{fakegpu.NAME}:0")
            found[name] = [wanted == ours, f"{wanted} {ours}", our_stops()]
    return found


def our_stops() -> dict[str, int]:
    """Returns how often the host has waited, by what and where, in the files that this test is about."""
    waits = {each: count for each, count in fakegpu.stops.items() if "SYNC" in each[0]}
    return {" ".join(each): n for each, n in waits.items() if each[1].split("/")[-1].split(":")[0] in OURS}


def fit_on_both_with_ranks(names: list[str]) -> dict[str, Any]:
    return {name: [agrees, values] for name, (agrees, values, _) in fit_on_both(names).items()}


class Drawn(Display):
    """Asks for the numbers in each step."""

    def __init__(self, into: list[dict[str, float]]) -> None:
        self._into = into

    def step(self, global_rows: int, measured: Callable[[], Any]) -> None:
        self._into.append(dict(measured()))


def draw_on(device: str) -> list[dict[str, float]]:
    shown: list[dict[str, float]] = []
    with displays_by(lambda shows: Drawn(shown)):
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd", device=device, metrics=[mine])
        trainer.fit(*make_rows(80), batch_size=BATCH, shuffle=False, callbacks=[Counting()])
    return shown


def draw() -> list[Any]:
    with cx.init():
        wanted, shown = draw_on("cpu"), draw_on(f"{fakegpu.NAME}:0")
    return [wanted, shown, our_stops()]


def multiply() -> list[bool]:
    """Returns, by dtype, whether gradients times a factor on the device have the bits of those times a number."""
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        sides = []
        for device in ("cpu", fakegpu.NAME):
            parameter = nn.Parameter(torch.zeros(50, dtype=dtype, device=device))
            parameter.grad = torch.linspace(-3, 3, 50, dtype=dtype).to(device)
            factor = torch.tensor(1 / 3, dtype=torch.float64, device=device)
            multiply_gradients([parameter, nn.Parameter(torch.zeros(2))], 1 / 3 if device == "cpu" else factor)
            sides.append(parameter.grad.cpu())
        found.append(torch.equal(*sides))
    return found


NAN = float("nan")
# values and weights of two losses
TWO_LOSSES = [((1.0, 2.0), (3, 3)), ((1.0, NAN), (3, 0)), ((1.0, NAN), (3, 3)), ((NAN, NAN), (0, 0))]


def sums_of_losses() -> list[list[str]]:
    """Returns the sums of `TWO_LOSSES` on the CPU, on the device, and there with weights that the host has."""
    loss = Loss({"a": "mse", "b": "mse"})
    found = []
    for device, keeps_weights in (("cpu", False), (fakegpu.NAME, False), (fakegpu.NAME, True)):
        sums = []
        for values, weights in TWO_LOSSES:
            parts = {}
            for name, value, count in zip(("a_loss", "b_loss"), values, weights, strict=True):
                weight: Any = count if keeps_weights else torch.tensor(count, device=device)
                parts[name] = BatchLoss(torch.tensor(value, device=device), count, weight)
            sums.append(str(float(loss._sum_of_losses(parts, 4).value)))
        found.append(sums)
    return found


def step_by_hand() -> list[Any]:
    """Returns (losses on the CPU, on the device, how often the host has waited) of calls of a trainer in 16 bits."""
    losses = []
    with cx.init():
        for device in ("cpu", fakegpu.NAME):
            model = make_model()
            trainer = cx.DistributedAMPTrainer(model.to(device), loss_fn=pair, optimizer="sgd")
            batches = [(inputs, targets) for inputs, targets in DataLoader(Rows(*some_ignored()), BATCH)][:6]
            with fakegpu.counting():
                losses.append([trainer.training_step(batch) for batch in batches])
        waits = sum(n for (kind, place), n in fakegpu.stops.items() if "SYNC" in kind and "metrics/loss.py" in place)
        return [*losses, waits, next(trainer.model.parameters()).device.type, multiply()]
