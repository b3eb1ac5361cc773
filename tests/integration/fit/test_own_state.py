"""Fits of models and optimizers with state of their own: it is averaged, saved and resumed by what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, fingerprint, make_model, make_rows, one_process
from markers import by_night, nightly_where
from refusals import warning_texts
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, prune

import cyxtrain as cx
from cyxtrain.callbacks import EMA, SWA, Callback, EarlyStopping, ModelCheckpoint

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.filterwarnings("ignore:Please use quant_min", "ignore:torch.ao", "ignore:.*spectral_norm.*deprecated"),
]
ROWS, VALID = make_rows(48), make_rows(24, seed=1)
FIT: dict[str, Any] = {"epochs": 3, "effective_batch_size": 12, "verbose": False}


def fit(model: nn.Module, *callbacks: Callback, **settings: Any) -> cx.DistributedTrainer:
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.2, momentum=0.9))
    trainer.fit(*ROWS, callbacks=[*callbacks], **{**FIT, **settings})
    return trainer


class Cached(nn.Module):
    """Keeps a table for the longest input so far."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.register_buffer("table", torch.ones(1))
        self.register_buffer("scale", None)
        self.scale: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1]).cos()
        if self.scale is None:
            self.scale = torch.full((), 0.5)
        out: Tensor = self.net(x * self.table * self.scale)
        return out


def quantised() -> nn.Module:
    model = make_model().train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    prepared: nn.Module = quantization.prepare_qat(model)
    return prepared


@pytest.mark.parametrize("make", [Cached, by_night(quantised)])
def test_a_fit_whose_buffers_have_grown_is_resumed_bit_for_bit(make, tmp_path: Path):
    saving = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_steps": 5, "keep_best": "loss", "load_best": True}
    with one_process():
        whole = fingerprint(fit(make(), **saving).model)
        assert fingerprint(fit(make(), resume=str(tmp_path / "step-00000005.ckpt"), **saving).model) == whole
        trainer = fit(make())
        trainer.save_checkpoint(tmp_path / "own.ckpt")
        other = cx.DistributedTrainer(make(), "cross_entropy", "sgd")
        with pytest.raises(cx.CheckpointError):  # another optimizer: nothing has changed
            cx.DistributedTrainer(make(), "cross_entropy", "adam").load_checkpoint(tmp_path / "own.ckpt")
        cx.load_weights(other.model, tmp_path / "own.ckpt")
        assert fingerprint(other.model) == fingerprint(trainer.model)


def ranges() -> list[Any]:
    model = fit(quantised(), epochs=1, effective_batch_size=48).model
    first = model[0].activation_post_process.activation_post_process  # sees what the layers before it give
    return [first.min_val.item(), first.max_val.item(), fingerprint(model)]


# --- buffers over ranks ---------------------------------------------------------------------------------------------


class Keeping(nn.Module):
    """Writes a memory bank, a moving mean under any name, a declared one, and what a range of its inputs is."""

    averaged_buffers: tuple[str, ...]

    def __init__(self, declared: tuple[str, ...] | None) -> None:
        super().__init__()
        self.net = make_model()
        self.register_buffer("bank", torch.eye(4))
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("running_center", torch.zeros(4))
        if declared is not None:
            self.averaged_buffers = declared

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.bank[:2] = nn.functional.normalize(x[:2], dim=1)
                self.center.lerp_(x.mean(0), 0.1)
                self.running_center.lerp_(x.mean(0), 0.1)
        out: Tensor = self.net(x)
        return out


def kept(declared: tuple[str, ...] | None) -> dict[str, Any]:
    with warning_texts() as said:
        model = fit(Keeping(declared)).model
    found = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    return {**found, "said": [text for text in said if "buffer" in text]}


@pytest.mark.parametrize("declared", [None, by_night(("center",)), by_night(("center", "running_center"))])
def test_only_means_over_samples_are_averaged_over_ranks_in_silence(declared):
    [alone] = everywhere(1, kept, declared)
    ranks = everywhere(2, kept, declared)
    assert [len(each["said"]) for each in ranks] == [int(declared is None), 0]
    assert ranks[0]["bank"] == ranks[1]["bank"]
    lengths = np.linalg.norm(ranks[0]["bank"], axis=1)
    if declared is None:
        assert (
            "the buffer bank, of shape (4, 4), differs between ranks and became their mean, as did center"
            in (ranks[0]["said"][0])
        )
        assert lengths.min() < 0.99
    else:
        np.testing.assert_allclose(lengths, 1, rtol=1e-5)
    for name in ("center", "running_center") if declared is None else declared:
        np.testing.assert_allclose(ranks[0][name], alone[name], rtol=1e-5, atol=1e-7)


def masked_and_ranged() -> list[Any]:
    layer = nn.Sequential(nn.Linear(4, 3), parametrizations.spectral_norm(nn.Linear(3, 3)))
    model = fit(layer).model
    lengths = [buffer.norm().item() for buffer in model.buffers()]
    prune.random_unstructured(model[0], "weight", 0.5)
    torch.manual_seed(cx.get_rank())
    model[0].weight_mask.bernoulli_(0.5)
    ddp = cx.DistributedDataParallel(model)
    model[0].weight_mask.copy_(torch.full((3, 4), float(cx.get_rank())))
    ddp(ROWS[0][:4])
    ddp.sync_buffers()
    mask = model[0].weight_mask.unique().tolist()
    ddp.close()
    return [lengths, mask, ranges()]


def test_what_belongs_to_a_weight_is_rank_0s_and_a_range_is_that_of_all_samples():
    [(_, _, alone)] = everywhere(1, masked_and_ranged)
    first, second = everywhere(2, masked_and_ranged)
    for lengths, mask, found in (first, second):
        np.testing.assert_allclose(lengths, 1, rtol=1e-5)
        assert mask == [0.0]
        assert found[:2] == pytest.approx(alone[:2], rel=1e-5)
    assert first[2] == second[2]


# --- averages of the weights ----------------------------------------------------------------------------------------


def test_an_average_of_weights_leaves_buffers_that_are_no_statistics():
    for norm in (parametrizations.spectral_norm, nn.utils.spectral_norm):
        layers = [nn.BatchNorm1d(4), norm(nn.Linear(4, 3)), nn.Linear(3, 3)]
        model = nn.Sequential(*layers)
        with one_process():
            average = SWA(0, overwrites_at_end=False)
            trainer = fit(model, average)
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            with average.applied():
                changed = [name for name, each in model.named_buffers() if not torch.equal(each, before[name])]
                assert trainer.evaluate(*VALID).loss < 10
        assert changed == ["0.running_mean", "0.running_var"]


class Changing(Callback):
    """Changes the model after an epoch."""

    def __init__(self, change: str, epoch: int = 0) -> None:
        self.change = change
        self.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch != self.epoch:
            return
        if self.change == "prune":
            prune.l1_unstructured(self.model[0], "weight", 0.5)
        elif self.change == "freeze":
            self.model[0].requires_grad_(False)
        elif self.change == "remove":
            self.model[1] = nn.ReLU()
            self.model[0].register_parameter("bias", None)
        else:
            self.model[2] = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
            self.trainer.optimizer.add_param_group({"params": [*self.model[2].parameters()]})


class Following(Callback):
    """Keeps the first layer's weights of each step, under whatever name."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.ends: list[Tensor] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(first_weight(self.model).detach().clone())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ends.append(self.steps[-1])


def first_weight(model: nn.Module) -> Tensor:
    named = dict(model.named_parameters())
    return named.get("0.weight_orig", named.get("0.weight"))


@nightly_where(lambda is_first, kind, change: not is_first or (kind == "EMA") != (change in ("prune", "remove")))
@pytest.mark.parametrize("kind", ["EMA", "SWA"])
@pytest.mark.parametrize("change", ["prune", "freeze", "remove", "new head"])
@pytest.mark.parametrize("is_first", [True, False])
def test_averages_follow_a_model_that_changes_within_a_fit(change, kind, is_first):
    average = EMA(0.5) if kind == "EMA" else SWA(0)
    callbacks = [Changing(change), average] if is_first else [average, Changing(change)]
    model, watching = make_model(), Following()
    with one_process():
        trainer = fit(model, *callbacks, watching, validation_data=VALID)
        assert trainer.evaluate(*VALID).loss == pytest.approx(trainer.history.val_losses[-1], rel=1e-4)
    expected = torch.stack(watching.ends).mean(0)
    if kind == "EMA":
        expected = watching.steps[0]
        for number, weights in enumerate(watching.steps):
            expected = weights.lerp(expected, 0.5) if number else make_model()[0].weight.data.lerp(weights, 0.5)
    torch.testing.assert_close(first_weight(model).detach(), expected, rtol=1e-4, atol=1e-5)


def test_a_layer_that_takes_the_name_of_another_does_not_share_its_average():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))

    class Inserting(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                model.insert(0, nn.Linear(4, 4))
                self.trainer.optimizer.add_param_group({"params": [*model[0].parameters()]})

    average = EMA(0.5)
    with one_process():
        fit(model, Inserting(), average)
    held = [*average._average.values()]
    assert len(held) == 6
    assert len({id(each) for each in held}) == len(held)


def test_best_weights_of_a_model_that_has_changed_since_are_refused_in_words():
    stopping = EarlyStopping("learning_rate", mode="max", restore_best_weights=True)
    with (
        one_process(),
        pytest.raises(cx.CheckpointError, match=r"the best weights of learning_rate: missing.*0.weight_orig"),
    ):
        fit(
            make_model(), Changing("prune", 1), stopping, cx.callbacks.LearningRateScheduler(lambda e, r: 0.1 / (1 + e))
        )


# --- optimizers -----------------------------------------------------------------------------------------------------


class Lookahead(torch.optim.SGD):
    """Keeps slow weights in its `state_dict`, besides its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1)
        self.slow = [each.detach().clone() for each in self.param_groups[0]["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}


class Wrapping(Lookahead):
    def state_dict(self) -> dict[str, Any]:
        return {"fast": super().state_dict()}


def train_with(kind: type[Lookahead], folder: str) -> str:
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", kind(model.parameters()))
    refused = pytest.raises(cx.CheckpointError, match=f"{kind.__name__} keeps .* outside its state")
    for settings in ({"checkpoint_every_n_epochs": 1}, {"callbacks": [ModelCheckpoint(f"{folder}/own.ckpt")]}):
        with refused:
            trainer.fit(*ROWS, checkpoint_dir=folder, **FIT, **settings)
        assert trainer.step == 0
    weights = ModelCheckpoint(f"{folder}/own.safetensors", save_weights_only=True)
    trainer.fit(*ROWS, callbacks=[weights], **FIT)
    with refused:
        trainer.save_checkpoint(f"{folder}/own.ckpt")
    assert trainer.step == 12
    return fingerprint(model)


@pytest.mark.parametrize("kind", [Lookahead, by_night(Wrapping)])
def test_an_optimizer_with_state_of_its_own_trains_and_is_refused_where_it_is_saved(kind, tmp_path: Path):
    found = everywhere(2, train_with, kind, str(tmp_path))
    assert found[0] == found[1]
