"""Ready callbacks do what Keras's do, on every rank alike, also where one rank alone has them, and resume."""

from __future__ import annotations

import csv
import errno
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, fingerprint, flat, make_model, make_rows, one_process, run_world
from markers import by_night
from refusals import refuses, warning_texts
from torch import nn

import cyxtrain as cx
from cyxtrain.callbacks import (
    EMA,
    SWA,
    Callback,
    CSVLogger,
    EarlyStopping,
    GradientNormMonitor,
    LambdaCallback,
    LearningRateMonitor,
    LearningRateScheduler,
    ModelCheckpoint,
    ProgressBar,
    ReduceLROnPlateau,
    SlowRankMonitor,
    TensorBoard,
    TerminateOnNaN,
    ThroughputMonitor,
    Timer,
)

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS, VALID = make_rows(40), make_rows(9, seed=1)
FIT = {"epochs": 3, "effective_batch_size": 8, "verbose": False}


def fit(*callbacks: Callback, rate: float = 0.1, scheduler: Any = None, **more: Any) -> cx.DistributedTrainer:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, scheduler=scheduler)
    trainer.fit(*ROWS, callbacks=list(callbacks), **{**FIT, **more})
    return trainer


# --- learning rates -------------------------------------------------------------------------------------------------


def test_a_schedule_sets_the_rate_of_each_epoch_with_or_without_the_rate(capsys):
    with one_process():
        for schedule in (lambda epoch, rate: rate / 2, lambda epoch: 0.1 / 2 ** (epoch + 1)):
            seen = LearningRateMonitor()
            fit(LearningRateScheduler(schedule, verbose=1), seen)
            assert [rates for _, rates in seen.values] == [[0.05], [0.025], [0.0125]]
            assert [step for step, _ in seen.values] == [5, 10, 15]
            assert "epoch 3: the learning rate is 0.0125" in capsys.readouterr().out


def set_by_one(setter: int) -> tuple[list[Any], str]:
    """Only one rank has a schedule."""
    own = [LearningRateScheduler(lambda epoch, rate: 0.3 / (epoch + 1))] if cx.get_rank() == setter else []
    seen = LearningRateMonitor(every_n_steps=5)
    trainer = fit(*own, seen)
    return seen.values, fingerprint(trainer.model)


@pytest.mark.parametrize("setter", [0, by_night(1)])
def test_what_one_rank_sets_is_set_on_all(setter):
    first, second = run_world(2, set_by_one, setter)
    assert first == second
    assert [rates[0] for _, rates in first[0]] == pytest.approx([0.3, 0.15, 0.1])


def follow(values: list[float], **arguments: Any) -> list[float]:
    """The rate after each epoch of a number."""
    callback = ReduceLROnPlateau("loss", **arguments)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 1.0)

    class Trainer:
        scheduler = None

        def __init__(self) -> None:
            self.optimizers = {"optimizer": optimizer}

        def set_learning_rates(self, rates: list[float]) -> None:
            optimizer.param_groups[0]["lr"] = rates[0]

    stand_in: Any = Trainer()
    callback.set_trainer(stand_in)
    callback.on_train_begin()
    rates = []
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {"loss": value})
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(
    ("values", "arguments", "expected"),
    [
        ([3, 2, 2, 2, 2], {"patience": 2}, [1, 1, 1, 0.1, 0.1]),
        ([3, 3, 3, 3, 3], {"patience": 1, "factor": 0.5}, [1, 0.5, 0.25, 0.125, 0.0625]),
        ([3, 3, 3, 3, 3, 3], {"patience": 1, "factor": 0.5, "cooldown": 2}, [1, 0.5, 0.5, 0.25, 0.25, 0.125]),
        ([3, 3, 3, 3], {"patience": 1, "factor": 0.5, "min_lr": 0.4}, [1, 0.5, 0.4, 0.4]),
        ([3, 2.9999, 2.9998], {"patience": 1, "factor": 0.5, "min_delta": 0.01}, [1, 0.5, 0.25]),
        ([1, 2, 3], {"patience": 1, "mode": "max"}, [1, 1, 1]),
        ([math.nan, math.nan], {"patience": 1, "factor": 0.5}, [0.5, 0.25]),
    ],
)
def test_a_rate_falls_on_a_plateau_as_in_keras(values, arguments, expected):
    assert follow(values, **arguments) == pytest.approx(expected)


def plateau(**more: Any) -> tuple[list[Any], str]:
    seen = LearningRateMonitor()
    fall = ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0)
    trainer = fit(fall, seen, epochs=5, validation_data=VALID, **more)
    return seen.values, fingerprint(trainer.model)


def resumed_plateau(folder: str, every: int) -> list[tuple[list[Any], str]]:
    whole = plateau(checkpoint_every_n_steps=every, checkpoint_dir=folder)
    return [whole] + [plateau(resume=str(path)) for path in sorted(Path(folder).glob("step-*.ckpt"))]


@pytest.mark.parametrize(("world_size", "every"), [(1, 8), by_night(1, 4), by_night(2, 4)])
def test_a_plateau_resumes(world_size, every, tmp_path):
    for whole, *resumed in everywhere(world_size, resumed_plateau, str(tmp_path), every):
        assert [rates[0] for _, rates in whole[0]] == [0.1, 0.05, 0.025, 0.0125, 0.00625]
        assert len(resumed) >= 25 // every
        assert all(found == whole for found in resumed)


FIXED_RATE = LearningRateScheduler(lambda epoch: 0.1)
test_two_that_set_the_rate_are_refused = refuses(
    (lambda: fit(FIXED_RATE, scheduler="cosine"), r"LearningRateScheduler and Cosine both set the learning rate"),
    (lambda: fit(FIXED_RATE, warmup_steps=3), r"LearningRateScheduler and warmup_steps both set the learning rate"),
    (lambda: fit(ReduceLROnPlateau("loss"), scheduler="cosine"), r"and Cosine both set the learning rate"),
    (lambda: fit(ReduceLROnPlateau("loss"), warmup_steps=3), r"and warmup_steps both set the learning rate"),
    (lambda: fit(LearningRateScheduler(lambda epoch: "fast")), "returned 'fast' for epoch 0: no learning rate"),
)


# --- files ----------------------------------------------------------------------------------------------------------


def table(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return [*csv.reader(file)]


def log_into(path: str, **more: Any) -> dict[str, list[float]]:
    append = more.pop("append", False)
    return fit(CSVLogger(path, append=append), validation_data=VALID, validation_freq=2, **more).history.history


def test_a_csv_log_and_a_profile_never_write_through_a_link(tmp_path):
    (tmp_path / "precious.txt").write_text("precious")
    links = [tmp_path / name for name in ("log.csv", "log.csv.new", "steps.txt", "rank-0.pt.trace.json")]
    for link in links:
        link.symlink_to("precious.txt")
    with one_process():
        log_into(str(tmp_path / "log.csv"), profile=str(tmp_path), epochs=4)
    assert (tmp_path / "precious.txt").read_text() == "precious"
    assert [link.name for link in links if link.is_symlink()] == ["log.csv.new"]


def test_a_line_per_epoch_is_written_by_rank_0_and_resumed(tmp_path):
    path = tmp_path / "logs" / "here.csv"
    [history, _] = run_world(2, log_all, str(path), str(tmp_path / "kept"))
    header, *lines = table(path)
    assert header == ["epoch", "loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"]
    assert [line[0] for line in lines] == ["0", "1", "2"]
    assert [float(line[1]) for line in lines] == history["loss"]
    assert lines[0][3] == ""
    assert float(lines[1][3]) == history["val_loss"][1]
    whole = path.read_text()
    with one_process():
        for checkpoint in ("epoch-0001.ckpt", "epoch-0002.ckpt"):
            path.write_text(whole)
            log_into(str(path), resume=str(tmp_path / "kept" / checkpoint))
            again = table(path)
            assert [line[0] for line in again] == ["epoch", "0", "1", "2"]
            assert again[1] == lines[0]
        log_into(str(path), append=True, epochs=1)
        assert [line[0] for line in table(path)] == ["epoch", "0", "1", "2", "0"]
        log_into(str(path), append=True, checkpoint_every_n_epochs=1, checkpoint_dir=str(tmp_path / "more"))
        log_into(str(path), append=True, resume=str(tmp_path / "more" / "epoch-0001.ckpt"))
        assert [line[0] for line in table(path)] == ["epoch", "0", "1", "2", "0", "0", "1", "2"]
        log_into(str(path), epochs=1)
        assert len(table(path)) == 2


def test_a_number_that_the_file_has_no_column_for_gets_one(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("epoch,loss\n0,0.5\n")
    with one_process():
        history = fit(CSVLogger(path, append=True), epochs=1).history.history
    header, *lines = table(path)
    assert header == ["epoch", "loss", "accuracy", "learning_rate"]
    assert lines == [["0", "0.5", "", ""], ["0", repr(history["loss"][0]), repr(history["accuracy"][0]), "0.1"]]


def log_all(path: str, kept: str) -> dict[str, list[float]]:
    return log_into(path, checkpoint_every_n_epochs=1, checkpoint_dir=kept)


def curves(folder: str) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = {}
    for run in ("train", "validation"):
        found = EventAccumulator(f"{folder}/{run}")
        found.Reload()
        if run == "train":
            assert "epochs" in found.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
        for name in found.Tags()["scalars"]:
            shown[f"{name}/{run}"] = [(each.step, each.value) for each in found.Scalars(name)]
    return shown


def show(folder: str, **more: Any) -> dict[str, list[float]]:
    freq, profiled = more.pop("update_freq", "epoch"), more.pop("profile_batch", 0)
    return fit(TensorBoard(folder, freq, profile_batch=profiled), validation_data=VALID, **more).history.history


def test_tensorboard_shows_the_numbers_of_the_history_on_rank_0(tmp_path):
    [history, _] = run_world(2, show, str(tmp_path / "logs"))
    shown = curves(str(tmp_path / "logs"))
    for name in ("loss", "accuracy"):
        assert [value for _, value in shown[f"epoch/{name}/train"]] == pytest.approx(history[name])
        assert [value for _, value in shown[f"epoch/{name}/validation"]] == pytest.approx(history[f"val_{name}"])
    assert [step for step, _ in shown["epoch/loss/train"]] == [5, 10, 15]
    assert [value for _, value in shown["step/learning rate/train"]] == pytest.approx([0.1] * 3)
    assert all(value > 0 for _, value in shown["step/gradient norm/train"] + shown["epoch/samples per second/train"])
    assert [len(list((tmp_path / "logs" / run).iterdir())) for run in ("train", "validation")] == [1, 1]


def test_tensorboard_shows_steps_and_goes_on_where_a_fit_is_resumed(tmp_path):
    with one_process():
        show(str(tmp_path / "logs"), update_freq=2, checkpoint_every_n_steps=5, checkpoint_dir=str(tmp_path / "kept"))
        whole = curves(str(tmp_path / "logs"))
        assert [step for step, _ in whole["step/loss so far/train"]] == [2, 4, 6, 8, 10, 12, 14]
        resumed = {"resume": str(tmp_path / "kept" / "step-00000005.ckpt"), "profile_batch": "2"}
        show(str(tmp_path / "logs"), update_freq=2, **resumed)
        assert len([*(tmp_path / "logs" / "train").glob("*.pt.trace.json")]) == 1
        assert curves(str(tmp_path / "logs"))["step/gradient norm/train"] == whole["step/gradient norm/train"]


class Convolved(torch.nn.Module):
    """Has a batch norm in eval mode, dropout, and a named argument."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.norm = torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)
        self.drop, self.out = torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.norm(self.kernel(pixels)).flatten(1)))


def fit_pictures(folder: str, **settings: Any) -> str:
    """Return the weights after a fit with TensorBoard; the data have a name."""
    torch.manual_seed(0)
    model = Convolved()
    model.norm.eval()
    trainer = cx.DistributedTrainer(model, "cross_entropy", "sgd")
    pixels, targets = {"pixels": torch.rand(16, 1, 4, 4)}, torch.arange(16) % 3
    boards = [TensorBoard(folder, **settings)] if folder else []
    trainer.fit(pixels, targets, epochs=4, effective_batch_size=8, verbose=False, callbacks=boards)
    assert not model.norm.training
    assert not model._forward_pre_hooks
    return fingerprint(trainer.model)


def fit_pictures_with_and_without(folder: str) -> list[str]:
    everything = {"histogram_freq": 2, "write_graph": True, "write_images": True, "profile_batch": (2, 3)}
    return [fit_pictures(""), fit_pictures(folder, **everything)]


def test_tensorboard_shows_weights_the_graph_and_a_profile_and_changes_no_bit(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (plain, shown), other = run_world(2, fit_pictures_with_and_without, str(tmp_path))
    assert plain == shown == other[0] == other[1]
    events = EventAccumulator(str(tmp_path / "train"), size_guidance={"images": 0, "histograms": 0})
    events.Reload()
    tags = events.Tags()
    names = ["kernel.weight", "kernel.bias", "norm.weight", "norm.bias", "out.weight", "out.bias"]
    assert tags["histograms"] == [f"weights/{name}" for name in names]
    assert [each.step for each in events.Histograms("weights/out.bias")] == [4, 8]
    assert tags["images"] == ["images/kernel.weight", "images/out.weight"]
    sizes = {name: (each.height, each.width) for name in tags["images"] for each in events.Images(name)}
    assert sizes == {"images/kernel.weight": (6, 3), "images/out.weight": (3, 8)}
    assert tags["graph"]
    assert b"kernel" in events.Graph().SerializeToString()
    [trace] = (tmp_path / "train").glob("*.pt.trace.json")  # of rank 0
    assert trace.stat().st_size > 1000


def test_a_graph_that_cannot_be_traced_is_a_warning(tmp_path):
    model = make_model()
    model.register_forward_pre_hook(lambda *_: 1 / 0 if torch.jit.is_tracing() else None)
    trainer = cx.DistributedTrainer(model, "cross_entropy", "sgd")
    board = TensorBoard(str(tmp_path), write_graph=True)
    with one_process(), pytest.warns(UserWarning, match="the model's graph could not be written for TensorBoard: "):
        trainer.fit(*ROWS, epochs=1, verbose=False, callbacks=board)


def test_two_profiles_at_once_are_refused(tmp_path):
    with one_process(), pytest.raises(cx.ConfigError, match="both profile steps: choose one"):
        fit(TensorBoard(str(tmp_path), profile_batch="1,2"), profile=str(tmp_path / "other"))


def save_models(folder: str) -> list[str]:
    fit(
        ModelCheckpoint(f"{folder}/all/{{epoch:02d}}-{{loss:.1f}}.ckpt"),
        ModelCheckpoint(f"{folder}/weights.safetensors", save_weights_only=True),
        ModelCheckpoint(f"{folder}/steps/{{epoch}}-{{batch}}.ckpt", save_freq=4),
        ModelCheckpoint(f"{folder}/best/{{epoch}}.ckpt", "accuracy", save_best_only=True),
        ModelCheckpoint(f"{folder}/never.ckpt", "loss", save_best_only=True, initial_value_threshold=-1.0),
    )
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.*"))


def test_models_are_saved_where_and_when_it_is_asked_for(tmp_path):
    first, _ = run_world(2, save_models, str(tmp_path))
    assert [name for name in first if name.startswith("steps")] == [
        "steps/1-4.ckpt",
        "steps/2-3.ckpt",
        "steps/3-2.ckpt",
    ]
    assert len([name for name in first if name.startswith("all/0")]) == 3
    assert first[-1] == "weights.safetensors"
    assert "best/1.ckpt" in first
    assert not any(name.startswith("never") for name in first)
    with one_process():
        trainer = fit(epochs=1)
        before = fingerprint(trainer.model)
        trainer.load_checkpoint(tmp_path / "steps" / "3-2.ckpt")
        assert trainer.step == 12
        cx.load_weights(trainer.model, tmp_path / "weights.safetensors")
        assert fingerprint(trainer.model) != before


def test_a_path_that_cannot_be_filled_in_is_an_error(tmp_path):
    with (
        one_process(),
        pytest.raises(cx.ConfigError, match=r"unknown names .*val_loss.*; available: epoch, step, l"),
    ):
        fit(ModelCheckpoint(f"{tmp_path}/{{val_loss}}.ckpt"))


def saved_in_place_of_a_file(path: str, only_weights: bool) -> tuple[type, str]:
    try:
        fit(ModelCheckpoint(f"{path}/{{epoch}}.ckpt", save_weights_only=only_weights))
    except RuntimeError as error:
        return type(error), str(error)
    raise AssertionError


@pytest.mark.parametrize("only_weights", [False, by_night(True)])
def test_a_model_checkpoint_that_cannot_be_written_is_an_error_with_a_remedy(only_weights, tmp_path):
    path = tmp_path / "file"
    path.touch()
    first, other = run_world(2, saved_in_place_of_a_file, str(path), only_weights)
    assert first[0] is cx.CheckpointError
    assert re.fullmatch(r"Cannot write .*: File exists. A file is in its place: choose another folder.", first[1])
    if not only_weights:
        assert other == (cx.CheckpointError, f"rank 0: {first[1]}")


# --- ends -----------------------------------------------------------------------------------------------------------


def end_on_nan(who: int) -> tuple[int, list[float], list[str]]:
    """The model becomes NaN in the eighth step; one rank alone has the callback."""
    poison = LambdaCallback(
        on_train_batch_begin=lambda batch, logs: None,
        on_epoch_begin=lambda epoch, logs: model[0].weight.data.fill_(math.nan) if epoch == 1 else None,
    )
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    own = [TerminateOnNaN()] if cx.get_rank() == who else []
    with warning_texts() as caught:
        trainer.fit(*ROWS, callbacks=[poison, *own], **FIT)
    return trainer.step, trainer.history.train_losses, caught


@pytest.mark.parametrize("who", [0, by_night(1)])
def test_a_fit_ends_on_nan_on_all_ranks_where_one_wants_it(who):
    first, second = run_world(2, end_on_nan, who)
    assert first[0] == second[0] == 6
    assert len(first[1]) == 2
    assert any("parameters are not finite" in text and "a callback ends the fit" in text for text in first[2])
    assert not second[2]


def test_a_timer_ends_a_fit_and_takes_the_time():
    timer = Timer()
    with one_process():
        fit(timer)
        assert len(timer.epoch_seconds) == 3
        assert all(seconds > 0 for seconds in timer.epoch_seconds)
        trainer = fit(Timer(seconds=1e-9), epochs=50)
        assert trainer.epoch == 1
        assert trainer.step == 2  # the ranks hear of it with the step that follows


# --- monitors -------------------------------------------------------------------------------------------------------


def monitored(**more: Any) -> tuple[list[Any], list[Any], list[Any]]:
    norms, rates, speed = GradientNormMonitor(2), LearningRateMonitor(3), ThroughputMonitor(2)
    fit(norms, rates, speed, clip_norm=1e-3, **more)
    return norms.values, rates.values, speed.values


def test_monitors_note_every_so_many_steps_the_same_on_any_number_of_ranks():
    [(norms, rates, speed)] = everywhere(1, monitored)
    assert [step for step, _ in norms] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [step for step, _ in rates] == [0, 3, 6, 9, 12]
    assert [step for step, _ in speed] == [2, 4, 6, 8, 10, 12, 14]
    assert all(value > 0 for _, value in speed)
    assert all(value > 1e-2 for _, value in norms)  # before they are clipped
    for found in run_world(2, monitored):
        assert [value for _, value in found[0]] == pytest.approx([value for _, value in norms], rel=1e-3)


def test_monitors_resume(tmp_path):
    with one_process():
        whole = monitored(checkpoint_every_n_steps=4, checkpoint_dir=str(tmp_path))
        for path in sorted(tmp_path.glob("step-*.ckpt")):
            again = monitored(resume=str(path))
            assert again[:2] == whole[:2]
            assert [step for step, _ in again[2]][-1] == 14


# --- averages -------------------------------------------------------------------------------------------------------


class Watching(Callback):
    """Keeps the parameters after each step, and those of validations."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.tested: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(flat(self.model.parameters()))

    def on_test_begin(self, logs: Any = None) -> None:
        self.tested.append(flat(self.model.parameters()))


def averaged(**more: Any) -> str:
    return fingerprint(fit(EMA(0.9), validation_data=VALID, **more).model)


def test_the_average_of_parameters_validates_and_stays(tmp_path):
    watching = Watching()
    with one_process():
        trainer = fit(EMA(0.9, start_step=2), watching, validation_data=VALID)
        average = watching.steps[0]
        expected = []
        for number, parameters in enumerate(watching.steps):
            average = parameters if number < 2 else 0.9 * average + 0.1 * parameters
            expected.append(average)
        assert abs(flat(trainer.model.parameters()) - expected[-1]).max() < 1e-6
        assert abs(watching.tested[0] - expected[4]).max() < 1e-6
        assert abs(watching.steps[5] - expected[5]).max() > 1e-3  # training goes on with the parameters themselves
        plain = fit(EMA(0.9, validates=False, overwrites_at_end=False), validation_data=VALID)
        assert fingerprint(plain.model) == fingerprint(fit(validation_data=VALID).model)
        whole = averaged(checkpoint_every_n_steps=4, checkpoint_dir=str(tmp_path))
        for path in sorted(tmp_path.glob("step-*.ckpt")):
            assert averaged(resume=str(path)) == whole


def normed() -> nn.Sequential:
    """A model with running statistics, which an average of weights has to take along."""
    return nn.Sequential(nn.BatchNorm1d(4), make_model())


class Ends(Callback):
    """The weights and running statistics at the end of each epoch, and those of each validation."""

    def __init__(self) -> None:
        self.ends: list[Any] = []
        self.tested: list[Any] = []

    def on_test_begin(self, logs: Any = None) -> None:
        self.tested.append(everything(self.model))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ends.append(everything(self.model))


def everything(model: nn.Module) -> Any:
    return flat(each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point())


def stochastic(start: int, *callbacks: Callback, **more: Any) -> cx.DistributedTrainer:
    model = normed()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.5))
    settings = {**FIT, "epochs": 5, "validation_data": VALID, **more}
    trainer.fit(*ROWS, callbacks=[SWA(start), *callbacks], **settings)
    return trainer


def test_the_mean_of_the_last_epochs_validates_and_stays(tmp_path):
    seen = Ends()
    with one_process():
        trainer = stochastic(2, seen)
        means = [np.mean(seen.ends[2:end], axis=0) for end in (3, 4, 5)]
        np.testing.assert_allclose(seen.tested, [*seen.ends[:2], *means], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(everything(trainer.model), means[-1], rtol=1e-5, atol=1e-6)
        assert trainer.evaluate(*VALID).loss == pytest.approx(trainer.history.val_losses[-1], rel=1e-5)
        whole = fingerprint(stochastic(2, checkpoint_every_n_steps=7, checkpoint_dir=str(tmp_path)).model)
        for path in sorted(tmp_path.glob("step-*.ckpt")):
            assert fingerprint(stochastic(2, resume=str(path)).model) == whole


def averaged_on_ranks() -> list[Any]:
    model, averages = make_model("float64"), [SWA(1), EMA(0.5, validates=False, overwrites_at_end=False)]
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.5))
    rows = [(x.double(), y) for x, y in (ROWS, VALID)]
    history = trainer.fit(*rows[0], validation_data=rows[1], callbacks=averages, **FIT)
    return [history.val_losses, flat(model.parameters())]


def test_averages_are_the_same_on_any_number_of_ranks():
    with one_process():
        losses, weights = averaged_on_ranks()
    for found in run_world(2, averaged_on_ranks):
        np.testing.assert_allclose(found[0], losses, rtol=1e-9)
        np.testing.assert_allclose(found[1], weights, rtol=1e-9)


@pytest.mark.parametrize("kind", [EMA, by_night(SWA)])
def test_an_average_is_loaded_with_the_best_checkpoint_and_applied_by_hand(kind, tmp_path):
    average = kind(0.5) if kind is EMA else kind(0)
    settings = {"keep_best": "val_loss", "load_best": True, "checkpoint_dir": str(tmp_path), "epochs": 6}
    with one_process():
        trainer = fit(average, rate=3.0, validation_data=VALID, **settings)
        losses = trainer.history.val_losses
        assert min(losses) < losses[-1], "the last epoch is not the best one"
        assert trainer.evaluate(*VALID).loss == pytest.approx(min(losses), rel=1e-5)
        average = kind(0.5, overwrites_at_end=False) if kind is EMA else kind(0, overwrites_at_end=False)
        trainer = fit(average, validation_data=VALID)
        own, last = trainer.evaluate(*VALID).loss, trainer.history.val_losses[-1]
        with average.applied():
            assert trainer.evaluate(*VALID).loss == pytest.approx(last, rel=1e-5)
        assert trainer.evaluate(*VALID, callbacks=[average]).loss == pytest.approx(last, rel=1e-5)
        assert trainer.evaluate(*VALID).loss == own != pytest.approx(last, rel=1e-5)
        with pytest.raises(cx.ConfigError, match="has no average yet"), kind(0.5 if kind is EMA else 0).applied():
            pass


class Failing(nn.Module):
    """Fails in a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.fails = False

    def forward(self, x):
        if self.fails and not self.training:
            raise RuntimeError("no")
        return self.net(x)


def test_an_error_in_a_validation_leaves_the_parameters_in_the_model_and_is_shown():
    seen: list[BaseException] = []
    model = Failing()
    watching = Watching()
    failing = LambdaCallback(on_epoch_begin=lambda epoch, logs: setattr(model, "fails", True), on_exception=seen.append)
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    with one_process(), pytest.raises(RuntimeError, match="no"):
        trainer.fit(*ROWS, validation_data=VALID, callbacks=[EMA(0.9), watching, failing], **FIT)
    assert abs(flat(model.parameters()) - watching.steps[-1]).max() == 0
    assert [str(error) for error in seen] == ["no"]


# --- hooks ----------------------------------------------------------------------------------------------------------


def test_gradients_are_seen_between_averaging_and_clipping():
    norms: list[float] = []

    class Looking(Callback):
        def on_before_optimizer_step(self, batch: int, logs: Any = None) -> None:
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            after.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])))

    after: list[float] = []
    with one_process():
        fit(Looking(), clip_norm=1e-3)
    assert min(norms) > 1e-2
    assert max(after) == pytest.approx(1e-3, rel=1e-3)


test_arguments_that_cannot_be_are_refused = refuses(
    (lambda: LearningRateScheduler(3), "schedule must be a function"),
    (lambda: ReduceLROnPlateau(factor=1.0), "factor must be between 0 and 1"),
    (lambda: ReduceLROnPlateau(patience=-1), "patience must be a whole number"),
    (lambda: CSVLogger("x", separator=";;"), "separator must be one character"),
    (lambda: CSVLogger(3), "filename must be a path"),
    (lambda: LambdaCallback(on_epoch_ends=print), "Did you mean 'on_epoch_end'"),
    (lambda: LambdaCallback(on_epoch_end=3), "must be a function"),
    (lambda: ModelCheckpoint("x", save_freq=0), "save_freq must be a whole number"),
    (lambda: ModelCheckpoint("x", save_freq=2, save_best_only=True), "save_best_only needs save_freq='epoch'"),
    (lambda: Timer(0), "seconds must be above 0"),
    (lambda: GradientNormMonitor(0), "every_n_steps must be a whole number of at least 1"),
    (lambda: EMA(1.0), "decay must be between 0 and 1"),
    (lambda: EMA(start_step=-1), "start_step must be a whole number"),
    (lambda: SWA(0.75), "start_epoch must be a whole number"),
    (lambda: TensorBoard(update_freq=0), "update_freq must be a whole number"),
    (lambda: TensorBoard(update_freq="step"), "update_freq must be a whole number"),
    (lambda: TensorBoard(histogram_freq=-1), "histogram_freq must be a whole number of at least 0"),
    (lambda: TensorBoard(write_images=True), "write_images needs histogram_freq"),
    (lambda: TensorBoard(write_graph=1), "write_graph must be True or False"),
    (lambda: TensorBoard(profile_batch=-1), "profile_batch must be the number of a step"),
    (lambda: TensorBoard(profile_batch=(3, 2)), "profile_batch must be the number of a step"),
    (lambda: TensorBoard(profile_batch="a"), "profile_batch must be the number of a step"),
    (lambda: TensorBoard(profile_batch=True), "profile_batch must be the number of a step"),
)


# --- each of them on one rank alone ---------------------------------------------------------------------------------


def made(name: str, folder: str) -> Callback:
    return {
        "EMA": lambda: EMA(0.9),
        "SWA": lambda: SWA(0),
        "CSVLogger": lambda: CSVLogger(f"{folder}/log.csv"),
        "EarlyStopping": lambda: EarlyStopping("loss", patience=1, min_delta=10.0),
        "GradientNormMonitor": lambda: GradientNormMonitor(),
        "LambdaCallback": lambda: LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        "LearningRateMonitor": lambda: LearningRateMonitor(),
        "LearningRateScheduler": lambda: LearningRateScheduler(lambda epoch, rate: rate / 2),
        "restoring": lambda: EarlyStopping("loss", restore_best_weights=True),
        "ModelCheckpoint": lambda: ModelCheckpoint(f"{folder}/model.ckpt"),
        "weights": lambda: ModelCheckpoint(f"{folder}/model.safetensors", save_weights_only=True),
        "ProgressBar": lambda: ProgressBar(),
        "ReduceLROnPlateau": lambda: ReduceLROnPlateau("loss", patience=0, min_delta=10.0),
        "SlowRankMonitor": lambda: SlowRankMonitor(),
        "TensorBoard": lambda: TensorBoard(f"{folder}/logs"),
        "TerminateOnNaN": lambda: TerminateOnNaN(),
        "ThroughputMonitor": lambda: ThroughputMonitor(2),
        "Timer": lambda: Timer(1e-6),
    }[name]()


ALONE = ["CSVLogger", "EarlyStopping", "GradientNormMonitor", "LambdaCallback", "LearningRateMonitor"]
ALONE += ["LearningRateScheduler", "weights", "ProgressBar", "ReduceLROnPlateau", "SlowRankMonitor"]
ALONE += ["TensorBoard", "TerminateOnNaN", "ThroughputMonitor", "Timer"]


def fit_with_one_each(who: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ALONE:
        own = [made(name, folder)] if cx.get_rank() == who else []
        trainer = fit(*own, validation_data=VALID)
        found[name] = [fingerprint(trainer.model), trainer.history.history, trainer.step]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("who", [0, 1])
def test_each_callback_on_one_rank_alone_decides_for_all(who, tmp_path):
    first, second = run_world(2, fit_with_one_each, who, str(tmp_path))
    assert first == second
    steps = {name: each[2] for name, each in first.items()}
    assert steps.pop("EarlyStopping") == 10
    assert steps.pop("Timer") < 15
    assert set(steps.values()) == {15}


REFUSED_ALONE = ["EMA", "SWA", "ModelCheckpoint", "restoring"]


def refuse_one_each(who: int, folder: str) -> list[str]:
    said = []
    for name in REFUSED_ALONE:
        try:
            fit(*([made(name, folder)] if cx.get_rank() == who else []))
        except cx.ConfigError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("who", [0, by_night(1)])
def test_what_changes_or_saves_a_model_is_refused_on_one_rank_alone(who, tmp_path):
    for said in run_world(2, refuse_one_each, who, str(tmp_path)):
        assert len(said) == len(REFUSED_ALONE)
        assert all("differs from rank 0 in the callbacks that every rank must have: [" in text for text in said)


def test_callbacks_that_are_verbose_say_what_they_do_on_rank_0(tmp_path, capsys):
    model = make_model()
    callbacks = [
        cx.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1e9, min_lr=0.05, verbose=1),
        cx.callbacks.EarlyStopping("loss", patience=3, min_delta=1e9, restore_best_weights=True, verbose=1),
        cx.callbacks.ModelCheckpoint(tmp_path / "{epoch}.ckpt", "loss", save_best_only=True, verbose=1),
    ]
    with one_process():
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), lr=0.1))
        trainer.fit(*make_rows(12), epochs=9, verbose=False, callbacks=callbacks)
        assert trainer.optimizer.param_groups[0]["lr"] == 0.05  # and falls no more, of which nothing is said
        assert trainer.epoch == 4
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("saved")]
    assert shown == [
        "epoch 2: loss has not improved, reducing the learning rate to 0.05",
        "epoch 4: early stopping, loss was best at epoch 1",
        "restored the weights of epoch 1",
    ]
    assert (tmp_path / "1.ckpt").exists()


# --- files that cannot be written -------------------------------------------------------------------------------------


def test_logs_that_cannot_be_written_are_one_warning_each_and_training_continues():
    folder = "/dev/null/logs"
    with one_process(), pytest.warns(UserWarning) as caught:  # noqa: PT030 - all of them are compared below
        trainer = fit(CSVLogger(f"{folder}/log.csv"), TensorBoard(folder, update_freq=1))
    found = [str(each.message) for each in caught]
    assert trainer.epoch == FIT["epochs"]
    assert [re.sub(r" /dev/null[^:\s]*", "", text) for text in sorted(found)] == [
        f"{name} cannot write: Not a directory. Training continues." for name in ("CSVLogger", "TensorBoard")
    ]


def test_a_log_that_fails_in_the_middle_is_written_again(tmp_path, monkeypatch):
    path = tmp_path / "log.csv"
    replace = os.replace
    answers = [OSError(errno.ENOSPC, "No space left on device")] * 2

    def full(*arguments: Any) -> None:
        if answers:
            raise answers.pop()
        replace(*arguments)

    monkeypatch.setattr(os, "replace", full)
    with one_process(), pytest.warns(UserWarning, match="No space left") as caught:
        fit(CSVLogger(path))
    assert len(caught) == 1
    with path.open() as file:
        assert [line[0] for line in csv.reader(file)] == ["epoch", "0", "1", "2"]


def test_an_error_of_a_users_callback_is_no_log_that_fails():
    def on_epoch_end(epoch: int, logs: Any = None) -> None:
        raise FileNotFoundError("mine")

    with one_process(), pytest.raises(FileNotFoundError, match="mine"):
        fit(LambdaCallback(on_epoch_end=on_epoch_end))
