"""What ranks compare: the backends of a group, and what they compute with."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from cyxtrain.environment import process_env
from cyxtrain.environment.accelerator import is_accelerator, name_of
from cyxtrain.environment.cpu import processor_name


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


def arithmetic_of_rank(device: torch.device) -> dict[str, str]:
    """Return what a rank that trains on a device computes with, by its name in messages: what may change bits.

    Numbers of threads, which a fit sets, are not part of it.
    """
    variables = [f"{name}={value}" for name, value in process_env.arithmetic_variables().items()]
    found = {
        "PyTorch": str(torch.__version__),
        "the processor": processor_name(),
        "the CPU kernels of PyTorch": own_arithmetic(),
        "torch.backends.mkldnn.enabled": str(torch.backends.mkldnn.enabled),
        "torch.use_deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "the environment of MKL, oneDNN and CUDA": " ".join(variables) or "without settings",
    }
    if is_accelerator(device):
        found["the accelerator"] = name_of(device)
    return found


def differing_types(by_rank: Sequence[str]) -> str:
    """Return which ranks have which CPUs, or other values, from those of each; "": all have the same."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(by_rank):
        ranks.setdefault(value, []).append(str(rank))
    if len(ranks) < 2:
        return ""
    return "; ".join(f"rank {', '.join(own)}: {value}" for value, own in ranks.items())
