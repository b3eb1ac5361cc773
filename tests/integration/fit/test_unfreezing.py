"""Layers that a callback unfreezes within a fit are trained, on any number of ranks, and also when it is resumed."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import fingerprint, flat, make_model, make_rows, one_process, run_world
from markers import by_night
from refusals import refusal
from torch import nn
from torch.optim import lr_scheduler as schedulers

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS, BATCH = 26, 8  # 4 steps per epoch, the last of 2 rows
SETTINGS: dict[str, Any] = {"epochs": 3, "effective_batch_size": BATCH, "verbose": False}


class Unfreeze(cx.callbacks.Callback):
    """Unfreezes the first layer when epoch 1 begins, and gives it to the optimizer in its own group."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model[0].requires_grad_(True)
            self.trainer.optimizer.add_param_group({"params": [*self.model[0].parameters()], "lr": 0.05})


class Thaw(cx.callbacks.Callback):
    """As `Unfreeze`, of an optimizer that has all parameters."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model[0].requires_grad_(True)


def one_cycle(optimizer: torch.optim.Optimizer, total_steps: int) -> schedulers.LRScheduler:
    return schedulers.OneCycleLR(optimizer, 0.2, total_steps)


def decay(optimizer: torch.optim.Optimizer) -> schedulers.LRScheduler:
    return schedulers.LambdaLR(optimizer, lambda step: 0.9**step)


KINDS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"make": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
    "dampening": {"make": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), "callback": Thaw},
    "adam": {"make": functools.partial(torch.optim.Adam, lr=0.01)},
    "thaw": {"make": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), "callback": Thaw},
    "cosine": {"scheduler": "cosine", "warmup_steps": 6},
    "function": {"scheduler": one_cycle, "make": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
    "built": {"scheduler": decay},
}


def frozen_model() -> nn.Sequential:
    model = make_model()
    model[0].requires_grad_(False)
    return model


def fitted(make: Any = None, callback: Any = Unfreeze, scheduler: Any = None, **settings: Any) -> cx.DistributedTrainer:
    model = frozen_model()
    parts = model.parameters() if callback is Thaw else model[2].parameters()
    optimizer = (make or functools.partial(torch.optim.SGD, lr=0.1))(parts)
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, scheduler=scheduler)
    trainer.fit(*make_rows(ROWS), callbacks=[callback()], **{**SETTINGS, **settings})
    return trainer


DAILY = ("momentum", "thaw", "function")


def parameters_of_each_kind(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: flat(fitted(**KINDS[name]).model.parameters()) for name in names}


def by_hand(make: Any, order: list[list[int]]) -> Any:
    """Trains in PyTorch's own words."""
    inputs, targets = make_rows(ROWS)
    model = frozen_model()
    optimizer = make(model[2].parameters())
    for step, rows in enumerate(order):
        if step == len(order) // 3:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.05})
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    return flat(model.parameters())


@pytest.mark.parametrize("names", [DAILY, by_night(tuple(KINDS))], ids=["some", "all"])
def test_what_is_unfrozen_is_trained_as_by_hand_and_alike_on_any_number_of_ranks(names):
    with one_process():
        alone = parameters_of_each_kind(names)
        frozen = flat(frozen_model()[0].parameters())
    sampler = cx.DistributedSampler(ROWS, seed=42, rank=0, world_size=1)
    order = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        indices = [int(each) for each in sampler.get_indices()]
        order += [indices[start : start + BATCH] for start in range(0, ROWS, BATCH)]
    for name in {"momentum", "adam"} & {*names}:
        np.testing.assert_allclose(alone[name], by_hand(KINDS[name]["make"], order), rtol=0, atol=1e-6)
    for found in run_world(2, parameters_of_each_kind, names):
        for name, values in found.items():
            assert not np.allclose(values[: len(frozen)], frozen, atol=1e-4), name
            np.testing.assert_allclose(values, alone[name], rtol=0, atol=1e-6, err_msg=name)


def resumed_after_each_step(folder: str, *names: str) -> None:
    for name in names:
        kind = KINDS[name]
        own = f"{folder}/{name}"
        whole = fitted(**kind, checkpoint_every_n_steps=1, checkpoint_dir=own)
        cx.barrier()
        for step in (3, 4, 5, 8, 10):  # the layer is unfrozen after 4
            path = f"{own}/step-{step:08d}.ckpt"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                again = fitted(**kind, resume=path)
            assert fingerprint(again.model) == fingerprint(whole.model), (name, step)
            assert [group["lr"] for group in again.optimizer.param_groups] == [
                group["lr"] for group in whole.optimizer.param_groups
            ], (name, step)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fit_resumed_before_and_after_it_has_the_bits_of_the_whole(tmp_path: Path, world_size: int):
    if world_size == 1:
        with one_process():
            resumed_after_each_step(str(tmp_path), *KINDS)
    else:
        run_world(world_size, resumed_after_each_step, str(tmp_path), "momentum", "function")


def test_an_added_group_follows_the_schedule_in_proportion():
    traced: list[list[float]] = []

    class LearningRates(Unfreeze):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            traced.append([group["lr"] for group in self.trainer.optimizer.param_groups])

    with one_process():
        for scheduler in ("linear", one_cycle, decay):
            traced.clear()
            fitted(scheduler=scheduler, callback=LearningRates)
            assert [len(rates) for rates in traced] == [1] * 4 + [2] * 8
            assert traced[4][1] == 0.05
            ratios = [second / first for first, second in traced[4:]]
            assert ratios == pytest.approx([ratios[0]] * 8)


def test_a_program_is_told_what_the_checkpoint_has_unfrozen(tmp_path: Path, capsys: Any):
    with one_process():
        fitted(checkpoint_every_n_epochs=1, checkpoint_dir=str(tmp_path))
        capsys.readouterr()
        path = str(tmp_path / "epoch-0002.ckpt")
        fitted(resume=path, verbose=True)
        shown = " ".join(capsys.readouterr().out.split())
        assert "trained 0.weight, 0.bias trained as in the checkpoint (frozen in the program)" in shown
        loaded = cx.DistributedTrainer(model := frozen_model(), None, torch.optim.SGD(model[2].parameters(), 0.1))
        loaded.load_checkpoint(path)
        assert len(loaded.optimizer.param_groups) == 2
        assert model[0].weight.requires_grad
        other = cx.DistributedTrainer(model := frozen_model(), None, torch.optim.SGD([model[2].weight], 0.1))
        with pytest.raises(cx.CheckpointError, match=r"only in the checkpoint: \['0.bias', '0.weight', '2.bias'\]"):
            other.load_checkpoint(path)


class OnOneRank(Unfreeze):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if cx.get_rank() == 1:
            super().on_epoch_begin(epoch, logs)


def unfreeze_on_one_rank() -> str:
    return refusal(fitted, callback=OnOneRank)


def test_unfreezing_on_one_rank_only_is_refused_on_all():
    for text in run_world(2, unfreeze_on_one_rank):
        assert "rank 1 differs from rank 0 in which parameters are trained" in text


@pytest.mark.parametrize(
    "make", [by_night(KINDS["momentum"]["make"]), by_night(KINDS["dampening"]["make"]), torch.optim.Adagrad]
)
def test_layers_unfrozen_between_two_fits_are_stepped_by_the_fused_optimizer_too(make: Any):
    found = []
    with one_process():
        for wanted in (False, "auto", True):
            model = frozen_model()
            trainer = cx.DistributedTrainer(model, "cross_entropy", make(model.parameters()))
            for _ in range(2):
                trainer.fit(*make_rows(ROWS), fused_optimizer=wanted, **{**SETTINGS, "epochs": 1})
                model[0].requires_grad_(True)
            found.append(flat(model.parameters()))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found[2], found[0], rtol=0, atol=1e-6)


def thaw_before_an_uneven_step() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        model[0].requires_grad_(False)
        before = flat(model[0].parameters())
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
        x, y = make_rows(9)
        settings: dict[str, Any] = {"batch_size": 4, "accumulation_steps": 2, "callbacks": Thaw(), "verbose": False}
        trainer.fit(x[:, :4].double(), y, epochs=2, **settings)
    assert not np.array_equal(before, flat(model[0].parameters()))
    return fingerprint(model)


def test_ranks_with_other_numbers_of_micro_batches_follow_an_unfrozen_layer_together():
    """The only step of an epoch has two micro-batches on rank 0, and one on rank 1."""
    first, second = run_world(2, thaw_before_an_uneven_step)
    assert first == second
