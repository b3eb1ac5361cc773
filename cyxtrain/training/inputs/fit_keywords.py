"""Types of what `fit`, `evaluate` and `predict` take, for editors and mypy; a test compares them with the config."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypedDict

from torch.utils.data import Dataset

from cyxtrain.callbacks.callback import Callback
from cyxtrain.config import AMPConfig, DistributedTrainingConfig


class SupportsArray(Protocol):
    """A table or an array of another library, such as a data frame."""

    def __array__(self) -> Any: ...


Data: TypeAlias = Iterable[Any] | Dataset[Any] | SupportsArray | Callable[[], Iterable[Any]]
"""Arrays, tensors, several by name, datasets, DataLoaders, and what gives batches."""


class FitSettings(TypedDict, total=False):
    """The fields of `DistributedTrainingConfig`; Keras's values of `verbose` too."""

    epochs: int
    batch_size: int
    effective_batch_size: int | None
    shuffle: bool
    seed: int
    verbose: bool | int | str
    log_every_n_batches: int
    checkpoint_every_n_epochs: int
    checkpoint_dir: str
    save_on_master_only: bool
    validation_split: float
    checkpoint_every_n_steps: int
    checkpoint_every_n_minutes: float
    max_time_seconds: float | None
    keep_last: int
    keep_best: str | None
    on_save_error: str
    on_nonfinite: str
    check_replicas_every_n_steps: int | None
    accumulation_steps: int
    clip_norm: float | None
    clip_value: float | None
    clip_adaptive: float | None
    precision: str
    amp: AMPConfig | None
    compile: bool | str
    sync_batchnorm: bool
    learning_rate_scaling: str | None
    warmup_steps: int | float
    fused_optimizer: bool | str
    validation_freq: int | list[int]
    steps_per_epoch: int | None
    fast_dev_run: bool | int
    sharded_data: bool | None
    profile: bool | str
    validation_steps: int | None
    validation_batch_size: int | None
    num_processes: int | str | None
    scheduler_interval: str | None
    drop_last: bool
    float32_precision: str | None
    channels_last: bool


class FitKeywords(FitSettings, total=False):
    """All that `fit` takes by keyword besides X and y."""

    X_val: Data | None
    y_val: Data | None
    config: DistributedTrainingConfig | None
    validation_data: Data | tuple[Any, ...] | None
    sample_weight: Any
    class_weight: Mapping[int, float] | None
    callbacks: Callback | Sequence[Callback] | None
    initial_epoch: int | None
    resume: str | os.PathLike[str] | None
