"""The start of a fit: find the checkpoint to resume from, and resume, or start from scratch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import xxhash

from cyxtrain.checkpoint.checkpoint_file import CheckpointState, unpack_checkpoint
from cyxtrain.checkpoint.folder import CheckpointFolder, Found, look_into, name_of
from cyxtrain.checkpoint.format.names import plain_parameters
from cyxtrain.checkpoint.remote_files import require_reachable
from cyxtrain.checkpoint.transport import read_file_on_all, read_on_all
from cyxtrain.checkpoint.validation import check_content, restoring_from
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.tables import check_columns, check_order
from cyxtrain.environment import process_env
from cyxtrain.environment.regular_files import url_of
from cyxtrain.errors import CheckpointError, ConfigError, counted, on_all_ranks, warn, warn_together
from cyxtrain.optim.schedule_length import check_schedule
from cyxtrain.training.inputs.facts import (
    POLICIES,
    Policy,
    as_in_checkpoint,
    describe_restored,
    differences,
    differing_settings,
    restorable,
)
from cyxtrain.training.inputs.fit_length import FitLength
from cyxtrain.training.inputs.plan import FitPlan
from cyxtrain.training.inputs.single_rows import with_batch_norm_checked
from cyxtrain.training.resume.resumption import Resumption
from cyxtrain.training.state import Position, TrainingState
from cyxtrain.world.agreement import on_each
from cyxtrain.world.world import World

AUTO = "auto"
Checkpoint = tuple[CheckpointState, str]
"""A checkpoint, and its name for messages."""
HeaderLines = list[tuple[str, str]]
_DATA = {"data": "the training data differ", "validation": "the validation data differ"}


def find_checkpoint(plan: FitPlan, state: TrainingState, program: str) -> Checkpoint | None:
    """Return the checkpoint to continue from, on every rank; None: none was found, or `resume` is not set.

    A program that runs again makes all its calls of `fit` again. Each continues from its own newest checkpoint, also if
    it was complete: so the model between two calls is as it was. Raises CheckpointError on every rank if the named one
    does not exist or is corrupt. `program`: as `_program_of` returns it.
    """
    folder = _folder_of(plan.config)
    resume = plan.resume
    if resume == AUTO:
        call = state.next_fit(plan.initial_epoch)
        return read_on_all(plan.world, lambda: _newest_of_call(folder, state, call, program))
    if resume is None:
        return None
    return read_file_on_all(plan.world, resume)


def _find_after_restart(plan: FitPlan, state: TrainingState, program: str) -> Checkpoint | None:
    """Return this fit's newest checkpoint of before the launcher restarted the ranks, on every rank, or None."""
    if not plan.attempt or plan.resume == AUTO:
        return None
    return read_on_all(plan.world, lambda: _newest_of_launch(plan, state, program))


def _newest_of_launch(plan: FitPlan, state: TrainingState, program: str) -> tuple[bytes, str]:
    """Return (bytes, path) as `_newest_of_call`, among the checkpoints since the launcher first started the ranks."""
    call: tuple[Any, Any] = state.next_fit(plan.initial_epoch)
    if plan.resume is not None:  # then this is the call of fit that made the checkpoint
        named = look_into(plan.resume).position
        call = (named.get("fits"), named.get("first_epoch"))
    launched, _ = process_env.launched_run()
    return _newest_of_call(_folder_of(plan.config), state, call, program, launched)


def _folder_of(config: DistributedTrainingConfig) -> CheckpointFolder:
    """Return the folder that rank 0 reads: where its own checkpoints are, if each rank writes some."""
    rank = None if config.save_on_master_only else 0
    return CheckpointFolder(config.checkpoint_dir, rank)


def start_or_resume(
    state: TrainingState, plan: FitPlan, numerics: dict[str, Any]
) -> tuple[FitPlan, Resumption | None, HeaderLines]:
    """Go to where a fit begins or continues; return the plan, the resumption and header lines."""
    try:
        _require_store(plan)
        digests = plan.digests()
        program = plan.world.gather(_program_of(state, plan.config, digests))[0]
        found = _find_after_restart(plan, state, program)
        if found is None:
            found = find_checkpoint(plan, state, program)
        else:
            # The run that wrote it continues, and not another one from the checkpoint that `resume` names.
            plan = replace(plan, resume=None)
        run = {**digests, "program": program, "started": _after_all(plan.world, plan.config)}
        begun = _start(state, plan, run) if found is None else _resume(state, plan, numerics, run, found)
    except (CheckpointError, ConfigError) as error:
        on_all_ranks(error)  # all ranks have the same checkpoint
        plan.world.gather("")  # all ranks have read it when the first one leaves
        raise
    state.set(arithmetic=numerics)
    return begun


def _require_store(plan: FitPlan) -> None:
    """Raise on all ranks if checkpoint_dir is the URL of a store that cannot be used. All ranks call it."""
    config = plan.config
    url = url_of(config.checkpoint_dir)
    is_read = plan.resume == AUTO or bool(plan.attempt)
    if not url or not (is_read or config.makes_checkpoints):
        return

    def reach() -> None:
        if plan.world.is_first or not config.save_on_master_only:
            require_reachable(url, writes=config.makes_checkpoints)

    on_each(plan.world, reach)


def _program_of(state: TrainingState, config: DistributedTrainingConfig, digests: Mapping[str, str]) -> str:
    """Return a digest by which a program recognizes its own checkpoints: of model, optimizers and samples."""
    # A program that continues on another number of ranks may adapt these.
    changes_with_world = ("batch_size", "effective_batch_size")
    same = [getattr(config, name) for name in POLICIES[Policy.EQUAL].split() if name not in changes_with_world]
    shapes = [(name, [*each.shape]) for name, each in plain_parameters(state.trained)]
    kinds = [type(each).__name__ for each in state.optimizers.values()]
    options = restorable(state)["optimizer"]
    return xxhash.xxh3_64_hexdigest(json.dumps([same, digests, shapes, kinds, options], default=repr).encode())


def _after_all(world: World, config: DistributedTrainingConfig) -> float:
    """Return a starting time that makes a run the newest in its folder: clocks may be ahead."""
    started = [0.0]
    if config.makes_checkpoints and world.is_first:
        started += [found.run.get("started", 0.0) for found in _folder_of(config).newest_first()]
    return math.nextafter(max(started), math.inf)


def _start(state: TrainingState, plan: FitPlan, run: Mapping[str, Any]) -> tuple[FitPlan, None, HeaderLines]:
    check_order(state.columns, plan.data.source.columns)
    plan = with_batch_norm_checked(state.model, plan)
    length = plan.length
    for rates in state.rates.values():
        scheduled = length.scheduled(rates)
        interval = plan.config.scheduler_interval or "step"
        check_schedule(rates.schedule_for(scheduled), scheduled, interval, length.steps_per_epoch)
    steps = length.all_steps
    if steps is not None and length.warmup_steps > steps:
        warn_together(
            f"warmup_steps={length.warmup_steps:,} and this fit has {counted(steps, 'step')}: the learning rate will "
            "not reach its value."
        )
    lengths = [(length.warmup_steps, steps, length.scheduled(rates)) for rates in state.rates.values()]
    effective = plan.feed.effective_batch_size
    state.begin_fit(plan.world, plan.config, run, effective, lengths, plan.initial_epoch)
    state.set(columns=dict(plan.data.source.columns))
    return plan, None, _describe_start(plan, state)


def _resume(
    state: TrainingState, plan: FitPlan, numerics: dict[str, Any], run: Mapping[str, Any], found: Checkpoint
) -> tuple[FitPlan, Resumption, HeaderLines]:
    saved, name = found
    source = f"checkpoint {name}"
    changed = differing_settings(saved.config, plan.config)
    _check_same_fit(saved, name, plan, run, changed[Policy.EQUAL])
    with restoring_from(source):
        plan = _with_length_of(saved, source, plan)
    checkpoint = _reopened(saved, source, plan.length)
    values_of_program = restorable(state)
    is_new_run = _is_new_run(plan, checkpoint, run)
    resumption = Resumption(checkpoint, source)
    resumption.load(state, plan, run, is_new_run=is_new_run)
    # The same, unless one of them is an array, which has no names.
    state.set(columns={**plan.data.source.columns, **state.columns})
    with restoring_from(source):
        plan = with_batch_norm_checked(state.model, plan)
    header_lines = describe_restored(values_of_program, restorable(state), changed[Policy.CHECKPOINT].values())
    header_lines += _describe_run(plan, name, checkpoint.run, state.run)
    if header_lines and not plan.config.verbose:
        warn_together(f"the fit resumed from {name}: {'; '.join(words for _, words in header_lines)}.")
    header_lines += _resume_schedules(state, plan)
    if checkpoint.others.get("compression") and plan.world.size == 1:
        header_lines.append(("gradients", "compression's error feedback is dropped: a single rank compresses nothing"))
    computed = differences(Policy.PROGRAM, checkpoint.arithmetic, numerics)
    if computed:
        consequence = "Numbers may differ in their last bits, or more"
        if plan.slices.is_virtual:
            consequence += ", also with virtual_ranks"
        warn_together(f"the checkpoint {name} was computed differently: {'; '.join(computed.values())}. {consequence}.")
    if changed[Policy.PROGRAM]:
        settings = "; ".join(changed[Policy.PROGRAM].values())
        warn_together(f"the fit resumed from {name} continues with other settings: {settings}.")
    where = _where(name, state, plan, checkpoint.world_size)
    return plan, resumption, [("resume", where), *header_lines]


def _check_same_fit(
    checkpoint: CheckpointState, name: str, plan: FitPlan, run: Mapping[str, Any], different: dict[str, str]
) -> None:
    """Refuse to continue with other data, or with steps of other samples.

    `run`: this program's, with digests of the data; `different`: descriptions of settings that differ, by name.
    """
    try:  # before the digests, which differ, too, and have no names
        check_columns(checkpoint.others.get("columns", {}), plan.data.source.columns)
    except ConfigError as error:
        raise ConfigError(f"fit cannot resume from {name}: {error}") from error
    config = plan.config
    same_steps = checkpoint.position.get("effective_batch_size") == plan.feed.effective_batch_size
    if config.learning_rate_scaling is None and (config.effective_batch_size is not None or same_steps):
        different.pop("batch_size", None)  # the steps are the same
        if same_steps:
            different.pop("effective_batch_size", None)
    for kind, words in _DATA.items():
        own = run[kind]
        saved = checkpoint.run.get(kind)
        if own != saved:
            different[kind] = words
            if not own:
                different[kind] += ": none are given"
            elif not saved:
                different[kind] += ": none were given"
    if different:
        raise ConfigError(
            f"fit cannot resume from {name}: {'; '.join(different.values())}. Pass what was passed before; or call "
            "load_checkpoint() and fit() without resume, to begin a new fit with that model."
        )


def _resume_schedules(state: TrainingState, plan: FitPlan) -> HeaderLines:
    """Fit schedules to the steps of this fit; return lines for the header about those that changed."""
    lines: HeaderLines = []
    for rates in state.rates.values():
        stretched = rates.continue_schedule(plan.length.schedule_steps(rates.warmup_steps))
        if plan.length.is_over(state.position):
            continue
        if stretched:
            lines.append(("schedule", stretched))
        to_come = plan.length.schedule_steps(rates.warmup_steps_left, state.position)
        check_schedule(rates.scheduler, to_come, rates.interval)
    return lines


def _is_new_run(plan: FitPlan, checkpoint: CheckpointState, run: Mapping[str, Any]) -> bool:
    """Return whether a fit that continues a checkpoint becomes another run; `run`: its own facts."""
    is_own = plan.resume != AUTO or checkpoint.run.get("program", run["program"]) == run["program"]
    return plan.resume not in (None, AUTO) or not is_own or "id" not in checkpoint.run


def _describe_run(plan: FitPlan, name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> HeaderLines:
    """Return the header's line about a run of another program that this one continues."""
    if plan.resume != AUTO or before.get("id", now["id"]) == now["id"]:
        return []
    return [("run", f"{name} is of {name_of(before)}, a program with other settings; {name_of(now)} continues it")]


def _with_length_of(checkpoint: CheckpointState, source: str, plan: FitPlan) -> FitPlan:
    """Return the plan with the steps and epochs that a fit has if it continues a checkpoint."""
    position = Position.from_json(checkpoint.position, source)
    plan.feed.set_step_size(position.effective_batch_size)
    config = as_in_checkpoint(plan.config, checkpoint.config)
    if plan.initial_epoch is not None:  # then `epochs` is the number of the last one, not how many there are
        left = plan.initial_epoch + config.epochs - position.first_epoch
        config = replace(config, epochs=max(left, 0))
    return replace(plan, config=config)


def _reopened(checkpoint: CheckpointState, source: str, length: FitLength) -> CheckpointState:
    """Return a checkpoint of a complete fit as it was before its last epoch ended, if this fit is longer.

    `length`: with the checkpoint's steps; another number of ranks would have others.
    """
    before = checkpoint.others.get("before_end")
    if not before:
        return checkpoint
    # Otherwise the rest of that epoch would never be trained.
    with restoring_from(source):
        others = {**checkpoint.others, **before["others"]}
        # Other ranks may have saved the complete fit again.
        world_size = len(before["ranks"]) or checkpoint.world_size
        earlier = replace(checkpoint, **{**before, "others": others, "world_size": world_size})
        check_content(earlier, source)
        position = Position.from_json(earlier.position, source)
    if checkpoint.position["stopped"] or length.is_over(position) or length.ends_early(position):
        return checkpoint
    return earlier


def _where(name: str, state: TrainingState, plan: FitPlan, ranks: int) -> str:
    """Describe the checkpoint that a fit continues from, and whether anything is left to train."""
    position = state.position
    words = f"from {name}: step {position.step:,}, epochs complete: {position.epoch}"
    there = _folder_of(plan.config).newest_first() if plan.world.is_first else []
    later = sum(found.fits is not None and found.fits > position.fits for found in there)
    if later:
        words += f"; {counted(later, 'checkpoint')} of later calls of fit there"
    if ranks != plan.world.size:
        words += f"; made by {counted(ranks, 'rank')}, samples keep their order"
    if position.stopped:
        why = f" ({state.stop_reason})" if state.stop_reason else ""
        words += f"; the fit was stopped there{why}: to continue, call load_checkpoint() and fit()"
    elif plan.length.is_over(position):
        limit = "max_steps" if plan.length.steps_left(position) == 0 else "epochs"
        words += f"; nothing is left to train: to continue, raise {limit}"
    return words


def _describe_start(plan: FitPlan, state: TrainingState) -> HeaderLines:
    """Return the header's lines about `resume` and checkpoint_dir if a fit starts from scratch."""
    config = plan.config
    if not plan.world.is_first:
        return []
    if plan.resume is None:
        is_named = config.checkpoint_dir != DistributedTrainingConfig().checkpoint_dir
        if is_named and not config.makes_checkpoints and config.log_hashes is None:
            return [("keeps", "no checkpoint: checkpoint_dir is set, but checkpoint_every_n_epochs is not")]
        return []
    there = _folder_of(config).newest_first()
    words = f"no checkpoint in {config.checkpoint_dir}"
    if there:
        words = f"{counted(len(there), 'checkpoint')} in {config.checkpoint_dir}"
        words += f", none that call {state.position.fits} of fit can continue"
    words += ", starting from scratch"
    if not config.makes_checkpoints:
        words += "; checkpoints are off"
    return [("resume", words)]


def _newest_of_call(
    folder: CheckpointFolder, state: TrainingState, call: tuple[Any, Any], program: str, launched: str | None = None
) -> tuple[bytes, str]:
    """Return (bytes, path) of the newest intact checkpoint of a call of `fit`; path "": none was found.

    Checkpoints of the same `program` come first. The state's claim tells other processes that the run continues here.
    """
    candidates = _checkpoints_of_call(folder, state, call, launched)
    own_runs = {each.origin for each in candidates if each.run.get("program", program) == program}
    # A stable sort: within each group the newest stays first.
    for found in sorted(candidates, key=lambda each: each.origin not in own_runs):
        # A store that fails in the middle raises: it must not look like a corrupt checkpoint, which is passed over.
        remote = b""
        if found.url and not found.problem:
            remote = found.read()
        try:
            if found.problem:
                raise CheckpointError(found.problem)
            data = remote or found.read()
            checkpoint = unpack_checkpoint(data, found.where)
            check_content(checkpoint, f"checkpoint {found.where}")
            Position.from_json(checkpoint.position, f"checkpoint {found.where}")
        except CheckpointError as error:
            warn(f"{error} It is skipped.")
            continue
        if folder.claim(checkpoint.run, state.claim):
            return data, found.where
    return b"", ""


def _checkpoints_of_call(
    folder: CheckpointFolder, state: TrainingState, call: tuple[Any, Any], launched: str | None
) -> list[Found]:
    """Return the checkpoints that a call of `fit` may continue from, also corrupt ones, newest first.

    `call`: its number, from 1, and the epochs before it. `launched`: the launch in which this trainer must have written
    them; None: any. Processes that are alive continue their own checkpoints, which are left out.
    """
    number, first_epoch = call
    live = folder.live_runs()
    candidates: list[Found] = []
    for found in folder.newest_first():
        is_own = launched is None or (found.run.get("launched"), found.run.get("trainer")) == (launched, state.trainer)
        if found.run and (not is_own or found.run.get("id") in live):
            continue
        # If the checkpoint of an earlier call is newer, the model was trained differently since the older ones.
        if found.fits is not None and number is not None and found.fits < number:
            break
        if not found.position or _is_of_call(found, number, first_epoch):
            candidates.append(found)
    return candidates


def _is_of_call(found: Found, number: object, first_epoch: object) -> bool:
    """Return whether a call of `fit` made a checkpoint, and began at the same epoch."""
    begins_alike = number == 1 or bool(found.position.get("first_epoch") == first_epoch)
    return found.fits == number and begins_alike
