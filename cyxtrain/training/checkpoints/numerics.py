"""What decides the last bits of a training's numbers, besides model, data and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cyxtrain.config import DDPConfig
from cyxtrain.optim.precision import float32_products
from cyxtrain.training.inputs.plan import FitPlan
from cyxtrain.training.model.compile import explain_compiled


def arithmetic(model: nn.Module, plan: FitPlan, ddp_config: DDPConfig) -> dict[str, Any]:
    """Return the numerics in use, as JSON values by their names in messages."""
    device = plan.data.placement.device
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    travelling = {
        "the size of buckets": ddp_config.bucket_size_mb,
        "the compression of gradients": ddp_config.compression or "none",
        "the rank of their approximation": ddp_config.matrix_approximation_rank,
    }
    return {
        "PyTorch": torch.__version__,
        "the parameters' dtypes": ", ".join(dtypes),
        "the precision": plan.config.precision,
        "the model": explain_compiled(plan.config.compile, plan.compiles_layers) or "run as it is",
        "the optimizer's kernel": "fused" if plan.fuses else "as it was built",
        "the device": device.type,
        "the backend": dist.get_backend(),
        **({"the number of threads per rank": torch.get_num_threads()} if device.type == "cpu" else {}),
        "the precision of float32 products": _product_precision(device, plan.config.float32_precision),
        **(travelling if dist.get_world_size() > 1 else {}),  # alone they do not
    }


def _product_precision(device: torch.device, asked: str | None) -> str:
    """Return the precision of float32 matrix products, whichever of PyTorch's two settings decides it."""
    backend = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with float32_products(asked):
        return str(backend.fp32_precision)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe what has another value than before; what was unknown then is skipped."""
    return [f"{name} was {before[name]} and is {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
