"""Which device a model is trained on, and in which memory format."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cyxtrain.data.batches.prefetch import as_channels_last
from cyxtrain.environment import accelerator, torch_compat
from cyxtrain.errors import ConfigError, counted, on_all_ranks, shortened
from cyxtrain.world import consensus, runtime
from cyxtrain.world.world import World


def checked_device(device: str | torch.device, model: nn.Module) -> str | torch.device:
    """Return the device that a user named, "auto" unchanged; raise ConfigError if it cannot be used."""
    visible, count = accelerator.visible(), accelerator.count()
    try:
        found = torch.device("cpu" if device == "auto" else device)
    except (RuntimeError, TypeError) as error:
        gpu = "cuda" if visible is None else visible.type
        meant = " Did you mean 'auto'?" * (str(device).lower() in ("gpu", "gpus", "tpu", "accelerator"))
        raise ConfigError(
            f"device must be 'auto' (a visible GPU, else the CPU), or one of torch's such as 'cpu' or {gpu!r}, got "
            f"{device!r}.{meant}"
        ) from error
    asked = f"device={str(device)!r}"
    is_there = visible is not None and visible.type == found.type
    if not (is_there or found.type == "cpu" or accelerator.is_there(found.type)):
        raise ConfigError(f"{asked}: no {found.type.upper()} device is visible. Use 'auto' or 'cpu'.")
    if is_there and (found.index or 0) >= count:
        numbers = f"{found.type}:0" + (f" to {found.type}:{count - 1}" if count > 1 else "")
        raise ConfigError(
            f"{asked}: {counted(count, 'such device')} visible ({numbers}). Use {found.type!r}: it is this rank's own."
        )
    if str(device) == "cpu" or visible is None:
        check_batch_norm(model, torch.device("cpu"), wanted=False)
    return device


def choose_device(world: World, asked: str | torch.device, model: nn.Module) -> torch.device:
    """Return where a model is to be, an accelerator with its number, and make that one this thread's.

    "auto" is where the model is, if that is an accelerator; otherwise the visible one, unless CPUs are asked for.
    """
    parameter = next(model.parameters(), None)
    here = torch.device("cpu") if parameter is None else parameter.device
    visible = accelerator.visible()
    places = sorted({str(each.device) for each in model.parameters() if accelerator.is_accelerator(each.device)})
    empty = [name for name, each in model.named_parameters() if each.is_meta]
    if empty:
        raise ConfigError(
            f"the model's {shortened(empty)} are on the meta device, which keeps no values: make the model without it, "
            "or call model.to_empty(device='cpu') and load weights."
        )
    if asked == "auto" and len(places) > 1:
        raise ConfigError(
            f"the model's parameters are on {' and '.join(places)}, and each rank trains a whole model on one device. "
            f"Leave out device_map or its like; device={torch.device(places[0]).type!r} moves the model to one."
        )
    if asked != "auto":
        chosen = torch.device(asked)
    elif here.type == "cpu" and visible is not None and not runtime.why_cpus():
        chosen = visible
    else:
        chosen = here
    if visible is None or chosen.type != visible.type:
        return chosen
    if chosen.index is None:
        index = torch.accelerator.current_device_index()  # the program's choice
        chosen = torch.device(chosen.type, index or world.local_rank % accelerator.count())
    bound = getattr(world.group, "bound_device_id", None)
    if bound is not None and bound.type == chosen.type and bound != chosen:
        what = f"the model is on {chosen}" if asked == "auto" else f"device={str(asked)!r}"
        raise ConfigError(
            f"{what}, and rank {world.number}, local rank {world.local_rank}, is connected over NCCL on "
            f"{bound}. Use {chosen.type!r} without a number: after cyxtrain.init() it is this rank's own."
        )
    torch.accelerator.set_device_index(chosen.index)
    return chosen


def check_batch_norm(model: nn.Module, device: torch.device, *, wanted: bool) -> None:
    """Refuse SyncBatchNorm on a CPU, where PyTorch has none; `wanted`: whether batch norms are to become such."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if device.type == "cpu" and (layers or wanted):
        asked = f"the model's {shortened(layers)} is SyncBatchNorm" if layers else "sync_batchnorm=True"
        raise ConfigError(
            f"{asked}, which PyTorch has on GPUs alone. On CPUs use nn.BatchNorm1d and its like, whose statistics are "
            "those of each rank's samples, or nn.GroupNorm, which needs no others."
        )


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return what ranks compare of their devices; `device` has its number."""
    identity = f"{device} of {platform.node()}"
    if device.type == "cuda":
        identity = torch_compat.identity_of_gpu(device.index)[0] or identity
    return {"the kind of device": device.type, "_device": [str(device), platform.node(), identity]}


def check_devices(world: World, facts_by_rank: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Refuse ranks that share a GPU over NCCL, on every rank, if NCCL has not connected them yet."""
    group = world.group_for(device)
    is_connected = getattr(group, "bound_device_id", None) is not None
    if is_connected or consensus.backends_of(group).get(device.type) != "nccl":
        return
    holders: dict[str, int] = {}
    for rank, facts in enumerate(facts_by_rank):
        name, node, identity = facts["_device"]
        if identity in holders:
            error = ConfigError(
                f"rank {holders[identity]} and rank {rank} train on one GPU, {name} of {node}, which NCCL refuses. Use "
                "device='cuda' without a number, or torch.cuda.set_device(local_rank) before the model is moved.",
                rank=rank,
            )
            raise on_all_ranks(error)
        holders[identity] = rank


def explain_device(world: World, device: torch.device, facts_by_rank: Sequence[dict[str, Any]]) -> str:
    """Describe which devices are used and which are visible."""
    visible, count = accelerator.visible(), accelerator.count()
    words = str(device)
    if device.type == "cpu":
        words += f", {counted(torch.get_num_threads(), 'thread')} per rank"
    if visible is None:
        return words
    if device.type != visible.type:
        what = f"1 {visible.type} device is" if count == 1 else f"{count} {visible.type} devices are"
        return f"{words}; {what} visible and not used: {runtime.why_cpus() or f'device={str(device)!r}'}"
    node = facts_by_rank[world.rank]["_device"][1]
    here = {name for name, other, _ in (facts["_device"] for facts in facts_by_rank) if other == node}
    used = sorted(here, key=lambda name: torch.device(name).index or 0)
    which = str(device) if len(used) == 1 else f"{used[0]} to {used[-1]}"
    return f"{which} ({len(used)} of {count} visible {accelerator.name_of(device)})"


def put_channels_last(model: nn.Module) -> None:
    """Give a model's weights of four and five dimensions that format, in place; raise ConfigError if it has none."""
    if not any(parameter.dim() in (4, 5) for parameter in model.parameters()):
        raise ConfigError(
            f"channels_last=True is for 2-d and 3-d convolutions, and no parameter of {type(model).__name__} has 4 or "
            "5 dimensions: leave it out."
        )
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() in (4, 5):
            tensor.data = as_channels_last(tensor.data)
