"""A fit that continues from a checkpoint: what it restores when, until it has restored all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cyxtrain.checkpoint.checkpoint_file import CheckpointState
from cyxtrain.checkpoint.format.encoding import decode_tree
from cyxtrain.checkpoint.format.optimizer_state import drop_groups
from cyxtrain.checkpoint.validation import restoring_from
from cyxtrain.data.rng import set_generators
from cyxtrain.errors import CheckpointError
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.sums import MetricSums
from cyxtrain.parallel import DistributedDataParallel
from cyxtrain.training.inputs.plan import FitPlan, place_of
from cyxtrain.training.state import TrainingState


class Resumption:
    """The checkpoint that a fit continues from, and the steps in which the fit restores it.

    1. `load`, before the ranks wrap the model: the header describes what is restored, and `on_train_begin` sees it.
    2. `drop_added_groups`, just before `on_train_begin`.
    3. `restore`, just after it: the same state again, which that hook may have changed, and the states of callbacks.
    4. `restore_epoch`, when the first epoch begins: what each rank has of an epoch that it continues.

    After these the fit loop lets go of it: a second model and optimizer would otherwise stay in memory.
    """

    def __init__(self, checkpoint: CheckpointState, source: str) -> None:
        self._checkpoint = checkpoint
        self._source = source
        self._is_restored = False

    def load(self, state: TrainingState, plan: FitPlan, run: Mapping[str, Any], *, is_new_run: bool) -> None:
        """Load state and data; raise CheckpointError as `TrainingState.load`. All ranks call it."""
        # A copy: on CPUs an optimizer takes the tensors over, and on_train_begin may change them in place.
        loaded = replace(self._checkpoint, **{name: _copy_of(each) for name, each in vars(self._checkpoint).items()})
        state.continue_fit(plan.world, loaded, self._source, plan.config, run, is_new_run=is_new_run)
        with restoring_from(self._source):
            plan.feed.check_world(loaded.world_size, place_of(state.position))
            plan.feed.load_state_dict(loaded.others.get("data", {}))
            # Checkpoints of earlier versions have no states of ranks' data.
            plan.feed.load_rank_states([decode_tree(each.get("data", {})) for each in loaded.ranks])

    def drop_added_groups(self, state: TrainingState) -> None:
        """Leave the groups that the optimizers were built with: `on_train_begin` may add the others again."""
        for rates in state.rates.values():
            drop_groups(rates.optimizer, rates.built_groups)

    def with_unrestored(self, found: CheckpointState) -> CheckpointState:
        """Return what a checkpoint holds now; `found`: what the trainer's state gives.

        Until the state is restored, groups are dropped, and callbacks are new: this checkpoint has the right ones.
        """
        if self._is_restored:
            return found
        own = {name: getattr(found, name) for name in ("position", "config", "run", "metadata")}
        return replace(self._checkpoint, **own)

    def restore(self, state: TrainingState, plan: FitPlan, ddp: DistributedDataParallel, logged: LoggedNumbers) -> None:
        """Load the state again, and the states of callbacks. All ranks call it."""
        checkpoint = self._checkpoint
        # The checkpoint has what on_train_begin logged.
        logged.reset()
        state.load_values(checkpoint, self._source)
        state.load_trained(checkpoint)
        for rates in state.rates.values():
            rates.continue_schedule(plan.length.schedule_steps(rates.warmup_steps))
        left = state.callbacks.load_state_dict(checkpoint.others.get("callbacks", {}), self._source)
        ddp.load_compression_state(checkpoint.others.get("compression", {}))
        # A callback may have requested to end the fit before the ranks have agreed on it.
        requested = any(each.get("stop") is True for each in checkpoint.ranks)
        state.set(kept=left, stop_training=state.stop_training or requested)
        self._is_restored = True

    def restore_epoch(self, plan: FitPlan, totals: MetricSums, logged: LoggedNumbers) -> None:
        """Restore this rank's generators, if there are as many ranks as there were, and its sums of the epoch."""
        rank = plan.world.rank
        ranks = self._checkpoint.ranks
        try:
            tables = [each["sums"] for each in ranks]
            if not any(tables):
                # Made between two epochs: the next one begins with its own generators.
                return
            slices = plan.slices
            if slices.is_virtual:
                self._restore_slices(plan, totals, tables)
                logged.restore([{**each.get("logged", {})} for each in ranks])
                return
            # With fewer ranks than before, a rank takes over several; with more, some take none.
            taken_over = ranks[rank :: plan.world.size]
            totals.metrics.merge([each.get("metrics", {}) for each in taken_over])
            states = [{**each.get("logged", {})} for each in taken_over]
            columns = [*zip(*(table[0] for table in tables), strict=True)]
            row = [0.0] * len(columns)
            if len(ranks) == plan.world.size:
                set_generators(ranks[rank]["generators"], plan.data.placement.device)
                row = tables[rank][0]
            elif rank == 0:
                # Added up once: which rank has counted what changes only the last bits of the result.
                row = [*map(math.fsum, columns)]
            totals.restore([row], ranks[0].get("names"), states)
            logged.restore(states)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"Cannot resume from {self._source}: the state of rank {rank} is wrong: {error}."
            ) from error

    def _restore_slices(self, plan: FitPlan, totals: MetricSums, tables: Sequence[Any]) -> None:
        """Restore the sums of this rank's slices; outside of slices, all ranks have the same generators."""
        ranks = self._checkpoint.ranks
        set_generators(ranks[0]["generators"], plan.data.placement.device)
        totals.metrics.merge([each.get("metrics", {}) for each in ranks])
        # Each row was filled by one rank.
        table = torch.tensor(tables, dtype=torch.float64, device="cpu").sum(0)
        for number in range(plan.slices.count):
            if number not in plan.slices.owned:
                table[number] = 0
        totals.restore(table.tolist(), ranks[0].get("names"), [])


def _copy_of(value: Any) -> Any:
    """Copy tensors, of any layout, and JSON values."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copy_of(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(_copy_of, value)]
    return value
