"""The private names of PyTorch that cyxtrain uses, and what happens in a version without one of them.

No other module names them (tests/unit/structure/test_private_names.py lists the few that a hot path reads). A public
name is used if PyTorch has one.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pkgutil
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cyxtrain.errors import CyxtrainError

TESTED_VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""Minor versions that the nightly tests run on; listed nowhere else."""


class PrivateName(NamedTuple):
    """A private name, what happens `without` it, and the first and last version in which it was `seen`."""

    name: str  # after a colon, the attribute of an object
    without: str
    seen: tuple[str, str] = (TESTED_VERSIONS[0], TESTED_VERSIONS[-1])


_SIGNALLING = "torch.utils.data._utils.signal_handling"
WORKER_LOOP = "torch.utils.data._utils.worker._worker_loop"
SET_WORKER_HANDLERS = f"{_SIGNALLING}._set_worker_signal_handlers"
SET_WORKER_PIDS = f"{_SIGNALLING}._set_worker_pids"
REMOVE_WORKER_PIDS = f"{_SIGNALLING}._remove_worker_pids"
CHECK_WORKERS = f"{_SIGNALLING}._error_if_any_worker_fails"
_WORKERS = "a signal to all processes ends the workers of DataLoaders, and the rank with them"
_HOOKS = "on accelerators the host waits for each step's gradients to be checked"
_LOOP = "tensors are processed one by one"
PRIVATE_NAMES = (
    PrivateName("torch.optim.Optimizer:_optimizer_step_pre_hooks", _HOOKS),
    PrivateName("torch.optim.Optimizer:_optimizer_step_post_hooks", _HOOKS),
    PrivateName("torch.optim.optimizer._global_optimizer_pre_hooks", _HOOKS),
    PrivateName("torch.optim.optimizer._global_optimizer_post_hooks", _HOOKS),
    PrivateName("torch.autograd.profiler._is_profiler_enabled", "a trace has no collectives of the ring"),
    PrivateName("torch.autograd._record_function_with_args_enter", "a trace has no collectives of the ring"),
    PrivateName("torch.autograd._record_function_with_args_exit", "a trace has no collectives of the ring"),
    PrivateName("torch.optim.Optimizer:_opt_called", "nothing: a schedule that does not read it does not warn"),
    PrivateName("torch.optim.Optimizer.step:_wrapped_by_lr_sched", _HOOKS),
    PrivateName(
        "torch.utils._foreach_utils._get_fused_kernels_supported_devices", "optimizers are fused on CPUs and CUDA alone"
    ),
    *(PrivateName(f"torch._foreach_{name}", _LOOP) for name in ("copy_", "lerp_", "norm", "mul_")),
    PrivateName("torch._C._nn.flatten_dense_tensors", "torch.cat makes one tensor of them"),
    PrivateName("torch._C._current_autograd_node", "a backward inside another one is found at its next gradient"),
    PrivateName("torch.autograd.Variable._execution_engine.queue_callback", "refused: DistributedDataParallel"),
    PrivateName("torch.Tensor._version", "finite tensors are checked again; a step in backward is not noticed"),
    PrivateName("torch.Tensor._backward_hooks", "refused: sending a tensor to the workers of a notebook"),
    PrivateName("torch.Tensor._cdata", "parameters whose tensors were swapped after wrapping are not averaged"),
    PrivateName("torch.Tensor._post_accumulate_grad_hooks", "refused: sending a tensor to the workers of a notebook"),
    PrivateName("torch.nn.Module:_parameters", "refused: what reads it"),
    PrivateName("torch.nn.Module:_buffers", "refused: what reads it"),
    PrivateName("torch.nn.Module:_modules", "refused: what reads it"),
    PrivateName("torch.nn.Module._load_from_state_dict", "a state of other names or shapes is refused"),
    PrivateName("torch.nn.Module:_load_state_dict_pre_hooks", "a module whose hooks rename its state is not loaded"),
    PrivateName("torch.nn.Module._compiled_call_impl", "refused: compile=True"),
    PrivateName("torch._inductor.cudagraph_trees.MarkStepBox", "CUDA graphs in a custom loop need marks, too"),
    PrivateName("torch.nn.utils.parametrize._inject_new_class", "refused: a model with parametrizations in a notebook"),
    PrivateName("torch.nn.utils.parametrize._inject_property", "refused: a model with parametrizations in a notebook"),
    PrivateName("torch.utils.data.DataLoader:_iterator", "nothing: there is no iterator to take from a copy"),
    *(PrivateName(name, _WORKERS) for name in (WORKER_LOOP, SET_WORKER_HANDLERS, SET_WORKER_PIDS)),
    *(PrivateName(name, _WORKERS) for name in (REMOVE_WORKER_PIDS, CHECK_WORKERS)),
    PrivateName("torch.optim.lr_scheduler.SequentialLR:_schedulers", "the lengths of its parts are not looked at"),
    PrivateName("torch.optim.lr_scheduler.SequentialLR:_milestones", "its length is not looked at"),
    PrivateName("torch._C._dynamo.eval_frame.set_code_exec_strategy", "torch.compiler.disable does the same, slower"),
    PrivateName("torch._C._dynamo.eval_frame._FrameExecStrategy", "torch.compiler.disable does the same, slower"),
    PrivateName("torch._C._dynamo.eval_frame._FrameAction", "torch.compiler.disable does the same, slower"),
    PrivateName("torch.distributed.distributed_c10d._set_pg_timeout", "torch.distributed.set_timeout, from 2.14 on"),
    PrivateName("torch.distributed.distributed_c10d._abort_process_group", "aborted groups are destroyed"),
    PrivateName("torch.distributed.distributed_c10d._world", "after an error only the default group is aborted"),
    PrivateName("torch._C._distributed_c10d.Backend", "the way of 2.13: a process group without a backend in C++"),
    PrivateName("torch.distributed.ProcessGroup._register_backend", "refused: the ring", ("2.14", "2.15")),
    PrivateName("torch.distributed.ProcessGroup._set_default_backend", "refused: the ring", ("2.14", "2.15")),
)
CALLED_BY_TORCH = (
    *("_allgather_base", "_reduce_scatter_base", "_get_backend", "_get_backend_name", "_device_types"),
    *("_set_default_timeout", "_set_sequence_number_for_group", "_get_sequence_number_for_group"),
    *("_set_group_name", "_set_group_desc", "_source_rank", "_supports_time_estimate"),
)
"""Private methods that the ring defines for PyTorch to call. A version that calls none of them loses nothing."""


def is_tested() -> bool:
    """Return whether cyxtrain is tested with this version of PyTorch."""
    return ".".join(torch.__version__.split(".")[:2]) in TESTED_VERSIONS


def tested_range() -> str:
    """Return the range of tested versions of PyTorch, such as "2.11 to 2.15"."""
    return f"{TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}"


def find(name: str) -> Any:
    """Return PyTorch's object of this name; None: this version does not have it."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


@contextlib.contextmanager
def replaced(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function of PyTorch within by `make(function)`; no effect if this version lacks it."""
    module, _, attribute = name.rpartition(".")
    place = find(module)
    original = find(name)
    if original is None:
        yield
        return
    setattr(place, attribute, make(original))
    try:
        yield
    finally:
        setattr(place, attribute, original)


def require(name: str, what: str) -> Any:
    """Return PyTorch's object of this name; `what` needs it."""
    found = find(name)
    if found is None:
        raise _refusal(name, what)
    return found


def _refusal(name: str, what: str) -> CyxtrainError:
    return CyxtrainError(
        f"PyTorch {torch.__version__} has no {name}, which {what} needs. Install one of {tested_range()}."
    )


def _attribute(obj: Any, name: str, what: str) -> Any:
    try:
        return getattr(obj, name)
    except AttributeError:
        raise _refusal(f"{type(obj).__name__}.{name}", what) from None


# Optimizers.

_devices_of_fused_kernels = find("torch.utils._foreach_utils._get_fused_kernels_supported_devices")
_global_hooks = [find(f"torch.optim.optimizer._global_optimizer_{when}_hooks") for when in ("pre", "post")]
_UNKNOWN = True  # a version that does not tell: hooks may exist


def has_fused_kernels(device_type: str) -> bool:
    """Return whether PyTorch's fused optimizers can step on devices of a type."""
    if _devices_of_fused_kernels is None:
        return device_type in ("cpu", "cuda")
    return device_type in _devices_of_fused_kernels()


def is_step_watched(optimizer: torch.optim.Optimizer, method: Any) -> bool:
    """Return whether hooks, or a method other than `method`, the class's original `step`, see each step."""
    own = vars(optimizer).get("step", method)
    if getattr(own, "_wrapped_by_lr_sched", False):  # PyTorch's schedules only record the call
        own = own.__wrapped__
    return bool(
        own is not method
        or type(optimizer).step is not method
        or getattr(optimizer, "_optimizer_step_pre_hooks", _UNKNOWN)
        or getattr(optimizer, "_optimizer_step_post_hooks", _UNKNOWN)
        or any(hooks is None or hooks for hooks in _global_hooks)
    )


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that a step was taken without `optimizer.step()`, so that a schedule does not warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def parts_of_schedule(scheduler: Any) -> Sequence[Any]:
    """Return the schedules that a schedule combines; most combine none."""
    return getattr(scheduler, "_schedulers", ())


def milestones_of(scheduler: Any) -> Sequence[int]:
    """Return the steps at which the later parts of a SequentialLR begin; empty if unknown."""
    return getattr(scheduler, "_milestones", ())


# Tensors.

_foreach_norm = find("torch._foreach_norm")
_foreach_mul = find("torch._foreach_mul_")
current_autograd_node: Callable[[], Any] = find("torch._C._current_autograd_node") or (lambda: None)


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


flatten: Callable[[list[Tensor]], Tensor] = find("torch._C._nn.flatten_dense_tensors") or _joined
"""Make one tensor of several."""


def _on_each(name: str) -> Callable[..., None]:
    """Return PyTorch's function for many tensors, or one that calls the method of each with its source."""

    def one_by_one(targets: Sequence[Tensor], sources: Sequence[Tensor], *arguments: float) -> None:
        for target, source in zip(targets, sources, strict=True):
            getattr(target, name)(source, *arguments)

    return find(f"torch._foreach_{name}") or one_by_one


copy_all = _on_each("copy_")
"""Copy each source into its target."""
lerp_all = _on_each("lerp_")
"""Move each target towards its source, by a weight: 1 is the whole way."""


def max_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest absolute value of each tensor, 0-dim; NaN if it contains one."""
    if _foreach_norm is not None:
        return list(_foreach_norm(tensors, math.inf))
    return [torch.linalg.vector_norm(tensor, math.inf) for tensor in tensors]


def multiply_all(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place by a number, or by a 0-dim tensor of their device and dtype."""
    if _foreach_mul is not None and tensors:
        _foreach_mul(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def version_of(tensor: Tensor) -> float:
    """Return how often a tensor was changed in place; NaN if PyTorch does not count."""
    # NaN is unequal to itself: a tensor without a count always looks changed.
    return getattr(tensor, "_version", float("nan"))


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place; zeros if PyTorch does not count."""
    return [getattr(tensor, "_version", 0) for tensor in tensors]


def tensor_of(parameter: Tensor) -> int:
    """Return the identity of the C++ tensor behind a parameter; 0 if unknown."""
    return getattr(parameter, "_cdata", 0)


def reattach_lost_hooks(parameter: Tensor) -> None:
    """Register the hooks of a parameter again after PyTorch has swapped its C++ tensor."""
    known = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if known is not None:
        parameter._post_accumulate_grad_hooks = known


def hooks_of(tensor: Tensor) -> tuple[list[Any], list[Any]]:
    """Return a tensor's gradient hooks and its post-accumulate-grad hooks."""
    what = "sending a tensor to another process"
    on_gradient = _attribute(tensor, "_backward_hooks", what) or {}
    after_accumulation = _attribute(tensor, "_post_accumulate_grad_hooks", what) or {}
    return [*on_gradient.values()], [*after_accumulation.values()]


_queue_callback = find("torch.autograd.Variable._execution_engine.queue_callback")


def require_end_of_backward() -> None:
    """Refuse a PyTorch without what `call_after_backward` needs."""
    if _queue_callback is None:
        raise _refusal("torch.autograd.Variable._execution_engine.queue_callback", "DistributedDataParallel")


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the current backward."""
    _queue_callback(callback)


# Modules.

LossModule: Any = nn.MSELoss.__base__
"""The base class of PyTorch's losses."""
BatchNormModule: Any = nn.BatchNorm1d.__base__
"""The base class of PyTorch's batch norms."""
NormModule: Any = BatchNormModule.__base__
"""The base class of PyTorch's norms with running statistics."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict of a module's own parameters."""
    found: dict[str, nn.Parameter | None] = _attribute(module, "_parameters", "cyxtrain")
    return found


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of a module's own buffers."""
    found: dict[str, Tensor | None] = _attribute(module, "_buffers", "cyxtrain")
    return found


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict of a module's direct children."""
    found: dict[str, nn.Module | None] = _attribute(module, "_modules", "cyxtrain")
    return found


def has_own_loading(module: nn.Module) -> bool:
    """Return whether a module loads its state by rules that PyTorch's layers do not have."""
    load = getattr(type(module), "_load_from_state_dict", None)
    is_own = not getattr(load, "__module__", "torch.nn.modules.").startswith("torch.nn.modules.")
    return is_own or bool(getattr(module, "_load_state_dict_pre_hooks", None))


def with_versions(state: dict[str, Any], own: Any) -> Any:
    """Return a state with the versions of modules in `own`, a `state_dict`, except for incomplete ones."""
    found: Any = OrderedDict(state)
    incomplete = {name.rpartition(".")[0] for name in own if name not in state}
    metadata = getattr(own, "_metadata", {})
    found._metadata = {path: each for path, each in metadata.items() if path not in incomplete}
    return found


def compiled_call(model: nn.Module) -> Any:
    """Return the compiled call that `model.compile()` has set, or None."""
    return _attribute(model, "_compiled_call_impl", "compile=True")


def set_compiled_call(model: nn.Module, call: Any) -> None:
    """Restore what `compiled_call` returned."""
    model._compiled_call_impl = call


def unmark_cuda_graph_steps() -> None:
    """Let PyTorch detect again where a step of a CUDA graph begins, after explicit marks."""
    box = find("torch._inductor.cudagraph_trees.MarkStepBox")
    if box is not None:
        box.mark_step_counter = 0


def inject_parametrizations(module: nn.Module, names: Sequence[str]) -> None:
    """Give a module its own class, in which parameters with these names are computed."""
    what = "a model with parametrizations in another process"
    require("torch.nn.utils.parametrize._inject_new_class", what)(module)
    for name in names:
        require("torch.nn.utils.parametrize._inject_property", what)(module, name)


_EVAL_FRAME = "torch._C._dynamo.eval_frame"
_skips = [find(f"{_EVAL_FRAME}.{name}") for name in ("_FrameExecStrategy", "_FrameAction", "set_code_exec_strategy")]


def skip_compiling(function: types.FunctionType) -> bool:
    """Exclude a function, and all that it calls, from compilation; return whether this version can."""
    if None in _skips:
        return False
    strategy, action, set_strategy = _skips
    set_strategy(function.__code__, strategy(action.SKIP, action.SKIP))
    return True


def forget_iterator(loader: torch.utils.data.DataLoader[Any]) -> None:
    """Remove the iterator from a copy of a loader: the original may be using its workers."""
    loader._iterator = None


# Profiling.

_begin_record = find("torch.autograd._record_function_with_args_enter")
_end_record = find("torch.autograd._record_function_with_args_exit")
_profiler = torch.autograd.profiler


def is_profiling() -> bool:
    """Return whether a profiler is active that accepts our events."""
    return _begin_record is not None and getattr(_profiler, "_is_profiler_enabled", False)


def begin_profiled(name: str, inputs: Sequence[Tensor]) -> Callable[[], None]:
    """Begin an event of the profiler, with the shapes of its inputs; return the function that ends it."""
    return functools.partial(_end_record, _begin_record(name, *inputs))


# Process groups.

_excepthooks: tuple[Any, Any] | None = None
"""`sys.excepthook` before and after PyTorch wrapped it."""


@contextlib.contextmanager
def noting_excepthook() -> Iterator[None]:
    """Remember, within, how init_process_group wraps `sys.excepthook` to prefix tracebacks with the rank.

    A wrapper left by a group that the program has destroyed itself is removed first.
    """
    global _excepthooks
    put_back_excepthook()
    before = sys.excepthook
    try:
        yield
    finally:
        _excepthooks = before, sys.excepthook


def put_back_excepthook() -> None:
    """Remove PyTorch's wrapper of `sys.excepthook`; a hook that the program has set since stays."""
    global _excepthooks
    if _excepthooks is not None and sys.excepthook is _excepthooks[1]:
        sys.excepthook = _excepthooks[0]
    _excepthooks = None


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of the default process group."""
    set_pg_timeout = find("torch.distributed.set_timeout")
    if set_pg_timeout is None:
        set_pg_timeout = require("torch.distributed.distributed_c10d._set_pg_timeout", "a backend but the ring")
    set_pg_timeout(timeout)


def identity_of_gpu(index: int) -> tuple[str, str]:
    """Return (UUID, PCI address) of a visible CUDA device; "" for one that this version of PyTorch lacks."""
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    address = [str(getattr(properties, f"pci_{part}_id", "")) for part in ("domain", "bus", "device")]
    return uuid, ":".join(address).strip(":")


_abort_process_group = find("torch.distributed.distributed_c10d._abort_process_group")


def process_groups() -> list[Any]:
    """Return the process groups of this process that PyTorch knows."""
    world = find("torch.distributed.distributed_c10d._world")
    names = getattr(world, "pg_names", None)
    return [dist.group.WORLD] if names is None else [*names]


def renumber_ranks(group: dist.ProcessGroup, world_size: int) -> None:
    """Renumber a group's ranks in PyTorch's table, from 0; it has only the default group."""
    ranks = getattr(find("torch.distributed.distributed_c10d._world"), "pg_group_ranks", {})
    if group in ranks:
        ranks[group] = {rank: rank for rank in range(world_size)}


def abort_process_groups() -> None:
    """Leave all process groups without waiting for pending operations, unlike `destroy_process_group`."""
    if _abort_process_group is not None:
        _abort_process_group()
        return
    for group in process_groups():
        group.abort()
    dist.destroy_process_group()


Backend: Any = find("torch._C._distributed_c10d.Backend") or object
"""The base class of backends written in Python; `torch.distributed.Backend` is a list of names."""


def _can_write_backends() -> bool:
    """Return whether a subclass of PyTorch's Backend can be constructed in Python."""
    try:
        type("_Probe", (Backend,), {})(0, 1)
    except TypeError:
        return False
    return True


BACKENDS_HAVE_A_CONSTRUCTOR = _can_write_backends()
"""From 2.14 on."""


def register_backend(group: dist.ProcessGroup, backend: Any, devices: Sequence[str]) -> None:
    """Register a backend with a process group, for some types of device."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    for device in devices:
        _attribute(group, "_register_backend", "the ring")(torch.device(device), kind, backend)
    _attribute(group, "_set_default_backend", "the ring")(kind)
