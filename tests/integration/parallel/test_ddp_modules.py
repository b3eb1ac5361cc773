"""Whatever a module has, all of it is averaged: unused, frozen and shared parameters, buffers, layouts, dtypes."""

from __future__ import annotations

import pytest
import torch
from ddp_models import assert_close, assert_same_on_all_ranks, batch, gradients, loss_on, mean_gradients, network
from kept_worlds import on_ranks
from markers import by_night
from torch import nn
from torch.utils.checkpoint import checkpoint

import cyxtrain as cx
from cyxtrain.parallel.consistency.broadcasting import tensors_of

pytestmark = pytest.mark.usefixtures("rank_server")


class Branches(nn.Module):
    """Uses the branches that its caller names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = (nn.Linear(6, 3).double() for _ in range(3))

    def forward(self, x, names):
        return sum(getattr(self, name)(x) for name in names)


def branch_loss(names_of):
    return lambda model, rank: model(batch(rank), names_of(rank)).square().mean()


@on_ranks(2, by_night(3))
def test_module_begins_as_that_of_rank_0():
    torch.manual_seed(cx.get_rank())
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Conv1d(3, 3, 1).double())
    model[0].weight.requires_grad_(False)
    model[1].running_mean += cx.get_rank() + 1
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cx.DistributedDataParallel(model)
    assert_same_on_all_ranks(model.state_dict())
    if cx.get_rank() == 0:
        assert all(torch.equal(first[name], tensor) for name, tensor in model.state_dict().items())


@on_ranks(2)
def test_parameters_stay_as_they_are_where_that_is_asked_for():
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, cx.get_rank())
    cx.DistributedDataParallel(model, cx.DDPConfig(broadcast_parameters=False))
    assert model.weight.unique().tolist() == [cx.get_rank()]


@on_ranks(2, by_night(3))
def test_parameter_unused_on_any_rank_is_an_error_that_names_it_on_every_rank():
    model = Branches()
    ddp = cx.DistributedDataParallel(model)
    loss = branch_loss(lambda rank: "ab" if rank == 1 else "abc")(ddp, cx.get_rank())
    with pytest.raises(cx.DistributedTrainingError, match=r"c\.bias, c\.weight|c\.weight, c\.bias") as caught:
        loss.backward()
    assert "a." not in str(caught.value).split(" If ")[0]
    assert "find_unused_parameters=True" in str(caught.value)
    model.zero_grad()
    use_all = branch_loss(lambda _: "abc")
    use_all(ddp, cx.get_rank()).backward()  # the world goes on
    assert_close(gradients(model), mean_gradients(model, use_all))


@on_ranks(2, by_night(3))
def test_parameter_unused_on_some_ranks_is_averaged_with_zeros():
    for fields in ({"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": False}):
        model = Branches()
        ddp = cx.DistributedDataParallel(model, **({"find_unused_parameters": True} | fields))
        branch_loss(lambda _: "abc")(ddp, cx.get_rank()).backward()  # leaves something in every bucket
        model.zero_grad()
        loss = branch_loss(lambda rank: "ab" if rank == 1 else "ac")
        loss(ddp, cx.get_rank()).backward()
        assert_close(gradients(model), mean_gradients(model, loss))


@on_ranks(2, by_night(3))
def test_parameter_unused_on_all_ranks_keeps_no_gradient():
    model = Branches()
    ddp = cx.DistributedDataParallel(model, find_unused_parameters=True)
    loss = branch_loss(lambda _: "ac")
    loss(ddp, cx.get_rank()).backward()
    assert model.b.weight.grad is None
    assert list(gradients(model)) == ["a.weight", "a.bias", "c.weight", "c.bias"]
    ddp.backward(loss(ddp, cx.get_rank()))
    assert list(ddp.sync_gradients()) == ["a.weight", "a.bias", "c.weight", "c.bias"]


@on_ranks(2)
def test_frozen_parameters_take_no_part():
    model = network()
    model[2].requires_grad_(False)
    ddp = cx.DistributedDataParallel(model)
    loss_on(ddp, cx.get_rank()).backward()
    assert_close(gradients(model), mean_gradients(model))
    assert model[2].weight.grad is None


@on_ranks(2)
def test_module_without_trained_parameters_is_wrapped():
    model = network().requires_grad_(False)
    ddp = cx.DistributedDataParallel(model)
    x = batch(cx.get_rank()).requires_grad_()
    assert ddp.backward(ddp(x).sum()) is not None
    assert ddp.sync_gradients() == {}


@on_ranks(2, by_night(3))
def test_buffers_are_shared_at_each_training_forward():
    model = nn.BatchNorm1d(6).double()
    ddp = cx.DistributedDataParallel(model)
    everyone = [nn.BatchNorm1d(6).double() for _ in range(cx.get_world_size())]
    for step in range(3):
        ddp(batch(cx.get_rank() + 10 * step, rows=3 + cx.get_rank()))
        for rank, alone in enumerate(everyone):
            alone(batch(rank + 10 * step, rows=3 + rank))
    ddp(batch(0))  # after the mean of what the ranks had
    total = sum(3 + rank for rank in range(len(everyone)))
    expected = sum(alone.running_mean * (3 + rank) for rank, alone in enumerate(everyone)) / total
    last = batch(0).mean(0)
    torch.testing.assert_close(model.running_mean, 0.9 * expected + 0.1 * last, rtol=1e-12, atol=1e-12)
    assert model.num_batches_tracked == 4
    ddp.eval()
    before = model.running_mean.clone()
    model.running_mean += cx.get_rank()
    ddp(batch(0))
    torch.testing.assert_close(model.running_mean, before + cx.get_rank())


def test_the_tensors_of_any_module_are_found():
    inner = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.ReLU())
    inner.register_buffer("absent", None)
    inner.register_module("nobody", None)
    model = nn.Sequential(inner, nn.ModuleList([inner, nn.BatchNorm2d(4)]), nn.InstanceNorm1d(2))
    model[2].register_buffer("shared", inner[0].running_mean, persistent=False)
    assert [id(each) for each in tensors_of(model)[0]] == [id(each) for each in model.parameters()]
    assert {id(each) for each in tensors_of(model)[1]} == {id(each) for each in model.buffers()}
    assert len(tensors_of(model)[1]) == 6
    inner.outer = model  # around in a circle
    assert len(tensors_of(model)[1]) == 6
    for _ in range(40):  # each holds the one before twice
        inner = nn.ModuleList([inner, inner])
    assert len(tensors_of(inner)[1]) == 6
    assert tensors_of(nn.Linear(2, 2))[1] == []


@on_ranks(2)
def test_parameters_shared_between_modules_are_averaged_once():
    model = network()
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    model.append(nn.Linear(3, 8).double()).append(nn.Linear(8, 8).double())
    model[6].weight = model[2].weight
    ddp = cx.DistributedDataParallel(model)
    loss_on(ddp, cx.get_rank()).backward()
    assert model[6].weight.grad is model[2].weight.grad
    assert_close(gradients(model), mean_gradients(model))


@on_ranks(2)
def test_channels_last_weights_keep_their_layout():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).double().to(memory_format=torch.channels_last)

    def loss(model, rank):
        image = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        return model(image.to(memory_format=torch.channels_last)).square().mean()

    for as_view in (True, False):
        model.zero_grad()
        ddp = cx.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        loss(ddp, cx.get_rank()).backward()
        assert_close(gradients(model), mean_gradients(model, loss))
        assert model[0].weight.grad.stride() == model[0].weight.stride()
        ddp.close()


@on_ranks(2)
def test_dtypes_are_mixed():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            kinds = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16)
            self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in (*kinds, *kinds))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
                x = x.abs() if x.is_complex() else x
            return x.double()

    for as_view in (True, False):
        model = Mixed()
        ddp = cx.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        loss_on(ddp, cx.get_rank()).backward()
        expected = mean_gradients(model)
        for name, gradient in gradients(model).items():
            assert gradient.dtype == model.get_parameter(name).dtype
            torch.testing.assert_close(gradient, expected[name])
        assert len(gradients(model)) == len(expected)


@on_ranks(2)
def test_bfloat16_flags_tell_used_from_unused():
    model = nn.ModuleList(nn.Linear(6, 3, dtype=torch.bfloat16) for _ in range(2))
    model.forward = lambda x, index: model[index](x)
    ddp = cx.DistributedDataParallel(model, find_unused_parameters=True)
    ddp(batch(0).bfloat16(), 1).sum().backward()
    assert list(gradients(model)) == ["1.weight", "1.bias"]


@on_ranks(2)
def test_empty_parameters_are_carried_along():
    model = network()
    model.nothing = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))
    ddp = cx.DistributedDataParallel(model)
    (loss_on(ddp, cx.get_rank()) + model.nothing.sum()).backward()
    assert_close(gradients(model), mean_gradients(model, lambda m, r: loss_on(m, r) + m.nothing.sum()))


@on_ranks(2)
def test_gradient_checkpointing_works_without_reentrance():
    class Checkpointed(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.net, self.reentrant = network(), reentrant

        def forward(self, x):
            return checkpoint(self.net[1:], self.net[0](x), use_reentrant=self.reentrant)

    for bucket_size_mb in (25, 1e-4):
        model = Checkpointed(False)
        ddp = cx.DistributedDataParallel(model, bucket_size_mb=bucket_size_mb)
        loss_on(ddp, cx.get_rank()).backward()
        assert_close(gradients(model), mean_gradients(model))
        ddp = cx.DistributedDataParallel(Checkpointed(True), bucket_size_mb=bucket_size_mb)
        with pytest.raises(cx.DistributedTrainingError, match="use_reentrant=False"):
            loss_on(ddp, cx.get_rank()).backward()


@on_ranks(2)
def test_state_dict_has_no_prefix_and_loads_into_the_bare_module():
    ddp, bare = cx.DistributedDataParallel(network()), network()
    state = ddp.state_dict()
    assert list(state) == list(bare.state_dict())
    bare.load_state_dict(state)
    ddp.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert all(not tensor.any() for tensor in ddp.get_model().state_dict().values())


@on_ranks(2)
def test_closed_wrapper_leaves_the_module_alone_and_another_can_take_it():
    model, alone = network(), network()
    ddp = cx.DistributedDataParallel(model)
    ddp.close()
    ddp.close()
    loss_on(ddp, cx.get_rank()).backward()
    loss_on(alone, cx.get_rank()).backward()
    assert_close(gradients(model), gradients(alone))
    model.zero_grad()
    again = cx.DistributedDataParallel(model)
    loss_on(again, cx.get_rank()).backward()
    assert_close(gradients(model), mean_gradients(model))
    assert (again.get_rank(), again.get_world_size(), again.is_master()) == (cx.get_rank(), 2, cx.get_rank() == 0)


def another_model(how: str) -> nn.Module:
    """A network that differs, on rank 1, in one way."""
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2))
    if cx.get_rank() != 1:
        return model
    if how == "shape":
        model[0] = nn.Conv2d(2, 2, 5)
    elif how == "dtype":
        model[0].double()
    elif how == "frozen":
        model[0].weight.requires_grad_(False)
    elif how == "missing":
        model[0] = nn.Conv2d(2, 2, 3, bias=False)
    elif how == "buffer":
        model[1] = nn.BatchNorm2d(2, track_running_stats=False)
    elif how == "layout":
        model.to(memory_format=torch.channels_last)
    return model


@on_ranks(2, by_night(3))
def test_models_that_differ_are_refused_on_every_rank_with_what_differs():
    weight = "the parameter 0.weight"
    names = {"shape": weight, "dtype": weight, "frozen": weight, "missing": "the parameter 0.bias", "layout": weight}
    for how, name in {**names, "buffer": "the buffer 1.running_mean"}.items():
        with pytest.raises(cx.ConfigError, match=f"rank 1 differs from rank 0 in {name}: ") as caught:
            cx.DistributedDataParallel(another_model(how))
        assert caught.value.rank == 1
        here, there = str(caught.value).split(" on rank 1, ")
        assert here.split(f"{name}: ")[1] != there.split(" on rank 0")[0], how


@on_ranks(2)
def test_parameters_in_another_order_are_refused():
    parts = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    order = "ab" if cx.get_rank() == 0 else "ba"
    with pytest.raises(cx.ConfigError, match="another order"):
        cx.DistributedDataParallel(nn.ModuleDict({name: parts[name] for name in order}))
