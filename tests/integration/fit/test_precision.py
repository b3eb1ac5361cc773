"""What computes in 16 bits trains as before, and the loss scale is that of PyTorch's GradScaler, on all ranks alike."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import CLASSES, FEATURES, adam, fingerprint, flat, make_model, make_rows, one_process, run_world, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from markers import by_night
from refusals import warning_texts
from torch import nn

import cyxtrain as cx
from cyxtrain.data.sampler import DistributedSampler
from cyxtrain.optim.precision import LossScale

pytestmark = pytest.mark.usefixtures("rank_server")
HUGE = 2.0**26  # the gradients of `make_model` overflow 16 bits at this scale, and at a 64th of it not
LARGE_ROW = 40


class Recorder(cx.callbacks.Callback):
    """Notes the loss scale after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.scales.append(self.trainer._state.loss_scale.value)


def make_task(large: bool) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer, and 60 rows; `large`: one of them makes gradients overflow, which the others do not."""
    inputs, targets = make_rows(60)
    if not large:
        model: nn.Module = make_model()
        return model, torch.optim.SGD(model.parameters(), 0.1), (inputs, targets)
    with seeded():
        model = nn.Linear(FEATURES, CLASSES)
    inputs[LARGE_ROW] = 2000.0
    targets[LARGE_ROW] = model(inputs[LARGE_ROW]).argmin()  # as wrong as can be, also when it has learnt a little
    return model, torch.optim.SGD(model.parameters(), 1e-6), (inputs, targets)


def fit_half(amp: dict[str, Any], effective_batch_size: int = 12, large: bool = False) -> dict[str, Any]:
    (model, optimizer, rows), recorder = make_task(large), Recorder()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), optimizer)
    history = trainer.fit(
        *rows,
        epochs=3,
        effective_batch_size=effective_batch_size,
        precision="fp16",
        amp=cx.AMPConfig(**amp),
        callbacks=[recorder],
        verbose=False,
    )
    return {
        "scales": recorder.scales,
        "parameters": flat(model.parameters()),
        "losses": history.train_losses,
        "dtypes": {str(parameter.dtype) for parameter in model.parameters()},
    }


def by_hand(amp: dict[str, Any], large: bool = False) -> tuple[list[float], Any, list[float]]:
    """The same with PyTorch's autocast and GradScaler, written out."""
    model, optimizer, (inputs, targets) = make_task(large)
    sampler = DistributedSampler(60, rank=0, world_size=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=amp["initial_scale"], growth_interval=amp["dynamic_history_size"])
    scales, losses = [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses.append(0.0)
        for rows in torch.from_numpy(sampler.global_indices().copy()).split(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = model(inputs[rows])
            loss = nn.functional.cross_entropy(output.float(), targets[rows])
            losses[-1] += loss.item() / 5
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    return scales, flat(model.parameters()), losses


@settings(deadline=None, max_examples=30)  # the first GradScaler imports much
@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 5),
    st.sampled_from([1.0, 2.0**15, 2.0**126, 2.0**127, 2.0**-140, 3.7]),
    st.sampled_from([2.0, 1.5]),
)
def test_the_scale_is_that_of_gradscaler_for_any_sequence_of_overflows(overflows, history, initial, growth):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=initial, growth_factor=growth, backoff_factor=0.5, growth_interval=history
    )
    theirs.scale(torch.ones(1))  # it makes its state when it is first used
    ours = LossScale(cx.AMPConfig(dynamic_history_size=history, initial_scale=initial, growth_factor=growth))
    for overflowed in overflows:
        weight.grad = torch.tensor([math.inf if overflowed else 0.0])
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflowed=overflowed)
        assert np.float32(ours.value) == np.float32(theirs.get_scale())


def test_a_fit_in_fp16_goes_as_a_loop_with_gradscaler():
    for amp, large in (
        ({"initial_scale": HUGE, "dynamic_history_size": 4}, False),
        ({"initial_scale": 2.0**10, "dynamic_history_size": 3}, True),
    ):
        scales, parameters, losses = by_hand(amp, large)
        with one_process():
            found = fit_half(amp, large=large)
        assert found["scales"] == scales
        assert {min(scales), max(scales)} != {scales[0]}, "nothing happened"
        assert float(abs(found["parameters"] - parameters).max()) < 1e-6
        assert found["losses"] == pytest.approx(losses, rel=1e-6)  # also of steps that were not taken
        assert found["dtypes"] == {"torch.float32"}


@pytest.mark.parametrize("world_size", [2, by_night(3)])
def test_ranks_stay_in_step_when_one_overflows(world_size):
    amp = {"initial_scale": 2.0**10, "dynamic_history_size": 3}
    scales, _, losses = by_hand(amp, large=True)
    assert any(later < earlier for earlier, later in itertools.pairwise(scales))
    ranks = run_world(world_size, fit_half, amp, 12, True)
    for found in ranks:
        assert found["scales"] == scales  # though the large row is on one rank alone
        assert found["losses"] == ranks[0]["losses"] == pytest.approx(losses, rel=1e-2)


def fit_bf16(effective_batch_size: int) -> Any:
    model = make_model()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), adam(model))
    rows = make_rows(60)
    trainer.fit(*rows, epochs=2, effective_batch_size=effective_batch_size, precision="bf16", verbose=False)
    return flat(model.parameters()), trainer.predict(rows[0].numpy()), trainer.evaluate(*rows).loss


def test_bf16_on_n_ranks_is_bf16_on_one_and_outputs_have_32_bits():
    with one_process():
        parameters, outputs, loss = fit_bf16(12)
        model = make_model()
        trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), adam(model))
        trainer.fit(*make_rows(60), epochs=2, effective_batch_size=12, verbose=False)
    in_full = flat(model.parameters())
    assert outputs.dtype == np.float32
    assert 0 < abs(parameters - in_full).max() < 2e-3  # Adam's steps are of 1e-3
    for theirs in run_world(2, fit_bf16, 12):
        assert abs(theirs[0] - parameters).max() < 2e-3
        assert theirs[2] == pytest.approx(loss, rel=1e-2)


def resume_in_the_middle(folder: str) -> dict[str, str]:
    """The bits of a whole fit, and of one that was cut off and went on; the scale has changed before and after."""
    found = {}
    for name in ("whole", "resumed"):
        model = make_model()
        trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), adam(model))
        config = cx.DistributedTrainingConfig(
            epochs=3,
            effective_batch_size=12,
            precision="fp16",
            amp=cx.AMPConfig(initial_scale=HUGE, dynamic_history_size=4),
            checkpoint_every_n_steps=7,
            checkpoint_dir=f"{folder}/{name}",
            verbose=False,
        )
        if name == "resumed":
            with pytest.raises(KeyboardInterrupt):
                trainer.fit(*make_rows(60), config, callbacks=[Interrupt()])
            model = make_model()
            trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), adam(model))
        trainer.fit(*make_rows(60), config, resume="auto")
        found[name] = f"{fingerprint(model)} {trainer._state.loss_scale.state_dict()}"
    return found


class Interrupt(cx.callbacks.Callback):
    """As Ctrl-C after the ninth step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.trainer._state.position.step == 9:
            raise KeyboardInterrupt


def test_a_resumed_fit_has_the_scale_of_the_uninterrupted_one(tmp_path):
    with one_process():
        found = resume_in_the_middle(str(tmp_path))
    assert found["whole"] == found["resumed"]


def test_an_overflow_that_no_smaller_scale_cures_is_an_error():
    with one_process():
        for amp in (
            cx.AMPConfig(initial_scale=HUGE, use_dynamic_scaling=False),
            cx.AMPConfig(initial_scale=HUGE, backoff_factor=0.999999),
        ):
            trainer = cx.DistributedTrainer(make_model(), nn.CrossEntropyLoss(), "sgd")
            asked = {"epochs": 1, "verbose": False, "precision": "fp16", "amp": amp, "batch_size": 4}
            if not amp.use_dynamic_scaling:
                words = r"gradients are not finite \(.*0.weight.* end at 65,504, and the loss was multiplied by .*bf16"
                with pytest.raises(cx.NonFiniteError, match=words):
                    trainer.fit(*make_rows(60), **asked)
            else:
                before = fingerprint(trainer.model)
                with pytest.warns(UserWarning, match="epoch 1: no step was taken: the gradients of all 15 overflowed"):
                    trainer.fit(*make_rows(60), **asked)
                assert fingerprint(trainer.model) == before  # no step could be taken
        inputs, targets = make_rows(8)
        inputs[3] = math.nan
        trainer = cx.DistributedTrainer(make_model(), nn.CrossEntropyLoss(), "sgd")
        with pytest.warns(UserWarning, match="sample 3 of X holds"), pytest.raises(cx.NonFiniteError, match="loss is"):
            trainer.fit(inputs, targets, epochs=1, precision="fp16", verbose=False)


def test_an_epoch_says_how_many_of_its_steps_overflowed(capsys):
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), nn.CrossEntropyLoss(), "sgd")
        amp = cx.AMPConfig(initial_scale=HUGE)
        trainer.fit(*make_rows(60), epochs=2, precision="fp16", amp=amp, batch_size=4)
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch"))
    scale = trainer._state.loss_scale.value
    overflows = round(math.log2(HUGE / scale))
    assert 1 < overflows < 15
    assert first.endswith(f"{overflows} steps overflowed, loss scale {scale:g}")
    assert "overflowed" not in second


def fit_of_gradients_that_vanish() -> list[str]:
    trainer = cx.DistributedTrainer(make_model(), lambda output, target: output.mean() * 1e-9, "sgd")
    with warning_texts() as caught:
        asked = {"epochs": 1, "verbose": False, "precision": "fp16", "effective_batch_size": 12}
        trainer.fit(*make_rows(60), amp=cx.AMPConfig(initial_scale=1.0), **asked)
    return caught


def test_gradients_that_vanish_in_16_bits_are_warned_of_on_rank_0():
    first, second = run_world(2, fit_of_gradients_that_vanish)
    assert "all gradients of its last step are 0: they may be too small for 16 bits, at a loss scale" in first[-1]
    assert second == []


def test_what_cannot_work_is_refused(capsys):
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), nn.CrossEntropyLoss(), "sgd")
        with pytest.raises(cx.ConfigError, match="amp scales the loss of fp16, and precision is 'bf16'"):
            trainer.fit(*make_rows(8), precision="bf16", amp=cx.create_default_amp_config())
        with pytest.raises(cx.ConfigError, match=r"precision must be one of .*'half'"):
            trainer.fit(*make_rows(8), precision="half")
        halved = cx.DistributedTrainer(make_model().half(), nn.CrossEntropyLoss(), "sgd")
        with pytest.raises(cx.ConfigError, match=r"0\.weight.* are of 16"):
            halved.fit(*make_rows(8), precision="fp16")
        trainer.fit(*make_rows(8), epochs=1, precision="bf16")
    assert "bf16, by autocast" in capsys.readouterr().out


def test_the_default_is_that_of_the_guides():
    assert cx.create_default_amp_config() == cx.AMPConfig(True, 2000, 2.0**15)
    assert cx.create_default_amp_config(initial_scale=4.0).initial_scale == 4.0


def test_a_checkpoint_with_a_wrong_scale_is_refused(tmp_path: Path):
    scale = LossScale(cx.AMPConfig())
    for state in ({}, {"scale": math.nan, "steps": 1}, {"scale": 1.0, "steps": -1}, {"scale": "1", "steps": 1}):
        with pytest.raises(cx.CheckpointError, match="its loss scale is"):
            scale.load_state_dict(state, "checkpoint x")
