"""Small agreements between ranks: gather texts, compare CPUs, check that all make the same call. No pickle."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from cyxtrain.errors import CollectiveMismatchError, on_all_ranks

SAME_CALL = "the check that all ranks make the same call"
"""The `during` of its errors."""
_LEAVES = "leaves the world (its program, or the with block of init, has ended; or it calls finalize)"


def backends_of(group: Any = None) -> dict[str, str]:
    """Return the backend for each type of device, such as {"cpu": "gloo", "cuda": "nccl"}."""
    found = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in found}


def gather_texts(text: str, group: Any) -> list[str]:
    """Return the text of every rank, by rank: how ranks compare what they know.

    Cost: two all_gathers; 8 bytes, then the longest text, of each rank.
    """
    content = text.encode()
    # device: a small agreement uses a CPU group, also if the program sets another default device.
    own = torch.tensor([len(content)], device="cpu")
    lengths = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, own, group=group)
    sizes = [int(length) for length in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    if content:
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [found[:size].numpy().tobytes().decode() for found, size in zip(texts, sizes, strict=True)]


def check_same_call(call: str, group: Any, *, works_alone: bool = False) -> bool:
    """Check that all ranks are about to make the same call.

    Where rank 0 is about to do what it can do alone, and the others wait elsewhere, they keep waiting meanwhile.

    Cost: as `gather_texts`.
    """
    while True:
        announced = [json.loads(text) for text in gather_texts(json.dumps([call, works_alone]), group)]
        calls = [name for name, _ in announced]
        if len(set(calls)) == 1:
            return True
        if not announced[0][1] or len(set(calls[1:])) > 1:
            other = next(rank for rank, name in enumerate(calls) if name != calls[0])
            mismatch = CollectiveMismatchError(
                f"rank 0 {_verb(calls[0])} and rank {other} {_verb(calls[other])}: all ranks must make the same calls. "
                "evaluate, predict and save_checkpoint work on rank 0 alone, while the others wait in another call.",
                rank=other,
                during=SAME_CALL,
            )
            raise on_all_ranks(mismatch)
        if dist.get_rank(group) == 0:
            return False


def _verb(call: str) -> str:
    return _LEAVES if call == "finalize" else f"calls {call}"


@functools.cache
def own_arithmetic() -> str:
    """Return for which type of CPU PyTorch has chosen its kernels, and a hash of what they compute: its last 8 digits.

    With equal hashes, optimizers and random numbers have the same bits, on an AVX512 beside an AVX2 too. Sums of
    products are not compared: they may differ from rank to rank, since gradients are averaged. Cost: 1 ms, once.
    """
    with torch.no_grad():
        x = torch.arange(1, 1001, dtype=torch.float32, device="cpu") / 1001
        y = (x - 0.3).flip(0)
        random = torch.empty_like(x).normal_(generator=torch.Generator("cpu").manual_seed(0))
        found = [random, x.sqrt(), x.pow(0.7), x.add(y, alpha=0.3), x.lerp(y, 0.1), y.addcmul(x, y), y.addcdiv(y, x)]
        found += [x.sum(), torch.linalg.vector_norm(y)]
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in found)).hexdigest()
    return f"{torch.backends.cpu.get_cpu_capability()} {digest[:8]}"


def differing_types(by_rank: Sequence[str]) -> str:
    """Return which ranks have which CPUs, from what `own_arithmetic` has returned on each; "": all have the same."""
    ranks = {text: [str(rank) for rank, other in enumerate(by_rank) if other == text] for text in by_rank}
    return "; ".join(f"rank {', '.join(own)}: {text}" for text, own in ranks.items() if len(ranks) > 1)
