"""Settings of one call of `fit`, and of averaging gradients."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

from cyxtrain.config.settings import Rules, check_fields, is_number, names_checked, require, settings
from cyxtrain.environment.regular_files import local_path, path_or_url, url_of

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""The modes of `torch.compile`."""


class _Unset(int):
    """A default that can be told apart from the same number if the user has set that."""


_THEIRS = {
    "precision": {
        **dict.fromkeys(("16", "16-mixed", "float16", "half", "mixed_float16"), "fp16"),
        **dict.fromkeys(("bf16-mixed", "bfloat16", "mixed_bfloat16"), "bf16"),
        **dict.fromkeys(("32", "32-true", "float", "float32", "full", "no", "none"), "fp32"),
    },
    "float32_precision": {"tf32": "high", "ieee": "highest", "true": "high"},
}
"""Names of Lightning, Keras, Accelerate and PyTorch for values of fields."""


def _between(low: float, high: float) -> tuple[str, Callable[[Any], bool]]:
    return f"a number above {low:g} and below {high:g}", lambda value: is_number(value) and low < value < high


_AMP_RULES: Rules = {
    "initial_scale": _between(2.0**-127, 2.0**127),  # both the scale and its inverse must be float32 numbers
    "growth_factor": _between(1.0, math.inf),
    "backoff_factor": _between(0.0, 1.0),
}


@settings
class AMPConfig:
    """Loss scaling for precision="fp16", which keeps small gradients from underflowing."""

    use_dynamic_scaling: bool = True
    """Lower the scale if gradients overflow, and raise it again."""
    dynamic_history_size: int = 2000
    """Steps without an overflow after which the scale grows."""
    initial_scale: float = 2.0**15
    """The factor of the loss at the start."""
    growth_factor: float = 2.0
    """The scale is multiplied by this when it grows."""
    backoff_factor: float = 0.5
    """The scale is multiplied by this after an overflow."""

    def validate(self) -> None:
        """Refuse invalid settings.

        Raises:
            ConfigError: Names the field, its value and what it must be.
        """
        check_fields(self, _AMP_RULES, positive=("dynamic_history_size",))


@names_checked
def create_default_amp_config(
    use_dynamic_scaling: bool = True, dynamic_history_size: int = 2000, initial_scale: float = 2.0**15
) -> AMPConfig:
    """Return the default loss scaling.

    Args:
        use_dynamic_scaling: Lower the scale if gradients overflow, and raise it again.
        dynamic_history_size: Steps without an overflow after which the scale doubles.
        initial_scale: The factor of the loss at the start.
    """
    return AMPConfig(use_dynamic_scaling, dynamic_history_size, initial_scale)


def _are_limits(value: object) -> bool:
    """Return whether a value is the limit of all gradients, or has one for each of several optimizers."""
    limits = value.values() if isinstance(value, Mapping) else [value]
    return all(is_number(limit) and 0 < limit < math.inf for limit in limits)


def _is_warmup(value: object) -> bool:
    return is_number(value) and (0 <= value < 1 or (isinstance(value, int) and value > 0))


def _is_frequency(value: object) -> bool:
    if isinstance(value, float):
        return 0 < value < 1
    epochs = value if isinstance(value, list) else [value]
    # type(), because True is an instance of int.
    return all(type(epoch) is int and epoch >= 1 for epoch in epochs)


def _is_profile(value: object) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, bool)


_POSITIVE = (
    *("epochs", "batch_size", "effective_batch_size", "accumulation_steps", "steps_per_epoch", "max_steps"),
    *("validation_steps", "validation_batch_size", "readers", "virtual_ranks", "num_threads", "log_hashes"),
)
_LIMITS = ("a finite number above 0 or None", _are_limits)
_MINUTES = ("a number of at least 0", lambda value: is_number(value) and 0 <= value < math.inf)
_MODES = ", ".join(map(repr, COMPILE_MODES))
_FIT_RULES: Rules = {
    "checkpoint_every_n_minutes": _MINUTES,
    "validate_every_n_minutes": _MINUTES,
    "max_time_seconds": ("a number of seconds above 0 or None", lambda value: is_number(value) and value > 0),
    "validation_split": ("at least 0 and below 1", lambda value: is_number(value) and 0 <= value < 1),
    "validation_freq": (
        "a number of epochs, a list of epochs, or a fraction of an epoch between 0 and 1",
        _is_frequency,
    ),
    "warmup_steps": ("a whole number of at least 0, or a fraction below 1", _is_warmup),
    "clip_norm": _LIMITS,
    "clip_value": _LIMITS,
    "clip_adaptive": _LIMITS,
    "amp": ("an AMPConfig or None", lambda value: isinstance(value, AMPConfig)),
    "fused_optimizer": ("one of ('auto', True, False)", lambda value: value in ("auto", True, False)),
    "compile": (
        f"True, False or a mode of torch.compile ({_MODES})",
        lambda value: isinstance(value, bool) or value in COMPILE_MODES,
    ),
    "profile": ("True, False or a folder", _is_profile),
    "fast_dev_run": ("True, False or a number of steps", lambda value: isinstance(value, int) and value >= 0),
    "num_processes": (
        'at least 1, "auto" or None',
        lambda value: value == "auto" or (type(value) is int and value >= 1),
    ),
    "keep_best": (
        "a number in the history, such as 'val_loss', or None",
        lambda value: isinstance(value, str) and value != "",
    ),
}


@settings
class DistributedTrainingConfig:
    """Settings of one call of `fit`; its keyword arguments are these fields, and take precedence."""

    epochs: int = _Unset(10)
    """Passes over the training data; with `max_steps`, at most so many, and as many as it takes if not set."""
    batch_size: int = 64
    """Samples per step on each rank, or per micro-batch with `accumulation_steps`; a DataLoader has its own."""
    effective_batch_size: int | None = None
    """Samples per step over all ranks; takes precedence over `batch_size` for training."""
    shuffle: bool = True
    """A new order in every epoch, from `seed`; a DataLoader's sampler decides for itself."""
    seed: int = 42
    """Determines the order of samples."""
    verbose: bool = True
    """Rank 0 prints a header and a progress bar; without a terminal, a line per epoch or 30 seconds."""
    log_every_n_batches: int = 0
    """Deprecated: use `log_every_n_steps`."""
    checkpoint_every_n_epochs: int = 0
    """Epochs between checkpoints; 0: none."""
    checkpoint_dir: str = "./checkpoints"
    """Folder for checkpoints, or the URL of one in a store, such as "s3://bucket/run"; if any are requested, it is
    created and tried before the first step."""
    save_on_master_only: bool = True
    """Rank 0 writes. False: each rank writes its own file, with its rank in the name."""
    validation_split: float = 0.0
    """Fraction of the training data, its last samples, to hold out for validation."""
    checkpoint_every_n_steps: int = 0
    """Optimizer steps between checkpoints; 0: none."""
    checkpoint_every_n_minutes: float = 0.0
    """Minutes between checkpoints, by rank 0's clock; 0: none."""
    max_time_seconds: float | None = None
    """Seconds after which `fit` stops, after a step that all ranks agree on; None: no limit."""
    keep_last: int = 0
    """How many checkpoints of a fit to keep, the newest; 0: all."""
    keep_best: str | None = None
    """Keep the checkpoint of the best epoch or validation as "best.ckpt": the lowest "loss" or "val_loss", the highest
    "accuracy" or "val_accuracy", or the best value of one of the trainer's metrics."""
    on_save_error: Literal["warn", "raise"] = "warn"
    """If a checkpoint cannot be written: "warn" and continue, or "raise"."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """If a loss or a gradient is NaN or infinite: "raise", or "skip" the step and continue, unless that happens ten
    times in a row."""
    check_replicas_every_n_steps: int | None = None
    """Optimizer steps between checks that all ranks hold the same parameters; None: each epoch; 0: never."""
    accumulation_steps: int = 1
    """Micro-batches per step: each rank's samples of a step (`batch_size` times this) pass through the model in so many
    parts, with the memory of one part, and the result of the whole."""
    clip_norm: float | Mapping[str, float] | None = None
    """Largest norm of all gradients together, averaged over ranks; larger ones are scaled down to it. A dictionary has
    one for the gradients of each optimizer that it names; others are not clipped."""
    clip_value: float | Mapping[str, float] | None = None
    """Largest absolute value of an element of a gradient; or a dictionary by names of optimizers."""
    clip_adaptive: float | Mapping[str, float] | None = None
    """Largest norm of a unit's gradient as a multiple of the norm of the unit's weights, 0.01 is usual; or a dictionary
    by names of optimizers."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What the model computes in: "fp32", as its parameters; "bf16" or "fp16", by autocast."""
    amp: AMPConfig | None = None
    """Loss scaling for precision="fp16"; None: `create_default_amp_config()`."""
    compile: bool | str = False
    """Run the model through `torch.compile` while it is trained: True, or a mode such as "reduce-overhead" or
    "max-autotune". The first steps take longer, by seconds or minutes."""
    sync_batchnorm: bool = False
    """Compute batch norm statistics over the samples of all ranks: the model's layers become PyTorch's SyncBatchNorm,
    and stay so. GPUs only."""
    learning_rate_scaling: Literal["linear", "sqrt"] | None = None
    """How the learning rate, given for `batch_size` samples per step (times `accumulation_steps`), grows with the
    samples per step over all ranks: "linear", with the ratio; "sqrt", with its root; None: not at all."""
    warmup_steps: int | float = 0
    """Optimizer steps in which the learning rate grows linearly to its value, before its schedule begins. Below 1: that
    fraction of the fit's steps."""
    fused_optimizer: bool | str = "auto"
    """Whether the optimizer uses PyTorch's fused kernel, several times as fast: "auto": if it can and you have not
    chosen another implementation; True: it must; False: as you built it."""
    validation_freq: int | float | list[int] = 1
    """Epochs between validations (2: after epochs 2, 4, ...); the epochs with one, as a list; or a fraction of an epoch
    (0.25: four in each)."""
    steps_per_epoch: int | None = None
    """Optimizer steps per epoch. The next epoch continues in the data where this one ended, and starts over at the end.
    None: each epoch passes once over all data."""
    fast_dev_run: bool | int = False
    """Try everything once: one epoch of so many steps (True: one) and as many batches of validation, without
    checkpoints and without `resume`."""
    sharded_data: bool | None = None
    """For IterableDatasets, generators and DataLoaders: True: each rank has its own part of the data; False: all have
    the same, which is split among them; None: DataLoaders have the same, others if their first batches are equal."""
    profile: bool | str = False
    """Write a trace of some steps and a table of where their time goes, per rank: into "profile" or another folder."""

    validation_steps: int | None = None
    """Batches of a validation, over all ranks: the first ones. None: all of the validation data, each sample once."""
    validation_batch_size: int | None = None
    """Samples per batch of a validation; None: `batch_size`, or the DataLoader's."""
    num_processes: int | str | None = None
    """Processes that train together, started from a notebook or a program without a launcher; they stay for the next
    call, and `evaluate` and `predict` use them too. "auto": one per GPU if the model is on one, otherwise one per core,
    up to 8. None: this process alone. Ignored under a launcher, whose ranks do the work."""
    scheduler_interval: Literal["step", "epoch"] | None = None
    """Step the schedule after each optimizer "step" or each "epoch"; None: as the trainer was built, by step."""

    drop_last: bool = False
    """Leave out the samples that do not fill the last global batch of an epoch, so that all steps have the same size. A
    new order leaves out others."""
    float32_precision: Literal["highest", "high", "medium"] | None = None
    """Precision of float32 matrix products and convolutions, as in `torch.set_float32_matmul_precision`: "highest";
    "high" (TF32 on NVIDIA GPUs); "medium". None: as your program has set it."""
    channels_last: bool = False
    """Keep convolution weights and their 4-d and 5-d inputs in PyTorch's `channels_last` memory format, which GPUs with
    tensor cores compute faster; the weights stay so."""
    max_steps: int | None = None
    """Optimizer steps after which the fit ends, those before it was resumed included; its last epoch may be shorter."""
    validate_every_n_steps: int = 0
    """Optimizer steps between validations, in place of those after epochs; the last step is validated too; 0: none."""
    validate_every_n_minutes: float = 0.0
    """Minutes between validations, by rank 0's clock, in place of those after epochs; the last step is validated too;
    0: none."""
    log_every_n_steps: int = 0
    """Optimizer steps between lines with the loss of the epoch so far over all ranks; 0: none."""
    validation_stratify: bool = False
    """With `validation_split`: hold out the same fraction of each class, drawn by `seed`, instead of the last
    samples."""
    load_best: bool = False
    """Load the weights of "best.ckpt" (`keep_best`) when the fit is complete."""
    readers: int | None = None
    """For data in parts (a function of `(reader, readers)`, an IterableDataset of Hugging Face, a pyarrow Dataset): how
    many readers share them. They give the samples of each step in turn, on as many ranks as readers or fewer, and each
    sample is read by one rank. None: data have no parts."""
    virtual_ranks: int | None = None
    """Train as on so many ranks, with the same bits on any number of ranks up to it: each rank computes the parts of
    several, one after the other. `batch_size` is per virtual rank. Refused if a slice of a step depends on those before
    it, as with state that forward keeps in an attribute. None: as many as there are ranks."""
    num_threads: int | None = None
    """PyTorch's threads on each rank in `fit`, and in `evaluate` and `predict` after it; their number may change the
    last bits of results. None: as they are; with `virtual_ranks`, 1."""
    log_hashes: int | None = None
    """Optimizer steps between lines with hashes of all gradients and parameters, in a file "hashes-RUN.jsonl" in
    `checkpoint_dir`: `cyxtrain bisect A B` finds the first step and tensor in which two runs differ. None: no lines."""

    @property
    def threads_of_fit(self) -> int | None:
        """The number of PyTorch's threads that a fit sets; None: it sets none."""
        if self.num_threads is None and self.virtual_ranks is not None:
            return 1
        return self.num_threads

    @property
    def has_own_epochs(self) -> bool:
        """Whether `epochs` is set, and not only its default."""
        return not isinstance(self.epochs, _Unset)

    @property
    def validates_within_epochs(self) -> bool:
        """Whether validations may come in the middle of an epoch."""
        return bool(self._validates_by_itself or isinstance(self.validation_freq, float))

    @property
    def _validates_by_itself(self) -> bool:
        return bool(self.validate_every_n_steps or self.validate_every_n_minutes)

    def validates_after(self, epoch: int, *, is_last: bool) -> bool:
        """Return whether a validation follows `epoch`, counted from 1; `is_last`: of the fit."""
        freq = self.validation_freq
        if self._validates_by_itself:
            return is_last
        if isinstance(freq, list):
            return epoch in freq
        return isinstance(freq, float) or epoch % freq == 0

    def validates_at(self, step: int, epoch_step: int, steps_per_epoch: int | None) -> bool:
        """Return whether a validation follows `step`, from 1: number `epoch_step` of `steps_per_epoch`."""
        if isinstance(self.validation_freq, float):
            # The decimal number that the user wrote: as a float, 0.1 is slightly more.
            share = Fraction(str(self.validation_freq)) * (steps_per_epoch or 1)
            return epoch_step // share > (epoch_step - 1) // share
        return self.validate_every_n_steps > 0 and step % self.validate_every_n_steps == 0

    @property
    def makes_checkpoints(self) -> bool:
        """Whether any setting asks for checkpoints."""
        often = self.checkpoint_every_n_epochs or self.checkpoint_every_n_steps or self.checkpoint_every_n_minutes
        return bool(often or self.keep_best)

    def validate(self) -> None:
        """Refuse invalid settings, before training starts.

        Raises:
            ConfigError: Names the field, its value and what it must be.
        """
        owner = "DistributedTrainingConfig"
        if isinstance(self.validation_freq, tuple):
            self.validation_freq = list(self.validation_freq)  # the config travels as JSON
        check_fields(self, _FIT_RULES, positive=_POSITIVE, theirs=_THEIRS)
        # PyTorch's generators take seeds of 64 bits.
        require(self.seed < 2**64, f"{owner}.seed must be below 2**64, got {self.seed}.")
        clips = [name for name in ("clip_norm", "clip_value", "clip_adaptive") if getattr(self, name) is not None]
        require(len(clips) < 2, f"{owner}: {' and '.join(clips)} are set. Gradients are clipped in one way: set one.")
        if self.amp is not None:
            self.amp.validate()
            require(
                self.precision == "fp16",
                f"{owner}.amp scales the loss of fp16, and precision is {self.precision!r}.",
            )
        self._check_pairs(owner)
        local_path(f"{owner}.profile", str(self.profile))
        path_or_url(f"{owner}.checkpoint_dir", self.checkpoint_dir)
        # The config travels as JSON.
        self.checkpoint_dir = url_of(self.checkpoint_dir) or os.fspath(self.checkpoint_dir)

    def _check_pairs(self, owner: str) -> None:
        """Refuse settings that need another one, or exclude it."""
        require(
            bool(self.validation_split) or not self.validation_stratify,
            f"{owner}.validation_stratify=True needs validation_split, such as 0.1: set both.",
        )
        require(
            not self._validates_by_itself or self.validation_freq == 1,
            f"{owner}: validation_freq={self.validation_freq!r} and validate_every_n_steps or validate_every_n_minutes "
            "are set. The latter replace validations after epochs: set one.",
        )
        require(
            self.readers is None or not self.sharded_data,
            f"{owner}: readers={self.readers} and sharded_data=True are set. Readers share the data, and ranks that "
            "have their own do not: set one.",
        )
        require(
            self.makes_checkpoints or self.keep_last == 0,
            f"{owner}.keep_last is set and no checkpoint is asked for: set checkpoint_every_n_epochs, too.",
        )
        require(
            self.log_hashes is None or not url_of(self.checkpoint_dir),
            f"{owner}: log_hashes={self.log_hashes} and checkpoint_dir={str(self.checkpoint_dir)!r} are set. Hashes "
            "are appended to a file, which a store does not allow: give a folder, or leave log_hashes out.",
        )
        require(
            self.keep_best is not None or not self.load_best,
            f'{owner}.load_best=True needs keep_best, such as keep_best="val_loss": set both.',
        )


_COMPRESSIONS = (None, "fp16", "bf16", "powersgd")
_DDP_RULES: Rules = {
    "bucket_size_mb": ("a number of MiB above 0", lambda value: is_number(value) and 0 < value < math.inf),
    "compression": (f"one of {_COMPRESSIONS}", lambda value: value in _COMPRESSIONS),
}


@settings
class DDPConfig:
    """How DistributedDataParallel averages gradients."""

    broadcast_parameters: bool = True
    """Start with rank 0's parameters and buffers on every rank."""
    bucket_size_mb: float = 25
    """MiB of gradients that are averaged together."""
    find_unused_parameters: bool = False
    """Allow parameters that the loss does not use. False: an error that names them."""
    gradient_as_bucket_view: bool = True
    """Let `.grad` be a view of the bucket, which saves a copy of all gradients."""
    static_graph: bool = False
    """The same parameters are used in every step; those never used are allowed."""
    compression: str | None = None
    """Compress gradients: "fp16", "bf16", "powersgd", or None."""
    matrix_approximation_rank: int = 1
    """For "powersgd": columns of the factor matrices; more are more accurate and larger."""

    def validate(self) -> None:
        """Refuse invalid settings.

        Raises:
            ConfigError: Names the field, its value and what it must be.
        """
        check_fields(self, _DDP_RULES, positive=("matrix_approximation_rank",))
        require(
            self.compression == "powersgd" or self.matrix_approximation_rank == 1,
            "DDPConfig.matrix_approximation_rank is set, and only compression='powersgd' approximates matrices: set "
            f"that, too; compression is {self.compression!r}.",
        )
