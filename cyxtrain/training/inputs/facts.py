"""What a fit is made of: what each setting's policy is, and what all ranks must have alike, in words for errors."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from cyxtrain.checkpoint.format.names import plain_parameters
from cyxtrain.checkpoint.format.optimizer_state import groups_by_name
from cyxtrain.config import AMPConfig, DistributedTrainingConfig
from cyxtrain.data.batches.rows import sampled_hash
from cyxtrain.errors import shortened
from cyxtrain.metrics.loss import Loss
from cyxtrain.optim.optimizers import described_name
from cyxtrain.optim.schedules import schedule_settings
from cyxtrain.parallel.consistency.replicas import module_facts
from cyxtrain.tensors.layouts import parts_of
from cyxtrain.training.state import TrainingState

_SAMPLED_ELEMENTS = 64
_NO_OPTIONS = {"params", "lr", "initial_lr"}
"""Entries of a parameter group that are not compared as options; learning rates are compared by initial value."""


class Policy(Enum):
    """Who wins if a setting differs from the checkpoint's, and the words for it. Ranks must agree on all but RANK."""

    EQUAL = "{name} is {now} and was {before}"  # it decides the samples of a step: a difference is refused
    CHECKPOINT = "{name} {before} as in the checkpoint (the program has {now})"  # applied once, to what was saved
    PROGRAM = "{name} was {before} and is {now}"  # it decides how each step is taken: a difference is warned of
    NUMERICS = "as PROGRAM, by the arithmetic that comes of it"  # compared by `numerics_of`
    FREE = "not compared"  # it decides how long a fit is, or what it reports and keeps
    RANK = "each rank's own"  # only one of them shows and writes


POLICIES = {
    Policy.EQUAL: "shuffle seed validation_split validation_stratify batch_size effective_batch_size steps_per_epoch "
    "drop_last",
    Policy.CHECKPOINT: "learning_rate_scaling warmup_steps initial_scale",
    Policy.PROGRAM: "accumulation_steps clip_norm clip_value clip_adaptive sync_batchnorm scheduler_interval "
    "channels_last use_dynamic_scaling dynamic_history_size growth_factor backoff_factor",
    Policy.NUMERICS: "precision amp compile fused_optimizer float32_precision",
    Policy.FREE: "epochs max_steps max_time_seconds fast_dev_run on_nonfinite check_replicas_every_n_steps "
    "sharded_data num_processes log_every_n_batches log_every_n_steps validation_freq validation_steps "
    "validation_batch_size validate_every_n_steps validate_every_n_minutes checkpoint_every_n_epochs "
    "checkpoint_every_n_steps checkpoint_every_n_minutes save_on_master_only keep_last keep_best load_best "
    "on_save_error",
    Policy.RANK: "verbose checkpoint_dir profile",
}
"""The settings of a fit, and of loss scaling, by policy."""


def _by_policy(config: Mapping[str, Any]) -> dict[Policy, dict[str, Any]]:
    """Return the settings by policy and name, those of loss scaling too if the loss is scaled.

    `config` may be that of a checkpoint older than a setting: it was made with the default.
    """
    known = dataclasses.asdict(DistributedTrainingConfig()) | dict(config)
    if known["precision"] == "fp16":
        known |= dataclasses.asdict(AMPConfig()) | (known["amp"] or {})
    return {
        policy: {name: known[name] for name in names.split() if name in known} for policy, names in POLICIES.items()
    }


def differences(policy: Policy, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Describe by name what has another value than before; what only one of them has is skipped."""
    names = [name for name in now if before.get(name, now[name]) != now[name]]
    return {name: policy.value.format(name=name, before=before[name], now=now[name]) for name in names}


def differing_settings(saved: Mapping[str, Any], config: DistributedTrainingConfig) -> dict[Policy, dict[str, str]]:
    """Describe by policy and name what a program's settings are that a checkpoint was `saved` with otherwise."""
    before = _by_policy(saved)
    now = _by_policy(dataclasses.asdict(config))
    return {policy: differences(policy, before[policy], now[policy]) for policy in POLICIES}


def config_facts(config: DistributedTrainingConfig) -> dict[str, Any]:
    """Return the settings one by one, but for those that ranks may set differently."""
    own = POLICIES[Policy.RANK].split()
    return {f"the setting {name}": value for name, value in dataclasses.asdict(config).items() if name not in own}


def model_facts(trained: nn.Module, loss: Loss) -> dict[str, Any]:
    """Return the kinds of parameters, buffers and loss; a hash only of the loss's constants, which stay each rank's."""
    facts: dict[str, Any] = {"the loss": loss.describe(), "accuracy": str(loss.accuracy)}
    facts |= module_facts(trained)
    known = {id(buffer) for buffer in trained.buffers()}
    for name, module in loss.named_modules("loss_fn").items():
        constants = [(own, buffer) for own, buffer in module.named_buffers(name) if id(buffer) not in known]
        facts |= {f"{own}: hash of its values": _hash([buffer]) for own, buffer in constants}
    return facts


def optimizer_facts(optimizers: Mapping[str, torch.optim.Optimizer], model: nn.Module) -> dict[str, Any]:
    """Return the kind of each optimizer, the settings of its groups, and a hash of samples of its state."""
    facts: dict[str, Any] = {"the optimizers": [*optimizers]}
    for own, optimizer in optimizers.items():
        what = f"the {described_name(own)}"
        groups = groups_by_name(optimizer, model)
        facts[what] = type(optimizer).__name__
        for number, group in enumerate(groups):
            for name, value in group.items():
                # Functions and the like have an address in their text, which differs.
                plain = isinstance(value, (bool, int, float, str, tuple, list, Tensor, type(None)))
                facts[f"{what}'s {name} (group {number})"] = str(value) if plain else type(value).__name__
        for name, parameter in plain_parameters(model):
            if parameter not in optimizer.state:
                continue
            tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
            facts[f"{what}'s state of {name}: hash of its values"] = _hash(tensors)
    return facts


def trained_facts(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return what callbacks may change: a hash of which parameters are trained, and the sizes of groups."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {
        "which parameters are trained": f"{len(names):,} ({hashlib.sha256(' '.join(names).encode()).hexdigest()[:8]})",
        "how many parameters each group of the optimizer has": [
            len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups
        ],
    }


def value_facts(model: nn.Module) -> dict[str, Any]:
    """Return a hash of samples of each parameter and buffer."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {f"the model's {name}: hash of its values": _hash([tensor]) for name, tensor in named}


def as_in_checkpoint(config: DistributedTrainingConfig, saved: Mapping[str, Any]) -> DistributedTrainingConfig:
    """Return the config with the values of what a fit does once that a checkpoint was `saved` with."""
    fields = _by_policy(saved)[Policy.CHECKPOINT]
    initial_scale = fields.pop("initial_scale", None)
    if config.precision == "fp16" and initial_scale is not None:
        fields["amp"] = dataclasses.replace(config.amp or AMPConfig(), initial_scale=initial_scale)
    return dataclasses.replace(config, **fields)


def restorable(state: TrainingState) -> dict[str, list[dict[str, Any]]]:
    """Return what a checkpoint restores, as it is now: by kind, part by part, by name."""
    options, schedules = [], []
    for rates in state.rates.values():
        hidden = _NO_OPTIONS | rates.moved_options
        groups = groups_by_name(rates.optimizer, state.trained)
        for group, rate in zip(groups, rates.program_rates(), strict=True):
            shown = {name: value for name, value in group.items() if name not in hidden}
            options.append({name: value for name, value in shown.items() if not isinstance(value, Tensor)})
            options[-1]["lr"] = rate
        schedules += schedule_settings(rates.scheduler)
    trained = {name: each.requires_grad for name, each in plain_parameters(state.trained)}
    return {"optimizer": options, "schedule": schedules, "parameters": [trained]}


def describe_restored(
    program: Mapping[str, list[dict[str, Any]]], checkpoint: Mapping[str, list[dict[str, Any]]], settings: Iterable[str]
) -> list[tuple[str, str]]:
    """Return the header's lines about what the checkpoint has replaced in the program: `settings` and the rest."""
    words = {*settings}
    for kind in ("optimizer", "schedule"):
        for now, before in zip(program[kind], checkpoint[kind], strict=False):
            words |= {*differences(Policy.CHECKPOINT, before, now).values()}
    ((now, before),) = zip(program["parameters"], checkpoint["parameters"], strict=True)
    trained = [
        f"{shortened(names)} {found} as in the checkpoint ({own} in the program)"
        for found, own, is_trained in (("trained", "frozen", True), ("frozen", "trained", False))
        if (names := [name for name in before if before[name] is is_trained is not now[name]])
    ]
    lines = [("restored", "; ".join(sorted(words))), ("trained", "; ".join(trained))]
    return [line for line in lines if line[1]]


def _hash(tensors: Iterable[Tensor]) -> str:
    flat = (part.reshape(-1) for tensor in tensors for part in parts_of(tensor) or ())
    return " ".join(sampled_hash(values, _SAMPLED_ELEMENTS) for values in flat if len(values))
