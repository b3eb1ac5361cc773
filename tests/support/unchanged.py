"""One world of ranks in which many pieces of other people's code run, each told apart; no pytest here."""

from __future__ import annotations

import functools
import importlib
import os
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import cyxtrain  # noqa: F401 - it registers the backend "ring"

TIMEOUT = timedelta(seconds=60)
MISSING = "not installed: "


def run_cases(module: str, names: list[str], folder: str) -> dict[str, str | None]:
    """Runs cases of a module in one world; returns for each None, or what went wrong."""
    os.environ["TEST_FOLDER"] = folder
    dist.init_process_group("ring", timeout=TIMEOUT)
    found: dict[str, str | None] = {}
    for name in names:
        try:
            getattr(importlib.import_module(module), name)()
            found[name] = None
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "torchmetrics":
                found[name] = f"{MISSING}torchmetrics"
                continue
            found[name] = traceback.format_exc()
            break  # the ranks may be out of step: what came after it would only confuse
    dist.destroy_process_group()
    return dict.fromkeys(names, "not run: another case failed before it") | found


def join_as(backend: str) -> dict[str, Any]:
    """Joins under another name of the backend; returns what came of it."""
    dist.init_process_group(backend, timeout=TIMEOUT)
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    refused = str(error_of(lambda: dist.all_reduce(torch.ones(3, device="meta"))))
    found = {"sum": tensor.item(), "class": type(dist.group.WORLD).__name__, "refused": refused}
    dist.destroy_process_group()
    return found


@functools.cache
def gloo() -> Any:
    """PyTorch's own CPU backend, with the same ranks: what the ring is compared with."""
    return dist.new_group(backend="gloo", timeout=TIMEOUT)


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 0.0) -> None:
    """Compares two state dicts: bit by bit, or up to a tolerance of rounding."""
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        msg = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(tensor, theirs[name], rtol=10 * tolerance, atol=tolerance, msg=msg)


def rounding(tolerance: float = 1e-6) -> float:
    """How far sums in two orders may part: two numbers add up to the same in either order, three do not."""
    return 0.0 if dist.get_world_size() == 2 else tolerance


def error_of(call: Any) -> BaseException:
    """Returns the error that a call raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error")
