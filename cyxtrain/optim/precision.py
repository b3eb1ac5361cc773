"""In which precision a model computes, and how its loss is scaled so that small gradients are not lost.

Parameters, gradients, sums and the optimizer stay as they are: only what autocast knows to be safe is calculated in
16 bits. Source: Micikevicius et al., Mixed Precision Training (2018), sections 3.1 and 3.2.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cyxtrain.config import AMPConfig, DistributedTrainingConfig
from cyxtrain.data.batches.structure import map_output
from cyxtrain.errors import CheckpointError

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_SCALE = 1.0
"""Gradients that overflow below it are too large for 16 bits as they are."""


class Precision:
    """In which precision a model computes.

    Args:
        name: "fp32", "bf16" or "fp16".
        device: Where it does so.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.dtype = _HALVES.get(name)
        """What autocast computes in; None: it does not."""
        self._device_type = device.type
        self.is_full = self.dtype is None
        """Whether models compute in what they are made of."""

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Within, PyTorch calculates in this precision, where it is not full."""
        return torch.autocast(self._device_type, self.dtype)

    def widened(self, output: Any) -> Any:
        """Returns what a model gave, its 16-bit numbers as float32: losses and metrics are not made of 16 bits."""
        return map_output(lambda tensor: tensor.float() if tensor.dtype is self.dtype else tensor, output)


@contextlib.contextmanager
def float32_products(precision: str | None) -> Iterator[None]:
    """Within, float32 matrices are multiplied, and convolved by cuDNN, in a precision; then as before.

    Args:
        precision: As `torch.set_float32_matmul_precision` takes it; None: as the program has set it.
    """
    if precision is None:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    owners: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, cudnn.conv, cudnn.rnn)  # type: ignore[attr-defined]
    by_name = [(owner, owner.fp32_precision) for owner in owners]
    products: str | None = None
    convolutions: bool | None = None
    with contextlib.suppress(RuntimeError):  # set by the new names alone, which PyTorch does not mix with the old ones
        products, convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
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


class LossScale:
    """What the loss is multiplied by before backward, and the gradients divided by after it.

    It halves when gradients overflow, and doubles after so many steps in which none did: the sequence of PyTorch's
    GradScaler. The averages tell all ranks alike whether any of them overflowed: they stay in step without a message.

    Args:
        config: How it begins, and changes.
    """

    def __init__(self, config: AMPConfig) -> None:
        self._config = config
        self.value = float(config.initial_scale)
        self._steps = 0

    def get_scale(self) -> float:
        """Returns `value`, under the name that PyTorch's GradScaler has for it."""
        return self.value

    @property
    def is_dynamic(self) -> bool:
        """Whether it changes."""
        return self._config.use_dynamic_scaling

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may be cured by a smaller scale."""
        return self._config.use_dynamic_scaling and self.value > _LEAST_SCALE

    def of_each(self, world_size: int) -> float:
        """Returns what each rank's loss is multiplied by.

        In a mean over N ranks a row counts N times as much on its rank as it would alone: in 16 bits its gradients
        would overflow N times as early.
        """
        return self.value / world_size

    def update(self, *, overflowed: bool) -> None:
        """Goes on to the scale of the next step."""
        config = self._config
        if not config.use_dynamic_scaling:
            return
        self._steps = 0 if overflowed else self._steps + 1
        if overflowed:
            self.value = _as_float32(self.value * config.backoff_factor)
        elif self._steps == config.dynamic_history_size:
            grown = _as_float32(self.value * config.growth_factor)
            self.value, self._steps = (grown if math.isfinite(grown) else self.value), 0

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of it."""
        return {"scale": self.value, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any], source: str) -> None:
        """Goes on from a checkpoint.

        Raises:
            CheckpointError: That is no such state.
        """
        value, steps = state.get("scale"), state.get("steps")
        if not isinstance(value, float) or not 0 < value < math.inf or type(steps) is not int or steps < 0:
            raise CheckpointError(f"Cannot load {source}: its loss scale is {dict(state)}.")
        self.value, self._steps = value, steps


def make_loss_scale(config: DistributedTrainingConfig) -> LossScale | None:
    """Returns the scale that a fit begins with; None: only fp16 needs one."""
    return LossScale(config.amp or AMPConfig()) if config.precision == "fp16" else None


def _as_float32(number: float) -> float:  # which GradScaler's is
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()
