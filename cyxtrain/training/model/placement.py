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
    visible = accelerator.visible()
    if device != "auto":
        _check_named(device, visible)
    if str(device) == "cpu" or visible is None:
        check_batch_norm(model, torch.device("cpu"), wanted=False)
    return device


def _check_named(device: str | torch.device, visible: torch.device | None) -> None:
    """Refuse a device that PyTorch does not know, or that is not on this machine."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        gpu = "cuda" if visible is None else visible.type
        got = f"got {device!r}."
        if str(device).lower() in ("gpu", "gpus", "tpu", "accelerator"):
            got += " Did you mean 'auto'?"
        raise ConfigError(
            f"device must be 'auto' (a visible GPU, otherwise the CPU) or a PyTorch device such as 'cpu' or {gpu!r}, "
            f"{got}"
        ) from error
    asked = f"device={str(device)!r}"
    kind = found.type
    is_visible = visible is not None and visible.type == kind
    if not (is_visible or kind == "cpu" or accelerator.is_there(kind)):
        raise ConfigError(f"{asked}: no {kind.upper()} device is visible. Use 'auto' or 'cpu'.")
    count = accelerator.count()
    if is_visible and (found.index or 0) >= count:
        numbers = f"{kind}:0"
        if count > 1:
            numbers += f" to {kind}:{count - 1}"
        raise ConfigError(
            f"{asked}: {counted(count, 'such device')} visible ({numbers}). Use {kind!r}: it is this rank's own."
        )


def choose_device(world: World, asked: str | torch.device, model: nn.Module) -> torch.device:
    """Return the device for a model, an accelerator with its number; make it this thread's current device.

    "auto" is the model's device, if that is an accelerator; otherwise the visible one, unless CPUs are asked for.
    """
    empty = [name for name, each in model.named_parameters() if each.is_meta]
    if empty:
        raise ConfigError(
            f"the model's {shortened(empty)} are on the meta device, which keeps no values: make the model without it, "
            "or call model.to_empty(device='cpu') and load weights."
        )
    visible = accelerator.visible()
    chosen = _automatic_device(model, visible) if asked == "auto" else torch.device(asked)
    if visible is None or chosen.type != visible.type:
        return chosen
    if chosen.index is None:
        # The program's choice; 0 is also the default, which leaves the choice to the local rank.
        index = torch.accelerator.current_device_index()
        chosen = torch.device(chosen.type, index or world.local_rank % accelerator.count())
    _check_connected_device(world, asked, chosen)
    torch.accelerator.set_device_index(chosen.index)
    return chosen


def _check_connected_device(world: World, asked: str | torch.device, chosen: torch.device) -> None:
    """Refuse another device than the one on which NCCL has connected this rank."""
    bound = getattr(world.group, "bound_device_id", None)
    if bound is None or bound.type != chosen.type or bound == chosen:
        return
    what = f"the model is on {chosen}" if asked == "auto" else f"device={str(asked)!r}"
    raise ConfigError(
        f"{what}, and rank {world.number}, local rank {world.local_rank}, is connected over NCCL on "
        f"{bound}. Use {chosen.type!r} without a number: after cyxtrain.init() it is this rank's own."
    )


def _automatic_device(model: nn.Module, visible: torch.device | None) -> torch.device:
    """Return where "auto" puts a model; refuse one on several accelerators."""
    devices = [parameter.device for parameter in model.parameters()]
    accelerators = sorted({str(device) for device in devices if accelerator.is_accelerator(device)})
    if len(accelerators) > 1:
        raise ConfigError(
            f"the model's parameters are on {' and '.join(accelerators)}, and each rank trains a whole model on one "
            f"device. Leave out device_map or its like; device={torch.device(accelerators[0]).type!r} moves the model "
            "to one."
        )
    here = next(iter(devices), torch.device("cpu"))
    if here.type == "cpu" and visible is not None and not runtime.why_cpus():
        return visible
    return here


def check_batch_norm(model: nn.Module, device: torch.device, *, wanted: bool) -> None:
    """Refuse SyncBatchNorm on a CPU, where PyTorch has none; `wanted`: layers will be converted."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if device.type == "cpu" and (layers or wanted):
        asked = f"the model's {shortened(layers)} is SyncBatchNorm" if layers else "sync_batchnorm=True"
        raise ConfigError(
            f"{asked}, which PyTorch has on GPUs alone. On CPUs use nn.BatchNorm1d and its like, which compute "
            "statistics of each rank's samples, or nn.GroupNorm, which computes them for each sample alone."
        )


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return the facts that ranks compare about their devices; `device` has its number."""
    identity = f"{device} of {platform.node()}"
    if device.type == "cuda":
        identity = torch_compat.identity_of_gpu(device.index)[0] or identity
    return {"the kind of device": device.type, "_device": [str(device), platform.node(), identity]}


def check_devices(world: World, facts_by_rank: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Refuse ranks that share a GPU over NCCL, if NCCL has not connected them yet; every rank raises."""
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
    visible = accelerator.visible()
    count = accelerator.count()
    words = str(device)
    if device.type == "cpu":
        words += f", {counted(torch.get_num_threads(), 'thread')} per rank"
    if visible is None:
        return words
    if device.type != visible.type:
        unused = f"1 {visible.type} device is" if count == 1 else f"{count} {visible.type} devices are"
        why = runtime.why_cpus() or f"device={str(device)!r}"
        return f"{words}; {unused} visible and not used: {why}"
    _, node, _ = facts_by_rank[world.rank]["_device"]
    used: set[str] = set()
    for facts in facts_by_rank:
        name, other_node, _ = facts["_device"]
        if other_node == node:
            used.add(name)
    in_order = sorted(used, key=lambda name: torch.device(name).index or 0)  # as text, cuda:10 precedes cuda:2
    which = in_order[0]
    if len(used) > 1:
        which += f" to {in_order[-1]}"
    return f"{which} ({len(used)} of {count} visible {accelerator.name_of(device)})"


def put_channels_last(model: nn.Module) -> None:
    """Store a model's weights of 4 and 5 dimensions channels last; raise ConfigError without any."""
    if not any(parameter.dim() in (4, 5) for parameter in model.parameters()):
        raise ConfigError(
            f"channels_last=True is for 2-d and 3-d convolutions, and no parameter of {type(model).__name__} has 4 or "
            "5 dimensions: leave it out."
        )
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() in (4, 5):
            # Not a new parameter: the optimizer keeps the present one.
            tensor.data = as_channels_last(tensor.data)
