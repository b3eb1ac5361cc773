"""What ranks tell each other with their gradients, and when the host reads it.

Each bucket ends in flags (`layout.py`). Their averages over ranks say which parameters some rank has not used, what
ranks signal, and whether a loss is not finite. On CPUs the host has them when the averages are there. From an
accelerator they come in one copy, for which the host waits as late as it can.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cyxtrain.environment import accelerator
from cyxtrain.errors import DistributedTrainingError, on_all_ranks
from cyxtrain.parallel.bucket import Bucket
from cyxtrain.parallel.layout import NUM_SIGNALS
from cyxtrain.parallel.step_report import Report
from cyxtrain.world import runtime


class SyncFlags:
    """The flags of all buckets in the latest synchronisation; `names` are those of the parameters.

    All ranks refuse unused parameters, or none does, and at the same point: at the end of the synchronisation on CPUs;
    on an accelerator when they read the flags, which is when the next synchronisation begins or somebody asks, or when
    they read a `report`.

    Attributes:
        wait_for_report: Whether flags stay on the accelerator until a `report` is read.
    """

    def __init__(self, buckets: Sequence[Bucket], names: Mapping[nn.Parameter, str]) -> None:
        self._buckets = buckets
        self._names = names
        self.wait_for_report = False
        self._in_flight: accelerator.HostCopy | None = None  # flags on their way to the host
        self._refuses_unused = False
        self._reported = [0.0] * NUM_SIGNALS  # the largest of each signal in the reports read since `received`

    def take_over(self, earlier: SyncFlags) -> None:
        """Continue where the flags of an `earlier` reducer end."""
        earlier.read()
        self.wait_for_report = earlier.wait_for_report
        self._reported = earlier._reported

    def received(self) -> list[float]:
        """Return, for each signal, a number above 0 if any rank gave it in the latest synchronisation.

        If that waits for a report: in those that were read since the last call.
        """
        if self.wait_for_report:
            reported = self._reported
            self._reported = [0.0] * NUM_SIGNALS
            return reported
        self.read()
        return self._buckets[-1].received

    @property
    def losses_are_finite(self) -> bool:
        """Whether the losses of all ranks were finite in the latest synchronisation."""
        self.read()
        return self._buckets[-1].losses_are_finite

    def receive(self) -> Sequence[Sequence[float] | None]:
        """Return the averaged flags of each bucket, or None if the host need not know them now.

        If this rank has all gradients, each parameter was used somewhere, and it does not wait for an accelerator.
        """
        flags = [bucket.flags for bucket in self._buckets]
        if flags[0].is_cpu or len({each.device for each in flags}) > 1:
            return [each.tolist() for each in flags]
        may_wait = all(bucket.complete for bucket in self._buckets)
        if self.wait_for_report and may_wait:
            return [None] * len(flags)
        copy = accelerator.HostCopy(torch.cat(flags))
        if not self.wait_for_report:
            self._in_flight = copy
        if may_wait:
            return [None] * len(flags)
        return self._split(copy)

    def end_synchronization(
        self, flags: Sequence[Sequence[float] | None], unused: Sequence[nn.Parameter], *, refuses_unused: bool
    ) -> None:
        """Store what `receive` returned, and refuse unused parameters, unless all ranks do both later.

        `unused`: further parameters that some rank has not used.
        """
        self._refuses_unused = refuses_unused
        found: list[nn.Parameter] = []
        is_read_later = self.wait_for_report or self._in_flight is not None
        if not is_read_later:
            found = self._store([own for own in flags if own is not None])
        if refuses_unused:
            self._refuse([*found, *unused])

    def read(self) -> None:
        """Wait for the flags of the latest synchronisation, unless they were read already."""
        copy = self._in_flight
        self._in_flight = None
        if copy is not None:
            self._merge(self._split(copy), refuses_unused=self._refuses_unused)

    def report(self, trained: Sequence[nn.Parameter], losses: Sequence[Tensor]) -> Report:
        """Return the report of the latest synchronisation, with the losses of this rank's micro-batches."""
        unused: list[Tensor] = []
        if self._refuses_unused:
            unused = [bucket.flags[: len(bucket.names)] for bucket in self._buckets]
        flags = [bucket.flags for bucket in self._buckets]
        # A report is read when the next synchronisation has begun: it must know what this one refuses.
        merge = functools.partial(self._merge_report, refuses_unused=self._refuses_unused)
        return Report(trained, flags, unused, losses, merge)

    def _merge_report(self, flags: Sequence[Sequence[float]], *, refuses_unused: bool) -> None:
        signals = self._merge(flags, refuses_unused=refuses_unused)
        self._reported = [*map(max, self._reported, signals)]

    def _merge(self, flags: Sequence[Sequence[float]], *, refuses_unused: bool) -> list[float]:
        """Store flags that came late, and refuse unused parameters; return the ranks' signals."""
        unused = self._store(flags)
        if refuses_unused:
            self._refuse(unused)
        return self._buckets[-1].received

    def _store(self, flags: Sequence[Sequence[float]]) -> list[nn.Parameter]:
        """Store the flags of each bucket; return the parameters that some rank with samples has not used."""
        unused: list[nn.Parameter] = []
        for bucket, own in zip(self._buckets, flags, strict=True):
            unused += bucket.read_flags(own)
        return unused

    def _split(self, copy: accelerator.HostCopy) -> list[list[float]]:
        numbers = copy.read()
        runtime.check_default_group()
        return [each.tolist() for each in numbers.split([len(bucket.flags) for bucket in self._buckets])]

    def _refuse(self, unused: Sequence[nn.Parameter]) -> None:
        """Raise if there are unused parameters. Every rank has seen the same flags, so every rank raises."""
        if unused:
            names = ", ".join(self._names[parameter] for parameter in unused)
            error = DistributedTrainingError(
                f"these parameters took no part in the loss on at least one rank: {names}. If that is intended, set "
                "DDPConfig(find_unused_parameters=True), or freeze them with requires_grad_(False) before wrapping."
            )
            raise on_all_ranks(error)
