"""What ranks compare: the backends of a group, and how their CPUs compute."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def backends_of(group: Any = None) -> dict[str, str]:
    """Return the backend for each type of device, such as {"cpu": "gloo", "cuda": "nccl"}."""
    found = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in found}


@functools.cache
def own_arithmetic() -> str:
    """Return PyTorch's CPU capability and a hash of what its kernels compute, which is the last 8 digits.

    With equal hashes, optimizers and random numbers have the same bits, also on AVX512 next to AVX2. Sums of products
    are not compared: they may differ from rank to rank, since gradients are averaged. Cost: 1 ms, once.
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
    """Return which ranks have which CPUs, from the `own_arithmetic` of each; "": all have the same."""
    ranks: dict[str, list[str]] = {}
    for rank, cpu in enumerate(by_rank):
        ranks.setdefault(cpu, []).append(str(rank))
    if len(ranks) < 2:
        return ""
    return "; ".join(f"rank {', '.join(own)}: {cpu}" for cpu, own in ranks.items())
