"""Which device and which backend a run gets: by pure functions, on CPUs, and on a stand-in for GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_collectives import every_collective
from fitting import fingerprint, make_model, make_rows, one_process
from markers import by_night
from stand_in import fakegpu
from stand_in.running import run_on_stand_in
from worlds import run_processes, start_processes

import cyxtrain as cx
from cyxtrain.environment.process_env import own_identity
from cyxtrain.ring import RingProcessGroup
from cyxtrain.training.model import placement
from cyxtrain.world import consensus, devices, join, runtime
from cyxtrain.world.devices import DeviceReport
from cyxtrain.world.world import World

# --- the agreement on a backend -------------------------------------------------------------------------------------


def ranks(*counts: int) -> tuple[list[DeviceReport], list[str]]:
    """Returns what the ranks of machines see, each of which has so many ranks and GPUs, and where each rank is."""
    seen = [
        DeviceReport("", "cuda", count, local, f"uuid {machine} {local}", f"0:{local}:0")
        for machine, count in enumerate(counts)
        for local in range(count)
    ]
    return seen, [f"machine {machine}" for machine, count in enumerate(counts) for _ in range(count)]


def changed(rank: int, **facts: Any) -> tuple[list[DeviceReport], list[str]]:
    """Returns two machines of four ranks and GPUs, and one rank that sees something else."""
    seen, machines = ranks(4, 4)
    seen[rank] = dataclasses.replace(seen[rank], **facts)
    return seen, machines


@pytest.mark.parametrize(
    ("world", "why"),
    [
        (ranks(4, 4), ""),
        (ranks(1, 7), ""),
        (ranks(1), "one rank needs no backend"),
        (changed(5, kind="", count=0, uuid="", slot=""), "rank 5 sees no CUDA device"),
        (changed(5, kind="xpu"), "rank 5 sees no CUDA device"),
        (changed(2, no_nccl="require_secret=True"), "rank 2 cannot use NCCL: require_secret=True"),
        # one machine has fewer GPUs than ranks: local rank 3 of 2 takes the GPU of local rank 1
        (changed(7, count=2, uuid="uuid 1 1", slot="0:1:0"), "rank 5 and rank 7 share a GPU"),
        # two parts of one GPU (MIG), which NCCL refuses: their own names in one place
        (changed(1, uuid="MIG 2", slot="0:0:0"), "rank 0 and rank 1 share a GPU"),
        # two containers of one machine
        (changed(4, uuid="uuid 0 0"), "rank 0 and rank 4 share a GPU"),
        # each sees one GPU, by CUDA_VISIBLE_DEVICES: it is device 0 to all, and they have names
        (([DeviceReport("", "cuda", 1, local, f"uuid {local}") for local in range(2)], ["a", "a"]), ""),
        (([DeviceReport("", "cuda", 1, local) for local in range(2)], ["a", "a"]), "rank 0 and rank 1 share a GPU"),
        (([DeviceReport("", "cuda", 2, local) for local in range(2)], ["a", "a"]), ""),
    ],
)
def test_ranks_use_nccl_where_each_has_a_gpu_of_its_own_and_else_the_ring(world, why):
    assert devices.why_ring(*world) == why


def test_what_a_rank_sees_survives_its_way_to_the_others_and_nothing_takes_no_bytes():
    for seen in (*changed(3, backend="nccl")[0], DeviceReport("cpu")):
        assert DeviceReport.from_text(seen.to_text()) == seen
    assert DeviceReport(local_rank=3).to_text() == ""
    for text in ("[1]", "{", '{"kind": "cuda", "count": 0}'):
        with pytest.raises(cx.ConfigError, match="Install the same version of cyxtrain everywhere"):
            DeviceReport.from_text(text)


def test_a_backend_that_one_rank_was_asked_for_is_that_of_all_and_two_are_refused():
    assert devices.common_backend(ranks(2)[0]) is None
    assert devices.common_backend([DeviceReport(), DeviceReport("nccl")]) is cx.BackendType.NCCL
    with pytest.raises(cx.ConfigError, match="rank 0 was started with the backend cpu and rank 1 with nccl"):
        devices.common_backend([DeviceReport("cpu"), DeviceReport("nccl")])


def test_nccl_that_one_rank_was_asked_for_and_another_cannot_use_is_refused_on_all():
    devices.check_nccl(ranks(4, 4)[0])
    for facts, words in [({"kind": ""}, "it sees no CUDA device"), ({"no_nccl": "none"}, "none. Leave the backend")]:
        with pytest.raises(cx.BackendUnavailableError, match=f"rank 5 cannot use it: {words}"):
            devices.check_nccl(changed(5, **facts)[0])


def test_all_ranks_train_on_one_kind_of_device():
    assert devices.why_cpus(ranks(2, 2)[0]) == devices.why_cpus([DeviceReport(), DeviceReport()]) == ""
    assert (
        devices.why_cpus([DeviceReport("", "cuda", 1), DeviceReport()])
        == "rank 0 sees cuda and rank 1 sees no accelerator"
    )


def test_two_ranks_of_an_adopted_group_of_nccl_on_one_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(placement.consensus, "backends_of", lambda _: {"cuda": "nccl"})
    everyone = [{"_device": ["cuda:0", "node", name]} for name in ("GPU-1", "GPU-2", "GPU-1")]
    placement.check_devices(World(), everyone[:2], torch.device("cuda", 0))
    with pytest.raises(cx.ConfigError, match="rank 0 and rank 2 train on one GPU, cuda:0 of node, which NCCL refuses"):
        placement.check_devices(World(), everyone, torch.device("cuda", 0))


@pytest.mark.parametrize("asked", ["mps", torch.device("mps")])
def test_a_device_that_pytorch_was_not_built_for_is_refused(monkeypatch, asked):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(cx.ConfigError, match=r"device='mps': no MPS device is visible\. Use 'auto' or 'cpu'"):
        fit(asked)


MIXED = [
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (in aten::addmm)",
    "Expected all tensors to be on the same device, but got weight is on cpu, different from other tensors on cuda:0",
    "indices should be either on cpu or on the same device as the indexed tensor (cuda:0)",
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
]


@pytest.mark.parametrize("words", MIXED, ids=["addmm", "nll_loss", "index", "conv"])
@pytest.mark.parametrize("part", ["model", "loss", "metric"])
def test_an_error_of_tensors_on_several_devices_says_what_to_do(part, words):
    def fails(*_: Any) -> Any:
        raise RuntimeError(words)

    model = make_model()
    if part == "model":
        model.register_forward_hook(fails)
    loss_fn = fails if part == "loss" else torch.nn.functional.cross_entropy
    trainer = cx.DistributedTrainer(model, loss_fn, "sgd", metrics=[fails] if part == "metric" else [])
    expected = (
        re.escape(f"{words}. A tensor was left on the device where it was created") + r".*register_buffer.*x\.device"
    )
    with one_process(), pytest.raises(cx.ConfigError, match=expected):
        trainer.fit(*make_rows(8), epochs=1, verbose=False)


# --- groups that carry no CPU tensors -------------------------------------------------------------------------------


def fit(
    asked: str | torch.device = "auto", model: torch.nn.Module | None = None, rows_on: str = "cpu"
) -> tuple[str, str, dict[str, str]]:
    """Trains a small model; returns the device it was trained on, its bits, and the header by its words."""
    model = make_model() if model is None else model
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1), device=asked)
        trainer.fit(*(each.to(rows_on) for each in make_rows(24)), epochs=1, batch_size=6)
    place = next(model.parameters()).device
    lines = (line.split(None, 1) for line in shown.getvalue().splitlines() if not line.startswith(" "))
    header = {words[0]: words[1] for words in lines if len(words) == 2}
    return str(place), fingerprint(model.to("cpu")), header


def train_over_groups_of_gpus(folder: str) -> None:
    """Trains on CPUs where the default group carries CUDA tensors alone: one of PyTorch's, and one of ours."""
    with cx.init(cx.DistributedConfig(backend="cpu")):
        expected = fit()[1]
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("cuda:gloo", store=store, rank=own_identity()["RANK"], world_size=2)
    group = dist.group.WORLD
    cx.init(cx.DistributedConfig(collective_timeout_ms=7000))
    beside = runtime.cpu_group()
    assert beside is not group
    assert beside.group.engine.timeout == timedelta(seconds=7)
    assert consensus.backends_of() == {"cuda": "gloo"}
    assert runtime.current().gather("here") == ["here"] * 2
    mine = torch.ones(3)
    cx.all_reduce(mine)
    assert mine.tolist() == [2.0] * 3
    assert runtime.group_for(torch.device("cuda", 0)) is group
    assert fit()[1] == expected
    cx.init()
    assert runtime.cpu_group() is beside
    cx.finalize()
    assert dist.group.WORLD is group
    dist.destroy_process_group()

    join.devices.why_ring, join.devices.check_nccl = lambda *_: "", lambda _: None  # as if each had a GPU

    def make(group: dict[str, Any], config: cx.DistributedConfig, _: Any) -> None:
        dist.init_process_group("cuda:gloo", **group, timeout=timedelta(seconds=20))

    join._make_nccl = make
    with cx.init(cx.DistributedConfig(collective_timeout_ms=9000)):
        assert runtime.cpu_group() is not dist.group.WORLD
        assert runtime.cpu_group().group.engine.timeout == runtime._joined.store.timeout == timedelta(seconds=9)  # type: ignore[union-attr]
        assert fit()[1] == expected


@pytest.mark.nightly
def test_small_agreements_and_cpu_tensors_go_over_a_ring_beside_a_group_of_gpus(tmp_path):
    run_processes(2, train_over_groups_of_gpus, str(tmp_path), seconds=100.0)


# --- on the stand-in ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "communication"), [(2, "thread"), by_night(3, "inline")])
def test_the_ring_carries_the_tensors_of_any_accelerator(fakegpu_folder, world_size, communication):
    env = {"CYXTRAIN_COMMUNICATION": communication}
    found = run_on_stand_in(
        fakegpu_folder, world_size, every_collective, fakegpu.NAME, [1, 100_003], env=env, seconds=100.0
    )
    assert found == [[]] * world_size


def choose_alone() -> None:
    """Goes through what a program that is alone may ask for, with two devices."""
    unused = "2 fakegpu devices are visible and not used"
    place, bits, header = fit()
    assert (place, header["device"]) == ("fakegpu:0", "fakegpu:0 (1 of 2 visible fakegpu)")
    place, _, header = fit("cpu")
    assert (place, header["device"].partition("; ")[2]) == ("cpu", f"{unused}: device='cpu'")
    assert fit("cpu", rows_on="fakegpu")[:2] == ("cpu", bits)  # the CPU waits for rows that come from a device
    for wrong, words in [
        ("fakegpu:2", r"2 such devices visible \(fakegpu:0 to fakegpu:1\)"),
        ("cuda", "no CUDA device"),
        ("gpu", "a PyTorch device such as 'cpu' or 'fakegpu', got 'gpu'"),
    ]:
        with pytest.raises(cx.ConfigError, match=words):
            fit(wrong)
    spread = make_model()
    layers = [each for each in spread.modules() if isinstance(each, torch.nn.Linear)]
    for number, layer in enumerate(layers):
        layer.to(f"fakegpu:{number % 2}")
    with pytest.raises(cx.ConfigError, match="parameters are on fakegpu:0 and fakegpu:1, and each rank"):
        fit(model=spread)
    assert fit("fakegpu", spread)[:2] == ("fakegpu:0", bits)  # asked for, it is moved
    cx.finalize()
    with cx.init(cx.DistributedConfig(backend="cpu")):
        place, same, header = fit()
        assert (place, header["device"].partition("; ")[2]) == ("cpu", f"{unused}: backend=cpu")
        assert same == bits
        assert fit(model=make_model().to("fakegpu:1"))[0] == "fakegpu:1"  # where the model is, it stays
        assert fit("fakegpu")[0] == "fakegpu:1"  # that of this thread
        torch.accelerator.set_device_index(0)
        assert fit("fakegpu:1")[0] == "fakegpu:1"
        assert torch.accelerator.current_device_index() == 1
    torch.accelerator.set_device_index(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    place, _, header = fit()
    assert (place, header["device"].partition("; ")[2]) == ("cpu", f"{unused}: the process group is gloo's")
    dist.destroy_process_group()
    # A default group that is bound to a device, as NCCL's: PyTorch asks every other group whether it can be split.
    bound = torch.device("fakegpu", 0)
    dist.init_process_group("ring", store=dist.HashStore(), rank=0, world_size=1, device_id=bound)
    dist.group.WORLD.bound_device_id = bound  # type: ignore[union-attr]
    assert fit("fakegpu")[0] == "fakegpu:0"
    with pytest.raises(cx.ConfigError, match="and rank 0, local rank 0, is connected over NCCL on fakegpu:0"):
        fit("fakegpu:1")
    dist.destroy_process_group()


def test_alone_a_visible_accelerator_is_used_unless_the_cpu_is_asked_for(fakegpu_folder):
    run_on_stand_in(fakegpu_folder, 1, choose_alone, env={"FAKEGPU_DEVICES": "2"}, seconds=100.0)


class OfDevices(RingProcessGroup):
    """A group that carries no CPU tensors, as NCCL's."""

    def allreduce(self, tensors: Any, *options: Any, **named: Any) -> Any:
        assert not any(tensor.is_cpu for tensor in tensors)
        return super().allreduce(tensors, *options, **named)

    def allgather(self, outputs: Any, inputs: Any, *options: Any, **named: Any) -> Any:
        assert not any(tensor.is_cpu for tensor in inputs)
        return super().allgather(outputs, inputs, *options, **named)

    def broadcast(self, tensors: Any, *options: Any, **named: Any) -> Any:
        assert not any(tensor.is_cpu for tensor in tensors)
        return super().broadcast(tensors, *options, **named)


def choose_together(folder: str) -> list[Any]:
    """Trains over the ring, then over an adopted group of the device; returns where, and rank 0's header."""
    found = [fit(), fit("fakegpu"), fit("cpu")]
    backend = dist.get_backend()
    rank = cx.get_rank()
    cx.finalize()

    def create(options: Any, _: Any) -> OfDevices:
        return OfDevices(options.store, options.group_rank, options.group_size, options.timeout)

    dist.Backend.register_backend("of_devices", create, extended_api=True, devices=["fakegpu"])
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("fakegpu:of_devices", store=store, rank=rank, world_size=2)
    found.append(fit())
    assert type(dist.group.WORLD) is OfDevices
    dist.destroy_process_group()
    places, bits, headers = zip(*found, strict=True)
    assert len(set(bits)) == 1, "a device makes other bits"
    return [backend, list(places), [header.get("device") for header in headers]]


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, by_night(1)])
def test_each_rank_takes_the_device_of_its_local_rank_over_the_ring(fakegpu_folder, tmp_path, count):
    env = {"FAKEGPU_DEVICES": str(count)}
    found = run_on_stand_in(fakegpu_folder, 2, choose_together, str(tmp_path), env=env, seconds=100.0)
    own = [f"fakegpu:{rank % count}" for rank in range(2)]
    assert [(backend, places) for backend, places, _ in found] == [
        ("ring", [own[rank], own[rank], "cpu", own[rank]]) for rank in range(2)
    ]
    used = "fakegpu:0 (1 of 1 visible fakegpu)" if count == 1 else "fakegpu:0 to fakegpu:1 (2 of 2 visible fakegpu)"
    assert [line.partition("; ")[0].startswith("cpu") or line for line in found[0][2]] == [used, used, True, used]


def fit_anywhere() -> tuple[str, str, dict[str, str]]:
    return fit()


@pytest.mark.nightly
def test_where_one_rank_sees_no_accelerator_all_train_on_cpus(fakegpu_folder):
    with start_processes(2, fit_anywhere, ranks=()) as world:
        for rank, count in enumerate("10"):
            world.start(rank, 2, fakegpu.environment(fakegpu_folder) | {"FAKEGPU_DEVICES": count})
        results = world.results(100.0)
    assert [result.value[:1] for result in results] == [["cpu"], ["cpu"]], results[0].stderr
    line = "1 fakegpu device is visible and not used: rank 0 sees fakegpu and rank 1 sees no accelerator"
    assert results[0].value[2]["device"].endswith(line)
