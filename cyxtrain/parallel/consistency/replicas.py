"""Whether all ranks have the same module, and hold the same parameters, bit for bit; if not, who is the odd one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from cyxtrain.errors import ConfigError, ReplicasDifferError, on_all_ranks, shortened
from cyxtrain.parallel.consistency.hashing import hashes_on_device
from cyxtrain.parallel.consistency.tensor_parts import is_plain, kind_of
from cyxtrain.world.consensus import gather_texts


def check_replicas(named: Sequence[tuple[str, Tensor]], group: Any) -> None:
    """Compares tensors over ranks. All ranks call it.

    Cost: a hash of all bytes (xxh3; on an accelerator it is calculated there), and two all_gathers of some bytes.

    Args:
        named: (name, tensor), the same names on every rank.
        group: Of all ranks, on CPUs.

    Raises:
        ReplicasDifferError: Some rank holds something else than most; on every rank, with the rank and the names.
    """
    if dist.get_world_size(group) == 1:
        return
    kind, hashes = _hashes(named)
    whole = xxhash.xxh3_128_hexdigest("".join(hashes.values()).encode())
    told = gather_texts(f"{kind} {whole}", group)
    if len(set(told)) == 1:
        return
    if len({text.split()[0] for text in told}) > 1:  # some ranks are on CPUs: all hash as those do
        hashes = {name: _hash(tensor) for name, tensor in named}
    everyone = [json.loads(text) for text in gather_texts(json.dumps(hashes), group)]
    odd = _odd_ones(everyone)
    if not odd:
        return
    ranks = sorted({rank for ranks in odd.values() for rank in ranks})
    error = ReplicasDifferError(_words(odd, ranks, len(everyone)), rank=ranks[0] if len(ranks) == 1 else None)
    raise on_all_ranks(error)


def _odd_ones(everyone: Sequence[dict[str, str]]) -> dict[str, list[int]]:
    """Returns, for each name that differs, the ranks that are not of the majority; all of them where there is none."""
    odd = {}
    for name in everyone[0]:
        found = [each[name] for each in everyone]
        common, count = Counter(found).most_common(1)[0]
        if count < len(found):
            has_majority = count > len(found) / 2
            odd[name] = [rank for rank, value in enumerate(found) if value != common or not has_majority]
    return odd


def _words(odd: dict[str, list[int]], ranks: list[int], world_size: int) -> str:
    numbers, names = ", ".join(map(str, ranks)), shortened(odd)
    if len(ranks) == world_size:
        who = f"ranks {numbers} differ from each other in {names}, and no majority says who is right"
    elif len(ranks) == 1:
        who = f"rank {numbers} differs from the {world_size - 1} others in {names}"
    else:
        who = f"ranks {numbers} differ from most in {names}"
    return (
        f"{who}: parameters must be equal on all ranks, bit for bit. Either code changes them on "
        "some ranks only, or memory is broken there. Go back to a checkpoint that was made before that: "
        "fit(..., resume=path); the newest may hold it already."
    )


def _hashes(named: Sequence[tuple[str, Tensor]]) -> tuple[str, dict[str, str]]:
    """Returns where the tensors have been hashed, and the hash of each."""
    devices = {tensor.device for _, tensor in named}
    if len(devices) != 1 or next(iter(devices)).type == "cpu" or not all(is_plain(tensor) for _, tensor in named):
        return "host", {name: _hash(tensor) for name, tensor in named}
    hashes = hashes_on_device([tensor for _, tensor in named])
    return "device", {name: str(value) for (name, _), value in zip(named, hashes, strict=True)}


def _hash(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(content.numpy().data)


def check_same_module(model: nn.Module, group: Any) -> None:
    """Refuses, on every rank, modules whose parameters or buffers differ in what the ring would not notice.

    Args:
        model: The module.
        group: Of all ranks, on CPUs.

    Raises:
        ConfigError: With the rank, and what it has.
    """
    own = {
        name: [list(tensor.shape), _type(tensor), tensor.requires_grad, _strides(tensor)]
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    everyone = [json.loads(text) for text in gather_texts(json.dumps(own), group)]
    for rank, other in enumerate(everyone):
        for name in {**everyone[0], **other}:
            if everyone[0].get(name) != other.get(name):
                raise ConfigError(
                    f"rank {rank} has another model than rank 0: {name} is {_text(other.get(name))} on rank {rank} and "
                    f"{_text(everyone[0].get(name))} on rank 0. Build the same model on every rank.",
                    rank=rank,
                )
        if list(everyone[0]) != list(other):
            raise ConfigError(f"rank {rank} has its parameters in another order than rank 0.", rank=rank)


def _text(facts: list[Any] | None) -> str:
    if facts is None:
        return "absent"
    shape, dtype, trained, strides = facts
    return f"{dtype.removeprefix('torch.')} {shape}{'' if trained else ' (frozen)'}" + (
        f" (strides {strides})" if strides else ""
    )


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype) if is_plain(tensor) else f"{tensor.dtype}, {kind_of(tensor)},"


def _strides(tensor: Tensor) -> list[int] | None:
    """Returns how the elements lie in memory, where that is not the usual order: buckets follow it."""
    return None if not is_plain(tensor) or tensor.is_contiguous() else list(tensor.stride())
