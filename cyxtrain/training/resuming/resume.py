"""Which checkpoint a fit goes on from, whether it fits, and what of it belongs to this rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from cyxtrain.checkpoint.checkpoint_file import CheckpointState, checkpoint_bytes, unpack_checkpoint
from cyxtrain.checkpoint.folder import CheckpointFolder, look_into
from cyxtrain.checkpoint.format.names import plain_parameters
from cyxtrain.checkpoint.transport import read_file_on_all, read_on_all
from cyxtrain.checkpoint.validation import check_content, taking_over
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.rng import set_generators
from cyxtrain.environment import process_env
from cyxtrain.errors import CheckpointError, ConfigError, counted, on_all_ranks, shortened, warn
from cyxtrain.metrics.sums import MetricSums
from cyxtrain.optim.schedule_length import check_schedule, warn_of_length
from cyxtrain.training.inputs.plan import FitPlan
from cyxtrain.training.inputs.single_rows import check_single_rows, part_without_rows
from cyxtrain.training.resuming.numerics import differences
from cyxtrain.training.resuming.resume_diff import as_in_checkpoint, done_otherwise, put_back, what_is_set
from cyxtrain.training.state import Position, TrainingState
from cyxtrain.world import runtime

AUTO = "auto"
_SAME_FIELDS = (
    "shuffle",
    "seed",
    "validation_split",
    "batch_size",
    "effective_batch_size",
    "steps_per_epoch",
    "drop_last",
)
"""What decides the samples of a step, beside the data."""
_BY_DEFAULT = dataclasses.asdict(DistributedTrainingConfig())
"""What a checkpoint was made with that is older than a field."""
_DATA = {"data": "the training data are others", "validation": "the validation data are others"}


@dataclass
class Resumed:
    """What belongs to this rank of a checkpoint that a fit goes on from.

    Attributes:
        checkpoint: What it holds.
        source: What it is, for messages.
    """

    checkpoint: CheckpointState
    source: str

    @property
    def ranks(self) -> Sequence[dict[str, Any]]:
        """What belonged to each rank that wrote it."""
        return self.checkpoint.ranks

    @property
    def callbacks(self) -> dict[str, Any]:
        """The states of callbacks, by name."""
        states: dict[str, Any] = self.checkpoint.others.get("callbacks", {})
        return states

    @property
    def stop_training(self) -> bool:
        """Whether a callback had asked for the end, and the ranks had not heard of it yet."""
        return any(each.get("stop") is True for each in self.ranks)

    def hand_over(self, totals: MetricSums, device: torch.device) -> None:
        """Gives this rank its generators, where there are as many ranks as there were, and its sums of the epoch.

        Raises:
            CheckpointError: The checkpoint holds something else.
        """
        rank, world_size = runtime.get_rank(), runtime.get_world_size()
        try:
            tables = [each["sums"] for each in self.ranks]
            if not any(tables):
                return  # made between two epochs: the next one begins with generators of its own
            if len(self.ranks) == world_size:
                set_generators(self.ranks[rank]["generators"], device)
                totals.restore(tables[rank])
                totals.metrics.merge([self.ranks[rank].get("metrics", {})])
                return
            totals.metrics.merge([each.get("metrics", {}) for each in self.ranks[rank::world_size]])
            if rank == 0:
                # Added up once: which rank has counted what makes no difference to the result but in its last bits.
                totals.restore([list(map(math.fsum, zip(*rows, strict=True))) for rows in zip(*tables, strict=True)])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"Cannot resume from {self.source}: what belongs to rank {rank} is wrong: {error}."
            ) from error


def find_checkpoint(run: FitPlan, state: TrainingState) -> tuple[CheckpointState, str] | None:
    """Returns (state, name) of the checkpoint to go on from, on every rank; None: there is none, or nobody asked.

    A program that runs again makes all its calls of `fit` again. Each goes on from its own newest checkpoint, also
    where it was complete: what the program does between two calls then sees the model as it was between them.
    Where the launcher has started all ranks again, the newest one that this launch has made comes first, whatever
    `resume` says.

    Args:
        run: What is asked for. `resume` is "auto": the newest one of `checkpoint_dir` that is intact; else its path,
            or None.
        state: What the call of `fit` finds.

    Raises:
        CheckpointError: The one that was named is not there, or damaged; the same on every rank.
    """
    launched, _ = process_env.launched_run()  # rank 0's, which reads
    folder, resume, initial_epoch = _folder_of(run.config), run.resume, run.initial_epoch
    if run.attempt and resume != AUTO:
        # What goes on from a path is that checkpoint's call of fit.
        named = None if resume is None else look_into(Path(resume)).position
        call = state.next_fit(initial_epoch) if named is None else (named.get("fits"), named.get("first_epoch"))
        found = read_on_all(lambda: _newest_of_call(folder, call, (launched, state.trainer)))
        if found is not None:
            return found
    if resume is None:
        return None
    if resume == AUTO:
        return read_on_all(lambda: _newest_of_call(folder, state.next_fit(initial_epoch)))
    return read_file_on_all(resume)


def _folder_of(config: DistributedTrainingConfig) -> CheckpointFolder:
    """Returns the folder that rank 0 reads from: its own checkpoints, where each rank writes some."""
    return CheckpointFolder(config.checkpoint_dir, None if config.save_on_master_only else 0)


def start_or_resume(
    state: TrainingState, run: FitPlan, arithmetic: dict[str, Any]
) -> tuple[Resumed | None, list[tuple[str, str]]]:
    """Goes to where a fit begins: where the model is, or where a checkpoint was made. All ranks call it.

    Args:
        state: What is trained.
        run: What is asked for.
        arithmetic: In use.

    Returns:
        What of the checkpoint belongs to this rank, or None; and what the header says of it.

    Raises:
        CheckpointError: It cannot be read, or does not fit.
        ConfigError: It is of a fit with other samples.
    """
    try:
        return _begin_or_go_on(state, run, arithmetic)
    except (CheckpointError, ConfigError) as error:
        on_all_ranks(error)  # they have the same checkpoint, and the same to do
        runtime.gather_texts("")  # nobody leaves before all have read it
        raise


def _begin_or_go_on(
    state: TrainingState, run: FitPlan, arithmetic: dict[str, Any]
) -> tuple[Resumed | None, list[tuple[str, str]]]:
    is_named = run.resume not in (None, AUTO)
    found = find_checkpoint(run, state)
    data = run.digests()
    if found is None:
        _check_batch_norm(state, run)
        scheduled = run.schedule_steps(run.warmup_steps if state.rates.warms_up_first else 0)
        _check_schedule(run, state.rates.schedule_for(scheduled), scheduled, run.steps_per_epoch)
        _warn_of_warmup(run)
        effective, lengths = run.feed.effective_batch_size, (run.warmup_steps, run.all_steps, scheduled)
        state.begin_fit(run.config, data, effective, lengths, run.initial_epoch)
        state.arithmetic = arithmetic
        return None, _say_what_is_there(run, state)
    checkpoint, name = found
    source = f"checkpoint {name}"
    check_same_fit(checkpoint, name, run.config, data, run.feed.effective_batch_size)
    given, asked, trained = what_is_set(state, run.config), run.config, _trained(state)
    run.config = as_in_checkpoint(asked, checkpoint.config)
    state.resume_from(checkpoint, source, run.config, data, is_new_run=is_named)
    if is_named:
        state.complete_fits = max(0, state.position.fits - 1)
    with taking_over(source):
        _go_on_in_data(run, state, checkpoint)
    if run.initial_epoch is not None:  # the last epoch is what was asked for, not how many there are
        left = run.initial_epoch + run.config.epochs - state.position.first_epoch
        run.config = state.config = dataclasses.replace(run.config, epochs=max(left, 0))
    says = put_back(given, what_is_set(state, run.config)) + _changed(trained, _trained(state))
    stretched = state.rates.resume_from(run.schedule_steps(state.rates.warmup_steps))
    if not run.is_over(state.position):
        says += [("schedule", stretched)] if stretched else []
        to_come = run.schedule_steps(state.rates.warmup_steps_left, state.position)
        _check_schedule(run, state.rates.scheduler, to_come)
    says += _what_is_dropped(checkpoint)
    _say_what_is_different(
        name, differences(checkpoint.arithmetic, arithmetic), done_otherwise(asked, checkpoint.config)
    )
    state.arithmetic = arithmetic
    return Resumed(checkpoint, source), [("resume", _where(name, state, run, checkpoint.world_size)), *says]


def _trained(state: TrainingState) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in plain_parameters(state.trained)}


def _changed(program: Mapping[str, bool], checkpoint: Mapping[str, bool]) -> list[tuple[str, str]]:
    """Returns what the header says of parameters that the checkpoint has unfrozen or frozen."""
    found = {True: "frozen", False: "trained"}
    words = []
    for value, before in found.items():
        names = [name for name in checkpoint if checkpoint[name] is value and program[name] is not value]
        words += (
            [f"{shortened(names)} {found[not value]} as in the checkpoint ({before} in the program)"] if names else []
        )
    return [("trained", "; ".join(words))] if words else []


def _check_schedule(
    run: FitPlan, scheduler: LRScheduler | None, steps: int | None, steps_per_epoch: int | None = None
) -> None:
    """Refuses a schedule that would raise, and warns of one that is not as long as the fit.

    Args:
        run: The fit.
        scheduler: Its schedule.
        steps: Times that it is still to be stepped, or None: nobody knows.
        steps_per_epoch: As `warn_of_length`; None also where a fit continues: the schedule has been stepped before.
    """
    interval = run.config.scheduler_interval or "step"
    check_schedule(scheduler, steps or 0, interval)
    if runtime.is_master():
        warn_of_length(scheduler, steps or 0, interval, steps_per_epoch)


def _go_on_in_data(run: FitPlan, state: TrainingState, checkpoint: CheckpointState) -> None:
    run.resume_from(state, checkpoint.world_size)
    run.feed.load_state_dict(checkpoint.others.get("data", {}))
    _check_batch_norm(state, run)


def _check_batch_norm(state: TrainingState, run: FitPlan) -> None:
    """Refuse rows that batch norm cannot be trained on, once it is known how many each rank has in a step."""
    check_single_rows(state.model, run)
    run.without_rows = part_without_rows(state.model, run)


def _warn_of_warmup(run: FitPlan) -> None:
    if run.all_steps is not None and run.warmup_steps > run.all_steps and runtime.is_master():
        warn(
            f"warmup_steps={run.warmup_steps:,} and this fit has {counted(run.all_steps, 'step')}: the learning "
            "rate will not reach its value."
        )


def _where(name: str, state: TrainingState, run: FitPlan, ranks: int) -> str:
    """Returns from which checkpoint a fit goes on, how many ranks made it, and whether anything is left of it."""
    position = state.position
    text = f"from {name}: step {position.step:,}, epochs complete: {position.epoch}"
    there = _folder_of(run.config).newest_first() if runtime.is_master() else []
    later = sum(found.fits is not None and found.fits > position.fits for found in there)
    if later:
        text += f"; {counted(later, 'checkpoint')} of later calls of fit there"
    if ranks != runtime.get_world_size():
        text += f"; made by {counted(ranks, 'rank')}, the same samples come in the same order"
    if position.stopped:
        return f"{text}; a callback had ended this fit there: load_checkpoint() and fit() go on"
    return text if not run.is_over(position) else f"{text}; nothing is left: for more, raise epochs"


def _say_what_is_there(run: FitPlan, state: TrainingState) -> list[tuple[str, str]]:
    """Returns what the header says where a fit begins; warns where its checkpoints would mix with others."""
    config = run.config
    if not runtime.is_master():
        return []
    if run.resume is None and not config.makes_checkpoints:
        is_named = config.checkpoint_dir != DistributedTrainingConfig().checkpoint_dir
        return [("keeps", "no checkpoint: checkpoint_dir is set, and checkpoint_every_n_epochs is not")] * is_named
    there = _folder_of(config).newest_first()
    others = [found for found in there if found.position and found.run.get("id") not in state.runs]
    if others and config.makes_checkpoints:
        warn(
            f"{config.checkpoint_dir} holds {counted(len(others), 'checkpoint')} of another training: those with the "
            "names of new ones will be replaced. Give each training a folder of its own (checkpoint_dir)."
        )
    if run.resume is None:
        return []
    found = f"{counted(len(there), 'checkpoint')} there, none intact of this call of fit (number {state.position.fits})"
    what = found if there else "nothing is there"
    keeps = "" if config.makes_checkpoints else "; no checkpoint will be made, because none is asked for"
    return [("resume", f"from {config.checkpoint_dir}: {what}, and the fit begins{keeps}")]


def _what_is_dropped(checkpoint: CheckpointState) -> list[tuple[str, str]]:
    kept = checkpoint.others.get("compression")
    if not kept or runtime.get_world_size() > 1:
        return []
    return [("gradients", "what compression had left out is dropped: alone nothing is compressed")]


def _say_what_is_different(name: str, computed: Sequence[str], done: Sequence[str]) -> None:
    """Warns of what is not as it was.

    Args:
        name: Of the checkpoint.
        computed: In words, what decides the last bits.
        done: In words, what a step does.
    """
    if computed and runtime.is_master():
        warn(
            f"what is resumed from {name} was computed otherwise: {'; '.join(computed)}. The numbers may differ in "
            "their last bits, or more."
        )
    if done and runtime.is_master():
        warn(f"what is resumed from {name} goes on in another way: {'; '.join(done)}.")


def _newest_of_call(
    folder: CheckpointFolder, call: tuple[Any, Any], launched: tuple[str, int] | None = None
) -> tuple[bytes, str]:
    """Returns (bytes, path) of the newest checkpoint that is intact and of this call of `fit`; "": there is none.

    Where one of an earlier call is newer than all of this call, or this call has begun at another epoch than one that
    is there, the earlier ones have been trained otherwise since.

    Args:
        folder: Where to look.
        call: Its number, from 1, and the epochs before it.
        launched: By which command and which trainer in it it must have been made; None: by any.
    """
    for found in folder.newest_first():
        own = launched is None or (found.run.get("launched"), found.run.get("trainer")) == launched
        if found.run and not own:
            continue
        if found.fits is not None and call[0] is not None and found.fits < call[0]:
            break
        same_beginning = call[0] == 1 or found.position.get("first_epoch") == call[1]
        if found.position and not (found.fits == call[0] and same_beginning):
            continue  # what is damaged is read, so that it is said
        try:
            data = checkpoint_bytes(found.path)
            checkpoint = unpack_checkpoint(data, str(found.path))
            check_content(checkpoint, f"checkpoint {found.path}")
            Position.from_json(checkpoint.position, f"checkpoint {found.path}")
        except CheckpointError as error:
            warn(f"{error} It is skipped.")
            continue
        return data, str(found.path)
    return b"", ""


def check_same_fit(
    state: CheckpointState,
    name: str,
    config: DistributedTrainingConfig,
    data: Mapping[str, str],
    effective_batch_size: int | None = None,
) -> None:
    """Refuses to go on with other data, or other samples of them, than those that the checkpoint would have seen.

    Args:
        state: The checkpoint.
        name: Its name.
        config: Of the fit.
        data: Digests, by what the data are for.
        effective_batch_size: Samples of its steps, over all ranks.

    Raises:
        ConfigError: With what differs.
    """
    now = dataclasses.asdict(config)
    hidden = set()
    same_steps = state.position.get("effective_batch_size") == effective_batch_size
    if config.learning_rate_scaling is None and (config.effective_batch_size is not None or same_steps):
        hidden |= {"batch_size", *(["effective_batch_size"] if same_steps else [])}  # they come to the same
    differences = [
        f"{field} is {now[field]} and was {state.config.get(field)}"
        for field in _SAME_FIELDS
        if field not in hidden and now[field] != state.config.get(field, _BY_DEFAULT[field])
    ]
    differences += [
        _DATA[what] + ("" if digest and state.run.get(what) else f": none {'were' if digest else 'are'} given")
        for what, digest in data.items()
        if state.run.get(what) != digest
    ]
    if differences:
        raise ConfigError(
            f"fit cannot resume from {name}: {'; '.join(differences)}. Give what was given before; or "
            "load_checkpoint() and fit() without resume, to begin a new fit with that model."
        )
