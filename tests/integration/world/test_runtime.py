"""From init to finalize in one process: a world of one, what is adopted, what is refused."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import cyxtrain as cx
from cyxtrain.ring.wire.link import Deadline
from cyxtrain.world import join, runtime

ALONE = cx.DistributedConfig(rank=0, world_size=1)
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DISTRIBUTED_BACKEND", "NCCL_TIMEOUT")


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """Nothing in the environment, and no world before or after."""
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    yield
    cx.finalize()
    if dist.is_initialized():
        dist.destroy_process_group()


def sockets():
    return [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if "socket:" in os.fspath(file.resolve())]


def facts():
    return cx.get_rank(), cx.get_world_size(), cx.get_local_rank(), cx.is_master()


def make_group(backend="ring"):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def test_nothing_is_initialised_before_init():
    assert not cx.is_initialized()
    assert not dist.is_initialized()


def test_one_process_is_a_world():
    cx.init()
    assert cx.is_initialized()
    assert dist.is_initialized()
    assert facts() == (0, 1, 0, True)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "ring")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux tells what is open")
def test_a_world_of_one_opens_no_socket_and_starts_no_thread():
    before = sockets(), threading.enumerate()
    cx.init()
    tensor = torch.ones(3)
    cx.all_reduce(tensor)
    cx.barrier()
    assert (sockets(), threading.enumerate()) == before


def test_finalize_leaves_and_can_be_called_again():
    cx.finalize()
    cx.init()
    cx.finalize()
    cx.finalize()
    assert not dist.is_initialized()
    with pytest.raises(cx.NotInitializedError):
        cx.get_rank()


def test_init_after_finalize_joins_anew():
    for _ in range(3):
        cx.init()
        assert facts() == (0, 1, 0, True)
        cx.finalize()


def leave_by_an_error():
    with pytest.raises(KeyError), cx.init():
        raise KeyError


@pytest.mark.parametrize(
    "live",
    [
        lambda: (cx.init(), cx.finalize()),
        lambda: (cx.init_process_group("gloo"), cx.destroy_process_group()),
        lambda: (cx.init(), dist.destroy_process_group(), cx.finalize()),
        lambda: (cx.init(), dist.destroy_process_group(), cx.init(), cx.finalize()),
        leave_by_an_error,
    ],
    ids=["finalize", "gloo", "pytorch's destroy", "pytorch's destroy and init", "error"],
)
def test_leaving_puts_back_the_excepthook_that_pytorch_has_wrapped(live, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, _: print(kind.__name__, error, file=sys.stderr))
    hook = sys.excepthook
    for _ in range(3):
        live()
        assert sys.excepthook is hook
    cx.init()
    sys.excepthook(ValueError, ValueError("wrong"), None)
    assert capsys.readouterr().err == "ValueError wrong\n"  # one rank needs no number


def test_an_excepthook_that_the_program_sets_after_init_stays(monkeypatch):
    def own(*_):
        pass

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    cx.init()
    sys.excepthook = own
    cx.finalize()
    assert sys.excepthook is own


def test_an_excepthook_that_pytorch_wraps_for_a_group_of_the_programs_own_stays(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    make_group()
    wrapped = sys.excepthook
    with cx.init():
        pass
    assert sys.excepthook is wrapped


def test_init_is_a_context_that_finalizes_also_on_an_exception():
    with cx.init() as world:
        assert cx.is_initialized()
        assert repr(world) == "World(rank=0, world_size=1, backend='ring')"
    assert not cx.is_initialized()
    assert repr(world) == "World(left)"
    with pytest.raises(KeyError), cx.init():
        raise KeyError
    assert not cx.is_initialized()


@pytest.mark.parametrize("config", [None, ALONE, cx.DistributedConfig()], ids=["none", "alone", "default"])
def test_init_twice_with_the_same_config_is_harmless(config):
    cx.init(config)
    group = dist.group.WORLD
    cx.init(config)
    cx.init()
    assert dist.group.WORLD is group
    cx.finalize()
    assert not cx.is_initialized()


def test_init_with_another_config_is_an_error_that_names_both():
    cx.init(ALONE)
    for other in (cx.DistributedConfig(rank=0, world_size=2), cx.DistributedConfig(collective_timeout_ms=5)):
        with pytest.raises(cx.ConfigError, match=r"another config.*finalize\(\) first"):
            cx.init(other)
    assert facts() == (0, 1, 0, True)


def test_the_users_config_stays_as_it_is_and_may_change_afterwards():
    config = cx.DistributedConfig()
    cx.init(config)
    assert config == cx.DistributedConfig()
    config.timeout_ms = 5
    cx.init()
    with pytest.raises(cx.ConfigError):
        cx.init(config)


def test_wrong_config_is_refused_before_anything_happens():
    with pytest.raises(cx.ConfigError, match="outside a world of 2"):
        cx.init(cx.DistributedConfig(rank=2, world_size=2))
    assert not dist.is_initialized()


@pytest.mark.parametrize("config", ["gloo", {"rank": 0}, cx.DDPConfig()], ids=["text", "dict", "another"])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(cx.ConfigError, match="config must be a DistributedConfig, got"):
        cx.init(config)


def test_timeout_is_a_timedelta_as_pytorchs():
    with pytest.raises(cx.ConfigError, match=r"timeout must be a datetime\.timedelta, got 30"):
        cx.init_process_group(timeout=30)


def test_config_in_code_needs_no_whole_environment(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(cx.ConfigError, match="RANK and WORLD_SIZE is missing"):
        cx.init()
    cx.init(ALONE)
    assert cx.get_local_rank() == 3


@pytest.mark.parametrize("backend", ["ring", "gloo"])
def test_existing_torch_group_is_adopted_and_left_alone(backend, monkeypatch):
    group = make_group(backend)
    monkeypatch.setenv("RANK", "0")  # half an environment: of no importance to what is there
    with cx.init():
        assert dist.group.WORLD is group
        assert facts() == (0, 1, 0, True)
        cx.init(ALONE)
        cx.barrier()
        assert runtime.cpu_group() is group
    cx.finalize()
    assert dist.group.WORLD is group
    cx.barrier()
    with pytest.raises(KeyError), cx.init():
        raise KeyError
    cx.barrier()


def test_config_that_contradicts_the_adopted_group_is_refused():
    make_group()
    with pytest.raises(cx.ConfigError, match=r"as rank 0 of 1, and the config says rank 1 of 2"):
        cx.init(cx.DistributedConfig(rank=1, world_size=2))


def test_group_that_somebody_else_destroyed_does_not_stand_in_the_way():
    cx.init()
    dist.destroy_process_group()
    assert not cx.is_initialized()
    cx.finalize()
    cx.init()
    cx.barrier()


def test_group_that_somebody_else_made_meanwhile_is_left_alone():
    cx.init()
    dist.destroy_process_group()
    group = make_group()
    cx.finalize()
    assert dist.group.WORLD is group


def test_init_process_group_does_the_same_under_pytorchs_name():
    cx.init_process_group("cpu", world_size=1, rank=0)
    assert facts() == (0, 1, 0, True)
    cx.destroy_process_group()
    assert not cx.is_initialized()
    cx.init_process_group()
    cx.init()
    cx.destroy_process_group()
    with cx.init_process_group(backend="gloo", init_method="env://"):
        assert dist.get_backend() == "gloo"


@pytest.mark.parametrize(
    "method", ["file:///tmp/x", "tcp://", "tcp://host", "tcp://:29500", "tcp://host:port", "host:1"]
)
def test_init_method_that_is_none_is_refused(method):
    with pytest.raises(cx.ConfigError, match=r"must be 'env://' or 'tcp://host:port', got"):
        cx.init_process_group(init_method=method, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("method", "address"), [("tcp://node-0:1234", ("node-0", 1234)), ("tcp://[::1]:1234", ("::1", 1234))]
)
def test_tcp_init_method_says_where_rank_0_is(method, address, monkeypatch):
    join = Mock(side_effect=LookupError("asked"))
    monkeypatch.setattr(runtime, "join", join)
    with pytest.raises(LookupError, match="asked"):
        cx.init_process_group("gloo", method, timedelta(seconds=7), 3, 1)
    (found,) = join.call_args.args
    assert (found.master_addr, found.master_port) == address
    assert (found.rank, found.world_size, found.backend) == (1, 3, cx.BackendType.GLOO)
    assert found.timeout_ms == found.collective_timeout_ms == 7000


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL is here")
@pytest.mark.parametrize("how", ["config", "environment", "pytorch"])
def test_absent_nccl_is_an_error_with_what_is_missing_and_what_to_use(how, monkeypatch):
    if how == "environment":
        monkeypatch.setenv("DISTRIBUTED_BACKEND", "nccl")
    with pytest.raises(cx.BackendUnavailableError, match=r"NCCL library not available: .*Use backend='cpu'"):
        cx.init_process_group("nccl") if how == "pytorch" else cx.init(
            cx.DistributedConfig(backend="nccl") if how == "config" else None
        )
    assert not cx.is_initialized()


def test_local_rank_beyond_the_gpus_is_an_error_that_names_both(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(cx.ConfigError, match="LOCAL_RANK 2 has no GPU: 2 are visible"):
        cx.init(cx.DistributedConfig(rank=2, world_size=3, backend="nccl"))


@pytest.mark.parametrize(("visible", "local_rank", "device"), [(1, 3, 0), (4, 3, 3)])
def test_where_one_gpu_is_visible_it_is_device_0(visible, local_rank, device, monkeypatch):
    chosen, bound = [], []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, device_id, **__: bound.append(device_id))
    monkeypatch.setattr(join.torch_compat, "set_timeout", lambda _: None)
    join._make_nccl({}, cx.DistributedConfig(rank=3, world_size=4, local_rank=local_rank), Deadline(1.0))
    assert chosen == bound == [torch.device("cuda", device)]


def test_two_ranks_on_one_gpu_are_named_by_what_nccl_says(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(cx.RendezvousError, match=r"rank 1 could not make a nccl group: .* Two ranks use one GPU"):
        join._make_nccl({}, cx.DistributedConfig(rank=1, world_size=2, local_rank=1), Deadline(1.0))


def test_nccl_timeout_gets_a_warning_at_init(monkeypatch):
    monkeypatch.setenv("NCCL_TIMEOUT", "60")
    with pytest.warns(UserWarning, match="NCCL_TIMEOUT is set, and PyTorch ignores it"):
        cx.init()


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0a0+git123"])
def test_pytorch_outside_the_tested_range_gets_one_warning(version, monkeypatch, recwarn):
    monkeypatch.setattr(torch, "__version__", version)
    for _ in range(2):
        with cx.init():
            pass
    found = [str(warning.message) for warning in recwarn if "tested" in str(warning.message)]
    assert found == [f"PyTorch {version} is outside the range that cyxtrain is tested with: 2.11 to 2.15."]


def test_ranks_but_the_first_do_not_warn_of_pytorch(monkeypatch, recwarn):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    join._warn_of_untested_torch(1)
    assert [*recwarn] == []
    with pytest.warns(UserWarning, match="outside the range"):
        join._warn_of_untested_torch(0)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1+cpu", "2.13.0a0+git1", "2.15.0+cu132"])
def test_pytorch_inside_the_tested_range_gets_none(version, monkeypatch, recwarn):
    monkeypatch.setattr(torch, "__version__", version)
    cx.init()
    assert [str(warning.message) for warning in recwarn if "tested" in str(warning.message)] == []


def test_collective_timeout_is_that_of_the_config():
    cx.init(cx.DistributedConfig(collective_timeout_ms=1234))
    assert dist.group.WORLD.group.engine.timeout == timedelta(milliseconds=1234)


def test_a_group_answers_what_pytorch_asks_one_written_in_python():
    with cx.init():
        group = dist.group.WORLD
        assert group._get_backend(torch.device("cpu")) is group
        assert not group.supports_coalescing
        group.get_group_store().set("who", "we")
        assert group.get_group_store().get("who") == b"we"
        group._set_default_timeout(timedelta(seconds=7))
        assert group.group.engine.timeout == timedelta(seconds=7)
        before = group._get_sequence_number_for_group()
        cx.all_reduce(torch.ones(1))
        assert group._get_sequence_number_for_group() == before + 1
