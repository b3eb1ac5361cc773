"""Groups, meshes, functional collectives and threads over "ring": what the ranks of test_unchanged_groups.py do."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import init_device_mesh
from unchanged import error_of

from cyxtrain.ring import RingProcessGroup


def mine(*shape: int) -> torch.Tensor:
    return torch.full(shape, float(dist.get_rank()))


def world() -> dist.ProcessGroup:
    """Return the default group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def total() -> float:
    return float(sum(range(dist.get_world_size())))


# --- groups ---------------------------------------------------------------------------------------------------------


def groups_say_what_they_are() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "ring"
    assert dist.get_process_group_ranks(None) == list(range(size))
    devices = "cpu:ring,cuda:ring" if torch.cuda.device_count() else "cpu:ring"
    assert dist.get_backend_config() in (devices, "ring")
    assert type(dist.group.WORLD) is RingProcessGroup
    part: Any = dist.new_group([size - 1, 0], group_desc="both ends")  # Any: outside of it PyTorch returns a number
    if rank in (0, size - 1):
        assert dist.get_process_group_ranks(part) == [0, size - 1]
        assert (dist.get_group_rank(part, size - 1), dist.get_global_rank(part, 1)) == (1, size - 1)
        assert (dist.get_backend(part), part.group_desc) == ("ring", "both ends")
        assert (dist.get_world_size(part), dist.get_rank(part)) == (2, 0 if rank == 0 else 1)
        dist.destroy_process_group(part)
    else:
        assert dist.get_rank(part) == -1
    dist.barrier()


def groups_of_neighbours() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own: Any
    own, everyone = dist.new_subgroups(group_size=1)
    assert (dist.get_process_group_ranks(own), len(everyone)) == ([rank], size)
    tensor = mine(3)
    dist.all_reduce(tensor, group=own)  # a world of one
    assert tensor.tolist() == [rank] * 3
    own, _ = dist.new_subgroups_by_enumeration([[0, 1], list(range(2, size))] if size > 2 else [[1, 0]])
    tensor = mine(3)
    dist.all_reduce(tensor, group=own)
    assert tensor.tolist() == [1.0 if rank < 2 else sum(range(2, size))] * 3


def groups_are_not_split() -> None:
    """Over Gloo they are from PyTorch 2.15 on."""
    error = str(error_of(lambda: dist.split_group(None, [[0], [1]])))
    assert "No device associated" in error or "does not support splitting" in error


def groups_of_other_backends_beside_it() -> None:
    other: Any = dist.new_group(backend="gloo")
    tensor = mine(2)
    dist.all_reduce(tensor, group=other)
    assert tensor.tolist() == [total()] * 2
    dist.destroy_process_group(other)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [total() * dist.get_world_size()] * 2


def the_monitored_barrier_is_gloos_own() -> None:
    """Up to PyTorch 2.13, which does not ask any other backend."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        assert "only implemented for GLOO" in str(error_of(dist.monitored_barrier))
    else:
        dist.monitored_barrier()


def objects_within_a_part_of_the_world() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    part: Any = dist.new_group([0, size - 1])
    if rank not in (0, size - 1):
        return
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": rank}, group=part)
    assert found == [{"rank": 0}, {"rank": size - 1}]
    objects = [rank, "x" * rank]
    dist.broadcast_object_list(objects, src=size - 1, group=part)
    assert objects == [size - 1, "x" * (size - 1)]
    gathered: list[Any] | None = [None, None] if rank == size - 1 else None
    dist.gather_object(rank, gathered, dst=size - 1, group=part)
    assert gathered == ([0, size - 1] if rank == size - 1 else None)
    output: list[Any] = [None]
    dist.scatter_object_list(output, ["for 0", "for the last"] if rank == 0 else None, src=0, group=part)
    assert output == ["for 0" if rank == 0 else "for the last"]


def barriers_and_their_work() -> None:
    work = dist.barrier(async_op=True)
    assert work.wait()
    assert work.is_completed()
    work = world().barrier()
    assert work.wait(timedelta(seconds=5))


def collectives_of_several_threads() -> None:
    """Each thread has its own group: nothing else says which call belongs to which."""
    groups = [dist.new_group() for _ in range(3)]
    wrong: list[object] = []

    def work(group: dist.ProcessGroup, number: int) -> None:
        for turn in range(50):
            tensor = torch.full((1000 * number + 1,), float(turn + number + dist.get_rank()))
            dist.all_reduce(tensor, group=group)
            expected = total() + dist.get_world_size() * (turn + number)
            if tensor.unique().tolist() != [expected]:
                wrong.append((number, turn, tensor))

    threads = [threading.Thread(target=work, args=(group, number)) for number, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def batches_of_messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(size) if other != rank]
    came = {other: torch.empty(1000) for other in others}
    operations = [dist.P2POp(dist.irecv, came[other], other) for other in others]
    operations += [dist.P2POp(dist.isend, torch.full((1000,), 10.0 * rank + other), other) for other in others]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert all(tensor.unique().item() == 10.0 * other + rank for other, tensor in came.items())


def bundled_calls() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [mine(3), mine(5)]
    with dist._coalescing_manager(async_ops=True) as bundle:
        for tensor in tensors:
            dist.all_reduce(tensor)
    bundle.wait()
    assert [tensor.unique().tolist() for tensor in tensors] == [[total()]] * 2
    outputs = [torch.empty(size, 2), torch.empty(size, 3)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.all_gather_into_tensor(output, mine(1, output.shape[1]))
    assert [output[:, 0].tolist() for output in outputs] == [list(range(size))] * 2
    with dist._coalescing_manager():
        for output in outputs:
            dist.reduce_scatter_tensor(output[0], torch.ones(size, output.shape[1]) * (rank + 1))
    assert [output[0].unique().tolist() for output in outputs] == [[total() + size]] * 2


# --- meshes and functional collectives ------------------------------------------------------------------------------


def meshes_of_two_dimensions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("rows", "columns"))
    assert mesh["columns"].get_local_rank() == rank % 2
    assert dist.get_backend(mesh.get_group("rows")) == "ring"
    tensor = mine(1)
    dist.all_reduce(tensor, group=mesh.get_group("columns"))
    assert tensor.item() == 2 * (rank - rank % 2) + 1
    tensor = mine(1)
    dist.all_reduce(tensor, group=mesh.get_group("rows"))
    assert tensor.item() == sum(range(rank % 2, size, 2))
    flat = mesh._flatten("flat")
    assert flat.size() == size
    tensor = functional.all_reduce(mine(1), "sum", flat)
    assert tensor.item() == total()


def collectives(x: torch.Tensor) -> list[torch.Tensor]:
    """One of each, of what has a row per rank."""
    group, size = world(), dist.get_world_size()
    return [
        functional.all_reduce(x, "sum", group) + 1,
        functional.all_reduce(x, "avg", group) + 1,
        functional.all_gather_tensor(x, 0, group) + 1,
        functional.reduce_scatter_tensor(x, "sum", 0, group) + 1,
        functional.all_to_all_single(x, None, None, group) + 1,
        functional.all_to_all_single(x, [1] * size, [1] * size, group) + 1,
        functional.broadcast(x, 1, group) + 1,
        *functional.all_reduce_coalesced([x, x * 2], "max", group),
        *functional.all_gather_into_tensor_coalesced([x, x * 2], group),
        *functional.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group),
    ]


def expected_of_collectives(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same from the values of all ranks."""
    rank, sum_of = dist.get_rank(), torch.stack(rows).sum(0)
    most = torch.stack(rows).amax(0)
    return [
        sum_of + 1,
        sum_of / len(rows) + 1,
        torch.cat(rows, 0) + 1,
        sum_of[rank : rank + 1] + 1,
        torch.stack([row[rank] for row in rows]) + 1,
        torch.stack([row[rank] for row in rows]) + 1,
        rows[1] + 1,
        most,
        most * 2,
        torch.cat(rows, 0),
        torch.cat(rows, 0) * 2,
        sum_of[rank : rank + 1],
        sum_of[rank : rank + 1] * 2,
    ]


def values_of(rank: int) -> torch.Tensor:
    return torch.arange(3.0 * dist.get_world_size()).view(-1, 3) * (rank + 1) - rank


def functional_collectives() -> None:
    expected = expected_of_collectives([values_of(rank) for rank in range(dist.get_world_size())])
    found = collectives(values_of(dist.get_rank()))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(functional.wait_tensor(ours), theirs)
    beside = functional.all_gather_tensor(values_of(dist.get_rank()), 1, world())
    assert torch.equal(beside + 0, torch.cat([values_of(rank) for rank in range(dist.get_world_size())], 1))


def functional_collectives_that_are_compiled() -> None:
    expected = expected_of_collectives([values_of(rank) for rank in range(dist.get_world_size())])
    compiled = torch.compile(collectives, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(compiled(values_of(dist.get_rank())), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y)
    gathered = torch.empty(dist.get_world_size() * y.shape[0], *y.shape[1:])
    dist.all_gather_into_tensor(gathered, y)
    return gathered + 1


def plain_collectives_that_are_compiled() -> None:
    found = torch.compile(in_place, backend="aot_eager", fullgraph=True)(mine(2, 3))
    assert found.unique().tolist() == [2 * total() + 1]


def collectives_that_autograd_knows() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for reduce in (
        lambda x: differentiable.all_reduce(x).sum(),
        lambda x: torch.stack(differentiable.all_gather(x)).sum(),
        lambda x: differentiable.reduce_scatter(torch.empty(2), [x * 1 for _ in range(size)]).sum(),
    ):
        x = torch.full((2,), rank + 1.0, requires_grad=True)
        reduce(x).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [size] * 2
    x = torch.full((size, 2), rank + 1.0, requires_grad=True)
    gathered = functional.all_gather_tensor_autograd(x, 0, world())
    (gathered * torch.arange(1.0, size * size + 1)[:, None]).sum().backward()
    first = rank * size
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [size * (first + row + 1) for row in range(size)]


# --- metrics --------------------------------------------------------------------------------------------------------


def metrics_of_torchmetrics() -> None:
    from torchmetrics import CatMetric, MeanMetric
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    parts = [(torch.randn(5 + 2 * other, 4), torch.randint(4, (5 + 2 * other,))) for other in range(size)]
    scores, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    for kind in (MulticlassAccuracy, MulticlassConfusionMatrix):
        ours, alone = kind(4), kind(4, sync_on_compute=False)
        ours.update(*parts[rank])
        alone.update(scores, labels)
        torch.testing.assert_close(ours.compute(), alone.compute(), rtol=0, atol=0)
    mean, values = MeanMetric(), CatMetric()
    mean.update(parts[rank][0])
    values.update(parts[rank][0].flatten())  # of another length on each rank
    torch.testing.assert_close(mean.compute(), scores.mean())
    assert torch.equal(values.compute(), scores.flatten())
