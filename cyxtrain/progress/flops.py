"""Floating-point operations of a step, and model FLOPs utilization (MFU).

Sources: Chowdhery et al., PaLM (2022), appendix B; peak FLOP/s from the vendors' datasheets: dense, without sparsity,
16-bit products accumulated in 32 bits, without overclocking.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

from cyxtrain.environment.accelerator import name_of, peak_memory

# Words of a GPU's name, specific ones first; TFLOP/s in 16 bits, with TF32 (None: it has neither TF32 nor bfloat16),
# and in float32.
_PEAKS: tuple[tuple[str, float, float | None, float], ...] = (
    ("B200", 2250, 1125, 75),
    ("H200 NVL", 835, 418, 60),
    ("H200", 989, 495, 67),
    ("GH200", 989, 495, 67),
    ("H100 NVL", 835, 418, 60),
    ("H100 PCIe", 756, 378, 51),
    ("H100", 989, 495, 67),
    ("A100", 312, 156, 19.5),
    ("A40", 149.7, 74.8, 37.4),
    ("A30", 165, 82, 10.3),
    ("A10", 125, 62.5, 31.2),
    ("RTX A6000", 154.8, 77.4, 38.7),
    ("L40S", 362, 183, 91.6),
    ("L40", 181, 90.5, 90.5),
    ("L4", 121, 60, 30.3),
    ("V100 PCIE", 112, None, 14),
    ("V100", 125, None, 15.7),
    ("T4", 65, None, 8.1),
    ("GeForce RTX 5090", 209.5, 104.8, 104.8),
    ("GeForce RTX 4090", 165.2, 82.6, 82.6),
    ("GeForce RTX 3090", 71, 35.6, 35.6),
    ("MI300X", 1307, 654, 163),
)
# words in the names of parts of GPUs, and of faster or slower variants
_OTHER_GPUS = {"mig", "laptop", "d", "ti"}


def flops_of_step(step: Callable[[], object]) -> int:
    """Return the floating-point operations of `step()`, which runs once, without compilation.

    Matrix products, convolutions and PyTorch's attention count; custom kernels, and attention on CPUs before PyTorch
    2.15, do not. Cost: some microseconds per operation.
    """
    from torch.utils.flop_counter import FlopCounterMode  # takes a tenth of a second

    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of a GPU in matrix products, by its datasheet; None if unknown."""
    if device.type != "cuda":
        return None
    return peak_of(name_of(device), dtype, uses_tf32=_uses_tf32())


def peak_of(name: str, dtype: torch.dtype, *, uses_tf32: bool = False) -> float | None:
    """Return the same for a GPU by name."""
    words = set(re.findall(r"\w+", name.lower()))
    known = next((row for row in _PEAKS if words.issuperset(row[0].lower().split())), None)
    if known is None or words & _OTHER_GPUS:
        return None
    _, half, tf32, single = known
    if dtype is torch.float32:
        return 1e12 * (tf32 if uses_tf32 and tf32 else single)
    has_bfloat16 = tf32 is not None
    if dtype is torch.float16 or (dtype is torch.bfloat16 and has_bfloat16):
        return 1e12 * half
    return None


def tf32_speedup(device: torch.device) -> str | None:
    """Return how much faster TF32 would be on a GPU, such as "about 8 times "; None if it is not or is on."""
    if _uses_tf32() or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    name = name_of(device)
    slow = peak_of(name, torch.float32, uses_tf32=False)
    fast = peak_of(name, torch.float32, uses_tf32=True)
    if slow is None or fast is None:
        return "several times "
    if fast < 1.5 * slow:
        return None
    return f"about {fast / slow:.0f} times "


def _uses_tf32() -> bool:
    return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def in_words(flops: float) -> str:
    """Return a number of operations with its unit, such as "312 TFLOP"."""
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if flops >= scale), (1.0, ""))
    scaled = flops / scale
    number = f"{scaled:.3g}" if flops < 1000 * scale else f"{scaled:,.0f}"
    return f"{number} {unit}FLOP"


def usage_of(device: torch.device, flops_per_second: float | None, dtype: torch.dtype) -> dict[str, float]:
    """Return a device's "peak_memory" (bytes), "flops_per_second" and "mfu" (a fraction), as far as known."""
    found: dict[str, float] = {}
    memory = peak_memory(device)
    if memory is not None:
        found["peak_memory"] = memory
    if flops_per_second:
        found["flops_per_second"] = flops_per_second
        peak = peak_flops(device, dtype)
        if peak is not None:
            found["mfu"] = flops_per_second / peak
    return found


def explain_usage(usage: Mapping[str, float]) -> list[str]:
    """Return the result of `usage_of` as parts of an epoch's line."""
    parts = []
    if "peak_memory" in usage:
        memory = usage["peak_memory"]
        shown = f"{memory / 2**30:.1f} GiB" if memory >= 2**30 else f"{memory / 2**20:.1f} MiB"
        parts.append(f"peak memory {shown}")
    if "flops_per_second" in usage:
        parts.append(f"{in_words(usage['flops_per_second'])}/s")
    if "mfu" in usage:
        parts.append(f"MFU {usage['mfu']:.1%}")
    return parts
