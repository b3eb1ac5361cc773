"""The learning rate of every step: scaled, warmed up, scheduled; the same trace on any number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import Trace, everywhere, fingerprint, make_model, make_rows, one_process, run_world
from markers import by_night
from torch import nn

import cyxtrain as cx
from cyxtrain.optim.learning_rates import LearningRates

pytestmark = pytest.mark.usefixtures("rank_server")
STEPS = 18  # 3 epochs of 6 steps
ASKED = {
    "nothing": {},
    "linear": {"learning_rate_scaling": "linear"},
    "root": {"learning_rate_scaling": "sqrt"},
    "warm-up": {"warmup_steps": 4},
    "cosine": {"scheduler": "cosine"},
    "all": {"learning_rate_scaling": "linear", "warmup_steps": 4, "scheduler": "cosine"},
    "one of PyTorch's": {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.1)},
    "warm-up before it": {
        "warmup_steps": 3,
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.1),
    },
}


def make_trainer(scheduler: Any = None) -> cx.DistributedTrainer:
    model = make_model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return cx.DistributedTrainer(model, nn.CrossEntropyLoss(), optimizer, scheduler=scheduler)


def trace(asked: dict[str, Any], **settings: Any) -> tuple[list[float], cx.DistributedTrainer]:
    kept = {name: value for name, value in asked.items() if name != "scheduler"}
    trainer, found = make_trainer(asked.get("scheduler")), Trace()
    fit = {"epochs": 3, "batch_size": 4, "effective_batch_size": 16, "verbose": False, **settings}
    trainer.fit(*make_rows(96), callbacks=[found], **fit, **kept)
    return found.rates, trainer


def traces(names: tuple[str, ...]) -> dict[str, list[float]]:
    return {name: trace(ASKED[name])[0] for name in names}


def test_each_step_has_the_rate_that_was_asked_for():
    with one_process():
        found = traces(tuple(ASKED))
    warm = [0.25, 0.5, 0.75, 1.0]
    cosine = [(1 + math.cos(math.pi * step / (STEPS - 4))) / 2 for step in range(STEPS - 4)]
    expected = {
        "nothing": [0.1] * STEPS,
        "linear": [0.4] * STEPS,
        "root": [0.2] * STEPS,
        "warm-up": [0.1 * part for part in warm] + [0.1] * (STEPS - 4),
        "cosine": [0.1 * (1 + math.cos(math.pi * step / STEPS)) / 2 for step in range(STEPS)],
        "all": [0.4 * part for part in [*warm, *cosine]],
        "one of PyTorch's": [0.1] * 5 + [0.01] * 5 + [0.001] * 5 + [0.0001] * 3,
        "warm-up before it": [0.1 / 3, 0.2 / 3, 0.1] + [0.1] * 5 + [0.01] * 5 + [0.001] * 5,
    }
    for name in ASKED:
        assert found[name] == pytest.approx(expected[name], rel=1e-12), name


@pytest.mark.parametrize(
    ("world_size", "names"), [(2, ("all", "root")), by_night(2, (*ASKED,)), by_night(4, (*ASKED,))]
)
def test_the_trace_is_the_same_on_any_number_of_ranks(world_size, names):
    with one_process():
        alone = traces(names)
    for found in run_world(world_size, traces, names):
        assert found == alone


def test_without_an_effective_batch_size_the_rate_grows_with_the_ranks():
    for world_size in (1, 2):
        for found in everywhere(world_size, scaled_by_ranks):
            assert found == pytest.approx([0.1 * world_size, 0.01 * world_size])


def scaled_by_ranks() -> list[float]:
    trainer = trace(ASKED["linear"], effective_batch_size=None, accumulation_steps=2, epochs=1)[1]
    return [group["lr"] for group in trainer.optimizer.param_groups]


def test_a_second_fit_begins_its_warm_up_and_cosine_anew_and_scales_nothing_twice():
    with one_process():
        first, trainer = trace(ASKED["all"])
        again = Trace()
        fit = {"epochs": 3, "batch_size": 4, "effective_batch_size": 16, "verbose": False}
        trainer.fit(*make_rows(96), callbacks=[again], learning_rate_scaling="linear", warmup_steps=4, **fit)
        assert again.rates == first
        back = Trace()
        trainer.fit(*make_rows(96), callbacks=[back], **fit)
        assert back.rates[0] == pytest.approx(0.1)


class Interrupt(cx.callbacks.Callback):
    """As Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.trainer._state.position.step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "steps"), [("all", (3, 11)), *(by_night(name, (2, 3, 4, 11)) for name in ("all", "warm-up before it"))]
)
def test_a_fit_resumed_in_or_after_its_warm_up_has_the_rates_and_bits_of_the_whole(
    tmp_path: Path, name: str, steps: tuple[int, ...], capsys
):
    asked = ASKED[name]
    with one_process():
        whole, trainer = trace(asked)
        bits = fingerprint(trainer.model)
        for step in steps:
            folder = {"checkpoint_dir": f"{tmp_path}/{step}", "checkpoint_every_n_steps": 1, "resume": "auto"}
            kept = {key: value for key, value in asked.items() if key != "scheduler"}
            fit = {"epochs": 3, "batch_size": 4, "effective_batch_size": 16, **folder, **kept}
            with pytest.raises(KeyboardInterrupt):
                make_trainer(asked.get("scheduler")).fit(
                    *make_rows(96), callbacks=[Interrupt(step)], verbose=False, **fit
                )
            resumed, rest = make_trainer(asked.get("scheduler")), Trace()
            capsys.readouterr()
            resumed.fit(*make_rows(96), callbacks=[rest], **fit)
            assert rest.rates == whole[-len(rest.rates) :]
            assert len(rest.rates) == STEPS - step + 1  # the last step had not been kept yet
            assert fingerprint(resumed.model) == bits
            assert "lr" not in capsys.readouterr().out  # nothing is put back that the program had otherwise


def test_what_has_rates_of_its_own_is_not_scaled():
    def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.1], total_steps=100)

    with one_process():
        with pytest.raises(cx.ConfigError, match="OneCycleLR sets rates itself"):
            trace({"scheduler": one_cycle, "learning_rate_scaling": "sqrt"})
        assert len(trace({"scheduler": one_cycle, "warmup_steps": 2})[0]) == STEPS
        with pytest.raises(cx.ConfigError, match=r"no scheduler 'cosin'. Did you mean 'cosine'"):
            make_trainer("cosin")


def test_the_header_says_what_becomes_of_the_rate(capsys):
    with one_process():
        trace(ASKED["all"], verbose=True)
        shown = " ".join(capsys.readouterr().out.split())
        scaled = "4 times what was given (linear: given for 4 samples, and a step has 16)"
        assert f"rate 0.4, 0.04, {scaled}, after a warm-up of 4 steps, then by cosine, each step" in shown
        trace({}, verbose=True)
        assert "rate " not in capsys.readouterr().out


def test_a_checkpoint_with_wrong_rates_is_refused():
    rates = LearningRates(torch.optim.SGD(make_model().parameters(), 0.1), None)
    good = {"factor": 1.0, "warmup_steps": 3, "warm_steps": 1, "targets": [0.1]}
    rates.load_state_dict(good, "checkpoint x")
    wrong = ({"factor": 0.0}, {"factor": "1"}, {"targets": 3}, {"targets": [1.0, 2.0]}, {"warm_steps": 4})
    for change in wrong:
        with pytest.raises(cx.CheckpointError, match="its learning rates are"):
            rates.load_state_dict({**good, **change}, "checkpoint x")


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_fit_that_ends_in_its_warm_up_leaves_the_rates_to_the_next_one(as_tensor):
    class Stop(cx.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.trainer.stop_training = True

    model, found = make_model(), Trace()
    rate = torch.tensor(0.5) if as_tensor else 0.5
    fit = {"epochs": 1, "effective_batch_size": 4, "warmup_steps": 4, "verbose": False}
    with one_process():
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.Adam(model.parameters(), lr=rate))
        trainer.fit(*make_rows(20), callbacks=[Stop()], **fit)
        assert trainer.step == 2
        trainer.fit(*make_rows(20), callbacks=[found], **fit)
    assert found.rates == [0.125, 0.25, 0.375, 0.5, 0.5]
    assert (trainer.optimizer.param_groups[0]["lr"] is rate) == as_tensor


def after_a_stop_within_the_warm_up(folder: str) -> dict[str, list[float]]:
    """The rates of a fit that begins after one that stopped within its warm-up, by how it begins."""
    fit: dict[str, Any] = {"batch_size": 4, "learning_rate_scaling": "linear", "warmup_steps": 4, "verbose": False}
    found = {}
    for name in ("same trainer", "set between", "loaded"):
        trainer = make_trainer()
        trainer.fit(*make_rows(48), max_steps=2, **fit)
        if name == "set between":
            trainer.set_learning_rates([0.05, 0.01])
        if name == "loaded":
            trainer.save_checkpoint(f"{folder}/warm.ckpt")
            trainer = make_trainer()
            trainer.load_checkpoint(f"{folder}/warm.ckpt")
        rates = Trace()
        trainer.fit(*make_rows(48), callbacks=[rates], epochs=1, **fit)
        found[name] = rates.rates
    return found


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_fit_after_one_that_stopped_in_its_warm_up_scales_the_programs_rate_once(world_size: int, tmp_path: Path):
    warm = [0.25, 0.5, 0.75, 1.0]
    for found in everywhere(world_size, after_a_stop_within_the_warm_up, str(tmp_path)):
        for name, rates in found.items():
            target = world_size * (0.05 if name == "set between" else 0.1)
            steps = 12 // world_size
            expected = [target * part for part in [*warm, *[1.0] * (steps - 4)]]
            assert rates == pytest.approx(expected), name


class GroupRates(cx.callbacks.Callback):
    """Notes the rate of each group in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[list[float]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append([float(group["lr"]) for group in self.trainer.optimizer.param_groups])


def constant(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


GROUP_SCHEDULES: dict[str, Any] = {"none": None, "by name": "linear", "function": constant}
FIRST_FITS: dict[str, Any] = {"no fit": None, "whole": {}, "within the warm-up": {"warmup_steps": 3, "max_steps": 2}}


def after_a_group_was_added(schedule: str) -> dict[str, list[float]]:
    """The first rates of both groups in a fit before which a group was added, by the fit before that."""
    found = {}
    for name, settings in FIRST_FITS.items():
        model = make_model()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, scheduler=GROUP_SCHEDULES[schedule])
        fit: dict[str, Any] = {"batch_size": 4, "epochs": 1, "learning_rate_scaling": "linear", "verbose": False}
        model[2].requires_grad_(False)
        if settings is not None:
            trainer.fit(*make_rows(24), **fit, **settings)
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": [*model[2].parameters()], "lr": 0.01})
        rates = GroupRates()
        trainer.fit(*make_rows(24), callbacks=[rates], **fit)
        found[name] = rates.rates[0]
    return found


@pytest.mark.parametrize("schedule", [by_night("none"), by_night("by name"), "function"])
@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_group_added_between_two_fits_is_scaled_and_scheduled_from_its_own_rate(world_size: int, schedule: str):
    for found in everywhere(world_size, after_a_group_was_added, schedule):
        for name, rates in found.items():
            assert rates == pytest.approx([world_size * 0.1, world_size * 0.01]), name


def test_the_warm_up_of_a_one_cycle_is_its_rise_in_that_fit_alone():
    with one_process():
        first, trainer = trace({"scheduler": "one_cycle"})
        fit = {"epochs": 3, "batch_size": 4, "effective_batch_size": 16, "verbose": False}
        warm, again = Trace(), Trace()
        trainer.fit(*make_rows(96), callbacks=[warm], warmup_steps=9, **fit)
        trainer.fit(*make_rows(96), callbacks=[again], **fit)
    assert warm.rates[8] == pytest.approx(0.1) != first[8]
    assert again.rates == first
