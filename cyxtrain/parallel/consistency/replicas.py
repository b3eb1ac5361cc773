"""Checks that all ranks have the same module, and the same parameters bit for bit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import xxhash
from torch import Tensor, nn

from cyxtrain.errors import ConfigError, ReplicasDifferError, on_all_ranks, shortened, warn
from cyxtrain.tensors.fingerprint import fingerprint, fingerprints
from cyxtrain.tensors.layouts import is_plain, kind_of
from cyxtrain.world import consensus
from cyxtrain.world.agreement import agree
from cyxtrain.world.world import World

_SAME_CPUS = "Use machines of one type, or set ATEN_CPU_CAPABILITY=default on every rank, which is slower."


def check_replicas(named: Sequence[tuple[str, Tensor]], world: World) -> None:
    """Compare named tensors over ranks; raise ReplicasDifferError if one differs. All ranks call it."""
    if world.size == 1:
        return
    tensors = [tensor for _, tensor in named]
    hashes = fingerprints(tensors)
    devices = "+".join(sorted({tensor.device.type for tensor in tensors}))
    everywhere = world.gather(f"{devices} {xxhash.xxh3_128_hexdigest(json.dumps(hashes).encode())}")
    if len(set(everywhere)) == 1:
        return
    kinds_of_devices = {each.split()[0] for each in everywhere}
    if len(kinds_of_devices) > 1:
        # An accelerator hashes tensors where they are, in a way of its own; `fingerprint` is the same on every device.
        hashes = [fingerprint(tensor) for tensor in tensors]
    differing, ranks = _differing(named, world.gather_json(hashes))
    if not differing:
        return
    cpus = consensus.differing_types(world.gather(consensus.own_arithmetic()))
    message = _explanation(shortened(differing), ranks, world.size, cpus)
    blamed = ranks[0] if len(ranks) == 1 else None
    raise on_all_ranks(ReplicasDifferError(message, rank=blamed))


def _differing(named: Sequence[tuple[str, Tensor]], by_rank: Sequence[Sequence[int]]) -> tuple[list[str], list[int]]:
    """Return the names whose hashes differ between ranks, and the ranks that differ from most, in order."""
    names: list[str] = []
    ranks: set[int] = set()
    for (name, _), hashes in zip(named, zip(*by_rank, strict=True), strict=True):
        outliers = _outliers(hashes)
        if outliers:
            names.append(name)
            ranks.update(outliers)
    return names, sorted(ranks)


def _outliers(values: Sequence[int]) -> list[int]:
    """Return the ranks whose value differs from the majority's; without a majority, all of them."""
    common, count = Counter(values).most_common(1)[0]
    has_majority = count > len(values) / 2
    return [rank for rank, value in enumerate(values) if value != common or not has_majority]


def _explanation(names: str, ranks: list[int], world_size: int, cpus: str) -> str:
    numbers = ", ".join(map(str, ranks))
    if len(ranks) == world_size:
        who = f"ranks {numbers} differ from each other in {names}, without a majority"
    elif len(ranks) == 1:
        who = f"rank {numbers} differs from the {world_size - 1} others in {names}"
    else:
        who = f"ranks {numbers} differ from most in {names}"
    cause = "Either code changes them on some ranks only, or memory is broken there."
    if cpus:
        cause = f"The ranks have different CPUs ({cpus}), which may compute differently. {_SAME_CPUS}"
    return (
        f"{who}: parameters must be equal on all ranks, bit for bit. {cause} Go back to a checkpoint that was made "
        "before that: fit(..., resume=path); the newest may hold it already."
    )


def check_same_module(model: nn.Module, world: World) -> None:
    """Raise ConfigError, on every rank, if the ranks' modules differ in what collectives would not notice."""
    facts_by_rank = agree(world, module_facts(model))
    for rank, facts in enumerate(facts_by_rank):
        if [*facts] != [*facts_by_rank[0]]:
            raise ConfigError(f"rank {rank} has its parameters in another order than rank 0.", rank=rank)
    cpus = [facts["_cpu"] for facts in facts_by_rank]
    # The last eight characters are a hash of how the CPU computes.
    compute_differently = len({cpu[-8:] for cpu in cpus}) > 1
    is_on_cpu = any(parameter.is_cpu for parameter in model.parameters())
    if compute_differently and is_on_cpu and world.is_first:
        warn(
            f"the ranks' CPUs compute differently ({consensus.differing_types(cpus)}): parameters will differ between "
            f"ranks after some steps, and ReplicasDifferError ends the fit. {_SAME_CPUS}"
        )


def module_facts(module: nn.Module) -> dict[str, str]:
    """Return the kinds of parameters and buffers by their names in messages."""
    facts = {}
    for name, parameter in module.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        facts[f"the parameter {name}"] = _kind(parameter) + frozen
    for name, buffer in module.named_buffers():
        facts[f"the buffer {name}"] = _kind(buffer)
    return facts


def _kind(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if not is_plain(tensor):
        return f"{kind_of(tensor)} {kind} {list(tensor.shape)}"
    # Buckets follow strides that are not the usual ones.
    strides = "" if tensor.is_contiguous() else f" (strides {list(tensor.stride())})"
    return f"{kind} {list(tensor.shape)}{strides}"
