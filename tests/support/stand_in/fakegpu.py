"""The device "fakegpu": a stand-in for a GPU, which knows each operation that stops the host, and who asked for it.

`built` compiles device.cpp, once for each PyTorch and source; `register` makes PyTorch know the device. A process whose
PYTHONPATH has the folder (`environment`) registers it as it imports torch: PyTorch's own way for devices of others.
The backend "fakenccl" carries its tensors between processes. What they cannot do: streams that run in parallel, and
speed.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAME = "fakegpu"
MODULE = "fakedev"
_SOURCES = [Path(__file__).with_name(name) for name in ("device.cpp", "fakenccl.h")]
stops: collections.Counter[tuple[str, str]] = collections.Counter()
"""How often each (kind, place in the package) has been told, while `counting`."""
_active = [False]
_WRITER = "cyxtrain-checkpoint"


def why_not() -> str:
    """Returns why the device cannot be built here; "": it can."""
    if sys.platform != "linux":
        return f"it is built on Linux, this is {sys.platform}"
    return "" if shutil.which("g++") else "there is no g++"


def built() -> Path:
    """Builds the device in a folder of this user's, unless it is there, and returns the folder.

    It is kept from run to run: another source, PyTorch or Python has another folder. One process builds, others wait.
    """
    import fcntl  # not on Windows

    files = [each.read_bytes() for each in (*_SOURCES, Path(__file__))]
    parts = [*files, torch.__version__.encode(), sys.version.encode()]
    key = hashlib.sha256(b"|".join(parts)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"cyxtrain-stand-in-{os.getuid()}-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: set TMPDIR to a folder of your own")
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(folder)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Returns the variables with which a new process has the device, once it has imported torch; so have its children.

    `folder` is what `built` returned. PYTHONPATH is this process's own, after the folders of the tests.
    """
    support = Path(__file__).parents[1]
    tests = sorted({str(path.parent) for path in support.parent.rglob("test_*.py")})
    path = [str(folder), str(support.parents[1]), str(support), *tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def build(folder: Path) -> None:
    """Compiles the device for this Python and this PyTorch, in about half a minute; once for a folder."""
    target, torch_folder = folder / f"{MODULE}.so", Path(torch.__file__).parent
    if target.exists():
        return
    folders = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    libraries = ["-L", str(torch_folder / "lib"), "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    options = ["-O0", "-std=c++20", "-fPIC", f"-DTORCH_EXTENSION_NAME={MODULE}", *(f"-I{each}" for each in folders)]
    made = folder / f"{os.getpid()}.so"
    command = ["g++", "-shared", *options, str(_SOURCES[0]), "-o", str(made), *libraries]
    subprocess.run(command, check=True, timeout=300)
    info = folder / f"{NAME}-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = stand_in.fakegpu:load\n")
    made.replace(target)  # whole, or not there


def load() -> None:
    """Registers the device of the folder on PYTHONPATH: PyTorch calls it at the end of its import."""
    module = importlib.util.find_spec(MODULE)
    assert module is not None
    assert module.origin is not None
    register(Path(module.origin).parent)


def register(folder: Path) -> Any:
    """Makes PyTorch know the device that was built in a folder; returns its module. Harmless where it knows it."""
    if MODULE in sys.modules:
        return sys.modules[MODULE]
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
    torch.nn.Module._apply = _swapping(torch.nn.Module._apply)  # type: ignore[method-assign]
    device.listen(_hear)
    dist.Backend.register_backend("fakenccl", _make_fakenccl, devices=[NAME])
    return device


def _swapping(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `nn.Module._apply` as it keeps parameters the same objects, where they change to or from this device.

    For CUDA it does so by itself. PyTorch's setting for devices of others would also change what never moves.
    """

    def apply_by_swapping(module: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
        parameters = list(module.parameters(recurse=False))
        moves = any(fn(torch.empty(0, dtype=p.dtype, device=p.device)).device != p.device for p in parameters[:1])
        if not moves:
            return apply(module, fn, recurse)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, fn, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return apply_by_swapping


def _make_fakenccl(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Makes the backend "fakenccl" of a process group: over Gloo, for this device alone."""
    device = sys.modules[MODULE]
    if "FakeNCCL" not in vars(device):
        device.define_fakenccl()
    return device.FakeNCCL(dist.ProcessGroupGloo(store, rank, world_size, timeout))


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
    # The thread that writes checkpoints may wait: the steps go on meanwhile.
    if not _active[0] or threading.current_thread().name.startswith(_WRITER):
        return
    place = "?"
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        _, inside, file = frame.f_code.co_filename.rpartition(f"{os.sep}cyxtrain{os.sep}")
        if inside:
            place = f"{file}:{frame.f_lineno}"
            break
        frame = frame.f_back
    stops[kind, place] += 1
