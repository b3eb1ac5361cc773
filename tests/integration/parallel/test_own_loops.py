"""A loop of the user's own is as honest as fit: whatever happens to a wrapped module is averaged, or is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from ddp_models import assert_close, assert_same_on_all_ranks, batch, gradients, loss_on, mean_gradients, network
from fitting import make_model, make_rows, one_process, run_world
from kept_worlds import on_ranks
from refusals import ending
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim.swa_utils import AveragedModel

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")


# --- a module that changes after it was wrapped ---------------------------------------------------------------------


def unfreeze(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)


def add(model: nn.Sequential) -> None:
    torch.manual_seed(cx.get_rank())  # begins as rank 0's
    model.add_module("head", nn.Linear(3, 2).double())


def replace(model: nn.Sequential) -> None:
    torch.manual_seed(cx.get_rank())
    model[2].weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))


def remove(model: nn.Sequential) -> None:
    del model[4]


def swap(model: nn.Sequential) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(copy.deepcopy(model.state_dict()))  # the same parameters, without their hooks
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CHANGES: list[Callable[[nn.Sequential], None]] = [unfreeze, add, replace, remove, swap]


@on_ranks(2)
def test_what_is_unfrozen_added_replaced_or_removed_after_wrapping_is_averaged_from_the_next_forward():
    for fields in ({}, {"gradient_as_bucket_view": False}):
        for change in CHANGES:
            model = network()
            model[0].requires_grad_(False)
            ddp = cx.DistributedDataParallel(model, **fields)
            loss_on(ddp, cx.get_rank()).backward()
            change(model)
            model.zero_grad()
            loss_on(ddp, cx.get_rank()).backward()
            assert_same_on_all_ranks(model.state_dict())
            assert_close(gradients(model), mean_gradients(model))
            ddp.close()


@on_ranks(2)
def test_a_wrapper_that_is_converted_averages_in_the_new_type():
    ddp = cx.DistributedDataParallel(network(torch.float32))
    ddp(batch(cx.get_rank(), dtype=torch.float32)).sum().backward()
    ddp.double()
    ddp.zero_grad()
    loss_on(ddp, cx.get_rank()).backward()
    assert_close(gradients(ddp.module), mean_gradients(ddp.module))


@on_ranks(2)
def test_what_waits_under_no_sync_is_averaged_with_what_was_unfrozen_meanwhile():
    model, rank = network(), cx.get_rank()
    model[0].requires_grad_(False)
    ddp = cx.DistributedDataParallel(model)
    with ddp.no_sync():
        loss_on(ddp, rank).backward()
        unfreeze(model)
        loss_on(ddp, rank + 10).backward()
    loss_on(ddp, rank + 20).backward()

    def expected(model: nn.Module, rank: int) -> Tensor:
        before = model[1:](model[0](batch(rank)).detach()).square().mean()
        return before + loss_on(model, rank + 10) + loss_on(model, rank + 20)

    assert_close(gradients(model), mean_gradients(model, expected))
    unfrozen = network()
    unfrozen[0].requires_grad_(False)
    ddp = cx.DistributedDataParallel(unfrozen)
    unfreeze(unfrozen)
    ddp.backward(loss_on(unfrozen, rank))  # no forward of the wrapper: sync_gradients looks too
    assert_close(ddp.sync_gradients(), mean_gradients(unfrozen))


@on_ranks(2)
def test_freezing_and_unfreezing_what_was_trained_builds_nothing_anew():
    model = network()
    ddp = cx.DistributedDataParallel(model, find_unused_parameters=True)
    reducer = ddp._reducer
    for trains in (False, True, False, True):
        model.requires_grad_(trains)
        model.zero_grad()
        x = batch(cx.get_rank()).requires_grad_()
        ddp(x).square().mean().backward()
        assert bool(gradients(model)) is trains
        assert ddp._reducer is reducer
    assert_close(gradients(model), mean_gradients(model))


@on_ranks(2)
def test_comm_hooks_and_what_compression_keeps_outlive_a_change():
    model, sent = network(), []
    model[0].requires_grad_(False)
    ddp = cx.DistributedDataParallel(model)
    ddp.register_comm_hook(None, lambda state, bucket: sent.append(1) or allreduce_hook(None, bucket))
    unfreeze(model)
    loss_on(ddp, cx.get_rank()).backward()
    assert sent == [1]
    assert_close(gradients(model), mean_gradients(model))
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    model[0].requires_grad_(False)
    ddp = cx.DistributedDataParallel(model, compression="powersgd")
    ddp(torch.randn(4, 40)).square().mean().backward()
    before = ddp._reducer.low_rank["1.weight"].error.clone()
    unfreeze(model)
    ddp.sync_gradients()
    assert before.any()
    assert torch.equal(ddp._reducer.low_rank["1.weight"].error, before)
    assert set(ddp._reducer.low_rank) == {"0.weight", "1.weight"}


def change_on_one_rank() -> str:
    model = network()
    model[0].requires_grad_(False)
    ddp = cx.DistributedDataParallel(model)
    loss_on(ddp, cx.get_rank()).backward()
    if cx.get_rank() == 1:
        unfreeze(model)
    return ending(lambda: loss_on(ddp, cx.get_rank()).backward())


def test_a_change_on_one_rank_alone_is_an_error_on_all():
    for text in run_world(2, change_on_one_rank):
        assert text.startswith("CollectiveMismatchError: ")


# --- backward -------------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


@on_ranks(2)
def test_backward_of_a_loss_that_a_method_made_is_averaged_from_the_first_one():
    model = WithLoss()
    model.net[0].requires_grad_(False)
    ddp = cx.DistributedDataParallel(model)
    ddp.module.loss(batch(cx.get_rank())).backward()
    assert_close(gradients(model), mean_gradients(model))
    model.zero_grad()
    unfreeze(model.net)  # nobody has looked at the module since
    loss = ddp.module.loss(batch(cx.get_rank()))
    with pytest.raises(cx.DistributedTrainingError, match=r"unfrozen or converted\), and this loss is not from the"):
        loss.backward()
    model.zero_grad()
    loss_on(ddp, cx.get_rank()).backward()
    assert_close(gradients(model), mean_gradients(model))


@on_ranks(2)
def test_of_two_wrappers_of_one_module_the_newer_one_averages():
    model = network()
    older, newer = cx.DistributedDataParallel(model), cx.DistributedDataParallel(model)
    sent: list[str] = []
    for name, ddp in (("older", older), ("newer", newer)):
        ddp.register_comm_hook(name, lambda name, bucket: sent.append(name) or allreduce_hook(None, bucket))
    loss_on(model, cx.get_rank()).backward()
    assert_close(gradients(model), mean_gradients(model))
    newer.close()
    model.zero_grad()
    loss_on(model, cx.get_rank()).backward()
    assert_close(gradients(model), mean_gradients(model))
    assert sent == ["newer", "older"]


@on_ranks(2)
def test_create_graph_is_an_error_that_says_what_to_write_instead():
    model, rank = network(), cx.get_rank()
    ddp = cx.DistributedDataParallel(model)
    with pytest.raises(cx.DistributedTrainingError, match=r"create_graph=True.*torch\.autograd\.grad"):
        loss_on(ddp, rank).backward(create_graph=True)
    model.zero_grad()

    def with_penalty(model: nn.Module, rank: int) -> Tensor:
        loss = loss_on(model, rank)
        own = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        return loss + sum(gradient.square().sum() for gradient in own)

    with_penalty(ddp, rank).backward()  # autograd.grad is this rank's alone; the loss made of it is averaged
    assert_close(gradients(model), mean_gradients(model, with_penalty))
    with ddp.no_sync():
        loss_on(ddp, rank).backward(create_graph=True)
    with pytest.raises(cx.DistributedTrainingError, match="create_graph=True"):
        ddp.sync_gradients()


def steps(model: nn.Module, *, clears: bool) -> None:
    """Lets a hook of each parameter step with its gradient."""
    for parameter in model.parameters():
        optimizer = torch.optim.Adam([parameter], 0.1)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            if clears:
                parameter.grad = None

        parameter.register_post_accumulate_grad_hook(step)


@on_ranks(2)
def test_a_hook_that_steps_in_backward_is_an_error_before_or_after_wrapping():
    rank = cx.get_rank()
    for clears in (True, False):
        for is_first in (True, False):
            for takes_method in (True, False):
                model = network()
                if is_first:
                    steps(model, clears=clears)
                ddp = cx.DistributedDataParallel(model)
                if not is_first:
                    steps(model, clears=clears)
                loss = loss_on(model if takes_method else ddp, rank)
                with pytest.raises(cx.DistributedTrainingError, match=r"a hook .*Call optimizer\.step\(\) after"):
                    loss.backward()
                ddp.close()


@on_ranks(2)
def test_steps_between_forward_and_backward_of_another_loss_are_nobodys_fault():
    table = nn.Embedding(5, 2, max_norm=1.0)  # changes its weights in forward
    ddp = cx.DistributedDataParallel(table)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    rows = torch.tensor([1, 2 + cx.get_rank()])
    first, second = ddp(rows).sum(), ddp(rows).square().sum()
    first.backward()
    optimizer.step()
    second.backward()  # needs no weights: PyTorch allows it
    with ddp.no_sync():
        for _ in range(2):
            ddp(rows).sum().backward()
            optimizer.step()  # of this rank alone, as the user wants it
    ddp(rows).sum().backward()
    assert_same_on_all_ranks(gradients(table))


def fit_with_steps_in_backward() -> str:
    model = make_model()
    steps(model, clears=True)
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.0))
    return ending(trainer.fit, *make_rows(16), epochs=1, effective_batch_size=8, verbose=False)


def test_fit_has_words_for_it_too():
    for text in run_world(2, fit_with_steps_in_backward):
        assert text.startswith("DistributedTrainingError: ")
        assert "a hook took the gradient of 2.bias before it was averaged over ranks" in text


# --- copies ---------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_copies_come_out_unwrapped():
    model = network()
    ddp = cx.DistributedDataParallel(model)
    bare = copy.deepcopy(ddp)
    averaged = AveragedModel(ddp)
    assert type(bare) is type(averaged.module) is nn.Sequential
    assert_close(bare.state_dict(), model.state_dict())
    with torch.no_grad():
        model[0].weight.add_(2.0)
    averaged.update_parameters(ddp)
    with torch.no_grad():
        model[0].weight.add_(2.0)
    averaged.update_parameters(ddp)
    torch.testing.assert_close(averaged.module[0].weight, model[0].weight - 1.0)
    if cx.get_rank() == 0:  # alone: nobody averages a copy's gradients
        loss_on(bare, 0).backward()
    assert not gradients(model)


def test_alone_a_step_in_backward_is_the_users_own_business():
    with one_process():
        fit = cx.DistributedTrainer
        model = make_model()
        before = copy.deepcopy(model.state_dict())
        steps(model, clears=True)
        fit(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.0)).fit(
            *make_rows(16), epochs=1, batch_size=8, verbose=False
        )
        assert not torch.equal(model[0].weight, before["0.weight"])


@on_ranks(2)
def test_a_forward_without_a_backward_does_not_blame_the_step_after_it():
    model = network()
    ddp = cx.DistributedDataParallel(model)
    ddp(batch(cx.get_rank()))  # looked at, with gradients enabled
    with torch.no_grad():
        model[0].weight.add_(1.0)  # as all ranks do
    if cx.get_rank() == 0:
        loss_on(ddp, 0).backward()
    else:
        ddp.share_buffers_once()
        ddp.average_accumulated()
    assert_same_on_all_ranks(gradients(model))


@on_ranks(2)
def test_a_new_synchronisation_discards_what_was_accumulated_and_watched():
    model = network()
    ddp = cx.DistributedDataParallel(model)
    with ddp.no_sync():
        loss_on(ddp, cx.get_rank()).backward()
    ddp.begin_sync().watch(torch.tensor(float("nan")))
    sync = ddp.begin_sync(signals=[float(cx.get_rank())] * ddp.num_signals)
    own = [gradient.clone() for gradient in gradients(model).values()]
    ddp.sync_gradients()  # nothing is left to average
    assert all(map(torch.equal, own, gradients(model).values()))
    assert not sync.is_sent
    model.zero_grad()
    loss_on(ddp, cx.get_rank()).backward()
    assert sync.is_sent
    assert ddp.is_finite()
    assert list(sync.received) == [0.5] * ddp.num_signals  # the mean over both ranks
    assert_same_on_all_ranks(gradients(model))
