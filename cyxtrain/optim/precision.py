"""Mixed precision, loss scaling against underflow of small gradients, and float64 factors of losses.

Parameters, gradients, sums and the optimizer keep their dtypes: autocast calculates in 16 bits where it is safe.
Source: Micikevicius et al., Mixed Precision Training (2018), sections 3.1 and 3.2.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cyxtrain.checkpoint.validation import is_loss_scale
from cyxtrain.config import AMPConfig, DistributedTrainingConfig
from cyxtrain.data.batches.structure import map_tree
from cyxtrain.errors import CheckpointError

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Gradients that overflow at this scale are too large for 16 bits themselves.
_LEAST_SCALE = 1.0


class Precision:
    """The precision in which a model computes: "fp32", "bf16" or "fp16"."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.dtype = _HALVES.get(name)  # of autocast; None without autocast
        self._device_type = device.type
        self.is_full = self.dtype is None  # models compute in the dtype of their parameters

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which PyTorch autocasts, unless the precision is full."""
        if self.is_full:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, self.dtype)

    def suspended(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which PyTorch does not autocast, within `computing`."""
        if self.is_full:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, enabled=False)

    def run(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return the result of a call in this precision, with 16-bit numbers as float32 for losses."""
        if self.is_full:
            return call(*arguments, **named)
        with self.computing():
            output = call(*arguments, **named)
        return map_tree(self._widened, output)

    def _widened(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype is self.dtype else tensor


@contextlib.contextmanager
def float32_products(precision: str | None) -> Iterator[None]:
    """Set the precision of float32 matrix products and cuDNN's convolutions in a `with` block, if given."""
    if precision is None:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    owners: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, cudnn.conv, cudnn.rnn)  # type: ignore[attr-defined]
    by_name = [(owner, owner.fp32_precision) for owner in owners]
    products: str | None = None
    convolutions: bool | None = None
    with contextlib.suppress(RuntimeError):  # the program uses PyTorch's new names, which exclude the old ones
        products = torch.get_float32_matmul_precision()
        convolutions = cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    cudnn.allow_tf32 = precision != "highest"
    try:
        yield
    finally:
        if products is not None:
            torch.set_float32_matmul_precision(products)
            cudnn.allow_tf32 = convolutions
        for owner, value in by_name:
            owner.fp32_precision = value


@contextlib.contextmanager
def threads_used(count: int | None) -> Iterator[None]:
    """Compute with this many of PyTorch's threads in a `with` block, if given: results differ by them in last bits."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


class LossScale:
    """The factor of the loss before backward, by which gradients are divided after it.

    It halves when gradients overflow, and doubles after some steps without overflow: the sequence of PyTorch's
    GradScaler. All ranks see in the averaged gradients whether any rank overflowed, so that they need no message.
    """

    def __init__(self, config: AMPConfig) -> None:
        self._config = config
        self.is_dynamic = config.use_dynamic_scaling
        self.value = float(config.initial_scale)
        self._steps = 0

    def get_scale(self) -> float:
        """Return `value`, as PyTorch's GradScaler does."""
        return self.value

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale may prevent an overflow."""
        return self.is_dynamic and self.value > _LEAST_SCALE

    def of_slice(self, count: int) -> float:
        """Return the factor of the loss of each of `count` slices of a step."""
        # In a mean over N slices a sample counts N times as much in its slice: gradients would overflow earlier.
        return self.value / count

    def update(self, *, overflowed: bool) -> None:
        """Change to the scale of the next step."""
        config = self._config
        if not self.is_dynamic:
            return
        if overflowed:
            self._steps = 0
            self.value = _as_float32(self.value * config.backoff_factor)
            return
        self._steps += 1
        if self._steps == config.dynamic_history_size:
            self._steps = 0
            grown = _as_float32(self.value * config.growth_factor)
            if math.isfinite(grown):
                self.value = grown

    def state_dict(self) -> dict[str, Any]:
        """Return the scale's part of a checkpoint."""
        return {"scale": self.value, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any], source: str) -> None:
        """Continue from a checkpoint."""
        if not is_loss_scale(state):
            raise CheckpointError(f"Cannot load {source}: its loss scale is {dict(state)}.")
        self.value = state["scale"]
        self._steps = state["steps"]


def make_loss_scale(config: DistributedTrainingConfig) -> LossScale | None:
    """Return the initial scale of a fit; None unless it trains in fp16."""
    if config.precision != "fp16":
        return None
    return LossScale(config.amp or AMPConfig())


def _as_float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()  # as GradScaler stores it


Number = Tensor | float
"""A weight or a factor of a loss; on an accelerator it stays there, so that the host need not wait."""


def as_double(number: Number, device: torch.device) -> Tensor:
    """Return a number as shape (1,), without a copy to an accelerator for which the host would wait."""
    if isinstance(number, Tensor):
        return number.detach().to(device, torch.float64, non_blocking=number.is_cpu).reshape(1)
    return torch.full((1,), number, dtype=torch.float64, device=device)


def quotient(number: Number, divisor: Number) -> Number:
    """Return number / divisor in float64, and 0 if the divisor is 0, without waiting for an accelerator."""
    if not isinstance(divisor, Tensor):
        return number / divisor if divisor else 0.0
    if not isinstance(number, Tensor):
        # PyTorch computes number / tensor as number * (1 / tensor), which is rounded twice.
        number = torch.tensor(number, dtype=torch.float64, device="cpu")
    return torch.div(number.double(), divisor).masked_fill_(divisor == 0, 0.0)


def times(loss: Tensor, factor: Number) -> Tensor:
    """Return loss * factor with the same bits for a float64 tensor as factor as for a number."""
    if not isinstance(factor, Tensor):
        return loss if factor == 1 else loss * factor
    wide = loss.float() if loss.dtype.itemsize == 2 else loss
    return (wide * factor.to(wide.dtype)).to(loss.dtype)
