"""Reports settings that differ from the checkpoint's.

The checkpoint wins for the optimizer, the schedule and changed learning rates; the program for how later steps are
taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cyxtrain.checkpoint.format.optimizer_state import optimizer_state_by_name
from cyxtrain.config import AMPConfig, DDPConfig, DistributedTrainingConfig
from cyxtrain.optim.optimizers import ONLY
from cyxtrain.optim.precision import float32_products
from cyxtrain.optim.schedules import schedule_settings
from cyxtrain.training.inputs.plan import FitPlan
from cyxtrain.training.model.compile import explain_compiled
from cyxtrain.training.state import TrainingState

_APPLIED_ONCE = ("learning_rate_scaling", "warmup_steps")
"""Settings applied once to learning rates: a checkpoint has the resulting rates."""
_EACH_STEP = (
    *("accumulation_steps", "clip_norm", "clip_value", "clip_adaptive", "sync_batchnorm"),
    *("scheduler_interval", "channels_last"),
)
"""Settings of each step; precision and compilation are reported with the numerics."""
_NO_OPTIONS = {"params", "lr", "initial_lr"}
"""Entries of a parameter group that are not compared as options; learning rates are compared by initial value."""


def as_in_checkpoint(config: DistributedTrainingConfig, saved: Mapping[str, Any]) -> DistributedTrainingConfig:
    """Return the config with the checkpoint's values of what a fit does once."""
    fields = {name: saved.get(name, getattr(config, name)) for name in _APPLIED_ONCE}
    if config.precision == saved.get("precision") == "fp16":
        initial = _loss_scaling(saved)["initial_scale"]
        fields["amp"] = dataclasses.replace(config.amp or AMPConfig(), initial_scale=initial)
    return dataclasses.replace(config, **fields)


def restored_settings(state: TrainingState, config: DistributedTrainingConfig) -> dict[str, list[dict[str, Any]]]:
    """Return the settings that a checkpoint restores, part by part."""
    options, schedules = [], []
    for rates in state.rates.values():
        _, groups = optimizer_state_by_name(rates.optimizer, state.trained)
        hidden = _NO_OPTIONS | rates.moved_options
        for group, rate in zip(groups, rates.program_rates(), strict=True):
            shown = {name: value for name, value in group.items() if name not in hidden}
            options.append({name: value for name, value in shown.items() if not isinstance(value, torch.Tensor)})
            options[-1]["lr"] = rate
        schedules += schedule_settings(rates.scheduler)
    own = dataclasses.asdict(config)
    applied_once = {name: own[name] for name in _APPLIED_ONCE}
    if config.precision == "fp16":
        applied_once["initial_scale"] = _loss_scaling(own)["initial_scale"]
    return {"settings": [applied_once], "optimizer": options, "schedule": schedules}


def describe_restored(
    program: Mapping[str, list[dict[str, Any]]], checkpoint: Mapping[str, list[dict[str, Any]]]
) -> list[tuple[str, str]]:
    """Return the header's line about settings of the program that the checkpoint has replaced."""
    words = {
        f"{name} {after[name]} as in the checkpoint (the program has {before[name]})"
        for what, parts in program.items()
        for before, after in zip(parts, checkpoint[what], strict=False)
        for name in before.keys() & after.keys()
        if before[name] != after[name]
    }
    return [("restored", "; ".join(sorted(words)))] if words else []


def describe_changes(config: DistributedTrainingConfig, saved: Mapping[str, Any]) -> list[str]:
    """Describe what steps do differently from now on."""
    own = dataclasses.asdict(config)
    found = differences(saved, {name: own[name] for name in _EACH_STEP})
    if config.precision == saved.get("precision") == "fp16":
        now = _loss_scaling(own)
        del now["initial_scale"]  # by now it has become another
        found += differences(_loss_scaling(saved), now)
    return found


def _loss_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    given: Mapping[str, Any] | None = config.get("amp")
    return dataclasses.asdict(AMPConfig()) | dict(given or {})


def numerics_of(model: nn.Module, plan: FitPlan, ddp_config: DDPConfig) -> dict[str, Any]:
    """Return the numerics in use, as JSON values by their names in messages."""
    device, names = plan.data.placement.device, ", ".join(name for name in plan.fused_optimizers if name != ONLY)
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    exchange = {
        "the size of buckets": ddp_config.bucket_size_mb,
        "the compression of gradients": ddp_config.compression or "none",
        "the rank of their approximation": ddp_config.matrix_approximation_rank,
    }
    return {
        "PyTorch": torch.__version__,
        "the parameters' dtypes": ", ".join(dtypes),
        "the precision": plan.config.precision,
        "the model": explain_compiled(plan.config.compile, plan.compiles_layers) or "run as it is",
        "the optimizer's kernel": f"fused {names}".rstrip() if plan.fused_optimizers else "as it was built",
        "the device": device.type,
        "the backend": dist.get_backend(),
        **({"the number of threads per rank": torch.get_num_threads()} if device.type == "cpu" else {}),
        "the precision of float32 products": _product_precision(device, plan.config.float32_precision),
        **(exchange if dist.get_world_size() > 1 else {}),  # alone they do not
    }


def _product_precision(device: torch.device, requested: str | None) -> str:
    """Return the precision of float32 matrix products, whichever of PyTorch's two settings decides it."""
    backend = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with float32_products(requested):
        return str(backend.fp32_precision)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe what has another value than before; what was unknown then is skipped."""
    return [f"{name} was {before[name]} and is {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
