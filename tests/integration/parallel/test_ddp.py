"""Gradients are averaged during backward, or when the explicit verbs say so: what comes out is the mean over ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import assert_close, assert_same_on_all_ranks, batch, gradients, loss_on, mean_gradients, network
from fitting import flat, make_model, make_rows
from kept_worlds import on_ranks
from markers import by_night
from rank_processes import run_ranks, values
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
MANY_BUCKETS = 1e-4  # MiB: about a parameter each


@on_ranks(2, by_night(3))
def test_gradients_after_backward_are_the_mean_over_ranks():
    for fields in ({}, {"bucket_size_mb": MANY_BUCKETS}, {"gradient_as_bucket_view": False}):
        model = network()
        ddp = cx.DistributedDataParallel(model, **fields)
        loss_on(ddp, cx.get_rank()).backward()
        assert_close(gradients(model), mean_gradients(model))
        assert_same_on_all_ranks(gradients(model))


@on_ranks(2, backend="gloo")
def test_gradients_are_the_mean_over_gloo_too():
    model = network()
    ddp = cx.DistributedDataParallel(model)
    loss_on(ddp, cx.get_rank()).backward()
    assert_close(gradients(model), mean_gradients(model))


@on_ranks(2, by_night(3))
def test_gradients_are_those_of_pytorchs_own_wrapper():
    ours, theirs = network(torch.float32), network(torch.float32)
    gloo = dist.new_group(backend="gloo")
    for model in (
        cx.DistributedDataParallel(ours),
        nn.parallel.DistributedDataParallel(theirs, process_group=gloo),
    ):
        model(batch(cx.get_rank(), dtype=torch.float32)).square().mean().backward()
    assert_close(gradients(ours), gradients(theirs), rtol=1e-7, atol=1e-7)


@on_ranks(2, by_night(3))
def test_training_goes_as_on_one_rank_with_the_joined_batch():
    for as_view in (True, False):
        for set_to_none in (True, False):
            model, alone = network(), network()
            ddp = cx.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
            optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, alone)]
            joined = torch.cat([batch(rank) for rank in range(cx.get_world_size())])
            for _ in range(4):
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=set_to_none)
                ddp(batch(cx.get_rank())).square().mean().backward()
                alone(joined).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
            assert_close(model.state_dict(), alone.state_dict())
            assert_same_on_all_ranks(model.state_dict())


@on_ranks(2)
def test_gradients_are_the_mean_whatever_a_later_hook_puts_in_their_place():
    for fields in ({}, {"gradient_as_bucket_view": False}):
        model = network()
        ddp = cx.DistributedDataParallel(model, **fields)
        first, second, *_ = model.parameters()
        first.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * (2 + cx.get_rank())))
        second.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        loss_on(ddp, cx.get_rank()).backward()
        assert_close(gradients(model), mean_gradients(network()))
        assert_same_on_all_ranks(gradients(model))


@on_ranks(2)
def test_first_buckets_travel_while_backward_still_runs():
    model, order = network(), []
    ddp = cx.DistributedDataParallel(model, bucket_size_mb=MANY_BUCKETS)

    def average(_, bucket):
        order.append(f"bucket {bucket.index()}")
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0] / 2)

    ddp.register_comm_hook(None, average)
    model[0].weight.register_hook(lambda gradient: order.append("the gradient of the first layer"))
    loss_on(ddp, cx.get_rank()).backward()
    assert order.index("bucket 0") < order.index("the gradient of the first layer") < order.index(order[-1])
    assert [text for text in order if text.startswith("bucket")] == [f"bucket {i}" for i in range(len(order) - 1)]
    assert_close(gradients(model), mean_gradients(model))


@on_ranks(2)
def test_gradients_are_views_of_buckets_where_that_is_asked_for():
    model = network()
    ddp = cx.DistributedDataParallel(model)
    loss_on(ddp, cx.get_rank()).backward()
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    ddp.close()
    ddp = cx.DistributedDataParallel(model, gradient_as_bucket_view=False)
    model.zero_grad()
    loss_on(ddp, cx.get_rank()).backward()
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == 6


@on_ranks(2)
def test_backward_verb_accumulates_here_and_sync_gradients_averages():
    model, alone = network(), network()
    ddp = cx.DistributedDataParallel(model)
    ddp.backward(loss_on(ddp, cx.get_rank()))
    loss_on(alone, cx.get_rank()).backward()
    assert_close(gradients(model), gradients(alone))
    assert_close(ddp.sync_gradients(), mean_gradients(model))
    assert_close(gradients(model), mean_gradients(model))


@on_ranks(2, by_night(3))
def test_syncing_twice_changes_nothing():
    model, sent = network(), []
    ddp = cx.DistributedDataParallel(model)

    def count(_, bucket):
        sent.append(bucket.index())
        return allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, count)
    ddp.backward(loss_on(ddp, cx.get_rank()))
    first = {name: gradient.clone() for name, gradient in ddp.sync_gradients().items()}
    second = ddp.sync_gradients()
    assert all(torch.equal(first[name], second[name]) for name in first)
    model.zero_grad()
    loss_on(ddp, cx.get_rank()).backward()  # averages by itself
    before = {name: gradient.clone() for name, gradient in gradients(model).items()}
    after = ddp.sync_gradients()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sent == [0, 0]


@on_ranks(2)
def test_sync_gradients_is_agreed_where_only_one_rank_has_something():
    model = network()
    ddp = cx.DistributedDataParallel(model)
    if cx.get_rank() == 1:
        ddp.backward(loss_on(ddp, 1))
    found = ddp.sync_gradients()
    alone = network()
    (loss_on(alone, 1) / 2).backward()
    assert_close(found, gradients(alone))


@on_ranks(2)
def test_backward_verb_takes_the_gradient_of_the_last_output():
    model = network()
    ddp = cx.DistributedDataParallel(model)
    x = batch(cx.get_rank()).requires_grad_()
    output = ddp.forward(x)
    returned = ddp.backward(2 * output.detach() / output.numel())  # the derivative of the mean of squares
    alone = network()
    expected = batch(cx.get_rank()).requires_grad_()
    alone(expected).square().mean().backward()
    torch.testing.assert_close(returned, expected.grad)
    assert_close(ddp.sync_gradients(), mean_gradients(model))


@on_ranks(2)
def test_backward_verb_returns_the_gradient_of_the_input_or_none():
    ddp = cx.DistributedDataParallel(network())
    x = batch(cx.get_rank()).requires_grad_()
    assert ddp.backward(ddp(x).sum()) is x.grad
    assert x.grad.shape == x.shape
    assert ddp.backward(ddp(batch(cx.get_rank())).sum()) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        no_leaf = x * 1
        assert ddp.backward(ddp(no_leaf).sum()) is None


@on_ranks(2)
def test_gradient_without_an_output_is_refused():
    ddp = cx.DistributedDataParallel(network())
    with pytest.raises(cx.ConfigError, match="output of the last forward"):
        ddp.backward(torch.ones(5, 3))
    ddp(batch(0))  # nobody keeps it
    with pytest.raises(cx.ConfigError, match="output of the last forward"):
        ddp.backward(torch.ones(5, 3))


@on_ranks(2)
def test_update_parameters_syncs_steps_and_clears():
    model, alone = network(), network()
    ddp = cx.DistributedDataParallel(model)
    expected = mean_gradients(model)
    ddp.backward(loss_on(ddp, cx.get_rank()))
    ddp.update_parameters(torch.optim.SGD(model.parameters(), 0.1))
    for name, parameter in alone.named_parameters():
        parameter.grad = expected[name]
    torch.optim.SGD(alone.parameters(), 0.1).step()
    assert_close(model.state_dict(), alone.state_dict())
    assert gradients(model) == {}


@on_ranks(2)
def test_no_sync_accumulates_and_the_first_backward_outside_averages_all():
    model, alone = network(), network()
    ddp = cx.DistributedDataParallel(model)
    rank = cx.get_rank()
    with ddp.no_sync():
        loss_on(ddp, rank).backward()
        loss_on(alone, rank).backward()
        assert_close(gradients(model), gradients(alone))
    loss_on(ddp, rank + 10).backward()
    assert_close(gradients(model), mean_gradients(network(), lambda m, r: loss_on(m, r) + loss_on(m, r + 10)))


@on_ranks(2)
def test_backward_decides_whether_to_sync_wherever_forward_was():
    model = network()
    ddp = cx.DistributedDataParallel(model)
    with ddp.no_sync():
        loss = loss_on(ddp, cx.get_rank())
    loss.backward()
    assert_close(gradients(model), mean_gradients(model))
    model.zero_grad()
    loss = loss_on(ddp, cx.get_rank())
    with ddp.no_sync():
        loss.backward()
    alone = network()
    loss_on(alone, cx.get_rank()).backward()
    assert_close(gradients(model), gradients(alone))


@on_ranks(2)
def test_no_sync_restores_itself_on_an_exception_and_when_nested():
    model = network()
    ddp = cx.DistributedDataParallel(model)
    with ddp.no_sync():
        with pytest.raises(KeyError), ddp.no_sync():
            raise KeyError
        loss_on(ddp, cx.get_rank()).backward()
        alone = network()
        loss_on(alone, cx.get_rank()).backward()
        assert_close(gradients(model), gradients(alone))
    model.zero_grad()
    loss_on(ddp, cx.get_rank()).backward()
    assert_close(gradients(model), mean_gradients(model))


@on_ranks(2)
def test_backward_twice_through_one_graph_averages_both():
    model = network()
    ddp = cx.DistributedDataParallel(model)
    loss = loss_on(ddp, cx.get_rank())
    loss.backward(retain_graph=True)
    loss.backward()
    assert_close(gradients(model), mean_gradients(model, lambda m, r: 2 * loss_on(m, r)))


@on_ranks(2)
def test_forward_twice_then_backward_averages_the_sum():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.register_buffer("mask", torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            return self.net(x) * self.mask  # autograd keeps the mask

    model = Masked()
    ddp = cx.DistributedDataParallel(model)
    rank = cx.get_rank()
    (loss_on(ddp, rank) + loss_on(ddp, rank + 10)).backward()
    assert_close(gradients(model), mean_gradients(model, lambda m, r: loss_on(m, r) + loss_on(m, r + 10)))


@on_ranks(2)
def test_backward_that_failed_does_not_spoil_the_next_one():
    model = network()
    ddp = cx.DistributedDataParallel(model, bucket_size_mb=MANY_BUCKETS)

    def fail(_):
        raise KeyError("of the user's own")

    loss = loss_on(ddp, cx.get_rank())
    handle = model[2].weight.register_hook(fail)  # on every rank, when some buckets have been sent already
    with pytest.raises(KeyError, match="of the user's own"):
        loss.backward(retain_graph=True)
    handle.remove()
    model.zero_grad()
    loss.backward()
    assert_close(gradients(model), mean_gradients(model))


@on_ranks(2)
def test_backward_whose_error_is_still_looked_at_does_not_spoil_the_next_one():
    model, failures = nn.Linear(6, 3).double(), [KeyError("once")]
    ddp = cx.DistributedDataParallel(model, bucket_size_mb=1e-6)  # the first gradient is sent at once

    def fail_once(_, bucket):
        if failures:
            raise failures.pop()
        return allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, fail_once)
    with pytest.raises(KeyError, match="once") as caught:  # a notebook keeps it too, with its frames
        loss_on(ddp, cx.get_rank()).backward()
    model.zero_grad()
    loss_on(ddp, cx.get_rank()).backward()
    assert_close(gradients(model), mean_gradients(model))
    assert caught.value.args == ("once",)


@on_ranks(2)
def test_evaluation_without_gradients_sends_nothing():
    ddp = cx.DistributedDataParallel(nn.BatchNorm1d(6).double())
    if cx.get_rank() == 0:  # alone: a message would have no partner
        with torch.no_grad():
            ddp(batch(0))
        ddp.eval()
        ddp(batch(0))
        ddp.train()
    cx.barrier()


def loop_of_the_documents(batch_size: int) -> Any:
    """What the loop in docs/loops.md makes of a model, with so many rows per rank and step."""
    page = (Path(__file__).parents[3] / "docs" / "loops.md").read_text(encoding="utf-8")
    [program] = [part for part in page.split("```python\n")[1:] if "DistributedDataParallel(model)" in part]
    model, (inputs, targets), saved = make_model(), make_rows(64), []
    names = {
        "cx": cx,
        "model": model,
        "X": inputs,
        "y": targets,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cx, "save_weights", lambda *_: saved.append(cx.get_rank()))
        exec(program.split("```")[0].replace("batch_size=16", f"batch_size={batch_size}"), names)
    return flat(model.parameters()), saved


def test_the_loop_of_the_documents_trains_as_on_one_rank():
    [(alone, saved)] = values(run_ranks(1, loop_of_the_documents, 32))
    assert saved == [0]
    assert abs(alone - flat(make_model().parameters())).max() > 1e-2
    for rank, (found, saved) in enumerate(values(run_ranks(2, loop_of_the_documents, 16))):
        assert abs(found - alone).max() < 1e-6
        assert saved == [0] * (rank == 0)
