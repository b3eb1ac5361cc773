"""What a checkpoint says of its fit, looked at before anything believes it: checksums only tell that it is as written.

What is absent is passed over here, as older versions have not written all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from cyxtrain.checkpoint.checkpoint_file import CheckpointState
from cyxtrain.config import AMPConfig, DistributedTrainingConfig
from cyxtrain.errors import CheckpointError, CyxtrainError, brief
from cyxtrain.progress.history import TrainingHistory

_Check = Callable[[Any], bool]

_MOST = 10**12
"""No training has as many epochs, steps or fits."""
_MOST_OF = {"samples": 10**15, "batches": 10**15, "order": 1 << 64}
_MOST_RANKS = 10**6
_NUMBERS = (int, float, torch.Tensor)


def check_content(state: CheckpointState, source: str) -> None:
    """Refuses a checkpoint that holds what no fit writes, whatever its model is.

    Args:
        state: All of it.
        source: What it is, for messages, such as "checkpoint run/epoch-0003.ckpt".

    Raises:
        CheckpointError: With the first part that is wrong.
    """
    for what, value, is_right in _parts(state):
        right = False
        with contextlib.suppress(Exception):
            right = is_right(value)
        if not right:
            raise CheckpointError(
                f"Cannot load {source}: its {what} is {brief(value)}, which is none, or that of another version."
            )


@contextlib.contextmanager
def taking_over(source: str) -> Iterator[None]:
    """Turns whatever the content of a checkpoint makes the code within raise into an error that names the checkpoint.

    Raises:
        CheckpointError: In place of errors that are not this package's.
    """
    try:
        yield
    except (CyxtrainError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {brief(str(error))}"
        raise CheckpointError(f"Cannot load {source}: it does not fit what is trained: {reason}.") from error


def is_position(value: Any) -> bool:
    """Returns whether a value may be where in its training a checkpoint was made."""
    return all(_is_count(each, _MOST_OF.get(name, _MOST)) for name, each in value.items())


def is_run(value: Any) -> bool:
    """Returns whether a value may be which run a checkpoint is of."""
    return _has(
        id=_is_text, started=_is_finite, launched=_is_text, trainer=_is_count, data=_is_text, validation=_is_text
    )(value)


def same_kinds(saved: Any, own: Any) -> bool:
    """Returns whether a part of a saved state may take the place of the present one: a number that of a number.

    Args:
        saved: Of a checkpoint.
        own: What is there; in the place of None may come anything but a text. Names that are only in one of two
            dictionaries are passed over, and so is what lists hold; tuples have their length.
    """
    if own is None:
        return not isinstance(saved, str)
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        return all(same_kinds(saved[name], own[name]) for name in own if name in saved)
    if isinstance(own, tuple) and isinstance(saved, (list, tuple)):
        return len(own) == len(saved) and all(map(same_kinds, saved, own))
    numbers = all(isinstance(each, _NUMBERS) and not isinstance(each, bool) for each in (saved, own))
    return numbers or type(own) is type(saved)


def _parts(state: CheckpointState) -> Iterator[tuple[str, Any, _Check]]:
    """Gives what there is to look at: (what it is, the value, whether that is right)."""
    yield "position", state.position, is_position
    yield "run", state.run, is_run
    yield "history", state.history, _is_history
    yield "config", state.config, _is_config
    yield "arithmetic", state.arithmetic, _dict_of(lambda each: isinstance(each, (str, int, float)))
    yield "versions", state.versions, _dict_of(_is_text)
    yield "world_size", state.world_size, lambda size: _is_count(size, _MOST_RANKS) and size > 0
    yield "ranks", state.ranks, _list_of(_RANK)
    yield "number of ranks", len(state.ranks), lambda count: count in (0, state.world_size)
    yield "optimizer", state.optimizer, _dict_of(_OPTIMIZER)
    yield "optimizer_groups", state.optimizer_groups, _list_of(lambda group: "params" in group and _GROUP(group))
    for name, is_right in _OTHERS.items():
        if name in state.others:
            yield name, state.others[name], is_right
    if state.history:
        complete = state.position.get("epoch", 0) - state.position.get("first_epoch", 0)
        # One more where it was saved at the end of an epoch, before its numbers were complete.
        left = complete - len(state.history.get("epochs", ()))
        yield "position", state.position, lambda _: left in (0, 1)


def _list_of(is_right: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _dict_of(is_right: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(isinstance(n, str) and is_right(e) for n, e in value.items())


def _has(**checks: _Check) -> _Check:
    """Returns a check of a dictionary in which some names have values of a kind, where they are there."""
    return lambda value: (
        isinstance(value, dict) and all(is_right(value[name]) for name, is_right in checks.items() if name in value)
    )


def _is_count(value: Any, most: int = _MOST) -> bool:
    return type(value) is int and 0 <= value < most


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 64)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_rate(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or _is_finite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_history(value: Any) -> bool:
    TrainingHistory.from_dict(value)
    numbers = [each for each in value.values() if not isinstance(each, (list, dict))]
    lists = [each for each in (*value.values(), *value.get("metrics", {}).values()) if isinstance(each, list)]
    return all(map(_is_number, numbers)) and all(map(_list_of(_is_number), lists)) and _COUNTS(value)


def _is_config(value: Any) -> bool:
    known = {field.name for field in dataclasses.fields(DistributedTrainingConfig)}
    fields = {name: each for name, each in value.items() if name in known}
    if fields.get("amp") is not None:
        fields["amp"] = AMPConfig(**fields["amp"])
    DistributedTrainingConfig(**fields).validate()
    return True


_COUNTS = _has(epochs=_list_of(_is_count), effective_batch_size=_is_count, world_size=_is_count)
# A user's own optimizer may keep something else than a number under that name.
_OPTIMIZER = _has(step=lambda step: not _is_number(step) or (math.isfinite(step) and 0 <= step < _MOST))
_RANK = _has(generators=_is_dict, sums=_list_of(_list_of(_is_number)), metrics=_is_dict)
_GROUP = _has(params=_list_of(_is_text), lr=_is_rate)
_SCHEDULE = _has(last_epoch=_is_number, base_lrs=lambda rates: bool(rates) and _list_of(_is_rate)(rates))
_OTHERS = {
    "scheduler": _has(type=_is_text, state=_SCHEDULE),
    "rates": _has(
        factor=_is_finite,
        warmup_steps=_is_count,
        warm_steps=_is_count,
        targets=_list_of(_is_finite),
        made_for=_is_count,
        first=_list_of(_is_finite),
    ),
    "loss_scale": _has(scale=_is_finite, steps=_is_count),
    "compression": _is_dict,
    "trained": _list_of(_is_text),
    "callbacks": _dict_of(_is_dict),
    "data": _is_dict,
    "losses": _dict_of(_is_dict),
    "buffers": _dict_of(lambda each: isinstance(each, torch.Tensor)),
}
"""Of what else has a state, as far as it is this package's."""
