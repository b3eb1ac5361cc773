"""Types of what `fit`, `evaluate` and `predict` take, for editors and mypy; a test compares them with the config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

from torch.utils.data import Dataset

from cyxtrain.config import AMPConfig


class SupportsArray(Protocol):
    """A table or an array of another library, such as a data frame."""

    def __array__(self) -> Any: ...


_Arrays: TypeAlias = SupportsArray | Mapping[Any, Any] | tuple[Any, ...] | list[Any]
# Not Iterable[Any], which would include the path of a file: a text is an iterable of texts.
Data: TypeAlias = _Arrays | Dataset[Any] | Iterable[_Arrays] | Callable[[], Iterable[Any]]
"""Arrays, tensors, several by name, datasets, DataLoaders, and what gives batches."""


class FitSettings(TypedDict, total=False):
    """The fields of `DistributedTrainingConfig`; Keras's values of `verbose`, and x; and `group_by_length`."""

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
    on_save_error: Literal["warn", "raise"]
    on_nonfinite: Literal["raise", "skip"]
    check_replicas_every_n_steps: int | None
    accumulation_steps: int
    clip_norm: float | Mapping[str, float] | None
    clip_value: float | Mapping[str, float] | None
    clip_adaptive: float | Mapping[str, float] | None
    precision: Literal["fp32", "bf16", "fp16"]
    amp: AMPConfig | None
    compile: bool | str
    sync_batchnorm: bool
    learning_rate_scaling: Literal["linear", "sqrt"] | None
    warmup_steps: int | float
    fused_optimizer: bool | str
    validation_freq: int | float | list[int]
    steps_per_epoch: int | None
    fast_dev_run: bool | int
    sharded_data: bool | None
    profile: bool | str
    validation_steps: int | None
    validation_batch_size: int | None
    num_processes: int | str | None
    scheduler_interval: Literal["step", "epoch"] | None
    drop_last: bool
    float32_precision: Literal["highest", "high", "medium"] | None
    channels_last: bool
    max_steps: int | None
    validate_every_n_steps: int
    validate_every_n_minutes: float
    log_every_n_steps: int
    validation_stratify: bool
    load_best: bool
    group_by_length: Any
    x: Data
