"""A random program as plain values: they are drawn from a seed, written as JSON, and made simpler one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

LISTS = ("loader_batches", "stream", "stream_len", "loader_stream", "generator")
"""Data that come in whole batches: each goes to one rank."""


_change: Callable[..., Any] = dataclasses.replace


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ARRAYS = ("tensors", "numpy", "tds", "mapds", "dictds")
STREAMS = ("stream", "stream_len", "loader_stream", "generator")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A model, its data, and the settings of `fit`; fields that `fit` has bear its names.

    Attributes:
        task: What the rows are: cls, reg, bin, conv, tok, seq or multi.
        loss, model, data, optimizer, own_step: Keys of the tables in models, rows and steps.
        batch: ("eff", rows of all ranks), ("per", six times the rows of a rank) or ("list", rows of a given batch).
        scheduler, lr: Of all optimizers.
        clip: What is clipped by which limit: ("norm", 0.1).
        callbacks: (name, arguments...) each.
        second_fit: Settings of a second fit of the same trainer.
        batches_between: Calls of train_on_batch after the fit.
        notes_rows: Whether a hook of the model notes which rows each step has.
    """

    task: str = "cls"
    loss: str = "ce"
    model: str = "mlp"
    dtype: str = "float64"
    precision: str = "fp32"
    dropout: float = 0.0
    rows: int = 24
    data_seed: int = 0
    data: str = "tensors"
    workers: int = 0
    sample_weight: bool = False
    class_weight: bool = False
    optimizer: str = "sgd"
    lr: float = 0.1
    scheduler: str | None = None
    scheduler_interval: str = "step"
    warmup_steps: float = 0
    learning_rate_scaling: str | None = None
    batch: tuple[str, int] = ("eff", 8)
    accumulation_steps: int = 1
    clip: tuple[str, Any] | None = None
    epochs: int = 2
    max_steps: int | None = None
    steps_per_epoch: int | None = None
    initial_epoch: int | None = None
    validation: str | None = None
    weighted_validation: bool = False
    validation_freq: Any = 1
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validate_every_n_steps: int = 0
    keep_best: str | None = None
    load_best: bool = False
    callbacks: tuple[tuple[Any, ...], ...] = ()
    metrics: tuple[str, ...] = ()
    logs: bool = False
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    drop_last: bool = False
    shuffle: bool = True
    seed: int = 42
    own_step: str | None = None
    recomputes: bool = False
    fused_optimizer: Any = "auto"
    check_replicas_every_n_steps: int | None = None
    log_every_n_steps: int = 0
    fast_dev_run: int = 0
    group_by_length: str | None = None
    second_fit: dict[str, Any] | None = None
    batches_between: int = 0
    evaluates_between: bool = False
    predicts_to_folder: bool = False
    evaluation_batch: int | None = None
    evaluates_loader: bool = False
    notes_rows: bool = True

    @property
    def has_lists(self) -> bool:
        return self.data in LISTS

    @property
    def computes_loss(self) -> bool:
        """Whether the model computes its own loss."""
        return self.loss.startswith("own")

    @property
    def repeats_forward(self) -> bool:
        """Whether the optimizer runs a closure more than once."""
        return self.optimizer.startswith("lbfgs") or self.own_step == "closure"

    @property
    def is_exact(self) -> bool:
        """Whether N ranks must train as one, up to the rounding of float64."""
        rounds = self.precision != "fp32" or self.dtype != "float64" or self.ddp.get("compression")
        return not (rounds or self.differs_by_rank)

    @property
    def differs_by_rank(self) -> bool:
        """Whether ranks draw numbers, or compute statistics of their own rows."""
        has_buffers = self.model == "buffer" or self.loss == "mod_buf"
        orders_buffers = has_buffers and (self.accumulation_steps > 1 or self.has_lists or self.repeats_forward)
        return self.dropout > 0 or self.own_step == "draws" or self.model == "bn" or orders_buffers

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from the plainest program's."""
        plain = dataclasses.asdict(PLAIN)
        return {name: value for name, value in dataclasses.asdict(self).items() if value != plain[name]}

    def has_callback(self, *names: str) -> bool:
        return any(each[0] in names for each in self.callbacks)


PLAIN = Spec()
RESUMES = ("path", "twice", "other", "ctrl_c", "longer")


@dataclasses.dataclass(frozen=True)
class Checks:
    """What is compared.

    Attributes:
        worlds: The numbers of ranks.
        size: On how many ranks, if it is one of them, variants and resumed runs are compared.
        plain_loop: Whether a plain loop repeats the program, if one can.
        variant: A change that must not change the weights.
        transport: Between two ranks, by name.
        pool: Whether `num_processes=2` is compared with two ranks.
        resumes: Kinds of resumed runs, of `RESUMES`.
        save_every: Steps from checkpoint to checkpoint.
        seed: Of the choice of checkpoints.
    """

    worlds: tuple[int, ...] = (1, 2)
    size: int = 2
    plain_loop: bool = True
    variant: str | None = None
    transport: str | None = None
    pool: bool = False
    resumes: tuple[str, ...] = ()
    save_every: int = 1
    seed: int = 0


def as_spec(values: dict[str, Any]) -> Spec:
    """Return a spec from JSON."""
    return Spec(**{name: _hashable(name, value) for name, value in values.items()})


def as_checks(values: dict[str, Any]) -> Checks:
    """Return checks from JSON."""
    return Checks(**{name: _hashable(name, value) for name, value in values.items()})


def _hashable(name: str, value: Any) -> Any:
    if not isinstance(value, list) or name == "validation_freq":
        return value
    return tuple(_hashable("", each) for each in value)


def features(spec: Spec, checks: Checks) -> list[str]:
    """Return the names of what a program has, for the table; which comparisons were made is known afterwards."""
    found = {f"{name}: {getattr(spec, name)}" for name in ("task", "loss", "model", "optimizer", "data")}
    found |= {f"batch: {spec.batch[0]}", f"ranks: {max(checks.worlds)}"}
    for name in ("scheduler", "own_step", "validation", "keep_best", "group_by_length", "learning_rate_scaling"):
        if value := getattr(spec, name):
            found.add(f"{name}: {value}")
    for name in _SWITCHES:
        if getattr(spec, name) != getattr(PLAIN, name):
            found.add(name)
    found |= {f"callback: {each[0]}" for each in spec.callbacks}
    found |= {f"metric: {each}" for each in spec.metrics}
    found |= {f"ddp: {name}" for name in spec.ddp if name != "compression"}
    if compression := spec.ddp.get("compression"):
        found.add(f"compression: {compression}")
    if spec.clip:
        found.add(f"clip: {spec.clip[0]}")
    if spec.precision != "fp32":
        found.add(f"precision: {spec.precision}")
    return sorted(found)


_SWITCHES = words(
    "workers sample_weight class_weight warmup_steps accumulation_steps max_steps steps_per_epoch initial_epoch "
    "weighted_validation validation_freq validation_steps validation_batch_size validate_every_n_steps load_best logs "
    "drop_last shuffle recomputes fused_optimizer check_replicas_every_n_steps fast_dev_run second_fit dropout dtype "
    "batches_between evaluates_between predicts_to_folder evaluates_loader scheduler_interval"
)


def simpler(spec: Spec, checks: Checks) -> Iterator[tuple[Spec, Checks]]:
    """Yield programs with one thing less."""
    for field in dataclasses.fields(Spec):
        value, plain = getattr(spec, field.name), getattr(PLAIN, field.name)
        if value != plain and field.name not in ("data_seed", "rows", "epochs"):
            yield _change(spec, **{field.name: plain}), checks
        if isinstance(value, tuple) and field.name in ("callbacks", "metrics"):
            for index in range(len(value)):
                yield _change(spec, **{field.name: value[:index] + value[index + 1 :]}), checks
    for name in spec.ddp:
        yield _change(spec, ddp={key: value for key, value in spec.ddp.items() if key != name}), checks
    for name in ("rows", "epochs"):
        value = getattr(spec, name)
        for less in {value // 2, value - 1} - {0, value}:
            yield _change(spec, **{name: less}), checks
    for name in ("variant", "plain_loop", "transport", "pool"):
        if value := getattr(checks, name):
            yield spec, _change(checks, **{name: type(value)() if name in ("plain_loop", "pool") else None})
    for name in ("worlds", "resumes"):
        values = getattr(checks, name)
        for each in values:
            if len(values) > (name == "worlds"):
                yield spec, _change(checks, **{name: tuple(k for k in values if k != each)})
