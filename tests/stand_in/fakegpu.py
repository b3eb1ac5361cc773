"""The device "fakegpu": a stand-in for a GPU, which knows each operation that stops the host, and who asked for it.

`build` compiles device.cpp; `register` makes PyTorch know the device. What it cannot do: streams that run beside each
other, NCCL, and speed.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "fakegpu"
MODULE = "fakedev"
_SOURCE = Path(__file__).with_name("device.cpp")
stops: collections.Counter[tuple[str, str]] = collections.Counter()
"""How often each (kind, place in the package) has been told, while `counting`."""
_active = [False]


def why_not() -> str:
    """Returns why the device cannot be built here; "": it can."""
    if sys.platform != "linux":
        return f"it is built on Linux, this is {sys.platform}"
    return "" if shutil.which("g++") else "there is no g++"


def build(folder: Path) -> None:
    """Compiles the device for this Python and this PyTorch, in about half a minute; once for a folder."""
    target, torch_folder = folder / f"{MODULE}.so", Path(torch.__file__).parent
    if target.exists():
        return
    folders = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    libraries = ["-L", str(torch_folder / "lib"), "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    options = ["-O0", "-std=c++20", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={MODULE}"]
    made = folder / f"{os.getpid()}.so"
    includes = [f"-I{each}" for each in folders]
    subprocess.run(["g++", *options, *includes, str(_SOURCE), "-o", str(made), *libraries], check=True, timeout=300)
    made.replace(target)  # whole, or not there


def register(folder: Path) -> Any:
    """Makes PyTorch know the device that was built in a folder; returns its module."""
    sys.path.insert(0, str(folder))
    device = __import__(MODULE)
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(NAME)
    vars(module).update(
        is_available=lambda: device.device_count() > 0,
        is_initialized=lambda: True,
        device_count=device.device_count,
        current_device=device.current_device,
        set_device=lambda given: device.set_device(torch.device(given).index if isinstance(given, str) else int(given)),
        _is_in_bad_fork=lambda: False,
        manual_seed=lambda seed: None,  # its generator is the CPU's: ranks on either draw the same
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda given=None: torch.get_rng_state(),
        set_rng_state=lambda state, given=None: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        memory_allocated=lambda given=None: device.memory_allocated(),
        max_memory_allocated=lambda given=None: device.max_memory_allocated(),
        reset_peak_memory_stats=lambda given=None: device.reset_peak_memory_stats(),
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.__future__.set_swap_module_params_on_conversion(True)
    device.listen(_hear)
    return device


@contextlib.contextmanager
def counting() -> Iterator[collections.Counter[tuple[str, str]]]:
    """Within, what the device tells is counted; `stops` begins anew."""
    stops.clear()
    _active[0] = True
    try:
        yield stops
    finally:
        _active[0] = False


def start_counting() -> None:
    """Does as `counting`, from a callback."""
    stops.clear()
    _active[0] = True


def stop_counting() -> None:
    """Ends `start_counting`."""
    _active[0] = False


def _hear(kind: str) -> None:
    if not _active[0]:
        return
    own = [frame for frame in traceback.extract_stack() if f"{os.sep}cyxtrain{os.sep}" in frame.filename]
    place = "?"
    if own:
        place = f"{own[-1].filename.rpartition(f'{os.sep}cyxtrain{os.sep}')[2]}:{own[-1].lineno}"
    stops[kind, place] += 1
