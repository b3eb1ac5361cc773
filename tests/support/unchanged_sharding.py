"""Sharded models, their checkpoints and pipelines over "ring": what the ranks of test_unchanged_sharding.py do."""

from __future__ import annotations

import copy
import os
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from unchanged import assert_same, gloo

STEPS = 3


def net() -> nn.Sequential:
    """Sizes that no number of ranks divides; the last layer has fewer rows than there are ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 31), nn.LayerNorm(31), nn.Tanh(), nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 1))


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(8, 13, generator=generator) for _ in range(STEPS)]


def sharded(mesh: dist.DeviceMesh | None = None, **settings: Any) -> nn.Module:
    model = net()
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def train(model: nn.Module, inputs: list[torch.Tensor]) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in inputs:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return optimizer


def alone() -> dict[str, torch.Tensor]:
    """What one process learns from the samples of all."""
    model = net()
    train(model, [torch.cat(parts) for parts in zip(*map(batches, range(dist.get_world_size())), strict=True)])
    return model.state_dict()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return all of a DTensor."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def shared_folder() -> Path:
    """A new folder that all ranks know."""
    name = [tempfile.mkdtemp(dir=os.environ["TEST_FOLDER"]) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    return Path(name[0])


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


def fully_sharded_as_one_process() -> None:
    expected = alone()
    choices: list[dict[str, Any]] = [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}]
    for settings in choices:
        model = sharded(**settings)
        train(model, batches(dist.get_rank()))
        assert_same(whole(model), expected, 1e-6)


def fully_sharded_as_over_gloo() -> None:
    gloo_mesh = dist.DeviceMesh.from_group(gloo(), "cpu")
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy, tolerance in ((MixedPrecisionPolicy(), 1e-6), (half, 1e-2)):
        ours, theirs = sharded(mp_policy=policy), sharded(gloo_mesh, mp_policy=policy)
        for model in (ours, theirs):
            train(model, batches(dist.get_rank()))
        assert_same(whole(ours), whole(theirs), 0.0 if dist.get_world_size() == 2 else tolerance)


def fully_sharded_with_accumulation() -> None:
    ours, expected = sharded(), net()
    assert isinstance(ours, FSDPModule)
    inputs = batches(dist.get_rank())
    for index, batch in enumerate(inputs):
        ours.set_requires_gradient_sync(index == STEPS - 1)
        ours(batch).square().mean().backward()
    for rank in range(dist.get_world_size()):
        for batch in batches(rank):
            (expected(batch).square().mean() / dist.get_world_size()).backward()
    norm = full(nn.utils.clip_grad_norm_(ours.parameters(), 0.01))
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), 0.01))
    for mine, one in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(full(mine.grad), one.grad)


def sharded_in_one_dimension_and_replicated_in_another() -> None:
    if dist.get_world_size() % 2:
        return
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    train(model, batches(dist.get_rank()))
    assert_same(whole(model), alone(), 1e-6)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def checkpoints_of_plain_tensors() -> None:
    rank, folder = dist.get_rank(), shared_folder()
    weights = torch.arange(10.0)
    state = {"weights": weights, f"rank {rank}": torch.full((3,), rank), "step": 7, "text": "as it was"}
    dcp.save(state, checkpoint_id=folder)
    found: dict[str, Any] = {"weights": torch.zeros(10), f"rank {rank}": torch.zeros(3, dtype=torch.int64)}
    found |= {"step": 0, "text": ""}
    dcp.load(found, checkpoint_id=folder)
    assert torch.equal(found["weights"], weights)
    assert found[f"rank {rank}"].tolist() == [rank] * 3
    assert (found["step"], found["text"]) == (7, "as it was")


def checkpoints_of_a_sharded_model() -> None:
    folder, ours = shared_folder(), sharded()
    optimizer = train(ours, batches(dist.get_rank()))
    weights, moments = get_state_dict(ours, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    other = sharded()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    others = torch.optim.Adam(other.parameters(), lr=0.5)
    weights, moments = get_state_dict(other, others)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(other, others, model_state_dict=weights, optim_state_dict=moments)
    assert_same(whole(other), whole(ours))
    for model, stepped in ((ours, optimizer), (other, others)):
        stepped.zero_grad()
        model(batches(9)[0]).square().mean().backward()
        stepped.step()
    assert_same(whole(other), whole(ours))  # the optimizer goes on too


def checkpoints_in_the_background() -> None:
    """A thread writes, with its own collectives in its own group, while training continues."""
    save_in_the_background(AsyncCheckpointerType.THREAD)


def checkpoints_in_another_process() -> None:
    """It asks whether the group has CPU tensors, and makes its own world, over Gloo."""
    save_in_the_background(AsyncCheckpointerType.PROCESS)


def save_in_the_background(kind: AsyncCheckpointerType) -> None:
    folder, ours, rank = shared_folder(), sharded(), dist.get_rank()
    train(ours, batches(rank))
    written = copy.deepcopy(whole(ours))
    saved = {"model": get_model_state_dict(ours), f"rank {rank}": torch.full((3,), rank)}
    group: Any = dist.new_group()
    future = dcp.async_save(saved, checkpoint_id=folder, async_checkpointer_type=kind, process_group=group)
    for _ in range(3):
        train(ours, batches(rank))
    assert isinstance(future, Future)
    future.result()
    found: dict[str, Any] = {"model": get_model_state_dict(ours), f"rank {rank}": torch.zeros(3, dtype=torch.int64)}
    dcp.load(found, checkpoint_id=folder)
    assert_same({name: tensor.full_tensor() for name, tensor in found["model"].items()}, written)
    assert found[f"rank {rank}"].tolist() == [rank] * 3


def state_dicts_gathered_on_rank_0() -> None:
    ours = sharded()
    optimizer = train(ours, batches(dist.get_rank()))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(ours, options=options)
    moments: dict[str, Any] = get_optimizer_state_dict(ours, optimizer, options=options)
    expected = whole(ours)
    if dist.get_rank() == 0:
        assert_same(weights, expected)
        assert moments["state"]["0.weight"]["exp_avg"].shape == (31, 13)
    else:
        assert weights == {}


def checkpoints_fit_another_number_of_ranks() -> None:
    """Saved by all, loaded by one without a group."""
    folder, ours = shared_folder(), sharded()
    train(ours, batches(dist.get_rank()))
    dcp.save({"model": get_model_state_dict(ours)}, checkpoint_id=folder)
    expected = whole(ours)
    found = {"model": net().state_dict()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert_same(found["model"], expected)


# --- DTensor and tensor parallelism ---------------------------------------------------------------------------------


def tensors_in_every_placement() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    tensor = torch.randn(size + 3, 7)
    placements = [Replicate(), Shard(0), Shard(1)]
    for begin in placements:
        for end in placements:
            moved = distribute_tensor(tensor, mesh, [begin]).redistribute(mesh, [end])
            assert torch.equal(moved.full_tensor(), tensor), (begin, end)
    part = DTensor.from_local(torch.full((5,), float(dist.get_rank() + 1)), mesh, [Partial()])
    total = float(sum(range(1, size + 1)))
    assert part.full_tensor().tolist() == [total] * 5
    assert part.redistribute(mesh, [Shard(0)]).full_tensor().tolist() == [total] * 5
    biggest = DTensor.from_local(torch.full((5,), float(dist.get_rank())), mesh, [Partial("max")])
    assert biggest.full_tensor().tolist() == [size - 1] * 5
    product = distribute_tensor(tensor, mesh, [Shard(1)]) @ distribute_tensor(tensor.T.contiguous(), mesh, [Shard(0)])
    torch.testing.assert_close(full(product), tensor @ tensor.T)


def parallel_layers_as_whole_ones() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 12 * size), nn.GELU(), nn.Linear(12 * size, 5), nn.LayerNorm(5)).double()

    expected, ours = make(), make()
    parallelize_module(ours, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for model in (expected, ours):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)).square().sum().backward()
            optimizer.step()
    assert_same(whole(ours), expected.state_dict(), 1e-12)


def parallel_sequences() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    expected = nn.LayerNorm(6)
    ours = parallelize_module(copy.deepcopy(expected), mesh, SequenceParallel())
    inputs = torch.randn(2, 4 * size, 6)
    found = ours(distribute_tensor(inputs, mesh, [Shard(1)]))
    torch.testing.assert_close(found.full_tensor(), expected(inputs))


def layers_split_over_ranks_and_sharded_over_others() -> None:
    """Two dimensions at once, on four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected, ours = (nn.Sequential(nn.Linear(13, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2))
    torch.manual_seed(0)
    for parameter in expected.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(expected.state_dict())
    parallelize_module(ours, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(ours, mesh=mesh["dp"])
    half = dist.get_rank() // 2
    train(ours, batches(half))
    train(expected, [torch.cat(parts) for parts in zip(batches(0), batches(1), strict=True)])
    assert_same(whole(ours), expected.state_dict(), 1e-5)


# --- pipelines ------------------------------------------------------------------------------------------------------


def pipelines_as_one_process() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = torch.cat(batches(0))
    targets = torch.zeros(len(inputs), 13)
    loss_fn = nn.MSELoss()
    for schedule in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(13, 13), nn.Tanh()) for _ in range(size)]
        mine = copy.deepcopy(layers[rank])
        stage = PipelineStage(mine, rank, size, torch.device("cpu"))
        runner = schedule(stage, n_microbatches=4, loss_fn=loss_fn)
        losses: list[torch.Tensor] = []
        if rank == 0:
            runner.step(inputs)
        elif rank == size - 1:
            runner.step(target=targets, losses=losses)
        else:
            runner.step()
        loss = loss_fn(nn.Sequential(*layers)(inputs), targets)
        loss.backward()
        for ours, one in zip(mine.parameters(), layers[rank].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, one.grad)
        if rank == size - 1:
            torch.testing.assert_close(torch.stack(losses).mean(), loss)
