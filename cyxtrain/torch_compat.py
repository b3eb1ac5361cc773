"""PyTorch's private names that cyxtrain uses, and what happens in a version without one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

TESTED_VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""Minor versions that the nightly tests run on."""

Backend: Any = _c10d.Backend
"""What a backend written in Python subclasses; `torch.distributed.Backend` is a list of names."""


def is_tested() -> bool:
    """Returns whether cyxtrain is tested with this version of PyTorch."""
    return ".".join(torch.__version__.split(".")[:2]) in TESTED_VERSIONS


def tested_range() -> str:
    """Returns which versions of PyTorch cyxtrain is tested with, in words."""
    return f"{TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}"


def _can_write_backends() -> bool:
    """Returns whether a subclass of PyTorch's Backend can be constructed in Python."""
    try:
        type("_Probe", (Backend,), {})(0, 1)
    except TypeError:
        return False
    return True


BACKENDS_HAVE_A_CONSTRUCTOR = _can_write_backends()
"""From 2.14 on."""


def register_backend(group: dist.ProcessGroup, backend: Any, devices: Sequence[str]) -> None:
    """Makes a backend that of a process group, for some types of device."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
