"""PyTorch's own DistributedDataParallel over "ring": what the ranks of test_unchanged_ddp.py do."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with its own types.

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from unchanged import assert_same, error_of, gloo, rounding

STEPS = 4
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
Register = Callable[[DistributedDataParallel], object]


class Net(nn.Module):
    """Odd sizes, a buffer, and a branch that may stay unused."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(13, 31)
        self.norm = nn.BatchNorm1d(31)
        self.branch = nn.Linear(31, 31, dtype=dtype)
        self.last = nn.Linear(31, 3)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        if branch:
            hidden = hidden + self.branch(hidden.to(self.branch.weight.dtype)).to(hidden.dtype)
        output: Tensor = self.last(hidden)
        return output


def always(step: int) -> bool:
    return True


class Trained:
    """A model under DDP in one group, trained for some steps of data that depend on the rank.

    Args:
        group: A process group; None is the default one, the ring.
        model: What is trained; a `Net` by default.
        hook: Called with the wrapped model, to register what it likes.
        branch: Whether a rank uses the branch in a step.
        accumulate: Backward passes per step, all but the last under no_sync.
        steps: How many.
        compiled: Whether the wrapped model is compiled.
        more: Settings of DistributedDataParallel.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        model: Callable[[], nn.Module] | None = None,
        *,
        hook: Register | None = None,
        branch: Callable[[int], bool] = always,
        accumulate: int = 1,
        steps: int = STEPS,
        compiled: bool = False,
        **more: Any,
    ) -> None:
        torch.manual_seed(dist.get_rank())  # DDP itself is to make them equal
        self.model = Net() if model is None else model()
        self.ddp = DistributedDataParallel(self.model, process_group=group, **more)
        if hook is not None:
            hook(self.ddp)
        call = torch.compile(self.ddp, backend="aot_eager") if compiled else self.ddp
        optimizer = torch.optim.SGD(self.ddp.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(100 + dist.get_rank())
        for step in range(steps):
            optimizer.zero_grad()
            for turn in range(accumulate):
                with contextlib.ExitStack() as stack:
                    if turn < accumulate - 1:
                        stack.enter_context(self.ddp.no_sync())
                    arguments = (branch(step),) if isinstance(self.model, Net) else ()
                    call(torch.randn(8, 13), *arguments).square().mean().backward()
            optimizer.step()
        self.state = self.model.state_dict()


def compare(tolerance: float = 1e-6, **settings: Any) -> Trained:
    ours, theirs = Trained(None, **settings), Trained(gloo(), **settings)
    assert_same(ours.state, theirs.state, rounding(tolerance))
    everyone: list[Any] = [None] * dist.get_world_size()
    flat = torch.cat([parameter.detach().flatten().double() for parameter in ours.model.parameters()])
    dist.all_gather_object(everyone, flat)
    assert all(torch.equal(flat, other) for other in everyone)  # the replicas never part
    return ours


# --- modes ----------------------------------------------------------------------------------------------------------


def by_default() -> None:
    compare()


def with_unused_parameters() -> None:
    # Another rank each step, once nobody.
    turn = lambda step: step > 0 and step % dist.get_world_size() != dist.get_rank()  # noqa: E731
    ours = compare(find_unused_parameters=True, branch=turn)
    assert ours.ddp.find_unused_parameters


def with_a_static_graph() -> None:
    compare(static_graph=True)
    compare(static_graph=True, branch=lambda step: False)


def with_gradients_as_views_of_buckets() -> None:
    ours = compare(gradient_as_bucket_view=True, bucket_cap_mb=0.001)
    assert isinstance(ours.model, Net)
    gradient = ours.model.first.weight.grad
    assert gradient is not None
    assert gradient._is_view()


def with_many_small_buckets() -> None:
    compare(bucket_cap_mb=0.0001)
    seen: set[int] = set()

    def register(ddp: DistributedDataParallel) -> None:
        def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            seen.add(bucket.index())
            return default_hooks.allreduce_hook(group, bucket)

        ddp.register_comm_hook(ddp.process_group, hook)

    compare(bucket_cap_mb=0.0001, hook=register)
    assert len(seen) > 3


def with_no_sync() -> None:
    compare(accumulate=3)


def with_and_without_broadcast_buffers() -> None:
    ours, without = compare(broadcast_buffers=True), compare(broadcast_buffers=False)
    same = torch.equal(ours.state["norm.running_mean"], without.state["norm.running_mean"])
    assert same == (dist.get_rank() == 0)  # the others begin each step with the buffers of rank 0


def with_mixed_dtypes() -> None:
    # Three numbers of eight bits add up to another one in another order.
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.bfloat16, 1e-2)):
        compare(tolerance, model=lambda dtype=dtype: Net(dtype))


def with_forward_in_evaluation() -> None:
    ours = Trained(None)
    ours.ddp.eval()
    with torch.no_grad():
        assert ours.ddp(torch.ones(2, 13)).shape == (2, 3)


def as_one_process_with_all_the_samples() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(13, 31), nn.Tanh(), nn.Linear(31, 3)).double()

    torch.set_default_dtype(torch.float64)
    try:
        ours = Trained(None, model)
        torch.manual_seed(0)
        alone = model()
        optimizer = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
        batches = []
        for rank in range(dist.get_world_size()):
            torch.manual_seed(100 + rank)
            batches.append([torch.randn(8, 13) for _ in range(STEPS)])
        for parts in zip(*batches, strict=True):
            optimizer.zero_grad()
            alone(torch.cat(parts)).square().mean().backward()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(ours.state[name], tensor, rtol=1e-12, atol=1e-14)


def with_debugging_on() -> None:
    """DETAIL wraps PyTorch's own backends in one that checks; a backend in Python it leaves as it is."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        part: Any = dist.new_group()
        assert type(part).__name__ == "RingProcessGroup"
        ours = Trained(part)
        assert ours.ddp._get_ddp_logging_data()["backend_name"] == "ring"
    finally:
        dist.set_debug_level(before)
    assert_same(ours.state, Trained(gloo()).state, rounding())


def that_is_compiled() -> None:
    """The gradients of the compiled model come in DDP's buckets; its buffers are broadcast between compiled parts."""
    torch._dynamo.reset()
    plain, compiled = Trained(None), Trained(None, compiled=True)
    assert_same(compiled.state, plain.state, 1e-6)
    assert_same(compiled.state, Trained(gloo(), compiled=True).state, rounding())


def sync_batch_norm_wants_a_gpu_over_gloo_too() -> None:
    for group in (None, gloo()):
        model = nn.SyncBatchNorm(13, process_group=group)
        error = error_of(lambda model=model: model(torch.randn(4, 13)))
        assert isinstance(error, ValueError)
        assert "SyncBatchNorm expected input tensor to be on GPU" in str(error), error


# --- other optimizers, uneven inputs, sparse gradients --------------------------------------------------------------


def trained(
    group: dist.ProcessGroup | None,
    make: Callable[[], nn.Module],
    make_optimizer: Callable[[DistributedDataParallel], torch.optim.Optimizer],
    *,
    steps: int = STEPS,
    around: Callable[[DistributedDataParallel, Any], contextlib.AbstractContextManager[Any]] | None = None,
) -> tuple[nn.Module, Any]:
    """Train a model under DDP in one group for some steps, within a context; return it and its optimizer."""
    torch.manual_seed(0)
    model = make()
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = make_optimizer(ddp)
    torch.manual_seed(dist.get_rank())
    with contextlib.nullcontext() if around is None else around(ddp, optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.randn(8, 13)).square().mean().backward()
            optimizer.step()
    return model, optimizer


def linear() -> nn.Module:
    return nn.Linear(13, 3)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 31), nn.Tanh(), nn.Linear(31, 3))


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 31), nn.Tanh(), nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 3))


def sgd(ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=0.1)


def joined_with_uneven_inputs() -> None:
    def state(group: dist.ProcessGroup | None) -> dict[str, Tensor]:
        def sharded(ddp: DistributedDataParallel) -> torch.optim.Optimizer:
            return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, process_group=group, lr=0.1)

        steps = 2 + 3 * dist.get_rank()
        return trained(group, two_layers, sharded, steps=steps, around=lambda *both: Join([*both]))[0].state_dict()

    assert_same(state(None), state(gloo()), rounding())


def joined_with_a_divisor_that_shrinks() -> None:
    """PyTorch's C++ alone holds the work of the collective that counts the ranks, and waits for it in backward."""

    def join(ddp: DistributedDataParallel, _: Any) -> Any:
        return ddp.join(divide_by_initial_world_size=False)

    ours, theirs = (trained(group, linear, sgd, steps=2 + dist.get_rank(), around=join)[0] for group in (None, gloo()))
    assert_same(ours.state_dict(), theirs.state_dict(), rounding())


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 5, sparse=True)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.table((x[:, 0].abs() * 5).long().clamp(max=19)))
        return output


def with_sparse_gradients() -> None:
    ours, theirs = (trained(group, Embedded, sgd)[0] for group in (None, gloo()))
    gradient = ours.get_parameter("table.weight").grad
    assert gradient is not None
    assert gradient.is_sparse
    assert_same(ours.state_dict(), theirs.state_dict(), rounding())


def joined_with_a_throw_on_early_end() -> None:
    ddp = DistributedDataParallel(nn.Linear(13, 3))

    def uneven() -> None:
        with Join([ddp], throw_on_early_termination=True):
            for _ in range(1 + dist.get_rank()):
                ddp(torch.randn(8, 13)).sum().backward()

    assert "exhausted" in str(error_of(uneven))


# --- communication hooks --------------------------------------------------------------------------------------------


def on_its_group(hook: Hook) -> Register:
    """Return a function that registers a hook whose state is the process group."""
    return lambda ddp: ddp.register_comm_hook(ddp.process_group, hook)


def hooks_that_compress() -> None:
    compare(hook=on_its_group(default_hooks.allreduce_hook), bucket_cap_mb=0.001)
    compare(1e-4, hook=on_its_group(default_hooks.fp16_compress_hook), bucket_cap_mb=0.001)
    wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    compare(1e-4, hook=on_its_group(wrapped), bucket_cap_mb=0.001)


def the_bf16_hook() -> None:
    """DDP lets it pass under its name only where there is NCCL; what it does works wherever there is bfloat16."""
    compare(1e-3, hook=on_its_group(lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)))


def a_hook_that_does_nothing() -> None:
    ours = Trained(None, hook=on_its_group(debugging_hooks.noop_hook))
    assert_same(ours.state, Trained(gloo(), hook=on_its_group(debugging_hooks.noop_hook)).state)


def power_sgd(wrapper: Callable[[Hook], Hook] = lambda hook: hook, **settings: Any) -> Register:
    def register(ddp: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(ddp.process_group, start_powerSGD_iter=2, **settings)
        ddp.register_comm_hook(state, wrapper(powerSGD_hook.powerSGD_hook))

    return register


def the_power_sgd_hook() -> None:
    """In one bucket: with several, Gloo's threads run the callbacks' collectives in any order, and it aborts."""
    for hook in (
        power_sgd(matrix_approximation_rank=2, min_compression_rate=1),
        power_sgd(matrix_approximation_rank=2, min_compression_rate=1, warm_start=False),
        power_sgd(default_hooks.fp16_compress_wrapper, min_compression_rate=1),
    ):
        compare(1e-3, hook=hook, steps=8)


def the_power_sgd_hook_in_several_buckets() -> None:
    """Where nothing is left out, it is an average."""
    everything = power_sgd(matrix_approximation_rank=31, min_compression_rate=0)
    ours = Trained(None, hook=everything, steps=8, bucket_cap_mb=0.001)
    plain = Trained(None, steps=8, bucket_cap_mb=0.001)
    for name, tensor in plain.state.items():
        torch.testing.assert_close(ours.state[name], tensor, rtol=1e-3, atol=1e-5)


def the_batched_power_sgd_hook_fails_over_gloo_too() -> None:
    def register(ddp: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(ddp.process_group, start_powerSGD_iter=2, min_compression_rate=1)
        ddp.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)

    for group in (None, gloo()):
        assert isinstance(error_of(lambda group=group: Trained(group, hook=register, steps=8)), AssertionError)


def the_post_local_sgd_hook() -> None:
    def state(group: dist.ProcessGroup | None) -> dict[str, Tensor]:
        def averaging(ddp: DistributedDataParallel) -> torch.optim.Optimizer:
            subgroup = dist.new_subgroups(group_size=1, backend=dist.get_backend(group))[0]
            hooked = post_localSGD_hook.PostLocalSGDState(process_group=group, subgroup=subgroup, start_localSGD_iter=2)
            ddp.register_comm_hook(hooked, post_localSGD_hook.post_localSGD_hook)
            averager = averagers.PeriodicModelAverager(period=2, warmup_steps=2, process_group=group)
            return PostLocalSGDOptimizer(sgd(ddp), averager)

        return trained(group, linear, averaging, steps=7)[0].state_dict()

    assert_same(state(None), state(gloo()), rounding())


def the_quantization_hooks() -> None:
    """They read an all_gather's result as NCCL gives it; over Gloo they fail."""
    plain = Trained(None)
    for hook in (quantization_hooks.quantization_pertensor_hook, quantization_hooks.quantization_perchannel_hook):
        ours = Trained(None, hook=on_its_group(hook))
        far = [(ours.state[name] - tensor).abs().max() for name, tensor in plain.state.items()]
        assert 0 < max(far) < 0.02, far  # eight bits


def builtin_hooks() -> None:
    """PyTorch's private hooks in C++: one works; the other wants a future that Python cannot make, and says so."""
    compare(hook=lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE))
    half = lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # noqa: E731
    error = error_of(lambda: Trained(None, hook=half))
    assert isinstance(error, RuntimeError)
    assert "should return TensorList" in str(error)
    dist.barrier()  # the group has not failed


# --- the sharded optimizer ------------------------------------------------------------------------------------------


def the_zero_redundancy_optimizer() -> None:
    def state(group: dist.ProcessGroup | None, views: bool) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        def sharded(ddp: DistributedDataParallel) -> torch.optim.Optimizer:
            return ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.Adam, process_group=group, parameters_as_bucket_view=views, lr=0.01
            )

        model, optimizer = trained(group, three_layers, sharded)
        optimizer.consolidate_state_dict(to=1)
        return model.state_dict(), optimizer.state_dict() if dist.get_rank() == 1 else None

    model, replicated = trained(None, three_layers, lambda ddp: torch.optim.Adam(ddp.parameters(), lr=0.01))
    moments = replicated.state_dict()["state"]
    for views in (False, True):
        ours, theirs = state(None, views), state(gloo(), views)
        assert_same(ours[0], theirs[0], rounding())
        assert_same(ours[0], model.state_dict())  # sharding the state changes no bit
        if dist.get_rank() == 1:
            assert ours[1] is not None
            assert len(ours[1]["state"]) == len(moments) == 6
            for index, slot in moments.items():
                assert torch.equal(slot["exp_avg_sq"], ours[1]["state"][index]["exp_avg_sq"])
