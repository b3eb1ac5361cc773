"""Claims about schedules and the fit's length: users hear of a misfit before it starts, or never need to count."""

from __future__ import annotations

import contextlib
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import Trace, fingerprint, make_model, make_rows, one_process, run_world
from markers import by_night
from refusals import warning_texts
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

import cyxtrain as cx
from cyxtrain.callbacks import LambdaCallback

pytestmark = pytest.mark.usefixtures("rank_server")

STEPS = 10  # in two epochs of five
SETTINGS = {"epochs": 2, "effective_batch_size": 4, "verbose": False}


def make_trainer(scheduler: Any, interval: str = "step") -> cx.DistributedTrainer:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return cx.DistributedTrainer(
        model, "cross_entropy", optimizer, scheduler=scheduler, scheduler_interval=interval, callbacks=[Trace()]
    )


def traced(scheduler: Any, interval: str = "step", **more: Any) -> list[float]:
    return rates_of(fitted(scheduler, interval, **more))


def fitted(scheduler: Any, interval: str = "step", **more: Any) -> cx.DistributedTrainer:
    trainer = make_trainer(scheduler, interval)
    trainer.fit(*make_rows(20), **{**SETTINGS, **more})
    return trainer


def rates_of(trainer: cx.DistributedTrainer) -> list[float]:
    (trace,) = trainer.callbacks
    assert isinstance(trace, Trace)
    return trace.rates


def stop_before_the_first_step(logs: Any) -> None:
    raise InterruptedError


def warned(*arguments: Any, **more: Any) -> str:
    start = LambdaCallback(on_train_begin=stop_before_the_first_step)
    with warning_texts() as found, contextlib.suppress(InterruptedError):
        fitted(*arguments, callbacks=start, **more)
    return " ".join(text for text in found if text.startswith("the "))


def as_transformers(optimizer: torch.optim.Optimizer, num_training_steps: int) -> schedulers.LambdaLR:
    """Builds what `transformers.get_linear_schedule_with_warmup` builds."""

    def factor(step: int, *, num_training_steps: int) -> float:
        return max(0.0, 1 - step / num_training_steps)

    return schedulers.LambdaLR(optimizer, functools.partial(factor, num_training_steps=num_training_steps))


def sequence(optimizer: torch.optim.Optimizer, milestone: int, steps: int) -> schedulers.SequentialLR:
    parts = [schedulers.LinearLR(optimizer, 0.1, 1.0, milestone), schedulers.CosineAnnealingLR(optimizer, steps)]
    return schedulers.SequentialLR(optimizer, parts, [milestone])


LONGER, SHORTER = "does not come to the end of it", "after them"
MISFITS: list[tuple[Any, str]] = [
    (lambda o: schedulers.OneCycleLR(o, 0.1, 20), LONGER),
    (lambda o: schedulers.CosineAnnealingLR(o, 20), LONGER),
    (lambda o: schedulers.CosineAnnealingLR(o, 6), "rises again after them"),
    (lambda o: schedulers.PolynomialLR(o, 20), LONGER),
    (lambda o: schedulers.PolynomialLR(o, 6), "is 0 after them"),
    (lambda o: schedulers.LinearLR(o, 1.0, 0.1, 20), LONGER),
    (lambda o: schedulers.LinearLR(o, 1.0, 0.1, 6), SHORTER),
    (lambda o: schedulers.LinearLR(o, 0.1, 1.0, 20), LONGER),  # a warm-up that never ends
    (lambda o: schedulers.ConstantLR(o, 0.1, 20), LONGER),
    (lambda o: schedulers.MultiStepLR(o, [6, 20]), LONGER),
    (lambda o: sequence(o, 20, 5), LONGER),
    (lambda o: sequence(o, 4, 16), LONGER),
    (lambda o: schedulers.ChainedScheduler([schedulers.ExponentialLR(o, 0.9), schedulers.PolynomialLR(o, 20)]), LONGER),
    (lambda o: as_transformers(o, 20), LONGER),
    (lambda o: as_transformers(o, 6), SHORTER),
]
FITTING: list[Any] = [
    lambda o: schedulers.OneCycleLR(o, 0.1, STEPS),
    lambda o: schedulers.CosineAnnealingLR(o, STEPS),
    lambda o: schedulers.CosineAnnealingLR(o, STEPS - 1),  # so that the last step has the lowest rate
    lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    lambda o: schedulers.LinearLR(o, 0.1, 1.0, 3),
    lambda o: schedulers.ConstantLR(o, 0.1, 3),
    lambda o: schedulers.MultiStepLR(o, [6, 8]),
    lambda o: schedulers.StepLR(o, 20),
    lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    lambda o: sequence(o, 4, 6),
    lambda o: as_transformers(o, STEPS),
    *("constant", "linear", "cosine", "one_cycle"),
    lambda o, total_steps: schedulers.OneCycleLR(o, 0.1, total_steps),
]


@pytest.mark.parametrize("every", [2, by_night(1)])
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own
def test_a_schedule_that_is_longer_or_shorter_than_the_fit_is_warned_of_before_it(every):
    with one_process():
        for number, (schedule, words) in enumerate(MISFITS[::every]):
            assert words in warned(schedule), number
        for number, schedule in enumerate(FITTING[::every]):
            assert "steps, and this fit" not in warned(schedule), number
        assert "has 20 steps, and this fit has 10:" in warned(MISFITS[0][0])
        assert "has 20 steps, and this fit has 2:" in warned(MISFITS[1][0], "epoch")
        for schedule in (lambda o: schedulers.CosineAnnealingLR(o, 2), lambda o: schedulers.MultiStepLR(o, [1])):
            assert warned(schedule, "epoch") == ""
            assert warned(schedule) != ""


def loader_cycle() -> tuple[str, tuple[int, int], int]:
    loader = DataLoader(TensorDataset(*make_rows(60)), batch_size=6, shuffle=True)
    counted = cx.count_steps(loader, epochs=3)
    cycle = functools.partial(schedulers.OneCycleLR, max_lr=0.1, epochs=3, steps_per_epoch=len(loader))
    trainer = make_trainer(cycle)
    with warning_texts() as found:
        trainer.fit(loader, epochs=3, verbose=False)
    return " ".join(found), counted, trainer.step


def test_what_len_of_a_loader_says_is_too_long_on_two_ranks():
    (text, counted, steps), (other, *_) = run_world(2, loader_cycle)
    assert "the OneCycleLR has 30 steps, and this fit has 15" in text
    assert other == ""  # rank 0 warns
    assert counted == (5, 15)
    assert steps == 15


def counts() -> list[Any]:
    rows = make_rows(50)
    config = cx.DistributedTrainingConfig(epochs=4, batch_size=3)
    with pytest.raises(cx.ConfigError, match="the number of batches is unknown"):
        cx.count_steps(lambda: iter([rows]))
    found = [
        cx.count_steps(*rows, config),
        cx.count_steps(*rows, config, effective_batch_size=7, validation_split=0.2),
        cx.count_steps(*rows, config, accumulation_steps=2, steps_per_epoch=3),
        cx.count_steps(iter([rows]), steps_per_epoch=3, epochs=2),
    ]
    trainer = make_trainer(None)
    trainer.fit(*rows, config, verbose=False)
    return [*found, trainer.step]


def test_count_steps_says_what_fit_takes():
    with one_process():
        assert counts() == [(17, 68), (6, 24), (3, 12), (3, 6), 68]
        assert cx.count_steps(*make_rows(50), batch_size=5, epochs=2, num_processes=2) == (5, 10)
    for found in run_world(2, counts):
        assert found == [(9, 36), (6, 24), (3, 12), (3, 6), 36]


def test_schedules_by_name_end_with_the_fit():
    with one_process():
        assert traced("constant") == [0.1] * STEPS
        assert traced("linear") == pytest.approx([0.1 * (1 - step / STEPS) for step in range(STEPS)])
        warm = [0.05, 0.1, *(0.1 * (1 - step / 8) for step in range(8))]
        assert traced("linear", warmup_steps=0.2) == pytest.approx(warm) == traced("linear", warmup_steps=2)
        for pct, more in ((0.3, {}), (0.5, {"warmup_steps": 0.5}), (0.5, {"warmup_steps": 5})):

            def cycle(optimizer: torch.optim.Optimizer, steps: int, pct: float = pct) -> schedulers.OneCycleLR:
                return schedulers.OneCycleLR(optimizer, 0.1, steps, pct_start=pct, cycle_momentum=False)

            assert traced("one_cycle", **more) == pytest.approx(traced(cycle))


def test_a_warm_up_that_is_no_fraction_or_of_an_unknown_fit_is_refused():
    with one_process():
        for wrong in (1.5, -0.1, "a"):
            with pytest.raises(cx.ConfigError, match="warmup_steps must be"):
                traced("linear", warmup_steps=wrong)
        rows = list(zip(*(part.split(4) for part in make_rows(20)), strict=True))
        for scheduler, settings in (("linear", {}), (lambda o, n: schedulers.PolynomialLR(o, n), {})):
            with pytest.raises(cx.ConfigError, match=r"the data do not say how many batches they give"):
                make_trainer(scheduler).fit(lambda: iter(rows), verbose=False, **settings)
        with pytest.raises(cx.ConfigError, match=r"warmup_steps=0.1 is a fraction"):
            make_trainer(None).fit(lambda: iter(rows), verbose=False, warmup_steps=0.1)


def test_a_function_is_given_the_steps_of_each_fit_and_starts_from_the_given_rate():
    asked: list[int] = []

    def make(optimizer: torch.optim.Optimizer, total_steps: int) -> schedulers.LRScheduler:
        asked.append(total_steps)
        rates = [group["lr"] for group in optimizer.param_groups]
        return schedulers.OneCycleLR(optimizer, rates, total_steps, cycle_momentum=False)

    with one_process():
        trainer = make_trainer(make)
        trainer.fit(*make_rows(20), **SETTINGS)
        assert set(asked) == {STEPS}
        trainer.fit(*make_rows(20), **{**SETTINGS, "epochs": 4})
        assert set(asked) == {STEPS, 2 * STEPS}
        assert max(rates_of(trainer)[:STEPS]) == pytest.approx(max(rates_of(trainer)[STEPS:])) == pytest.approx(0.1)
        trainer.optimizer.param_groups[0]["lr"] = 0.3
        trainer.fit(*make_rows(20), **SETTINGS)
        assert max(rates_of(trainer)[3 * STEPS :]) == pytest.approx(0.3)
        asked.clear()
        traced(make, "epoch", epochs=4)
        assert set(asked) == {4}
        with pytest.raises(cx.ConfigError, match="scheduler must be one of"):
            traced(lambda optimizer, total_steps: None)


@pytest.mark.nightly
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_schedule_of_a_function_resumes_bit_for_bit_and_follows_more_epochs(tmp_path: Path, interval: str):
    def make(optimizer: torch.optim.Optimizer, total_steps: int) -> schedulers.LRScheduler:
        return schedulers.LambdaLR(optimizer, lambda step: 1 - step / total_steps)

    for scheduler in (make, "linear"):
        folder = tmp_path / str(scheduler == make)
        with one_process(), warnings.catch_warnings():
            warnings.simplefilter("error")
            whole = fitted(scheduler, interval, warmup_steps=2, checkpoint_every_n_steps=1, checkpoint_dir=str(folder))
            longer = traced(scheduler, interval, warmup_steps=2, epochs=3)
            assert len(set(rates_of(whole))) > 1
            for step in (1, 3, 5, 7, 10):
                path = str(folder / f"step-{step:08d}.ckpt")
                rest = fitted(scheduler, interval, warmup_steps=2, resume=path)
                assert rates_of(rest) == rates_of(whole)[step:]
                assert fingerprint(rest.model) == fingerprint(whole.model)
                more = traced(scheduler, interval, warmup_steps=2, epochs=3, resume=path)
                assert more == pytest.approx(longer[step:]), step
            loaded = make_trainer(scheduler)
            loaded.load_checkpoint(str(folder / "step-00000007.ckpt"))
            loaded.fit(*make_rows(20), **SETTINGS)
            assert rates_of(loaded) == pytest.approx([0.1 * (1 - step / STEPS) for step in range(STEPS)])


def test_a_schedule_of_epochs_is_stepped_after_each():
    def decay(optimizer: torch.optim.Optimizer) -> schedulers.ExponentialLR:
        return schedulers.ExponentialLR(optimizer, 0.5)

    with one_process():
        by_epochs = [0.1] * 5 + [0.05] * 5
        assert traced(decay, "epoch") == by_epochs == traced(decay, scheduler_interval="epoch")
        assert traced(decay, "epoch", warmup_steps=2) == pytest.approx([0.05, *by_epochs[1:]])
        assert traced("cosine", "epoch") == pytest.approx([0.1] * 5 + [0.05] * 5)
        waits = traced("linear", "epoch", warmup_steps=7, epochs=3)
        assert waits == pytest.approx([*(0.1 * (step + 1) / 7 for step in range(7)), *[0.1] * 3, *[0.05] * 5])
        with pytest.raises(cx.ConfigError, match=r"scheduler_interval must be one of \('step', 'epoch'\)"):
            make_trainer(decay, "batch")


def epochs_on_rank() -> list[float]:
    return traced("one_cycle", "epoch", epochs=4)


def test_every_rank_has_the_same_rates():
    with one_process():
        alone = epochs_on_rank()
    assert len(set(alone)) == 4
    assert run_world(2, epochs_on_rank) == [alone] * 2
