"""Numbers of the user's own: `trainer.log` from steps, losses and hooks, joined over ranks and kept by checkpoints."""

from __future__ import annotations

import csv
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, make_model, make_rows, one_process, run_new_world, run_world
from markers import by_night
from refusals import refusal, warning_texts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cyxtrain as cx
from cyxtrain.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    GradientNormMonitor,
    LambdaCallback,
    LearningRateMonitor,
    LearningRateScheduler,
    ModelCheckpoint,
    TensorBoard,
)

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS, VALID = make_rows(37), make_rows(9, seed=1)
FIT: dict[str, Any] = {"epochs": 2, "effective_batch_size": 8, "verbose": False}


class Program:
    """A trainer whose loss and callback log; the loss is the mean over the batch's rows."""

    def __init__(self, *callbacks: Callback, larger: bool | None = None, **settings: Any) -> None:
        self.larger = larger
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        self.trainer = cx.DistributedTrainer(model, self.loss, optimizer, callbacks=[Logs(), *callbacks], **settings)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(output, target, reduction="none")
        self.trainer.log("own loss", each.mean(), larger_is_better=self.larger)
        self.trainer.log("hardest", each.max(), reduce="max")
        self.trainer.log("easiest", each.min().item(), reduce="min")
        self.trainer.log("rows", len(target), reduce="sum")
        self.trainer.log("zeros", (target == 0).double().mean(), weight=np.float32(len(target)))
        return each.mean()


class Logs(Callback):
    """Logs from every hook; on rank 0 alone where the number is that of all ranks."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.trainer.log("begun", 1, reduce="sum")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.trainer.log("begun", 1, reduce="sum")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.trainer.is_master():
            self.trainer.log("at_step", self.trainer.step, reduce="last")
            self.trainer.log("steps", 1, reduce="sum")

    def on_test_begin(self, logs: Any = None) -> None:
        self.trainer.log("begun", 1)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trainer.log("batches", 1, reduce="sum")

    def on_test_end(self, logs: Any = None) -> None:
        self.trainer.log("doubled", 2 * logs["loss"])
        assert logs["own loss"] == pytest.approx(logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.trainer.get_rank() == self.trainer.get_world_size() - 1:
            self.trainer.log("score", (epoch - 1) ** 2, larger_is_better=False)
        assert logs["own loss"] == pytest.approx(logs["loss"])


def train(**settings: Any) -> tuple[dict[str, list[float]], dict[str, float]]:
    program = Program()
    history = program.trainer.fit(*ROWS, validation_data=VALID, validation_batch_size=4, **{**FIT, **settings})
    return history.history, dict(program.trainer.evaluate(*VALID))


@pytest.mark.parametrize("world_size", [2, by_night(3), by_night(4)])
def test_it_has_the_numbers_of_all_ranks(world_size):
    found = everywhere(world_size, train)
    assert all(each == found[0] for each in found)
    with one_process():
        expected, evaluated = train()
    history, own = found[0]
    for name, values in history.items():
        if name not in ("begun",):
            np.testing.assert_allclose(values, expected[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(history["own loss"], history["loss"], rtol=1e-6)
    np.testing.assert_allclose(history["val_own loss"], history["val_loss"], rtol=1e-6)
    np.testing.assert_allclose(history["val_doubled"], 2 * np.array(history["val_loss"]), rtol=1e-6)
    assert (history["rows"], history["val_rows"]) == ([37, 37], [9, 9])
    assert history["begun"] == [2 * world_size, world_size], "each rank calls it"
    assert (history["at_step"], history["steps"], history["val_batches"]) == ([5, 10], [5, 5], [3, 3])
    assert history["score"] == [1, 0]
    np.testing.assert_allclose([own[name] for name in own], [evaluated[name] for name in own], rtol=1e-5)
    assert (own["own loss"], own["rows"]) == (pytest.approx(own["loss"]), 9)


def stop_and_resume(folder: str, ranks: int | None, accumulation: int) -> list[Any]:
    """An uninterrupted fit, and one that a callback stops in the middle of the second epoch; `ranks` that resume."""

    def fit(name: str, *callbacks: Callback, **more: Any) -> Any:
        settings = {
            **FIT,
            "checkpoint_dir": f"{folder}/{name}",
            "checkpoint_every_n_steps": 3,
            "clip_norm": 0.5,
            **more,
        }
        program = Program(*callbacks, scheduler="linear")
        return program.trainer.fit(*ROWS, validation_data=VALID, accumulation_steps=accumulation, **settings).history

    if ranks is not None:
        return [fit("own", resume="auto")]
    whole = fit("whole")
    save = LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0 if save.trainer.step == 8 else None)
    with pytest.raises((ZeroDivisionError, cx.CyxtrainError)):
        fit("own", save)
    return [whole]


@pytest.mark.parametrize(("world_size", "resuming"), [(2, 2), by_night(2, 1), by_night(1, 1), by_night(1, 2)])
def test_a_resumed_epoch_has_all_its_numbers(tmp_path, world_size, resuming):

    ((whole,), *_) = run_world(world_size, stop_and_resume, str(tmp_path), None, 1)
    ((resumed,), *_) = run_new_world(resuming, stop_and_resume, str(tmp_path), resuming, 1)
    if world_size == resuming:
        assert resumed == whole
        return
    for name in whole:
        if name != "begun":
            np.testing.assert_allclose(resumed[name], whole[name], rtol=1e-5, err_msg=name)


def test_callbacks_and_checkpoints_use_it(tmp_path):
    with one_process():
        early = EarlyStopping("score", patience=1, mode="min")
        best = ModelCheckpoint(f"{tmp_path}/" + "{epoch}-{score:.0f}.ckpt", "score", save_best_only=True, mode="min")
        program = Program(early, best, CSVLogger(tmp_path / "log.csv"), TensorBoard(tmp_path / "logs"))
        settings = {**FIT, "epochs": 5, "keep_best": "score", "checkpoint_dir": str(tmp_path / "kept")}
        history = program.trainer.fit(*ROWS, **settings)
    assert history.metrics["score"] == [1, 0, 1], "stopped by the third"
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["1-1.ckpt", "2-0.ckpt"]
    assert (tmp_path / "kept" / "best.ckpt").samefile(tmp_path / "kept" / "epoch-0002.ckpt")
    with open(tmp_path / "log.csv") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["score"]) for line in lines] == [1, 0, 1]
    assert {"own loss", "learning_rate"} <= lines[0].keys()


def test_a_step_of_the_users_own_logs_and_is_tried_first(tmp_path):
    def train_step(trainer: cx.DistributedTrainer, batch: Any) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(trainer.model(x), y)
        trainer.log("perplexity", loss.exp(), larger_is_better=False)
        return loss

    with one_process():
        trainer = cx.DistributedTrainer(make_model(), train_step=train_step)
        settings = {**FIT, "keep_best": "val_perplexity", "checkpoint_dir": str(tmp_path)}
        history = trainer.fit(*ROWS, validation_data=VALID, **settings).history
        assert (tmp_path / "best.ckpt").exists()
        assert history["val_perplexity"][-1] == pytest.approx(np.exp(history["val_loss"][-1]), rel=1e-5)
        trainer.predict(VALID[0])


def test_validations_within_an_epoch_and_several_sets_have_it(tmp_path):
    program = Program()
    sets = {"near": VALID, "far": make_rows(7, seed=2)}
    settings = {**FIT, "validate_every_n_steps": 2, "keep_best": "val_far_hardest", "checkpoint_dir": str(tmp_path)}
    with one_process():
        with pytest.raises(cx.ConfigError, match="keep_best with 'hardest': it is unknown whether larger is better"):
            program.trainer.fit(*ROWS, validation_data=sets, **settings)
        settings["keep_best"] = "val_far_own loss"
        history = Program(larger=False).trainer.fit(*ROWS, validation_data=sets, **settings)
    rows = history.validations
    assert len(rows) == 5
    for row in rows:
        np.testing.assert_allclose(row["val_far_own loss"], row["val_far_loss"], rtol=1e-6)
        np.testing.assert_allclose(row["val_own loss"], row["val_near_loss"], rtol=1e-6)
        np.testing.assert_allclose(row["val_doubled"], 2 * row["val_loss"], rtol=1e-6)
        assert (row["val_near_rows"], row["val_far_rows"]) == (9, 7)
    assert history.history["own loss"] == pytest.approx(history.history["loss"]), "of training alone"
    assert (tmp_path / "best.ckpt").exists()


def test_outside_of_a_batch_a_number_counts_once_also_after_a_validation_within_an_epoch():
    values = itertools.count(1)
    hook = LambdaCallback(on_validation_end=lambda epoch, logs: hook.trainer.log("seen", next(values)))
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", callbacks=hook)
        settings = {**FIT, "epochs": 1, "max_steps": 4, "validation_freq": 0.5}
        history = trainer.fit(*make_rows(32), validation_data=VALID, **settings)
    assert len(history.validations) == 2
    assert history.history["seen"] == [1.5]


@pytest.mark.parametrize("kind", ["step", "metric"])
def test_what_has_no_weight_counts_as_nothing_also_if_it_is_not_a_number(kind):
    def mean_of_rare(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        own = nn.functional.cross_entropy(output, target, reduction="none")[target == 2]
        return own.mean() * len(own), torch.tensor(len(own))  # NaN * 0

    def step(trainer: cx.DistributedTrainer, batch: Any) -> Tensor:
        output = trainer.model(batch[0])
        own, count = mean_of_rare(output, batch[1])
        trainer.log("rare", own / count, weight=count)
        return nn.functional.cross_entropy(output, batch[1])

    inputs, targets = ROWS
    order = targets.argsort(stable=True)
    more: dict[str, Any] = {"metrics": {"rare": mean_of_rare}} if kind == "metric" else {"test_step": step}
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd", **more)
        found = [trainer.evaluate(inputs[order], targets[order], batch_size=size)["rare"] for size in (4, len(inputs))]
    assert found[0] == pytest.approx(found[1])


def test_a_validation_number_that_a_callback_logs_at_the_end_of_an_epoch_is_monitored(tmp_path):
    values = iter([3.0, 1.0, 2.0, 0.0])
    hook = LambdaCallback(
        on_epoch_end=lambda epoch, logs: hook.trainer.log("val_bleu", next(values), larger_is_better=False)
    )
    early = EarlyStopping("val_bleu", patience=1, mode="min")
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", callbacks=[early, hook])
        settings = {**FIT, "epochs": 4, "keep_best": "val_bleu", "checkpoint_dir": str(tmp_path)}
        assert trainer.fit(*ROWS, validation_data=VALID, **settings).metrics["val_bleu"] == [3, 1, 2]
    assert (tmp_path / "best.ckpt").samefile(tmp_path / "epoch-0002.ckpt")


def test_a_column_that_appears_later_is_kept_also_on_resume(tmp_path):
    def fit(epochs: int) -> list[dict[str, str]]:
        late = LambdaCallback(on_epoch_end=lambda epoch, logs: epoch < 2 or late.trainer.log("late", epoch))
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy")
        settings = {**FIT, "epochs": epochs, "checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every_n_epochs": 1}
        trainer.fit(*ROWS, callbacks=[late, CSVLogger(tmp_path / "log.csv")], resume="auto", **settings)
        with open(tmp_path / "log.csv") as file:
            return list(csv.DictReader(file))

    with one_process():
        assert "late" not in fit(2)[0]
        assert [line["late"] for line in fit(4)] == ["", "", "2.0", "3.0"]
        assert [line["late"] for line in fit(5)] == ["", "", "2.0", "3.0", "4.0"]


def test_a_number_that_an_epoch_lacks_leaves_a_gap_and_is_plotted(tmp_path):
    seen = LambdaCallback(on_epoch_end=lambda epoch, logs: epoch % 2 or seen.trainer.log("even", epoch))
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy")
        history = trainer.fit(*ROWS, callbacks=seen, **{**FIT, "epochs": 3})
    np.testing.assert_array_equal(history.metrics["even"], [0, np.nan, 2])
    assert [axes.get_title() for axes in history.plot().axes if axes.get_visible()] == ["loss", "accuracy", "even"]


def log_refusal(name: Any, value: Any, **more: Any) -> str:
    hook = LambdaCallback(on_train_batch_end=lambda batch, logs: hook.trainer.log(name, value, **more))
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy")
    return refusal(trainer.fit, *ROWS, callbacks=hook, **FIT)


def test_what_cannot_be_logged_is_refused_by_name_and_kind(tmp_path):
    with one_process():
        for name in ("loss", "accuracy", "val_loss", "learning_rate", "grad_norm", "epoch", "step"):
            assert f"log({name!r}): fit records a number of this name itself" in log_refusal(name, 1.0)
        assert "log('x'): value must be a number, got 1.0 (str)" in log_refusal("x", "1.0")
        assert "got None (NoneType)" in log_refusal("x", None)
        assert "got Tensor of shape [2]" in log_refusal("x", torch.ones(2))
        assert "log.reduce must be one of" in log_refusal("x", 1, reduce="median")
        assert "a weight counts in a mean, not with 'max'" in log_refusal("x", 1, reduce="max", weight=2)
        assert "weight must be a finite number of at least 0, got -1.0" in log_refusal("x", 1, weight=-1)
        assert "log takes a name, got 3" in log_refusal(3, 1)
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy")
        with pytest.raises(cx.ConfigError, match="called outside of a fit"):
            trainer.log("x", 1)
        late = LambdaCallback(on_train_end=lambda logs: late.trainer.log("x", 1))
        with pytest.raises(cx.ConfigError, match="called after the last epoch"):
            trainer.fit(*ROWS, callbacks=late, **FIT)
        kinds = iter(["mean", "sum"])
        changing = LambdaCallback(on_epoch_end=lambda epoch, logs: changing.trainer.log("x", 1, reduce=next(kinds)))
        with pytest.raises(cx.ConfigError, match="with reduce='mean', and with reduce='sum'"):
            trainer.fit(*ROWS, callbacks=changing, **FIT)
        hook = LambdaCallback(on_epoch_end=lambda epoch, logs: hook.trainer.log("x", 1))
        with pytest.raises(cx.ConfigError, match="Pass larger_is_better=True or False to trainer"):
            trainer.fit(*ROWS, callbacks=hook, keep_best="x", checkpoint_dir=str(tmp_path), **FIT)


def log_differently() -> str:
    reduce = ("mean", "sum")[cx.get_rank()]
    hook = LambdaCallback(on_epoch_end=lambda epoch, logs: hook.trainer.log("x", 1, reduce=reduce))
    return refusal(cx.DistributedTrainer(make_model(), "cross_entropy").fit, *ROWS, callbacks=hook, **FIT)


class LogsTwice(Callback):
    """Logs "x" in validations and "val_x" in steps, each on one rank."""

    def on_test_end(self, logs: Any = None) -> None:
        if self.trainer.get_rank() == self.trainer.get_world_size() - 1:
            self.trainer.log("x", 1.0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.trainer.is_master():
            self.trainer.log("val_x", 2.0)


def clash() -> str:
    with pytest.raises(cx.ConfigError) as error:
        cx.DistributedTrainer(make_model(), "cross_entropy").fit(
            *make_rows(12), validation_data=make_rows(6), epochs=1, verbose=False, callbacks=LogsTwice()
        )
    return str(error.value)


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_name_that_a_validation_has_is_refused_on_all_ranks(world_size):
    for text in everywhere(world_size, clash):
        assert text.startswith(
            "log('val_x') was called in training, and a validation has a number of this name: what it"
        )


def test_ranks_that_reduce_differently_are_refused_on_all():
    first, second = run_world(2, log_differently)
    assert first == second
    assert "with reduce='mean', and with reduce='sum'" in first


def test_a_name_that_nobody_logs_is_refused_or_warned_of(tmp_path):
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy")
        with pytest.raises(cx.ConfigError, match="no such metric in this run"):
            trainer.fit(*ROWS, keep_best="score", **FIT)  # before anything starts
        with pytest.raises(cx.ConfigError, match="no metric named 'score'"):
            trainer.fit(*ROWS, callbacks=EarlyStopping("score", mode="min"), **FIT)
        with warning_texts() as caught:
            settings = {**FIT, "keep_best": "scroe", "checkpoint_dir": str(tmp_path)}
            Program().trainer.fit(*ROWS, callbacks=EarlyStopping("scroe", mode="min"), **settings)
        texts = caught
        assert sum("keep_best='scroe': the first epoch has no such number" in text for text in texts) == 1
        assert sum("EarlyStopping monitors 'scroe', which this epoch has not logged" in text for text in texts) == 1


def fit_clipped() -> list[Any]:
    norms, rates = GradientNormMonitor(), LearningRateMonitor(every_n_steps=1)
    model = make_model()
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, 0.1)
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, scheduler="linear")
    history = trainer.fit(*ROWS, callbacks=[norms, rates], clip_norm=0.5, warmup_steps=2, **FIT)
    return [history.metrics, [norm for _, norm in norms.values], [rate for _, rate in rates.values]]


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_the_history_has_the_last_rate_and_the_mean_norm_of_each_epoch(world_size):
    metrics, norms, rates = everywhere(world_size, fit_clipped)[-1]
    with one_process():
        [alone, *_] = fit_clipped()
    assert [metrics["learning_rate"], metrics["learning_rate_1"]] == [
        [rates[4][0], rates[9][0]],
        [rates[4][1], rates[9][1]],
    ]
    np.testing.assert_allclose(metrics["grad_norm"], np.mean(np.reshape(norms, (2, 5)), axis=1), rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], alone["grad_norm"], rtol=1e-5)


def test_the_rate_of_each_epoch_is_that_which_a_schedule_per_epoch_or_a_callback_has_set():
    with one_process():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        trainer = cx.DistributedTrainer(
            model, "cross_entropy", optimizer, scheduler=schedule, scheduler_interval="epoch"
        )
        assert trainer.fit(*ROWS, **FIT).metrics["learning_rate"] == pytest.approx([0.1, 0.01])
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy")
        halves = LearningRateScheduler(lambda epoch: 0.5 ** (epoch + 1))
        assert trainer.fit(*ROWS, callbacks=halves, **FIT).metrics["learning_rate"] == [0.5, 0.25]


def test_logs_of_a_batch_have_it_and_the_rate():
    seen = []
    look = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    with one_process():
        Program(look).trainer.fit(*ROWS, clip_norm=1.0, **{**FIT, "epochs": 1})
    assert all(each["own loss"] == pytest.approx(each["loss"]) for each in seen)
    assert all(each["learning_rate"] == 0.1 and each["grad_norm"] > 0 for each in seen)


# --- what runs twice counts once --------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its rows in a layer; `reentrant`: how gradient checkpointing runs that again, None: not at all."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.last = make_model(), nn.Linear(3, 3)
        self.reentrant = reentrant
        self.trainer: Any = None

    def layer(self, x: Tensor) -> Tensor:
        self.trainer.log("rows", len(x), reduce="sum")
        self.trainer.log("large", 2**24 + 1, reduce="max")
        return self.first(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.last(self.layer(x))
        x = x.requires_grad_(torch.is_grad_enabled())
        return self.last(checkpoint(self.layer, x, use_reentrant=self.reentrant))


class CountingTwo(Counting):
    """Has two outputs."""

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        return {"a": output, "b": output[:, :1]}


def counted(model: Counting, loss: Any = "cross_entropy", optimizer: Any = "sgd", **more: Any) -> Any:
    step, targets = more.pop("train_step", None), more.pop("y", ROWS[1])
    trainer = model.trainer = cx.DistributedTrainer(model, loss, optimizer, train_step=step)
    history = trainer.fit(ROWS[0], targets, shuffle=False, **{**FIT, "epochs": 1, **more})
    return history.metrics


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=3)


def row_sum(output: Tensor, target: Tensor) -> Any:
    return nn.functional.cross_entropy(output, target, reduction="sum"), len(target)


def by_closure(trainer: Any, batch: Any) -> Any:
    x, y = batch
    trainer.log("own rows", len(x), reduce="sum")
    trainer.optimize(lambda: nn.functional.cross_entropy(trainer.model(x), y))
    return {"loss": torch.zeros(()), "time": 1_764_311_015.25}


def second_is_nan(trainer: Any, batch: Any, *, optimizes: bool) -> Any:
    x, y = batch
    loss = nn.functional.cross_entropy(trainer.model(x), y)
    trainer.log("own rows", len(x), reduce="sum")
    loss = loss / (trainer.step != 1)
    if optimizes:
        trainer.optimize(loss)
    return {"loss": loss, "time": 1_764_311_015.25}


def what_runs_twice() -> list[Any]:
    torch.manual_seed(0)
    targets = {"a": ROWS[1], "b": torch.zeros(37, 1)}
    return [
        *(counted(Counting(reentrant)) for reentrant in (None, False, True)),
        counted(Counting(False), precision="bf16"),
        counted(Counting(False), optimizer=lbfgs, effective_batch_size=20),
        counted(Counting(), None, lbfgs, train_step=by_closure),
        counted(CountingTwo(True), {"a": row_sum, "b": "mse"}, y=targets, accumulation_steps=2),
    ]


def what_is_skipped() -> list[Any]:
    hook = LambdaCallback(on_train_batch_end=lambda batch, logs: hook.trainer.log("steps", 1, reduce="last"))
    steps = [functools.partial(second_is_nan, optimizes=optimizes) for optimizes in (False, True)]
    settings = {"on_nonfinite": "skip", "callbacks": [hook]}
    return [counted(Counting(), None, train_step=step, **settings) for step in steps]


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_what_runs_twice_counts_once(world_size):
    for found in everywhere(world_size, what_runs_twice)[0]:
        assert (found["rows"], found["large"]) == ([37], [2**24 + 1])
        assert found.get("own rows", [37]) == [37]
        assert found.get("time", [1_764_311_015.25]) == [1_764_311_015.25]


@pytest.mark.filterwarnings("ignore:.*The step is skipped")
@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_skipped_steps_numbers_count_as_little_as_its_loss(world_size):
    for found in everywhere(world_size, what_is_skipped)[0]:
        assert (found["rows"], found["own rows"], found["time"]) == ([29], [29], [1_764_311_015.25])
        assert found["steps"] == [1], "a hook's numbers count"


def test_hooks_of_gradients_count_and_a_look_at_batch_norm_does_not():
    model = Counting(False)
    model.last = nn.Sequential(nn.BatchNorm1d(3), model.last)
    with one_process():
        model.last[1].bias.register_hook(lambda _: model.trainer.log("hooks", 1, reduce="sum"))
        assert counted(model, effective_batch_size=10)["hooks"] == [4]
        with pytest.raises(cx.ConfigError, match="the last step of an epoch has 1 sample"):
            counted(model, effective_batch_size=9)
