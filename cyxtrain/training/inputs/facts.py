"""Facts of a fit, named as in errors: what must be the same on all ranks, and on resume."""

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
_PLAIN = (bool, int, float, str, tuple, list, Tensor, type(None))
# Entries of a parameter group that are not compared as options; learning rates are compared by initial value.
_NO_OPTIONS = {"params", "lr", "initial_lr"}


class Policy(Enum):
    """Which value of a setting wins on resume, and the message. Ranks must agree on all but RANK."""

    EQUAL = "{name} is {now} and was {before}"  # decides the samples of a step: a difference is refused
    CHECKPOINT = "{name} {before} as in the checkpoint (the program has {now})"  # applied once: its effect was saved
    PROGRAM = "{name} was {before} and is {now}"  # decides how each step is taken: a difference is warned of
    NUMERICS = "as PROGRAM, by the resulting arithmetic"  # compared by `numerics_of`
    FREE = "not compared"  # decides how long a fit is, or what it reports and keeps
    RANK = "each rank's own"  # only one rank prints and writes


POLICIES = {
    Policy.EQUAL: "shuffle seed validation_split validation_stratify batch_size effective_batch_size steps_per_epoch "
    "drop_last readers virtual_ranks",
    Policy.CHECKPOINT: "learning_rate_scaling warmup_steps initial_scale",
    Policy.PROGRAM: "accumulation_steps clip_norm clip_value clip_adaptive sync_batchnorm scheduler_interval "
    "channels_last use_dynamic_scaling dynamic_history_size growth_factor backoff_factor",
    Policy.NUMERICS: "precision amp compile fused_optimizer float32_precision num_threads",
    Policy.FREE: "epochs max_steps max_time_seconds fast_dev_run on_nonfinite check_replicas_every_n_steps "
    "sharded_data num_processes log_every_n_batches log_every_n_steps validation_freq validation_steps "
    "validation_batch_size validate_every_n_steps validate_every_n_minutes checkpoint_every_n_epochs "
    "checkpoint_every_n_steps checkpoint_every_n_minutes save_on_master_only keep_last keep_best load_best "
    "on_save_error log_hashes",
    Policy.RANK: "verbose checkpoint_dir profile",
}
"""The settings of a fit, and of loss scaling, by policy."""


def _by_policy(config: Mapping[str, Any]) -> dict[Policy, dict[str, Any]]:
    """Return the settings by policy and name, with the settings of loss scaling if the loss is scaled."""
    # A checkpoint that is older than a setting was made with its default.
    known = dataclasses.asdict(DistributedTrainingConfig()) | dict(config)
    if known["precision"] == "fp16":
        known |= dataclasses.asdict(AMPConfig()) | (known["amp"] or {})
    found: dict[Policy, dict[str, Any]] = {}
    for policy, names in POLICIES.items():
        found[policy] = {name: known[name] for name in names.split() if name in known}
    return found


def differences(policy: Policy, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Describe by name the values that differ; skip a name that only one side has."""
    names = [name for name in now if before.get(name, now[name]) != now[name]]
    return {name: policy.value.format(name=name, before=before[name], now=now[name]) for name in names}


def differing_settings(saved: Mapping[str, Any], config: DistributedTrainingConfig) -> dict[Policy, dict[str, str]]:
    """Describe by policy and name the settings that differ from a checkpoint's (`saved`)."""
    before = _by_policy(saved)
    now = _by_policy(dataclasses.asdict(config))
    return {policy: differences(policy, before[policy], now[policy]) for policy in POLICIES}


def config_facts(config: DistributedTrainingConfig) -> dict[str, Any]:
    """Return the settings one by one, except those that ranks may set differently."""
    own = POLICIES[Policy.RANK].split()
    return {f"the setting {name}": value for name, value in dataclasses.asdict(config).items() if name not in own}


def deciding_settings(config: DistributedTrainingConfig) -> dict[str, Any]:
    """Return the settings that decide the numbers of a fit, by name."""
    found: dict[str, Any] = {}
    for policy, settings in _by_policy(dataclasses.asdict(config)).items():
        if policy not in (Policy.FREE, Policy.RANK):
            found |= settings
    return found


def model_facts(trained: nn.Module, loss: Loss) -> dict[str, Any]:
    """Return the kinds of parameters, buffers and loss, and a hash of the loss's constants.

    Rank 0 sends its parameters and buffers to all ranks, but not these constants.
    """
    facts: dict[str, Any] = {"the loss": loss.describe(), "accuracy": str(loss.accuracy)}
    facts |= module_facts(trained)
    known = {id(buffer) for buffer in trained.buffers()}
    for name, module in loss.named_modules("loss_fn").items():
        for own, buffer in module.named_buffers(name):
            if id(buffer) not in known:
                facts[f"{own}: hash of its values"] = _hash([buffer])
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
                # The string of a function or another object has an address, which differs between ranks.
                shown = str(value) if isinstance(value, _PLAIN) else type(value).__name__
                facts[f"{what}'s {name} (group {number})"] = shown
        for name, parameter in plain_parameters(model):
            if parameter not in optimizer.state:
                continue
            tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
            facts[f"{what}'s state of {name}: hash of its values"] = _hash(tensors)
    return facts


def trained_facts(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return what callbacks may change: a hash of the names of trained parameters, and the sizes of groups."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    digest = hashlib.sha256(" ".join(names).encode()).hexdigest()
    return {
        "which parameters are trained": f"{len(names):,} ({digest[:8]})",
        "how many parameters each group of the optimizer has": [
            len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups
        ],
    }


def value_facts(model: nn.Module) -> dict[str, Any]:
    """Return a hash of samples of each parameter and buffer."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {f"the model's {name}: hash of its values": _hash([tensor]) for name, tensor in named}


def as_in_checkpoint(config: DistributedTrainingConfig, saved: Mapping[str, Any]) -> DistributedTrainingConfig:
    """Return the config with a checkpoint's values (`saved`) of the settings that are applied only once."""
    fields = _by_policy(saved)[Policy.CHECKPOINT]
    initial_scale = fields.pop("initial_scale", None)
    if config.precision == "fp16" and initial_scale is not None:
        fields["amp"] = dataclasses.replace(config.amp or AMPConfig(), initial_scale=initial_scale)
    return dataclasses.replace(config, **fields)


def restorable(state: TrainingState) -> dict[str, list[dict[str, Any]]]:
    """Return the present values that a checkpoint restores: of groups, schedules and parameters."""
    groups: list[dict[str, Any]] = []
    schedules: list[dict[str, Any]] = []
    for rates in state.rates.values():
        hidden = _NO_OPTIONS | rates.moved_options
        named = groups_by_name(rates.optimizer, state.trained)
        for group, rate in zip(named, rates.program_rates(), strict=True):
            options = {name: value for name, value in group.items() if name not in hidden}
            options = {name: value for name, value in options.items() if not isinstance(value, Tensor)}
            groups.append({**options, "lr": rate})
        schedules += schedule_settings(rates.scheduler)
    is_trained = {name: each.requires_grad for name, each in plain_parameters(state.trained)}
    return {"optimizer": groups, "schedule": schedules, "parameters": [is_trained]}


def describe_restored(
    program: Mapping[str, list[dict[str, Any]]], checkpoint: Mapping[str, list[dict[str, Any]]], settings: Iterable[str]
) -> list[tuple[str, str]]:
    """Return the header's lines about the program's values that the checkpoint has replaced."""
    replaced = {*settings}
    for kind in ("optimizer", "schedule"):
        for now, before in zip(program[kind], checkpoint[kind], strict=False):
            replaced |= {*differences(Policy.CHECKPOINT, before, now).values()}
    (now,) = program["parameters"]
    (before,) = checkpoint["parameters"]
    trained: list[str] = []
    for found, other, is_trained in (("trained", "frozen", True), ("frozen", "trained", False)):
        names = [name for name in before if before[name] is is_trained and now[name] is not is_trained]
        if names:
            trained.append(f"{shortened(names)} {found} as in the checkpoint ({other} in the program)")
    lines = [("restored", "; ".join(sorted(replaced))), ("trained", "; ".join(trained))]
    return [(name, words) for name, words in lines if words]


def _hash(tensors: Iterable[Tensor]) -> str:
    """Return hashes of some elements of each tensor, or of the parts of a sparse tensor."""
    flat = [part.reshape(-1) for tensor in tensors for part in parts_of(tensor) or ()]
    return " ".join(sampled_hash(values, _SAMPLED_ELEMENTS) for values in flat if len(values))
