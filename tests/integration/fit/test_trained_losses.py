"""Claims about a loss that is a module: it is part of what is trained, and of what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import CLASSES, everywhere, fingerprint, flat, make_model, make_rows, one_process, run_world, seeded
from markers import by_night
from refusals import refusal, warning_texts
from torch import Tensor, nn
from torch.nn import functional

import cyxtrain as cx
from cyxtrain.callbacks import Callback

pytestmark = pytest.mark.usefixtures("rank_server")


class Cosine(nn.Module):
    """Compares rows with a learned direction per class, as ArcFace does; keeps a running mean and drops numbers."""

    mean: Tensor
    steps: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        with seeded():
            self.weight = nn.Parameter(torch.randn(CLASSES, CLASSES))
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        scores = functional.linear(functional.normalize(self.dropout(output)), functional.normalize(self.weight))
        if self.training:
            self.mean = self.mean.lerp(output.detach().mean(0), 0.1)
            self.steps += 1
            scores = scores * (1 + 0.01 * self.steps)
        return functional.cross_entropy(4 * scores + 0.1 * self.mean, target)


class Drifting(nn.Module):
    """A metric that depends on what it has seen in the epoch, and on its mode."""

    higher_is_better = True
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.dropout = nn.Dropout(0.5)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.total += self.dropout(output).abs().sum()
        return output.mean() + 0.1 * self.total


class Counted(nn.Module):
    """A model that depends on its own buffer that is in no state_dict, and on one that is made in forward."""

    steps: Tensor
    late: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()
        self.register_buffer("steps", torch.zeros(1), persistent=False)
        self.register_buffer("late", None, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.steps = self.steps + 1
            self.late = self.steps.repeat(2)
        late = 0 if self.late is None else self.late.sum()
        return self.body(inputs) * (1 + 0.01 * self.steps + 0.01 * late)


def train(settings: dict[str, Any], optimizer: Any = "adam") -> dict[str, Any]:
    model, loss = Counted(), Cosine(dropout=0.2)
    drifting = Drifting()
    trainer = cx.DistributedTrainer(model, loss, optimizer, metrics={"drift": drifting})
    history = trainer.fit(*make_rows(26), *make_rows(7, seed=1), epochs=2, batch_size=4, verbose=False, **settings)
    assert drifting.training
    assert drifting.total == 0
    return {"bits": [fingerprint(model), fingerprint(loss)], "history": history.history, "steps": loss.steps.item()}


def train_and_resume(folder: str, every: int) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    whole = train({"checkpoint_dir": folder, "checkpoint_every_n_steps": every})
    cx.barrier()
    paths = sorted(path for path in Path(folder).iterdir() if path.suffix == ".ckpt")
    return whole, {path.name: train({"checkpoint_dir": folder, "resume": path}) for path in paths}


@pytest.mark.parametrize(("world_size", "every"), [(1, 5), *(by_night(world_size, 2) for world_size in (1, 2, 3))])
def test_a_fit_with_a_loss_that_learns_is_resumed_bit_for_bit(world_size: int, every: int, tmp_path: Path) -> None:
    for whole, resumed in everywhere(world_size, train_and_resume, str(tmp_path), every):
        assert len(resumed) >= 2
        for name, found in resumed.items():
            assert found == whole, name


class Still(Cosine):
    """Without what each rank keeps of its own rows."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(4 * functional.linear(output, functional.normalize(self.weight)), target)


WAYS = ("a name", "an object", "by output", "a method")


def learn_in_many_ways(ways: tuple[str, ...]) -> list[list[Any]]:
    return [learn_in(way) for way in ways]


def learn_in(way: str) -> list[Any]:
    inputs, targets = make_rows(30)
    model, loss = make_model(), Still()
    before, answers = loss.weight.detach().clone(), targets
    optimizer: Any = "sgd"
    if way == "an object":
        optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], 1e-2)
    given: Any = {"by output": {"logits": loss}, "a method": loss.forward}.get(way, loss)
    if way == "by output":
        model.register_forward_hook(lambda *parts: {"logits": parts[-1]})
        answers = {"logits": targets}  # type: ignore[assignment]
    cx.DistributedTrainer(model, given, optimizer).fit(
        inputs, answers, epochs=2, effective_batch_size=6, clip_norm=1.0, verbose=False
    )
    return [flat([*model.parameters(), loss.weight]), bool((before != loss.weight).any())]


@pytest.mark.parametrize(
    ("world_size", "ways"), [(2, ("an object", "by output")), by_night(2, ("a name", "a method")), by_night(3, WAYS)]
)
def test_n_ranks_train_a_loss_as_one_rank_does_however_it_is_given(world_size, ways) -> None:
    alone = everywhere(1, learn_in_many_ways, ways)[0]
    for found in run_world(world_size, learn_in_many_ways, ways):
        for way, (values, learned), (expected, _) in zip(ways, found, alone, strict=True):
            np.testing.assert_allclose(values, expected, rtol=0, atol=1e-6, err_msg=way)
            assert learned, way


def restored() -> list[Any]:
    """Returns whether early stopping restores the loss with the model, and how far an average of bfloat16 is off."""
    best: list[str] = []
    steps: list[Any] = []

    class Watching(cx.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                best.append(fingerprint(loss))

    class Averaging(cx.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps.append(flat(self.model.parameters()))

    loss, inputs = Still(), make_rows(12)
    early = cx.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True)
    trainer = cx.DistributedTrainer(make_model(), loss, callbacks=[Watching(), early])
    trainer.fit(*inputs, epochs=3, batch_size=4, verbose=False)
    half, average = make_model().bfloat16(), cx.callbacks.EMA(0.999, overwrites_at_end=False)
    expected = flat(half.parameters())
    optimizer = torch.optim.SGD(half.parameters(), 1.0)
    averaged = cx.DistributedTrainer(half, "cross_entropy", optimizer, callbacks=[average, Averaging()])
    averaged.fit(*inputs, epochs=2, batch_size=1, verbose=False)
    for each in steps:
        expected = 0.999 * expected + 0.001 * each
    return [best[0] == fingerprint(loss), abs(flat(average.state_dict()["average"]) - expected).max()]


def test_early_stopping_restores_the_loss_and_averages_of_16_bits_move() -> None:
    with one_process():
        is_best, off = restored()
    assert is_best
    assert off < 1e-6


def refusals() -> list[str]:
    inputs, targets = make_rows(12)
    rank = cx.get_rank()
    other = Still()
    if rank == 1:
        other.weight = nn.Parameter(torch.randn(CLASSES, CLASSES + 1))
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 1.0 + rank]))
    said = []
    for loss in (other, weighted):
        said.append(refusal(cx.DistributedTrainer(make_model(), loss).fit, inputs, targets, epochs=1, verbose=False))
    same = Still()
    trainer = cx.DistributedTrainer(make_model(), same)
    if rank == 1:
        same.weight.data.add_(1.0)
    said.append(refusal(trainer.evaluate, inputs, targets))
    trainer.fit(inputs, targets, epochs=1, verbose=False)  # parameters begin as rank 0's
    return [*said, fingerprint(same)]


def test_ranks_that_have_other_losses_are_told() -> None:
    zero, one = run_world(2, refusals)
    assert "rank 1" in zero[0]
    assert "loss_fn.weight" in zero[1]
    assert "loss_fn.weight: hash of its values" in zero[2]
    assert zero[3] == one[3]


def test_a_checkpoint_has_the_loss_and_is_refused_where_that_is_another(tmp_path: Path) -> None:
    inputs, targets = make_rows(12)
    with one_process():
        loss = Cosine()
        trainer = cx.DistributedTrainer(make_model(), loss)
        trainer.fit(inputs, targets, epochs=1, verbose=False)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        again = Cosine()
        cx.DistributedTrainer(make_model(), again).load_checkpoint(tmp_path / "a.ckpt")
        assert fingerprint(again) == fingerprint(loss)
        assert again.steps.item() == loss.steps.item() > 0
        with pytest.raises(cx.CheckpointError, match=r"it has a state of loss_fn, and this trainer of no loss"):
            cx.DistributedTrainer(make_model(), "cross_entropy").load_checkpoint(tmp_path / "a.ckpt")
        bare = make_model()
        cx.load_weights(bare, tmp_path / "a.ckpt")
        assert fingerprint(bare) == fingerprint(trainer.model)


def test_a_loss_that_the_optimizer_does_not_have_is_a_warning_and_the_header_counts_what_it_learns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = make_model()
    trainer = cx.DistributedTrainer(model, Still(), torch.optim.SGD(model.parameters(), 0.1))
    with one_process(), pytest.warns(UserWarning, match=r"the optimizer does not have loss_fn.weight, which requires"):
        trainer.fit(*make_rows(12), epochs=1)
    assert "learns its own 9 parameters" in capsys.readouterr().out


class Unfreezes(Callback):
    """Unfreezes the first layer before the second epoch; `adds` it to the optimizer too."""

    def __init__(self, *, adds: bool) -> None:
        self.adds = adds

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if epoch == 1:
            layer = self.model[0].requires_grad_()
            if self.adds:
                self.trainer.optimizer.add_param_group({"params": [*layer.parameters()]})


def warnings_of(trainer: cx.DistributedTrainer, *callbacks: Callback, epochs: int = 3) -> list[str]:
    with one_process(), warning_texts() as caught:
        trainer.fit(*make_rows(12), epochs=epochs, callbacks=callbacks, verbose=0)
    return [text for text in caught if "the optimizer does not have" in text]


def test_parameters_of_the_model_that_the_optimizer_does_not_have_are_one_warning() -> None:
    model = make_model()
    last = [*model[-1].parameters()]
    (text,) = warnings_of(cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(last, 0.1)))
    assert "0.weight, 0.bias" in text
    assert "fit does not train them" in text
    assert "add_param_group" in text
    model[0].requires_grad_(False)
    assert not warnings_of(cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(last, 0.1)))
    for adds, count in ((False, 1), (True, 0)):
        model[0].requires_grad_(False)
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(last, 0.1))
        found = warnings_of(trainer, Unfreezes(adds=adds))
        assert len(found) == count
        assert all("0.weight" in each for each in found)


def mixed() -> list[Any]:
    loss = Still()
    model = make_model()
    before = loss.weight.detach().clone()
    trainer = cx.DistributedAMPTrainer(model, cx.AMPConfig(initial_scale=8.0), loss_fn=loss, optimizer="sgd")
    inputs, targets = make_rows(6, seed=cx.get_rank())
    for _ in range(3):
        trainer.training_step((inputs, targets))
    return [fingerprint(model), fingerprint(loss), bool((before != loss.weight).any()), loss.training]


def test_the_amp_trainer_trains_a_loss_too() -> None:
    zero, one = run_world(2, mixed)
    assert zero == one
    assert zero[2:] == [True, True]
