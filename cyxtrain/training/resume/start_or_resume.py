"""Which checkpoint a fit continues from, whether it fits, and what differs from it.

The checkpoint wins for the optimizer, the schedule and changed learning rates; the program for how later steps are
taken.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from cyxtrain.checkpoint.checkpoint_file import CheckpointState, checkpoint_bytes, unpack_checkpoint
from cyxtrain.checkpoint.folder import CheckpointFolder, Found, look_into, name_of
from cyxtrain.checkpoint.format.names import plain_parameters
from cyxtrain.checkpoint.format.optimizer_state import groups_by_name
from cyxtrain.checkpoint.transport import read_file_on_all, read_on_all
from cyxtrain.checkpoint.validation import check_content, taking_over
from cyxtrain.config import AMPConfig, DDPConfig, DistributedTrainingConfig
from cyxtrain.data.rng import set_generators
from cyxtrain.environment import process_env
from cyxtrain.errors import CheckpointError, ConfigError, counted, on_all_ranks, shortened, warn, warn_together
from cyxtrain.metrics.logged import LoggedNumbers
from cyxtrain.metrics.sums import MetricSums
from cyxtrain.optim.optimizers import ONLY
from cyxtrain.optim.precision import float32_products
from cyxtrain.optim.schedule_length import check_schedule
from cyxtrain.optim.schedules import schedule_settings
from cyxtrain.training.inputs.plan import FitPlan, place_of
from cyxtrain.training.inputs.single_rows import check_single_rows, part_without_rows
from cyxtrain.training.model.compile import explain_compiled
from cyxtrain.training.state import Position, TrainingState
from cyxtrain.world.world import World

AUTO = "auto"
_SAME_FIELDS = (
    *("shuffle", "seed", "validation_split", "validation_stratify"),
    *("batch_size", "effective_batch_size", "steps_per_epoch", "drop_last"),
)
"""What decides the samples of a step, besides the data."""
_BY_DEFAULT = dataclasses.asdict(DistributedTrainingConfig())
"""What a checkpoint was made with that is older than a field."""
_APPLIED_ONCE = ("learning_rate_scaling", "warmup_steps")
"""Settings applied once to learning rates: a checkpoint has the resulting rates."""
_EACH_STEP = (
    *("accumulation_steps", "clip_norm", "clip_value", "clip_adaptive", "sync_batchnorm"),
    *("scheduler_interval", "channels_last"),
)
"""Settings of each step; precision and compilation are reported with the numerics."""
_NO_OPTIONS = {"params", "lr", "initial_lr"}
"""Entries of a parameter group that are not compared as options; learning rates are compared by initial value."""
_DATA = {"data": "the training data differ", "validation": "the validation data differ"}

Checkpoint = tuple[CheckpointState, str]
"""A checkpoint, and its name for messages."""
HeaderLines = list[tuple[str, str]]


def restore_rank(
    world: World,
    checkpoint: CheckpointState,
    source: str,
    totals: MetricSums,
    logged: LoggedNumbers,
    device: torch.device,
) -> None:
    """Restore this rank's generators, if there are as many ranks as there were, and its sums of the epoch."""
    rank, world_size, ranks = world.rank, world.size, checkpoint.ranks
    try:
        tables = [each["sums"] for each in ranks]
        if not any(tables):
            return  # made between two epochs: the next one begins with its own generators
        totals.metrics.merge([each.get("metrics", {}) for each in ranks[rank::world_size]])
        states = [{**each.get("logged", {})} for each in ranks[rank::world_size]]
        # Added up once: which rank has counted what changes only the last bits of the result.
        row = [math.fsum(column) if rank == 0 else 0.0 for column in zip(*(table[0] for table in tables), strict=True)]
        if len(ranks) == world_size:
            set_generators(ranks[rank]["generators"], device)
            row = tables[rank][0]
        totals.restore(row, ranks[0].get("names"), states)
        logged.restore(states)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"Cannot resume from {source}: the state of rank {rank} is wrong: {error}.") from error


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
        return _begin(state, plan, numerics, run) if found is None else _resume(state, plan, numerics, run, found)
    except (CheckpointError, ConfigError) as error:
        on_all_ranks(error)  # all ranks have the same checkpoint
        plan.world.gather("")  # all ranks have read it when the first one leaves
        raise


def _program_of(state: TrainingState, config: DistributedTrainingConfig, digests: Mapping[str, str]) -> str:
    """Return a digest by which a program recognizes its own checkpoints: of model, optimizers and samples."""
    by_world = ("batch_size", "effective_batch_size")
    same = [getattr(config, name) for name in _SAME_FIELDS if name not in by_world]
    shapes = [(name, [*each.shape]) for name, each in plain_parameters(state.trained)]
    kinds = [type(each).__name__ for each in state.optimizers.values()]
    options = restored_settings(state, config)["optimizer"]
    return xxhash.xxh3_64_hexdigest(json.dumps([same, digests, shapes, kinds, options], default=repr).encode())


def _after_all(world: World, config: DistributedTrainingConfig) -> float:
    """Return the earliest time at which a run may begin to be newer than all others, whose clocks may be ahead."""
    started = [0.0]
    if config.makes_checkpoints and world.is_first:
        started += [found.run.get("started", 0.0) for found in _folder_of(config).newest_first()]
    return math.nextafter(max(started), math.inf)


def _begin(
    state: TrainingState, plan: FitPlan, numerics: dict[str, Any], run: Mapping[str, Any]
) -> tuple[FitPlan, None, HeaderLines]:
    plan = with_batch_norm_checked(state, plan)
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
    state.begin_fit(plan.world, plan.config, run, effective, lengths, plan.initial_epoch, numerics)
    return plan, None, _describe_start(plan, state)


def _resume(
    state: TrainingState, plan: FitPlan, numerics: dict[str, Any], run: Mapping[str, Any], found: Checkpoint
) -> tuple[FitPlan, Checkpoint, HeaderLines]:
    name, source = found[1], f"checkpoint {found[1]}"
    checkpoint = _reopened(found[0], source, plan)
    check_same_fit(checkpoint, name, plan.config, {each: run[each] for each in _DATA}, plan.feed.effective_batch_size)
    given, asked, trained = restored_settings(state, plan.config), plan.config, _trained(state)
    plan = replace(plan, config=as_in_checkpoint(asked, checkpoint.config))
    is_new_run = _is_new_run(plan, checkpoint, run)
    state.resume_from(plan.world, checkpoint, source, plan.config, run, numerics, is_new_run=is_new_run)
    with taking_over(source):
        plan.feed.check_world(checkpoint.world_size, place_of(state.position))
        plan.feed.resume_from(state.position.effective_batch_size)
        plan.feed.load_state_dict(checkpoint.others.get("data", {}))
        plan = with_batch_norm_checked(state, plan)
    if plan.initial_epoch is not None:  # the last epoch is what was asked for, not how many there are
        left = plan.initial_epoch + plan.config.epochs - state.position.first_epoch
        state.set(config=replace(state.config, epochs=max(left, 0)))
        plan = replace(plan, config=state.config)
    restored = describe_restored(given, restored_settings(state, plan.config))
    header_lines = restored + _describe_frozen(trained, _trained(state))
    header_lines += _describe_run(plan, name, checkpoint.run, state.run)
    if header_lines and not plan.config.verbose:
        warn_together(f"the fit resumed from {name}: {'; '.join(words for _, words in header_lines)}.")
    header_lines += _resume_schedules(state, plan)
    if checkpoint.others.get("compression") and plan.world.size == 1:
        header_lines.append(("gradients", "compression's error feedback is dropped: a single rank compresses nothing"))
    if computed := differences(checkpoint.arithmetic, numerics):
        warn_together(
            f"the checkpoint {name} was computed differently: {'; '.join(computed)}. Numbers may differ in their last "
            "bits, or more."
        )
    if done := describe_changes(asked, checkpoint.config):
        warn_together(f"the fit resumed from {name} continues with other settings: {'; '.join(done)}.")
    header_lines.insert(0, ("resume", _where(name, state, plan, checkpoint.world_size)))
    return plan, (checkpoint, source), header_lines


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
        with taking_over(source):
            earlier = replace(checkpoint, **{**before, "others": {**checkpoint.others, **before["others"]}})
            check_content(earlier, source)
            position = Position.from_json(earlier.position, source)
        if not (checkpoint.position["stopped"] or plan.is_over(position) or plan.ends_early(position)):
            return earlier
    return checkpoint


def _trained(state: TrainingState) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in plain_parameters(state.trained)}


def _describe_frozen(program: Mapping[str, bool], checkpoint: Mapping[str, bool]) -> list[tuple[str, str]]:
    """Return the header's line about parameters that the checkpoint has frozen or unfrozen."""
    found = {True: "frozen", False: "trained"}
    words = [
        f"{shortened(names)} {found[not value]} as in the checkpoint ({before} in the program)"
        for value, before in found.items()
        if (names := [name for name in checkpoint if checkpoint[name] is value and program[name] is not value])
    ]
    return [("trained", "; ".join(words))] if words else []


def with_batch_norm_checked(state: TrainingState, plan: FitPlan) -> FitPlan:
    """Refuse rows that batch norm cannot train on, now that each rank's rows of a step are known."""
    check_single_rows(state.model, plan)
    empty, micro_batches = part_without_rows(state.model, plan), plan.feed.micro_batches
    return replace(plan, data=replace(plan.data, without_rows=empty, num_micro_batches=micro_batches))


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


def check_same_fit(
    state: CheckpointState,
    name: str,
    config: DistributedTrainingConfig,
    data: Mapping[str, str],
    effective_batch_size: int,
) -> None:
    """Refuse to continue with other data, or other samples of them; `data`: digests by what the data are for."""
    now = dataclasses.asdict(config)
    hidden = set()
    same_steps = state.position.get("effective_batch_size") == effective_batch_size
    if config.learning_rate_scaling is None and (config.effective_batch_size is not None or same_steps):
        hidden |= {"batch_size", *(["effective_batch_size"] if same_steps else [])}  # they come to the same
    found = [
        f"{field} is {now[field]} and was {state.config.get(field)}"
        for field in _SAME_FIELDS
        if field not in hidden and now[field] != state.config.get(field, _BY_DEFAULT[field])
    ]
    found += [
        _DATA[what] + ("" if digest and state.run.get(what) else f": none {'were' if digest else 'are'} given")
        for what, digest in data.items()
        if state.run.get(what) != digest
    ]
    if found:
        raise ConfigError(
            f"fit cannot resume from {name}: {'; '.join(found)}. Pass what was passed before; or call "
            "load_checkpoint() and fit() without resume, to begin a new fit with that model."
        )


def as_in_checkpoint(config: DistributedTrainingConfig, saved: Mapping[str, Any]) -> DistributedTrainingConfig:
    """Return the config with the checkpoint's values of what a fit does once."""
    fields = {name: saved.get(name, getattr(config, name)) for name in _APPLIED_ONCE}
    if config.precision == saved.get("precision") == "fp16":
        initial = _loss_scaling(saved)["initial_scale"]
        fields["amp"] = dataclasses.replace(config.amp or AMPConfig(), initial_scale=initial)
    return dataclasses.replace(config, **fields)


def restored_settings(state: TrainingState, config: DistributedTrainingConfig) -> dict[str, list[dict[str, Any]]]:
    """Return the settings that a checkpoint restores, part by part."""
    options, schedules = [], []
    for rates in state.rates.values():
        groups = groups_by_name(rates.optimizer, state.trained)
        hidden = _NO_OPTIONS | rates.moved_options
        for group, rate in zip(groups, rates.program_rates(), strict=True):
            shown = {name: value for name, value in group.items() if name not in hidden}
            options.append({name: value for name, value in shown.items() if not isinstance(value, torch.Tensor)})
            options[-1]["lr"] = rate
        schedules += schedule_settings(rates.scheduler)
    own = dataclasses.asdict(config)
    applied_once = {name: own[name] for name in _APPLIED_ONCE}
    if config.precision == "fp16":
        applied_once["initial_scale"] = _loss_scaling(own)["initial_scale"]
    return {"settings": [applied_once], "optimizer": options, "schedule": schedules}


def describe_restored(
    program: Mapping[str, list[dict[str, Any]]], checkpoint: Mapping[str, list[dict[str, Any]]]
) -> list[tuple[str, str]]:
    """Return the header's line about settings of the program that the checkpoint has replaced."""
    words = {
        f"{name} {after[name]} as in the checkpoint (the program has {before[name]})"
        for what, parts in program.items()
        for before, after in zip(parts, checkpoint[what], strict=False)
        for name in before.keys() & after.keys()
        if before[name] != after[name]
    }
    return [("restored", "; ".join(sorted(words)))] if words else []


def describe_changes(config: DistributedTrainingConfig, saved: Mapping[str, Any]) -> list[str]:
    """Describe what steps do differently from now on."""
    own = dataclasses.asdict(config)
    found = differences(saved, {name: own[name] for name in _EACH_STEP})
    if config.precision == saved.get("precision") == "fp16":
        now = _loss_scaling(own)
        del now["initial_scale"]  # by now it has become another
        found += differences(_loss_scaling(saved), now)
    return found


def _loss_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    given: Mapping[str, Any] | None = config.get("amp")
    return dataclasses.asdict(AMPConfig()) | dict(given or {})


def numerics_of(model: nn.Module, plan: FitPlan, ddp_config: DDPConfig) -> dict[str, Any]:
    """Return the numerics in use, as JSON values by their names in messages."""
    device, names = plan.data.placement.device, ", ".join(name for name in plan.fused_optimizers if name != ONLY)
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    exchange = {
        "the size of buckets": ddp_config.bucket_size_mb,
        "the compression of gradients": ddp_config.compression or "none",
        "the rank of their approximation": ddp_config.matrix_approximation_rank,
    }
    return {
        "PyTorch": torch.__version__,
        "the parameters' dtypes": ", ".join(dtypes),
        "the precision": plan.config.precision,
        "the model": explain_compiled(plan.config.compile, plan.compiles_layers) or "run as it is",
        "the optimizer's kernel": f"fused {names}".rstrip() if plan.fused_optimizers else "as it was built",
        "the device": device.type,
        "the backend": dist.get_backend(plan.world.group),
        **({"the number of threads per rank": torch.get_num_threads()} if device.type == "cpu" else {}),
        "the precision of float32 products": _product_precision(device, plan.config.float32_precision),
        **(exchange if plan.world.size > 1 else {}),  # alone they do not
    }


def _product_precision(device: torch.device, requested: str | None) -> str:
    """Return the precision of float32 matrix products, whichever of PyTorch's two settings decides it."""
    backend = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with float32_products(requested):
        return str(backend.fp32_precision)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe what has another value than before; what was unknown then is skipped."""
    return [f"{name} was {before[name]} and is {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
