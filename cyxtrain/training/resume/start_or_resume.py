"""Which checkpoint a fit continues from, and how it begins or continues."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from cyxtrain.checkpoint.checkpoint_file import CheckpointState, checkpoint_bytes, unpack_checkpoint
from cyxtrain.checkpoint.folder import CheckpointFolder, Found, look_into, name_of
from cyxtrain.checkpoint.format.names import plain_parameters
from cyxtrain.checkpoint.transport import read_file_on_all, read_on_all
from cyxtrain.checkpoint.validation import check_content, restoring_from
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.environment import process_env
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
from cyxtrain.training.inputs.plan import FitPlan, place_of
from cyxtrain.training.inputs.single_rows import with_batch_norm_checked
from cyxtrain.training.state import Position, TrainingState
from cyxtrain.world.world import World

AUTO = "auto"
Checkpoint = tuple[CheckpointState, str]
"""A checkpoint, and its name for messages."""
HeaderLines = list[tuple[str, str]]
_DATA = {"data": "the training data differ", "validation": "the validation data differ"}


def find_checkpoint(plan: FitPlan, state: TrainingState, program: str) -> Checkpoint | None:
    """Return the checkpoint to continue from, on every rank; None: there is none, or `resume` is not set.

    A program that runs again makes all its calls of `fit` again. Each continues from its own newest checkpoint, also if
    it was complete: the program then sees the model between two calls as it was. If the launcher has restarted the
    ranks, the newest checkpoint of this launch takes precedence over `resume`. Raises CheckpointError on every rank if
    the named one does not exist or is corrupt. `program`: as `_program_of` returns it.
    """
    launched, _ = process_env.launched_run()  # rank 0's, which reads
    folder, resume, initial_epoch = _folder_of(plan.config), plan.resume, plan.initial_epoch
    if plan.attempt and resume != AUTO:
        # A fit that resumes from a path is that checkpoint's call of fit.
        named = None if resume is None else look_into(Path(resume)).position
        call = state.next_fit(initial_epoch) if named is None else (named.get("fits"), named.get("first_epoch"))
        found = read_on_all(plan.world, lambda: _newest_of_call(folder, state, call, program, launched))
        if found is not None:
            return found
    if resume is None:
        return None
    if resume == AUTO:
        return read_on_all(plan.world, lambda: _newest_of_call(folder, state, state.next_fit(initial_epoch), program))
    return read_file_on_all(plan.world, resume)


def _folder_of(config: DistributedTrainingConfig) -> CheckpointFolder:
    """Return the folder that rank 0 reads: where its own checkpoints are, if each rank writes some."""
    return CheckpointFolder(config.checkpoint_dir, None if config.save_on_master_only else 0)


def start_or_resume(
    state: TrainingState, plan: FitPlan, numerics: dict[str, Any]
) -> tuple[FitPlan, Checkpoint | None, HeaderLines]:
    """Go to where a fit begins or continues; return the final plan, the checkpoint, and lines for the header."""
    try:
        digests = plan.digests()
        program = plan.world.gather(_program_of(state, plan.config, digests))[0]
        found = find_checkpoint(plan, state, program)
        run = {**digests, "program": program, "started": _after_all(plan.world, plan.config)}
        begun = _begin(state, plan, run) if found is None else _resume(state, plan, numerics, run, found)
    except (CheckpointError, ConfigError) as error:
        on_all_ranks(error)  # all ranks have the same checkpoint
        plan.world.gather("")  # all ranks have read it when the first one leaves
        raise
    state.set(arithmetic=numerics)
    return begun


def _program_of(state: TrainingState, config: DistributedTrainingConfig, digests: Mapping[str, str]) -> str:
    """Return a digest by which a program recognizes its own checkpoints: of model, optimizers and samples."""
    by_world = ("batch_size", "effective_batch_size")
    same = [getattr(config, name) for name in POLICIES[Policy.EQUAL].split() if name not in by_world]
    shapes = [(name, [*each.shape]) for name, each in plain_parameters(state.trained)]
    kinds = [type(each).__name__ for each in state.optimizers.values()]
    options = restorable(state)["optimizer"]
    return xxhash.xxh3_64_hexdigest(json.dumps([same, digests, shapes, kinds, options], default=repr).encode())


def _after_all(world: World, config: DistributedTrainingConfig) -> float:
    """Return the earliest time at which a run may begin to be newer than all others, whose clocks may be ahead."""
    started = [0.0]
    if config.makes_checkpoints and world.is_first:
        started += [found.run.get("started", 0.0) for found in _folder_of(config).newest_first()]
    return math.nextafter(max(started), math.inf)


def _begin(state: TrainingState, plan: FitPlan, run: Mapping[str, Any]) -> tuple[FitPlan, None, HeaderLines]:
    plan = with_batch_norm_checked(state.model, plan)
    for rates in state.rates.values():
        scheduled = plan.scheduled(rates)
        interval = plan.config.scheduler_interval or "step"
        check_schedule(rates.schedule_for(scheduled), scheduled, interval, plan.steps_per_epoch)
    if plan.all_steps is not None and plan.warmup_steps > plan.all_steps:
        warn_together(
            f"warmup_steps={plan.warmup_steps:,} and this fit has {counted(plan.all_steps, 'step')}: the learning rate "
            "will not reach its value."
        )
    lengths = [(plan.warmup_steps, plan.all_steps, plan.scheduled(rates)) for rates in state.rates.values()]
    effective = plan.feed.effective_batch_size
    state.begin_fit(plan.world, plan.config, run, effective, lengths, plan.initial_epoch)
    return plan, None, _describe_start(plan, state)


def _resume(
    state: TrainingState, plan: FitPlan, numerics: dict[str, Any], run: Mapping[str, Any], found: Checkpoint
) -> tuple[FitPlan, Checkpoint, HeaderLines]:
    name, source = found[1], f"checkpoint {found[1]}"
    checkpoint = _reopened(found[0], source, plan)
    changed = differing_settings(checkpoint.config, plan.config)
    _check_same_fit(checkpoint, name, plan, run, changed[Policy.EQUAL])
    program = restorable(state)
    plan = replace(plan, config=as_in_checkpoint(plan.config, checkpoint.config))
    is_new_run = _is_new_run(plan, checkpoint, run)
    state.resume_from(plan.world, checkpoint, source, plan.config, run, is_new_run=is_new_run)
    with restoring_from(source):
        plan.feed.check_world(checkpoint.world_size, place_of(state.position))
        plan.feed.resume_from(state.position.effective_batch_size)
        plan.feed.load_state_dict(checkpoint.others.get("data", {}))
        plan = with_batch_norm_checked(state.model, plan)
    if plan.initial_epoch is not None:  # the last epoch is what was asked for, not how many there are
        left = plan.initial_epoch + plan.config.epochs - state.position.first_epoch
        state.set(config=replace(state.config, epochs=max(left, 0)))
        plan = replace(plan, config=state.config)
    header_lines = describe_restored(program, restorable(state), changed[Policy.CHECKPOINT].values())
    header_lines += _describe_run(plan, name, checkpoint.run, state.run)
    if header_lines and not plan.config.verbose:
        warn_together(f"the fit resumed from {name}: {'; '.join(words for _, words in header_lines)}.")
    header_lines += _resume_schedules(state, plan)
    if checkpoint.others.get("compression") and plan.world.size == 1:
        header_lines.append(("gradients", "compression's error feedback is dropped: a single rank compresses nothing"))
    if computed := differences(Policy.PROGRAM, checkpoint.arithmetic, numerics):
        warn_together(
            f"the checkpoint {name} was computed differently: {'; '.join(computed.values())}. Numbers may differ in "
            "their last bits, or more."
        )
    if done := changed[Policy.PROGRAM].values():
        warn_together(f"the fit resumed from {name} continues with other settings: {'; '.join(done)}.")
    header_lines.insert(0, ("resume", _where(name, state, plan, checkpoint.world_size)))
    return plan, (checkpoint, source), header_lines


def _check_same_fit(
    checkpoint: CheckpointState, name: str, plan: FitPlan, digests: Mapping[str, str], found: dict[str, str]
) -> None:
    """Refuse to continue with other data, or other samples of them.

    `digests`: of the data, by what they are for; `found`: differences of settings, by name.
    """
    config, effective = plan.config, plan.feed.effective_batch_size
    same_steps = checkpoint.position.get("effective_batch_size") == effective
    if config.learning_rate_scaling is None and (config.effective_batch_size is not None or same_steps):
        found.pop("batch_size", None)  # the steps are the same
        if same_steps:
            found.pop("effective_batch_size", None)
    for what, words in _DATA.items():
        own, saved = digests[what], checkpoint.run.get(what)
        if own != saved:
            found[what] = words + ("" if own and saved else f": none {'were' if own else 'are'} given")
    if found:
        raise ConfigError(
            f"fit cannot resume from {name}: {'; '.join(found.values())}. Pass what was passed before; or call "
            "load_checkpoint() and fit() without resume, to begin a new fit with that model."
        )


def _resume_schedules(state: TrainingState, plan: FitPlan) -> HeaderLines:
    """Fit schedules to the steps of this fit; return lines for the header about those that changed."""
    lines: HeaderLines = []
    for rates in state.rates.values():
        stretched = rates.resume_from(plan.schedule_steps(rates.warmup_steps))
        if plan.is_over(state.position):
            continue
        if stretched:
            lines.append(("schedule", stretched))
        to_come = plan.schedule_steps(rates.warmup_steps_left, state.position)
        check_schedule(rates.scheduler, to_come, rates.interval)
    return lines


def _is_new_run(plan: FitPlan, checkpoint: CheckpointState, run: Mapping[str, Any]) -> bool:
    """Return whether a fit that continues a checkpoint becomes another run; `run` are facts of this fit's."""
    is_own = plan.resume != AUTO or checkpoint.run.get("program", run["program"]) == run["program"]
    return plan.resume not in (None, AUTO) or not is_own or "id" not in checkpoint.run


def _describe_run(plan: FitPlan, name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> HeaderLines:
    """Return the header's line about a run of another program that this one continues."""
    if plan.resume != AUTO or before.get("id", now["id"]) == now["id"]:
        return []
    return [("run", f"{name} is of {name_of(before)}, a program with other settings; {name_of(now)} continues it")]


def _reopened(checkpoint: CheckpointState, source: str, plan: FitPlan) -> CheckpointState:
    """Return a checkpoint of a complete fit as it was before its last epoch ended, if this fit is longer."""
    if before := checkpoint.others.get("before_end"):
        with restoring_from(source):
            earlier = replace(checkpoint, **{**before, "others": {**checkpoint.others, **before["others"]}})
            check_content(earlier, source)
            position = Position.from_json(earlier.position, source)
        if not (checkpoint.position["stopped"] or plan.is_over(position) or plan.ends_early(position)):
            return earlier
    return checkpoint


def _where(name: str, state: TrainingState, plan: FitPlan, ranks: int) -> str:
    """Describe the checkpoint that a fit continues from, and whether anything is left to train."""
    position = state.position
    text = f"from {name}: step {position.step:,}, epochs complete: {position.epoch}"
    there = _folder_of(plan.config).newest_first() if plan.world.is_first else []
    later = sum(found.fits is not None and found.fits > position.fits for found in there)
    if later:
        text += f"; {counted(later, 'checkpoint')} of later calls of fit there"
    if ranks != plan.world.size:
        text += f"; made by {counted(ranks, 'rank')}, samples keep their order"
    limit = "max_steps" if plan.steps_left(position) == 0 else "epochs"
    if position.stopped:
        why = f" ({state.stop_reason})" if state.stop_reason else ""
        return f"{text}; the fit was stopped there{why}: to continue, call load_checkpoint() and fit()"
    return text if not plan.is_over(position) else f"{text}; nothing is left to train: to continue, raise {limit}"


def _describe_start(plan: FitPlan, state: TrainingState) -> list[tuple[str, str]]:
    """Return the header's lines where a fit begins."""
    config = plan.config
    if not plan.world.is_first:
        return []
    if plan.resume is None and not config.makes_checkpoints:
        is_named = config.checkpoint_dir != DistributedTrainingConfig().checkpoint_dir
        return [("keeps", "no checkpoint: checkpoint_dir is set, but checkpoint_every_n_epochs is not")] * is_named
    if plan.resume is None:
        return []
    there = _folder_of(config).newest_first()
    found = counted(len(there), "checkpoint") if there else "no checkpoint"
    others = f", none that call {state.position.fits} of fit can continue" if there else ""
    keeps = "" if config.makes_checkpoints else "; checkpoints are off"
    return [("resume", f"{found} in {config.checkpoint_dir}{others}, starting from scratch{keeps}")]


def _newest_of_call(
    folder: CheckpointFolder, state: TrainingState, call: tuple[Any, Any], program: str, launched: str | None = None
) -> tuple[bytes, str]:
    """Return (bytes, path) of the newest intact checkpoint of this call of `fit`; "": there is none.

    If one of an earlier call is newer, or this call begins at another epoch than the one on disk, the earlier ones were
    trained differently since.

    `call` is its number, from 1, and the epochs before it; `launched` the command in which this trainer must have
    written it, None: any. Those of the same `program` come first, and those of runs that are alive never: the state's
    claim tells other processes that the run is continued here.
    """
    candidates, live = list[Found](), folder.live_runs()
    for found in folder.newest_first():
        own = launched is None or (found.run.get("launched"), found.run.get("trainer")) == (launched, state.trainer)
        if found.run and (not own or found.run.get("id") in live):
            continue
        if found.fits is not None and call[0] is not None and found.fits < call[0]:
            break
        same_beginning = call[0] == 1 or found.position.get("first_epoch") == call[1]
        if found.position and not (found.fits == call[0] and same_beginning):
            continue
        candidates.append(found)
    own_runs = {each.origin for each in candidates if each.run.get("program", program) == program}
    for found in sorted(candidates, key=lambda each: each.origin not in own_runs):
        try:
            if found.problem:
                raise CheckpointError(found.problem)
            data = checkpoint_bytes(found.path)
            checkpoint = unpack_checkpoint(data, str(found.path))
            check_content(checkpoint, f"checkpoint {found.path}")
            Position.from_json(checkpoint.position, f"checkpoint {found.path}")
        except CheckpointError as error:
            warn(f"{error} It is skipped.")
            continue
        if folder.claim(checkpoint.run, state.claim):
            return data, str(found.path)
    return b"", ""
