"""What belongs to a slice of a step, whichever rank computes it: its random numbers, and what it changes in buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from numpy.random.mtrand import set_bit_generator  # type checkers miss numpy.random's

from cyxtrain.data.batches.batch import Part, Share
from cyxtrain.data.rng import MT19937, generators_apart, seed_generators
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.parallel.consistency.slice_buffers import SliceBuffers
from cyxtrain.parallel.exchange import sum_over_slices
from cyxtrain.training.state import TrainingState


class SliceScope:
    """The slices of one rank, one after the other; without virtual ranks a slice is what the rank does anyway.

    Attributes:
        slices: None: there are no virtual ranks.
    """

    def __init__(
        self, ddp: DistributedDataParallel, state: TrainingState, logged: LoggedNumbers, device: torch.device
    ) -> None:
        self._ddp = ddp
        self._logged = logged
        self._state = state
        self._device = device
        self.slices = ddp.slices if ddp.slices.is_virtual else None
        self._buffers: SliceBuffers | None = None
        self._numpy = MT19937(0)  # `enter` seeds it

    @property
    def rows(self) -> int:
        """How many rows the sums of an epoch have: one per slice, or one for this rank."""
        return 1 if self.slices is None else self.slices.count

    def row_of(self, part: Part) -> int:
        """Return the row of a slice in the sums of an epoch."""
        return 0 if self.slices is None else part.number

    @contextlib.contextmanager
    def of_slices(self) -> Iterator[None]:
        """Let `enter` choose the slice within; random and logged numbers are this rank's again afterwards."""
        if self.slices is None:
            yield
            return
        with generators_apart(device=self._device):
            set_bit_generator(self._numpy)
            try:
                yield
            finally:
                self._logged.enter_slice(None)

    def enter(self, part: Part) -> None:
        """Give a slice random numbers of its own, and let what is logged from now on be of it."""
        if self.slices is None:
            return
        position = self._state.position
        seed_generators(self._state.config.seed, position.epoch, position.step, part.number, self._device)
        self._logged.enter_slice(part.number)

    def begin_step(self) -> None:
        """Keep the buffers that each slice begins with."""
        if self.slices is not None:
            add_up = partial(sum_over_slices, slices=self.slices, group=self._ddp.world.cpu_tensors)
            self._buffers = SliceBuffers(self._ddp.module, self.slices, add_up)

    def end_slice(self, part: Part, rows: int) -> None:
        """Take what a slice of so many rows has changed in buffers."""
        if self._buffers is not None:
            self._buffers.end_slice(part.number, rows)

    def end_step(self, share: Share) -> None:
        """Join what all slices have changed in buffers. All ranks call it."""
        if self._buffers is not None:
            self._buffers.end_step(self._ddp.world, share.global_rows)
            self._buffers = None
