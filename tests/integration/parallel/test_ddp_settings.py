"""The wrapper's settings and hooks; in a world of one it is inert; errors keep their type through autograd."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import EXACT, assert_close, batch, gradients, loss_on, mean_gradients, network
from kept_worlds import on_ranks
from markers import by_night
from rank_processes import run_ranks
from refusals import refuses
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")


@on_ranks(2)
def test_pytorchs_hooks_are_taken():
    for hook, tolerance in (
        (allreduce_hook, EXACT),
        (fp16_compress_hook, {"rtol": 1e-2, "atol": 1e-3}),
        (bf16_compress_hook, {"rtol": 1e-1, "atol": 1e-2}),
    ):
        for fields in ({}, {"bucket_size_mb": 1e-4}, {"gradient_as_bucket_view": False}):
            model = network()
            ddp = cx.DistributedDataParallel(model, **fields)
            ddp.register_comm_hook(None, hook)
            loss_on(ddp, cx.get_rank()).backward()
            assert_close(gradients(model), mean_gradients(model), **tolerance)
            assert all(gradient.dtype == torch.float64 for gradient in gradients(model).values())


@on_ranks(2)
def test_hook_of_ones_own_gets_its_state_and_pytorchs_bucket():
    model, seen = network(), []

    def scale(state, bucket):
        state.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        assert bucket.buffer().numel() == sum(g.numel() for g in bucket.gradients())
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 3)
        bucket.set_buffer(torch.zeros_like(bucket.buffer()))  # the future rules
        return future

    ddp = cx.DistributedDataParallel(model)
    ddp.register_comm_hook(seen, scale)
    loss_on(ddp, cx.get_rank()).backward()
    alone = network()
    (loss_on(alone, cx.get_rank()) * 3).backward()
    assert_close(gradients(model), gradients(alone))
    assert seen == [(0, True, 6)]
    with pytest.raises(cx.ConfigError, match="registered already"):
        ddp.register_comm_hook(None, allreduce_hook)


@on_ranks(2)
def test_hook_leaves_unused_parameters_to_the_wrapper():
    model = nn.ModuleList([network(), network()])
    model.forward = lambda x, used: sum(model[index](x) for index in used)
    ddp = cx.DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(None, fp16_compress_hook)
    ddp(batch(cx.get_rank()), [0]).sum().backward()
    assert all(name.startswith("0.") for name in gradients(model))
    ddp(batch(cx.get_rank()), [cx.get_rank()]).sum().backward()
    assert len(gradients(model)) == 12


@on_ranks(2)
def test_fields_rule_over_the_config():
    config = cx.DDPConfig(bucket_size_mb=7, static_graph=True)
    ddp = cx.DistributedDataParallel(network(), config, static_graph=False, find_unused_parameters=True)
    assert ddp.config == cx.DDPConfig(bucket_size_mb=7, find_unused_parameters=True)
    assert config == cx.DDPConfig(bucket_size_mb=7, static_graph=True)


def test_before_init_the_wrapper_says_what_to_call():
    with pytest.raises(cx.NotInitializedError, match=r"cyxtrain\.init\(\)"):
        cx.DistributedDataParallel(network())


def wrap(model: Any, *arguments: Any, **fields: Any) -> None:
    cx.DistributedDataParallel(model, *arguments, **fields)


test_wrong_arguments_are_refused = refuses(
    (lambda: wrap(network(), bucket_cap_mb=25), r"'bucket_cap_mb'.*Did you mean 'bucket_size_mb'"),
    (lambda: wrap(network(), bucket_size_mb=0), "bucket_size_mb"),
    (lambda: wrap(network(), device_ids=[0, 1]), "one process drives one device"),
    (lambda: wrap(network(), 25), "config must be a DDPConfig, got int"),
    (lambda: wrap(network), r"model must be a torch\.nn\.Module, got function"),
    (lambda: wrap(nn.Sequential(nn.LazyLinear(3))), r"0\.weight has no shape yet"),
)


@pytest.mark.usefixtures("alone")
def test_in_a_world_of_one_the_wrapper_is_inert():
    model, alone = network(), network()
    ddp = cx.DistributedDataParallel(model)
    ddp.register_comm_hook(None, lambda state, bucket: 1 / 0)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    with ddp.no_sync():
        loss_on(ddp, 0).backward()
    loss_on(alone, 0).backward()
    assert all(torch.equal(g, gradients(alone)[name]) for name, g in gradients(model).items())
    pointers = [p.grad.data_ptr() for p in model.parameters()]
    assert list(ddp.sync_gradients()) == list(gradients(alone))
    assert pointers == [p.grad.data_ptr() for p in model.parameters()]


@pytest.mark.usefixtures("alone")
def test_in_a_world_of_one_the_verbs_do_their_work():
    model, alone = network(), network()
    ddp = cx.DistributedDataParallel(model)
    x = batch(0).requires_grad_()
    output = ddp(x)
    assert ddp.backward(torch.ones_like(output)) is x.grad
    ddp.update_parameters(torch.optim.SGD(model.parameters(), 0.1))
    alone(batch(0)).sum().backward()
    torch.optim.SGD(alone.parameters(), 0.1).step()
    assert_close(model.state_dict(), alone.state_dict())
    assert (ddp.get_rank(), ddp.get_world_size(), ddp.is_master()) == (0, 1, True)
    ddp.close()


@on_ranks(2)
def test_wrapper_that_is_gone_takes_its_buckets_along():
    model = network()
    ddp = cx.DistributedDataParallel(model)
    loss_on(ddp, cx.get_rank()).backward()
    gone = weakref.ref(ddp._reducer)
    del ddp
    gc.collect()
    assert gone() is None
    loss_on(model, cx.get_rank()).backward()


def die_in_backward(layer):
    cx.init()
    model = network()
    ddp = cx.DistributedDataParallel(model, bucket_size_mb=1e-4)
    if cx.get_rank() == 1:
        model[layer].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    loss_on(ddp, cx.get_rank()).backward()


def die_before_backward():
    cx.init()
    ddp = cx.DistributedDataParallel(network())
    loss = loss_on(ddp, cx.get_rank())
    if cx.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()


def meet_a_barrier():
    cx.init()
    ddp = cx.DistributedDataParallel(network())
    if cx.get_rank() == 0:
        loss_on(ddp, 0).backward()
    cx.barrier()


def fail_in_a_hook():
    with cx.init():
        ddp = cx.DistributedDataParallel(network())
        if cx.get_rank() == 1:
            ddp.register_comm_hook(None, lambda state, bucket: 1 / 0)
        loss_on(ddp, cx.get_rank()).backward()


@pytest.mark.parametrize("layer", [0, by_night(2), by_night(4)])
def test_rank_killed_in_backward_is_a_peer_lost_error_of_backward_elsewhere(layer):
    ended = run_ranks(3, die_in_backward, layer)
    assert [outcome.kind for outcome in ended] == ["PeerLostError", "Killed", "PeerLostError"]
    for outcome in (ended[0], ended[2]):
        assert outcome.error["rank"] == 1
        assert "rank 1" in outcome.message
        assert outcome.seconds < ended[1].seconds + 2


def test_rank_killed_before_backward_is_a_peer_lost_error_at_its_end_elsewhere():
    ended = run_ranks(2, die_before_backward)
    assert [outcome.kind for outcome in ended] == ["PeerLostError", "Killed"]


def test_backward_that_meets_another_collective_is_a_mismatch_on_both_ranks():
    ended = run_ranks(2, meet_a_barrier)
    assert [outcome.kind for outcome in ended] == ["CollectiveMismatchError"] * 2


def test_error_in_a_hook_keeps_its_type_and_reaches_the_others():
    ended = run_ranks(2, fail_in_a_hook)
    assert [outcome.kind for outcome in ended] == ["PeerLostError", "ZeroDivisionError"]
    assert "ZeroDivisionError" in ended[0].message


@on_ranks(2, backend="gloo")
def test_gloo_carries_hooks_and_unused_parameters_too():
    assert dist.get_backend() == "gloo"
    model = network()
    model.append(nn.Linear(3, 3).double())
    model.forward = lambda x: model[:5](x)
    for hook in (None, allreduce_hook):
        model.zero_grad()
        ddp = cx.DistributedDataParallel(model, find_unused_parameters=True)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        loss_on(ddp, cx.get_rank()).backward()
        assert_close(gradients(model), mean_gradients(network()))
        ddp.close()


@on_ranks(2, by_night(3))
def test_a_rank_without_samples_has_no_say_in_what_was_used():
    for fields in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": False}):
        model = network()
        ddp = cx.DistributedDataParallel(model, **fields)
        if cx.get_rank() == 0:
            loss_on(ddp, 0).backward()
        else:
            ddp.share_buffers_once()
            ddp.average_accumulated()
        alone = network()
        alone.load_state_dict(model.state_dict())
        loss_on(alone, 0).backward()
        expected = {name: gradient / cx.get_world_size() for name, gradient in gradients(alone).items()}
        assert_close(gradients(model), expected, **EXACT)


@on_ranks(2)
def test_a_parameter_that_no_rank_with_samples_used_is_named_on_every_rank_also_without_samples():
    model = network_with_an_idle_layer()
    ddp = cx.DistributedDataParallel(model)
    if cx.get_rank() == 0:
        backward = ddp(torch.ones(3, 2)).sum().backward
    else:
        ddp.share_buffers_once()
        backward = ddp.average_accumulated
    with pytest.raises(cx.DistributedTrainingError, match=r"idle\.weight"):
        backward()
    assert model["idle"].weight.grad is None


def network_with_an_idle_layer():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})
    model.forward = lambda rows: model["used"](rows)
    return model


@on_ranks(2)
def test_ranks_that_all_average_without_a_backward_refuse_no_unused_parameter():
    model = network_with_an_idle_layer()
    ddp = cx.DistributedDataParallel(model)
    if cx.get_rank() == 0:
        with ddp.no_sync():
            ddp(torch.ones(3, 2)).sum().backward()
    else:
        ddp.share_buffers_once()
    ddp.average_accumulated(others_run_backward=False)
    assert model["idle"].weight.grad is None
    assert model["used"].weight.grad.tolist() == [[1.5, 1.5]]


@on_ranks(2)
def test_a_rank_that_has_accumulated_refuses_what_the_backward_of_others_refuses():
    ddp = cx.DistributedDataParallel(network_with_an_idle_layer())
    average = ddp.average_accumulated
    if cx.get_rank() == 0:
        with ddp.no_sync():
            ddp(torch.ones(3, 2)).sum().backward()
    else:
        average = ddp(torch.ones(3, 2)).sum().backward
    with pytest.raises(cx.DistributedTrainingError, match=r"idle\.weight"):
        average()


@on_ranks(2)
def test_parameters_cannot_be_replaced_by_others_that_nobody_averages():
    ddp = cx.DistributedDataParallel(network())
    with pytest.raises(cx.ConfigError, match="assign=True"):
        ddp.load_state_dict(ddp.state_dict(), assign=True)


@on_ranks(2)
def test_sparse_gradients_that_nobody_could_foresee_are_averaged_as_dense_ones():
    for fields in ({}, {"gradient_as_bucket_view": False}):
        model = nn.Embedding(4, 2)
        model.forward = lambda rows, weight=model.weight: nn.functional.embedding(rows, weight, sparse=True)
        ddp = cx.DistributedDataParallel(model, **fields)
        for step in range(2):
            ddp(torch.tensor([1, 2 + cx.get_rank()])).sum().backward()
            assert model.weight.grad.to_dense()[:, 0].tolist() == [0, step + 1, (step + 1) / 2, (step + 1) / 2]
