"""What the host must know of a step on an accelerator, computed there, sent in one copy, and read when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cyxtrain.environment import accelerator
from cyxtrain.parallel.finite import magnitudes, values_of
from cyxtrain.ring import Deadline
from cyxtrain.world import runtime


class Report:
    """Whether the gradients and losses of a synchronisation are finite, and the ranks' flags.

    The host waits for it only when it is read. The gradients of `parameters`, at least one, and `shared` are the same
    on every rank: the flags of each bucket, or the loss of a single rank. The step is bad too if `unused`, parts of
    `shared` that refuse unused parameters, are not 0. `losses`, of this rank's micro-batches, decide nothing.
    `take_flags`, called by `merge` with the numbers in `shared`, may raise.

    Cost: the gradients are read once, and a dozen small operations.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shared: Sequence[Tensor],
        unused: Sequence[Tensor],
        losses: Sequence[Tensor],
        take_flags: Callable[[list[list[float]]], None],
    ) -> None:
        device = parameters[0].device
        with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        numbers, vectors = magnitudes([values_of(p.grad) for p in with_gradient if p.grad is not None])
        vectors = vectors or [torch.zeros(0, device=device)]
        self._parameters = [with_gradient[number] for number in numbers]
        own = [each.detach().to(device).reshape(1) for each in losses]
        self._sizes = [len(numbers), *map(len, shared), len(own)]
        self._take_flags = take_flags
        values = torch.cat([*vectors, *shared])
        found = torch.sum(values * 0)  # 0, or NaN
        if unused:
            found += torch.cat(list(unused)).sum()
        self.bad = found.ne(0).float()
        """1 if the step must be skipped, otherwise 0: on the device, 0-dim, float32; the same on every rank."""
        self._copy = accelerator.HostCopy(torch.cat([self.bad.view(1), values, *own]))
        self._found: tuple[Tensor, ...] | None = None

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        if self._found is None:
            numbers = self._copy.read()
            runtime.check_default_group()
            self._found = numbers.split([1, *self._sizes])
        return self._found

    def is_good(self) -> bool:
        """Return whether the step may be taken; waits for the report."""
        return self._parts[0].item() == 0

    def arrives_within(self, seconds: float) -> bool:
        """Return whether the report arrives within some seconds."""
        return Deadline(seconds).poll_until(self._copy.is_there)

    @property
    def nonfinite(self) -> list[nn.Parameter]:
        """The parameters whose gradients are not finite."""
        are_finite = self._parts[1].isfinite().tolist()
        return [parameter for parameter, finite in zip(self._parameters, are_finite, strict=True) if not finite]

    def merge(self) -> None:
        """Give the flags to the wrapper; waits for the report, and raises what it refuses."""
        self._take_flags([part.tolist() for part in self._parts[2:-1]])

    @property
    def losses(self) -> list[Tensor]:
        """This rank's losses, on the CPU."""
        return [*self._parts[-1]]
