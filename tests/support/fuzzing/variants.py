"""Changes of a program that must not change its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .spec import PLAIN, Spec

_WEIGHTS = ("params", "buffers")
_BOTH = (*_WEIGHTS, "history")
_change = dataclasses.replace


@dataclasses.dataclass(frozen=True)
class Variant:
    """Another program, and the parts of its outcome that must be the same to the bit, or up to rounding."""

    spec: Spec
    same: tuple[str, ...] = _BOTH
    close: tuple[str, ...] = ()


def has_best(spec: Spec) -> bool:
    """Return whether the metrics decide about the weights."""
    return bool(spec.keep_best or spec.load_best or spec.has_callback("early", "plateau", "checkpoint"))


def _ddp(spec: Spec, **fields: Any) -> Spec:
    given = spec.ddp or {"find_unused_parameters": True}  # as the trainer does without a config
    return _change(spec, ddp=given | fields)


def _no_validation(spec: Spec) -> Variant | None:
    if spec.validation not in ("pair", "loader", "named") or has_best(spec):
        return None
    names = (
        "validation validation_freq validate_every_n_steps validation_steps validation_batch_size weighted_validation"
    )
    return Variant(_change(spec, **{name: getattr(PLAIN, name) for name in names.split()}), _WEIGHTS)


def _container(spec: Spec) -> Variant | None:
    other = {"tensors": "loader", "numpy": "tensors", "tds": "mapds", "mapds": "tds"}.get(spec.data)
    weighs = spec.sample_weight or spec.class_weight
    splits = (spec.validation or "").startswith("split")
    is_named = spec.task == "multi" or spec.computes_loss
    if other is None or spec.batch[0] != "eff" or weighs or splits or is_named or spec.group_by_length:
        return None
    # A loader's batch size is the one that learning rates are given for.
    if other == "loader" and (spec.drop_last or spec.learning_rate_scaling):
        return None
    changed = _change(spec, data=other)
    # A tensor's ignored targets are known beforehand; those of a data set are counted in each step, and the loss of
    # uneven shares is then divided in another order.
    if spec.loss.startswith(("ce", "nn_ce", "tok")):
        return Variant(changed, (), _BOTH) if spec.is_exact else None
    # Rows that are collated lie otherwise in memory than rows of one tensor: the metrics differ in the last digit.
    return Variant(changed, _WEIGHTS, ("history",))


def _accumulation(spec: Spec) -> Variant | None:
    has_buffer = spec.loss == "mod_buf" or spec.model == "buffer"
    if spec.has_lists or spec.batch[0] != "eff" or spec.own_step or has_buffer or not spec.is_exact:
        return None
    if spec.learning_rate_scaling:  # from the rows of `accumulation_steps` micro-batches
        return None
    return Variant(_change(spec, accumulation_steps=3 if spec.accumulation_steps == 1 else 1), (), _BOTH)


def _without_ema(spec: Spec) -> Variant | None:
    if not any(name == "ema" and not (arguments[2] or arguments[3]) for name, *arguments in spec.callbacks):
        return None
    return Variant(_change(spec, callbacks=tuple(each for each in spec.callbacks if each[0] != "ema")), _WEIGHTS)


def _static_graph(spec: Spec) -> Variant | None:
    if spec.model in ("branch", "unused") or spec.own_step or spec.has_callback("unfreeze"):
        return None
    return Variant(_ddp(spec, static_graph=not spec.ddp.get("static_graph", False)))


def _workers(spec: Spec) -> Variant | None:
    if not spec.data.startswith("loader") or spec.data == "loader_stream":
        return None
    return Variant(_change(spec, workers=0 if spec.workers else 1))


def _bucket_size(spec: Spec) -> Variant:
    size = 0.0001 if spec.ddp.get("bucket_size_mb", 25) > 1 else 25
    return Variant(_ddp(spec, bucket_size_mb=size), (), _BOTH)


def _views(spec: Spec) -> Variant:
    return Variant(_ddp(spec, gradient_as_bucket_view=not spec.ddp.get("gradient_as_bucket_view", True)))


VARIANTS: dict[str, Callable[[Spec], Variant | None]] = {
    "no_validation": _no_validation,
    "container": _container,
    "accumulation": _accumulation,
    "without_ema": _without_ema,
    "static_graph": _static_graph,
    "workers": _workers,
    "bucket_size": _bucket_size,
    "bucket_views": _views,
    "find_unused": lambda spec: Variant(_ddp(spec, find_unused_parameters=True, static_graph=False)),
    "replica_checks": lambda spec: Variant(
        _change(spec, check_replicas_every_n_steps=0 if spec.check_replicas_every_n_steps == 1 else 1)
    ),
    "log_lines": lambda spec: Variant(_change(spec, log_every_n_steps=1)),
    "noted_rows": lambda spec: Variant(_change(spec, notes_rows=not spec.notes_rows)),
}
MAY_BE_REFUSED = ("container", "accumulation")
"""A batch that the first form cannot have may be wrong in the other one."""
