"""Claims about schedules of the learning rate: PyTorch's, once per optimizer step, resumed, the same on all ranks."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import make_model, make_rows, one_process, run_world
from markers import by_night, nightly_where
from refusals import refusal, refuses, warning_texts
from torch.optim import lr_scheduler as schedulers

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

INPUTS, TARGETS = make_rows(20)
STEPS = 10  # in two epochs of five
SETTINGS = {"epochs": 2, "effective_batch_size": 4, "verbose": False}

SCHEDULES: dict[str, Any] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 3, 0.5),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 5, 5, 8], 0.5),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "ConstantLR": lambda optimizer: schedulers.ConstantLR(optimizer, 0.3, 4),
    "LinearLR": lambda optimizer: schedulers.LinearLR(optimizer, 0.1, 1.0, 6),
    "PolynomialLR": lambda optimizer: schedulers.PolynomialLR(optimizer, 8, 2.0),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, STEPS),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, 3, cycle_momentum=False),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.2, STEPS),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer, 0.1, 1.0, 3), schedulers.MultiStepLR(optimizer, [1, 3], 0.5)], [4]
    ),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(optimizer, 0.9), schedulers.MultiStepLR(optimizer, [3, 6], 0.5)]
    ),
}


class Halving:
    """Halves the rate with each call; keeps the count itself, as packages other than PyTorch do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.calls = 0

    def step(self) -> None:
        self.calls += 1
        self.set(0.1 / 2**self.calls)

    def set(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Timms(Halving):
    """The interface of timm's schedules, of which one is called per epoch, the other per update."""

    def __init__(self, optimizer: torch.optim.Optimizer, t_in_epochs: bool) -> None:
        super().__init__(optimizer)
        self.t_in_epochs = t_in_epochs

    def step(self, epoch: int, metric: float | None = None) -> None:  # type: ignore[override]
        if self.t_in_epochs:
            self.calls = epoch
            self.set(0.1 / 2**epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        if not self.t_in_epochs:
            self.calls = num_updates
            self.set(0.1 / 2**num_updates)


OF_OTHERS: dict[str, Any] = {
    "Halving": Halving,
    "Timms": lambda optimizer: Timms(optimizer, t_in_epochs=False),
    "Timms per epoch": lambda optimizer: Timms(optimizer, t_in_epochs=True),
}


class Trace(cx.callbacks.Callback):
    """The learning rate of each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.trainer.optimizer.param_groups[0]["lr"]))

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = state["rates"]


def make_trainer(name: str) -> cx.DistributedTrainer:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return cx.DistributedTrainer(model, "cross_entropy", optimizer, scheduler=SCHEDULES[name])


def traced(name: str, **more: Any) -> list[float]:
    trace = Trace()
    make_trainer(name).fit(INPUTS, TARGETS, callbacks=trace, **{**SETTINGS, **more})
    return trace.rates


def by_hand(name: str) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1, momentum=0.9)
    scheduler, rates = SCHEDULES[name](optimizer), []
    for _ in range(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own
@pytest.mark.parametrize(("name", "every"), [("StepLR", 4), *(by_night(name, 1) for name in SCHEDULES)])
def test_it_is_stepped_once_per_step_and_resumes(name, every, tmp_path):
    with one_process():
        expected = by_hand(name)
        assert len(set(expected)) > 1
        assert traced(name, checkpoint_every_n_steps=1, checkpoint_dir=str(tmp_path)) == expected
        paths = sorted(Path(tmp_path).glob("step-*.ckpt"))
        assert len(paths) == STEPS
        for path in paths[::every]:
            assert traced(name, resume=str(path)) == expected


@nightly_where(lambda name: name not in ("SequentialLR", "CosineAnnealingLR"))
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("CyclicLR", "OneCycleLR")])
def test_what_is_scaled_or_set_between_two_fits_scales_all_of_it(name):
    with one_process():
        expected = by_hand(name)
        assert traced(name, batch_size=1, learning_rate_scaling="sqrt") == pytest.approx(
            [2 * each for each in expected]
        )
        trainer, trace = make_trainer(name), Trace()
        trainer.fit(INPUTS, TARGETS, **{**SETTINGS, "epochs": 1})
        trainer.optimizer.param_groups[0]["lr"] = 0.3
        trainer.fit(INPUTS, TARGETS, callbacks=trace, **{**SETTINGS, "epochs": 1})
        assert trace.rates[0] == 0.3
        assert all(rate < 1 for rate in trace.rates)


def fit_with_others(name: str, folder: str, **more: Any) -> list[Any]:
    model, trace = make_model(), Trace()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = OF_OTHERS[name](optimizer)
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, scheduler=schedule)
    assert trainer.scheduler is schedule
    settings = {**SETTINGS, "scheduler_interval": "epoch" if "epoch" in name else "step", **more}
    trainer.fit(INPUTS, TARGETS, callbacks=trace, checkpoint_every_n_steps=3, checkpoint_dir=folder, **settings)
    return [trace.rates, schedule.calls]


@nightly_where(lambda name: name != "Timms per epoch")
@pytest.mark.parametrize("name", OF_OTHERS)
def test_an_object_of_another_package_is_stepped_and_resumes(name, tmp_path):
    per_step = [0.1 / 2**step for step in range(STEPS)]
    rates = [0.1] * 5 + [0.05] * 5 if "epoch" in name else per_step
    expected = [rates, 2 if "epoch" in name else STEPS]
    with one_process():
        assert fit_with_others(name, str(tmp_path)) == expected
        assert fit_with_others(name, str(tmp_path), resume=str(tmp_path / "step-00000003.ckpt")) == expected
        assert fit_with_others(name, str(tmp_path), resume=str(tmp_path / "step-00000006.ckpt")) == expected


def test_an_object_of_another_package_that_would_be_stepped_wrongly_is_refused(tmp_path):
    with one_process():
        with pytest.raises(cx.ConfigError, match=r'Timms counts epochs .* set scheduler_interval="epoch"'):
            fit_with_others("Timms per epoch", str(tmp_path), scheduler_interval="step")
        with pytest.raises(cx.ConfigError, match=r'Timms counts steps .* set scheduler_interval="step"'):
            fit_with_others("Timms", str(tmp_path), scheduler_interval="epoch")
        with pytest.raises(cx.ConfigError, match="scales the optimizer's rate, and Halving sets rates itself"):
            fit_with_others("Halving", str(tmp_path), learning_rate_scaling="sqrt")


def test_a_step_that_is_skipped_is_none():
    inputs = INPUTS.clone()
    inputs[:, 0] = torch.where(torch.arange(20) == 7, math.nan, inputs[:, 0])
    trace = Trace()
    with one_process(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer("ExponentialLR").fit(
            inputs, TARGETS, callbacks=trace, on_nonfinite="skip", **{**SETTINGS, "epochs": 1}, shuffle=False
        )
    assert trace.rates == pytest.approx([0.1, 0.09, 0.09, 0.081, 0.0729])


def fit_with(scheduler: Any) -> None:
    cx.DistributedTrainer(MODEL, "cross_entropy", OWN, scheduler=scheduler).fit(INPUTS, TARGETS, **SETTINGS)


MODEL = make_model()
OWN, OTHER = (torch.optim.SGD(MODEL.parameters(), 0.1) for _ in range(2))
test_what_is_no_schedule_of_this_optimizer_is_refused = refuses(
    (lambda: fit_with(schedulers.StepLR(OTHER, 3)), "StepLR uses a different optimizer"),
    (lambda: fit_with(schedulers.ReduceLROnPlateau(OWN)), "ReduceLROnPlateau needs a metric at each step"),
    (lambda: fit_with(lambda optimizer: None), "scheduler must be one of torch.optim.lr_scheduler"),
    (lambda: fit_with(3), "scheduler must be one of torch.optim.lr_scheduler"),
    (lambda: fit_with(Odd), "Odd has a state that cannot be saved"),
)


def test_a_cycle_that_ends_before_the_fit_is_refused():
    with one_process():
        trainer = make_trainer("OneCycleLR")
        with pytest.raises(cx.ConfigError, match=r"ends after 10 steps \(.*\), and this fit ends after 15"):
            trainer.fit(INPUTS, TARGETS, **{**SETTINGS, "epochs": 3})
        trainer.fit(INPUTS, TARGETS, **SETTINGS)
        with pytest.raises(cx.ConfigError, match=r"ends after 10 steps \(.*\), and this fit ends after 20"):
            trainer.fit(INPUTS, TARGETS, **SETTINGS)


@pytest.mark.parametrize(
    ("schedule", "warns"),
    [
        (lambda optimizer: schedulers.StepLR(optimizer, 1, 0.1), True),  # 1e-10 after ten steps
        by_night(lambda optimizer: schedulers.StepLR(optimizer, 2, 0.1), True),  # 1e-5
        by_night(lambda optimizer: schedulers.StepLR(optimizer, 5, 0.1), False),
        (lambda optimizer: schedulers.ExponentialLR(optimizer, 0.1), True),
        by_night(lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9), False),
        (lambda optimizer: schedulers.MultiStepLR(optimizer, [1, 2]), True),
        by_night(lambda optimizer: schedulers.MultiStepLR(optimizer, [1, 7]), False),
        (lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 2), True),
        (lambda optimizer: schedulers.CosineAnnealingLR(optimizer, STEPS), False),
        by_night(lambda optimizer: schedulers.PolynomialLR(optimizer, 2), True),
        by_night(lambda optimizer: schedulers.LinearLR(optimizer, 0.1, 1.0, 2), False),
        (
            lambda optimizer: schedulers.ChainedScheduler(
                [schedulers.LinearLR(optimizer), schedulers.PolynomialLR(optimizer, 2)], optimizer
            ),
            True,
        ),
        ("cosine", False),
    ],
)
def test_a_schedule_that_seems_to_count_epochs_is_warned_of(schedule, warns):
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd", scheduler=schedule)
    with one_process(), warning_texts() as said:
        trainer.fit(INPUTS, TARGETS, **SETTINGS)
    found = [text for text in said if "seems to have been built for one step per epoch" in text]
    assert len(found) == int(warns)
    assert all("5 times in an epoch" in text and "LearningRateScheduler" in text for text in found)


def fit_with_other_schedules() -> str:
    name = "StepLR" if cx.get_rank() == 0 else "ExponentialLR"
    return refusal(make_trainer(name).fit, INPUTS, TARGETS, **SETTINGS)


def test_ranks_with_other_schedules_are_refused():
    for text in run_world(2, fit_with_other_schedules):
        assert text.startswith("rank 1 differs from rank 0 in the scheduler: ExponentialLR on rank 1, StepLR on rank 0")


def test_a_checkpoint_of_another_schedule_is_refused(tmp_path):
    path = tmp_path / "one.ckpt"
    with one_process():
        make_trainer("StepLR").save_checkpoint(path)
        with pytest.raises(cx.CheckpointError, match="written with the scheduler StepLR, and this trainer has the"):
            make_trainer("ExponentialLR").load_checkpoint(path)
        model = make_model()
        bare = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        with pytest.raises(cx.CheckpointError, match="written with the scheduler StepLR, and this trainer has no"):
            bare.load_checkpoint(path)
        bare.save_checkpoint(path)
        with pytest.raises(cx.CheckpointError, match="written with no scheduler, and this trainer has the scheduler"):
            make_trainer("StepLR").load_checkpoint(path)


class Odd(schedulers.LRScheduler):
    """A schedule with a state that no checkpoint can hold."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.anything = object()
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [0.1]


def test_a_rate_that_is_a_tensor_is_kept(tmp_path):
    def fit(**more: Any) -> list[float]:
        model, trace = make_model(), Trace()
        optimizer = torch.optim.Adam(model.parameters(), torch.tensor(0.1))
        schedule = schedulers.StepLR(optimizer, 3, 0.5)
        trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, scheduler=schedule)
        trainer.fit(INPUTS, TARGETS, callbacks=trace, checkpoint_dir=str(tmp_path), **{**SETTINGS, **more})
        return trace.rates

    with one_process():
        whole = fit(checkpoint_every_n_steps=4)
        assert fit(resume=str(tmp_path / "step-00000004.ckpt")) == whole
        assert len(set(whole)) > 2


def test_a_schedule_of_other_parts_is_refused_and_nothing_has_changed(tmp_path):
    path = tmp_path / "one.ckpt"
    with one_process():
        make_trainer("SequentialLR").save_checkpoint(path)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        parts = [schedulers.ConstantLR(optimizer, 1.0, 1) for _ in range(3)]
        schedule = schedulers.SequentialLR(optimizer, parts, [2, 4])
        trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, scheduler=schedule)
        with torch.no_grad():
            model[0].weight.zero_()
        with pytest.raises(cx.CheckpointError, match="SequentialLR is made of other schedules"):
            trainer.load_checkpoint(path)
        assert not model[0].weight.any()


def test_a_fit_that_is_refused_for_its_schedule_has_changed_nothing():
    with one_process():
        trainer = make_trainer("OneCycleLR")
        trainer.fit(INPUTS, TARGETS, **SETTINGS)
        before = trainer._state.position
        with pytest.raises(cx.ConfigError, match="OneCycleLR ends"):
            trainer.fit(INPUTS, TARGETS, **SETTINGS)
        assert (trainer.history.epochs, trainer._state.position) == ([1, 2], before)


@pytest.mark.parametrize("new", [True, by_night(False)])
def test_either_way_of_setting_the_precision_of_products_is_fine(new):
    cuda = torch.backends.cuda.matmul
    before = torch.backends.mkldnn.matmul.fp32_precision, cuda.fp32_precision
    try:
        if new:
            cuda.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        with one_process():
            traced("StepLR")
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.matmul.fp32_precision, cuda.fp32_precision = before


def test_what_is_computed_otherwise_is_said(tmp_path):
    with one_process():
        traced("StepLR", checkpoint_every_n_steps=5, checkpoint_dir=str(tmp_path))
        path = str(sorted(tmp_path.glob("step-*.ckpt"))[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            traced("StepLR", resume=path)
        torch.set_num_threads(2)
        with pytest.warns(UserWarning, match="computed differently: the number of threads per rank was 1 and is 2"):
            traced("StepLR", resume=path)
