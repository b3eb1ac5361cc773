"""Whether a checkpoint's content is what a fit writes; checksums only tell that it is unchanged.

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
    for what, value, is_right in _parts(state):
        right = False
        with contextlib.suppress(Exception):
            right = is_right(value)
        if not right:
            raise CheckpointError(
                f"Cannot load {source}: its {what} is {brief(value)}, which is invalid, or from another version."
            )


@contextlib.contextmanager
def taking_over(source: str) -> Iterator[None]:
    """Turn errors that the content of a checkpoint causes into a CheckpointError with the checkpoint's name."""
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
    """Return whether a value may be the run that a checkpoint is of."""
    return _has(
        **dict.fromkeys(("launched", "data", "validation", "program", "origin"), _TEXT),
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
        and _has(made_for=_is_count, first=rates)(value)
    )


def _parts(state: CheckpointState) -> Iterator[tuple[str, Any, _Check]]:
    yield "position", state.position, is_position
    yield "run", state.run, is_run
    yield "history", state.history, _is_history
    yield "config", state.config, _is_config
    yield "arithmetic", state.arithmetic, _dict_of(_instance_of((str, int, float)))
    yield "versions", state.versions, _dict_of(_TEXT)
    yield "world_size", state.world_size, lambda size: _is_count(size, _MAX_RANKS) and size > 0
    yield "ranks", state.ranks, _list_of(_RANK)
    yield "number of ranks", len(state.ranks), lambda count: count in (0, state.world_size)
    yield "optimizer", state.optimizer, _dict_of(_OPTIMIZER)
    yield "optimizer_groups", state.optimizer_groups, _list_of(lambda group: "params" in group and _GROUP(group))
    for name, is_right in _OTHERS.items():
        if name in state.others:
            yield name, state.others[name], is_right
    if state.history:
        complete = state.position.get("epoch", 0) - state.position.get("first_epoch", 0)
        # One more if it was saved at the end of an epoch, before the epoch's numbers were complete.
        left = complete - len(state.history.get("epochs", ()))
        yield "position", state.position, lambda _: left in (0, 1)


def _instance_of(kind: type | tuple[type, ...]) -> _Check:
    return lambda value: isinstance(value, kind)


def _list_of(is_right: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _dict_of(is_right: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(isinstance(n, str) and is_right(e) for n, e in value.items())


def _has(**checks: _Check) -> _Check:
    """Return a check of a dictionary whose values have kinds, as far as they are present."""
    return lambda value: (
        isinstance(value, dict) and all(is_right(value[name]) for name, is_right in checks.items() if name in value)
    )


def _is_count(value: Any, limit: int = _MAX_COUNT) -> bool:
    return type(value) is int and 0 <= value < limit


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 64)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return type(value) is float and 0 < value < math.inf


def _is_rate(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or _is_finite(value)


def _is_history(value: Any) -> bool:
    return value.keys() <= HISTORY.keys() and _has(**HISTORY)(value)


def _is_config(value: Any) -> bool:
    known = {field.name for field in dataclasses.fields(DistributedTrainingConfig)}
    fields = {name: each for name, each in value.items() if name in known}
    if fields.get("amp") is not None:
        fields["amp"] = AMPConfig(**fields["amp"])
    DistributedTrainingConfig(**fields).validate()
    return True


_TEXT, _DICT = _instance_of(str), _instance_of(dict)
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
_OPTIMIZER = _has(step=lambda step: not _is_number(step) or (_is_finite(step) and 0 <= step < _MAX_COUNT))
_RANK = _has(generators=_DICT, sums=_list_of(_NUMBERS), metrics=_DICT)
_GROUP = _has(params=_list_of(_TEXT), lr=_is_rate)
_SCHEDULE = _has(last_epoch=_is_number, base_lrs=lambda rates: bool(rates) and _list_of(_is_rate)(rates))
_RATES = {"scheduler": _has(type=_TEXT, state=_SCHEDULE), "rates": lambda value: not value or is_rates(value)}
_OTHERS = {
    **_RATES,
    "optimizers": _dict_of(lambda each: _has(**_RATES, groups=_is_count)(each) and len(each) == len(_RATES) + 1),
    "loss_scale": lambda value: isinstance(value, dict) and (not value or is_loss_scale(value)),
    "compression": _DICT,
    "trained": _list_of(_TEXT),
    "callbacks": _dict_of(_DICT),
    "stop_reason": _TEXT,
    "before_end": _DICT,
    "data": _DICT,
    "losses": _dict_of(_DICT),
    "buffers": _dict_of(_instance_of(torch.Tensor)),
}
