"""Checks that a fit can have written a checkpoint's content; checksums only tell that it is unchanged.

Absent parts are accepted, because older versions did not write all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from cyxtrain.checkpoint.checkpoint_file import CheckpointState
from cyxtrain.config import AMPConfig, DistributedTrainingConfig
from cyxtrain.errors import CheckpointError, CyxtrainError, brief

_Check = Callable[[Any], bool]

_MAX_COUNT = 10**12
_MAX_COUNTS = {"samples": 10**15, "batches": 10**15, "order": 1 << 64}
_MAX_RANKS = 10**6
_MAX_SECONDS = 10**11  # thousands of years since 1970, which `time.localtime` takes


def check_content(state: CheckpointState, source: str) -> None:
    """Refuse a checkpoint that no fit can have written, whatever its model."""
    for part, value, check in _parts(state):
        is_valid = False
        with contextlib.suppress(Exception):  # a check may meet any value, and need not expect it
            is_valid = check(value)
        if not is_valid:
            raise CheckpointError(
                f"Cannot load {source}: its {part} is {brief(value)}, which is invalid, or from another version."
            )


@contextlib.contextmanager
def restoring_from(source: str) -> Iterator[None]:
    """Turn errors that a checkpoint's content causes into a CheckpointError with the checkpoint's name."""
    try:
        yield
    except (CyxtrainError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {brief(str(error))}"
        raise CheckpointError(f"Cannot load {source}: it does not fit what is trained: {reason}.") from error


def is_position(value: Any) -> bool:
    """Return whether a value may be a checkpoint's position in its training."""
    return all(_is_count(each, _MAX_COUNTS.get(name, _MAX_COUNT)) for name, each in value.items())


def is_run(value: Any) -> bool:
    """Return whether a value may be the run that a checkpoint is from."""
    return _fields(
        **dict.fromkeys(("launched", "data", "validation", "program", "origin"), _STRING),
        id=lambda name: re.fullmatch(r"\w{1,64}", name) is not None,  # a part of file names
        started=lambda seconds: _is_finite(seconds) and 0 <= seconds < _MAX_SECONDS,
        trainer=_is_count,
    )(value)


def is_loss_scale(value: Any) -> bool:
    """Return whether a value may be the state of a loss scale."""
    return _is_positive(value.get("scale")) and _is_count(value.get("steps"))


def is_rates(value: Mapping[str, Any]) -> bool:
    """Return whether a value may be the state of learning rates."""
    rates = _list_of(_is_finite)
    return (
        _is_positive(value.get("factor"))
        and _is_count(value.get("warmup_steps"))
        and _is_count(value.get("warm_steps"), value["warmup_steps"] + 1)
        and rates(value.get("targets"))
        and _fields(made_for=_is_count, first=rates)(value)
    )


def _parts(state: CheckpointState) -> Iterator[tuple[str, Any, _Check]]:
    """Yield (name, value, check) of each part of a checkpoint."""
    yield "position", state.position, is_position
    yield "run", state.run, is_run
    yield "history", state.history, _is_history
    yield "config", state.config, _is_config
    yield "arithmetic", state.arithmetic, _dict_of(_instance_of((str, int, float)))
    yield "versions", state.versions, _dict_of(_STRING)
    yield "world_size", state.world_size, lambda size: _is_count(size, _MAX_RANKS) and size > 0
    yield "ranks", state.ranks, _list_of(_RANK)
    yield "number of ranks", len(state.ranks), lambda count: count in (0, state.world_size)
    yield "optimizer", state.optimizer, _dict_of(_OPTIMIZER)
    yield "optimizer_groups", state.optimizer_groups, _list_of(lambda group: "params" in group and _GROUP(group))
    for name, check in _OTHERS.items():
        if name in state.others:
            yield name, state.others[name], check
    if state.history:
        complete_epochs = state.position.get("epoch", 0) - state.position.get("first_epoch", 0)
        missing_epochs = complete_epochs - len(state.history.get("epochs", ()))
        # The history lacks one if it was saved at the end of an epoch, before the epoch's numbers were complete.
        yield "position", state.position, lambda _: missing_epochs in (0, 1)


def _instance_of(kind: type | tuple[type, ...]) -> _Check:
    return lambda value: isinstance(value, kind)


def _list_of(check: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _dict_of(check: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(map(_STRING, value)) and all(map(check, value.values()))


def _fields(**checks: _Check) -> _Check:
    """Return a check of a dictionary: each named value that is present passes its own check."""

    def is_valid(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        present = [name for name in checks if name in value]
        return all(checks[name](value[name]) for name in present)

    return is_valid


def _is_count(value: Any, limit: int = _MAX_COUNT) -> bool:
    return type(value) is int and 0 <= value < limit  # a bool is an int, too


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 64)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return type(value) is float and 0 < value < math.inf


def _is_rate(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or _is_finite(value)


def _is_history(value: Any) -> bool:
    return value.keys() <= HISTORY.keys() and _fields(**HISTORY)(value)


def _is_config(value: Any) -> bool:
    known = {field.name for field in dataclasses.fields(DistributedTrainingConfig)}
    fields = {name: each for name, each in value.items() if name in known}
    if fields.get("amp") is not None:
        fields["amp"] = AMPConfig(**fields["amp"])
    DistributedTrainingConfig(**fields).validate()
    return True


_STRING = _instance_of(str)
_DICT = _instance_of(dict)
_NUMBERS = _list_of(_is_number)
HISTORY = {
    **dict.fromkeys(("train_losses", "train_accuracies", "val_losses", "val_accuracies"), _NUMBERS),
    **dict.fromkeys(("total_time_seconds", "samples_per_second"), _is_number),
    **dict.fromkeys(("effective_batch_size", "world_size"), _is_count),
    **dict.fromkeys(("epochs", "steps"), _list_of(_is_count)),
    "metrics": _dict_of(_NUMBERS),
    "validations": _list_of(_dict_of(_is_number)),
}
"""The fields of `TrainingHistory`."""
# A user's own optimizer may keep something else than a number under that name.
_OPTIMIZER = _fields(step=lambda step: not _is_number(step) or (_is_finite(step) and 0 <= step < _MAX_COUNT))
_RANK = _fields(generators=_DICT, sums=_list_of(_NUMBERS), metrics=_DICT)
_GROUP = _fields(params=_list_of(_STRING), lr=_is_rate)
_SCHEDULE = _fields(last_epoch=_is_number, base_lrs=lambda rates: bool(rates) and _list_of(_is_rate)(rates))
_RATES = {"scheduler": _fields(type=_STRING, state=_SCHEDULE), "rates": lambda value: not value or is_rates(value)}
_OTHERS = {
    **_RATES,
    "optimizers": _dict_of(lambda each: _fields(**_RATES, groups=_is_count)(each) and len(each) == len(_RATES) + 1),
    "loss_scale": lambda value: isinstance(value, dict) and (not value or is_loss_scale(value)),
    "compression": _DICT,
    "trained": _list_of(_STRING),
    "callbacks": _dict_of(_DICT),
    "stop_reason": _STRING,
    "before_end": _DICT,
    "columns": _dict_of(_list_of(_STRING)),
    "data": _DICT,
    "losses": _dict_of(_DICT),
    "buffers": _dict_of(_instance_of(torch.Tensor)),
}
