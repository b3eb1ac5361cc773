"""Claims about num_processes: workers train, and the caller's own objects are what was trained."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import leaks
import numpy as np
import pytest
import torch
from fitting import CLASSES, FEATURES, fingerprint, flat, make_model, make_rows, one_process, run_world, seeded
from launching import SECONDS, runs
from markers import by_night
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import wait_until

import cyxtrain as cx
from cyxtrain.environment import process_env
from cyxtrain.notebook import worker_cache
from cyxtrain.notebook.pool import Pool
from cyxtrain.notebook.worker import Job, Signal

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="these workers get POSIX signals"),
    pytest.mark.usefixtures("rank_server", "workers"),
]
X, Y = make_rows(50)
RANKS = 2
SETTINGS: dict[str, Any] = {"epochs": 2, "batch_size": 5, "verbose": False, "num_processes": RANKS}
LIBRARY = Path(cx.__file__).parents[1]


@pytest.fixture(scope="module")
def workers(nothing_left_behind: None) -> Iterator[None]:
    """Workers stay from test to test, and end after the last one."""
    with pytest.MonkeyPatch.context() as patch:
        own = process_env.to_pass_on
        # pytest notes the running test there, and workers are started anew where the environment is another.
        patch.setattr(process_env, "to_pass_on", lambda: {k: v for k, v in own().items() if k != "PYTEST_CURRENT_TEST"})
        yield
        cx.finalize()


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compares before and after all tests here: some end the workers, and the next one starts others."""
    with leaks.nothing_left_behind(tmp_path_factory.mktemp("cwd")):
        yield


def trainer_of(model: nn.Module | None = None, **keywords: Any) -> cx.DistributedTrainer:
    """Returns a trainer which has been told of workers."""
    model = make_model() if model is None else model
    keywords.setdefault("optimizer", torch.optim.Adam(model.parameters(), 1e-2))
    trainer = cx.DistributedTrainer(model, "cross_entropy", **keywords)
    trainer._state.config = cx.DistributedTrainingConfig(num_processes=RANKS)
    return trainer


def started() -> list[int]:
    """The workers of this process, by rank, after they have been started where there were none."""
    trainer_of().predict(X[:2])
    return pids()


def pids() -> list[int]:
    """The workers of this process, by rank; none: they have ended."""
    pool = worker_cache.workers._pool
    return [] if pool is None or not pool.is_usable else [rank._process.pid for rank in pool._supervisor._ranks]


class Broken(nn.Sequential):
    """Goes wrong in a training step on one rank, in a way that its user decides."""

    def __init__(self, how: Callable[[], Any], rank: int = 1) -> None:
        super().__init__(*make_model())
        self.how = how
        self.rank = rank
        self.has_begun = False

    def forward(self, rows: Tensor) -> Tensor:
        if cx.get_rank() == self.rank and self.has_begun:
            self.how()
        return super().forward(rows)


class Begin(cx.callbacks.Callback):
    """Tells the model that its dry run is over."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.trainer.model.has_begun = True


# --- what comes back --------------------------------------------------------------------------------------------------


def fit_in_world() -> list[Any]:
    model = make_model()
    trainer = cx.DistributedTrainer(
        model, "cross_entropy", torch.optim.Adam(model.parameters(), 1e-2), scheduler="cosine", metrics="top_2"
    )
    found = [trainer.fit(X, Y, **SETTINGS).history for _ in range(2)]
    return [fingerprint(model), found, list(trainer.evaluate(X, Y)), trainer.predict(X).numpy(), trainer.step]


def test_numbers_are_those_of_launched_ranks_to_the_bit():
    launched = run_world(RANKS, fit_in_world)[0]
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, scheduler="cosine", metrics="top_2")
    found = [trainer.fit(X, Y, **SETTINGS).history for _ in range(2)]
    assert trainer.model is model
    assert found == launched[1]
    assert fingerprint(model) == launched[0]
    assert (list(trainer.evaluate(X, Y)), trainer.step) == (launched[2], launched[4])
    assert (trainer.predict(X).numpy() == launched[3]).all()


@pytest.mark.nightly
def test_a_fit_without_workers_goes_on_from_weights_that_workers_have_laid_out_anew():
    images = torch.randn(20, 3, 6, 6)
    found = []
    for settings in ({}, {"num_processes": RANKS, "channels_last": True, "float32_precision": "high"}):
        with seeded():
            model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 3))
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.Adam(model.parameters(), 1e-3))
        given = {"epochs": 1, "effective_batch_size": 10, "verbose": False}
        with contextlib.nullcontext() if settings else one_process():
            trainer.fit(images, Y[:20], **given, **settings)
        with one_process():
            trainer.fit(images, Y[:20], **given)
        found.append(flat(model.parameters()))
    assert abs(found[0] - found[1]).max() < 1e-5


def test_everything_comes_back_into_the_callers_objects():
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.9)
    trainer = trainer_of(model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3))
    before = fingerprint(model)
    history = trainer.fit(X, Y, **SETTINGS)
    assert fingerprint(model) != before
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), weights, strict=True))
    assert optimizer.state[weights[0]]["momentum_buffer"].abs().sum() > 0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)  # after 10 steps
    assert model[1].num_batches_tracked == 10
    assert history is trainer.history
    assert (history.world_size, len(history.train_losses), trainer.epoch, trainer.step) == (RANKS, 2, 2, 10)
    assert trainer.config.num_processes == RANKS
    assert {part for rank in trainer.step_seconds for part in rank} >= {"data", "forward", "backward"}
    assert not cx.is_initialized()


def test_the_names_of_columns_come_back_and_workers_compare_them():
    pandas = pytest.importorskip("pandas")
    rows = pandas.DataFrame(X.numpy(), columns=["area", "rooms", "age", "floor"])
    swapped = rows[["rooms", "area", "age", "floor"]]
    trainer = trainer_of()
    trainer.fit(rows, Y.numpy(), **SETTINGS)
    for distributed in (True, False):  # in the workers, and here
        with pytest.raises(cx.ConfigError, match=r"X must have the columns .*: their order differs"):
            trainer.predict(swapped, distributed=distributed)


def two_parts_step(trainer: cx.DistributedTrainer, batch: Any) -> dict[str, Tensor]:
    rows = batch[0]
    hidden = trainer.model["first"](rows)
    losses = {"first": hidden.square().mean(), "second": trainer.model["second"](hidden.detach()).square().mean()}
    return {f"{name}_loss": trainer.optimize(loss, name) for name, loss in losses.items()}


def fit_two_parts(num_processes: int | None) -> list[Any]:
    with seeded():
        model = nn.ModuleDict({"first": nn.Linear(FEATURES, 3), "second": nn.Linear(3, 2)})
    optimizers = {name: torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for name, part in model.items()}
    trainer = cx.DistributedTrainer(
        model, optimizers=optimizers, schedulers={"first": "cosine"}, train_step=two_parts_step
    )
    history = trainer.fit(X, epochs=2, batch_size=5, verbose=False, num_processes=num_processes)
    momenta = [each["momentum_buffer"] for one in optimizers.values() for each in one.state.values()]
    rates = [one.param_groups[0]["lr"] for one in optimizers.values()]
    evaluation = trainer.evaluate(X)
    return [fingerprint(model), flat(momenta).tolist(), rates, history.history, evaluation.loss]


@pytest.mark.nightly
def test_several_optimizers_return_into_the_callers_objects():
    assert fit_two_parts(RANKS) == run_world(RANKS, fit_two_parts, None)[0]


@pytest.mark.parametrize("kind", ["numpy", "tensors", "loader", "dataset", "function"])
def test_data_of_every_kind(kind):
    loader = DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True)
    given = {
        "numpy": (X.numpy(), Y.numpy()),
        "tensors": (X, Y),
        "loader": (loader,),
        "dataset": (TensorDataset(X, Y),),
        "function": (lambda: iter([(X[i : i + 5], Y[i : i + 5]) for i in range(0, 50, 5)]),),
    }[kind]
    trainer = trainer_of()
    settings = {name: value for name, value in SETTINGS.items() if name != "batch_size" or kind != "loader"}
    assert len(trainer.fit(*given, **settings).train_losses) == 2
    output = trainer.model(X)
    here = nn.functional.cross_entropy(output, Y).item(), (output.argmax(1) == Y).float().mean().item()
    assert list(trainer.evaluate(*given)) == pytest.approx(here)
    if kind == "numpy":
        assert isinstance(trainer.predict(given[0]), np.ndarray)


@pytest.mark.nightly
def test_workers_open_an_hdf5_file_themselves(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = X.numpy()
        file["y"] = Y.numpy()
        with pytest.raises(cx.ConfigError, match=r"X cannot be sent to worker processes: .* is open for writing"):
            trainer_of().fit(file["x"], file["y"], **SETTINGS)
    trainer = trainer_of()
    trainer.fit(X, Y, **SETTINGS)
    stored = trainer_of()
    with h5py.File(tmp_path / "rows.h5") as file:
        stored.fit(file["x"], file["y"], **SETTINGS)
        assert (stored.predict(file["x"]) == stored.predict(X.numpy())).all()
    assert fingerprint(stored.model) == fingerprint(trainer.model)


@dataclasses.dataclass
class Cut:
    """Scores, and nothing."""

    scores: Any
    nothing: Any = None


class Cutting(nn.Module):
    """Returns as many columns as rows: other shapes from batch to batch, as with padding to the longest of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, inputs: Tensor) -> Cut:
        return Cut(self.body(inputs)[:, : len(inputs)])


def test_rows_of_different_lengths_and_dataclasses_come_back():
    trainer = trainer_of(Cutting())
    rows, padded = (trainer.predict(X[:5], batch_size=3, pad_value=pad_value) for pad_value in (None, 7.0))
    expected = [*trainer.model.body(X[:3]), *trainer.model.body(X[3:5])[:, :2]]
    assert (type(rows), type(padded), rows.nothing) == (Cut, Cut, None)
    torch.testing.assert_close(rows.scores, expected)
    torch.testing.assert_close(padded.scores, nn.utils.rnn.pad_sequence(expected, True, 7.0))


def count_rows(outputs: Any, targets: Any) -> dict[str, float]:
    return {"rows": len(targets), "ranks": cx.get_world_size(), "right": float((outputs.argmax(1) == targets).mean())}


@pytest.mark.nightly
def test_workers_compute_metrics_over_whole_sets(tmp_path):
    matrix = cx.metrics.ConfusionMatrix(tmp_path / "matrix.png")
    trainer = trainer_of(metrics=[cx.metrics.WholeSet(count_rows), matrix, "f1_per_class"])
    history = trainer.fit(X, Y, validation_data=(X, Y), **{**SETTINGS, "epochs": 1})
    assert history.metrics["val_rows"] == [50]
    assert history.metrics["val_ranks"] == [RANKS]
    assert history.metrics["val_right"] == history.val_accuracies
    assert "val_f1_class_2" in history.metrics
    assert trainer.evaluate(X, Y)["rows"] == 50
    assert (tmp_path / "matrix.png").exists()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.digit, self.size = make_model(), nn.Linear(FEATURES, 1)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"digit": self.digit(inputs), "size": self.size(inputs)}


def test_workers_compute_metrics_by_output_name():
    model, answers = Heads(), {"digit": Y, "size": X.sum(1, keepdim=True)}
    metrics = {"digit": ["accuracy", cx.metrics.WholeSet(count_rows)], "size": "mae"}
    trainer = cx.DistributedTrainer(model, {"digit": "cross_entropy", "size": "mse"}, metrics=metrics)
    history = trainer.fit(X, answers, validation_data=(X, answers), num_processes=RANKS, epochs=1, verbose=False)
    assert history.metrics["val_digit_ranks"] == [RANKS]
    assert history.metrics["val_digit_right"] == history.metrics["val_digit_accuracy"]
    assert trainer.evaluate(X, answers)["size_mae"] == history.metrics["val_size_mae"][-1]


class Noting(cx.callbacks.Callback):
    """Keeps what it sees, as its user reads it afterwards."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.last: Any = None
        self.lock: Any = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])
        self.last = (self.model, self.trainer, self.model[0].weight)


def test_callbacks_come_back_with_what_they_have_noted():
    ours, of_fit = Noting(), Noting()
    trainer = trainer_of(callbacks=[ours])
    history = trainer.fit(X, Y, callbacks=[of_fit], **SETTINGS)
    assert ours.losses == of_fit.losses == history.train_losses
    model, who, weight = ours.last
    assert (model, who, weight) == (trainer.model, trainer, trainer.model[0].weight)
    assert weight is trainer.model[0].weight
    trainer.fit(X, Y, **SETTINGS)
    assert (len(ours.losses), len(of_fit.losses)) == (4, 2)


class Logging(cx.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trainer.log("rank", self.trainer.get_rank(), reduce="max")


def test_numbers_of_the_callers_own_come_back():
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(output, target)
        trainer.log("own loss", loss)
        return loss

    trainer = cx.DistributedTrainer(make_model(), loss_fn, callbacks=[Logging()])
    history = trainer.fit(X, Y, **SETTINGS).history
    assert history["own loss"] == pytest.approx(history["loss"])
    assert history["rank"] == [RANKS - 1] * 2
    evaluated = trainer.evaluate(X, Y)
    assert evaluated["own loss"] == pytest.approx(evaluated["loss"])


class Counting(nn.Module):
    """Keeps what no state_dict has: attributes, and a buffer that is not to be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.calls = {"count": 0}
        self.note = "new"
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_load_state_dict_pre_hook(lambda *_: None)

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.calls["count"] += 1
            self.note = "used"
            self.seen += len(rows)
        return self.layer(rows)

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        return {"layer.bias": self.layer.bias}  # as models do that keep what was trained alone


class CountingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.scale = 1.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.steps += 1
        self.scale *= 0.99
        return nn.functional.cross_entropy(output, target) * self.scale


class OwnSGD(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= group["lr"] * parameter.grad


def fit_what_keeps_much() -> list[Any]:
    torch.manual_seed(1)
    model, loss = Counting(), CountingLoss()
    model.layer.weight.register_hook(lambda gradient: gradient * 0.5)
    optimizer = OwnSGD(model.parameters())
    trainer = cx.DistributedTrainer(model, loss, optimizer)
    for _ in range(2):
        trainer.fit(X, Y, **SETTINGS)
    kept = [model.calls["count"], model.note, float(model.seen), float(loss.steps), loss.scale, optimizer.count]
    return [fingerprint(model), *kept]


@pytest.mark.nightly
def test_what_no_state_dict_has_comes_back_too():
    launched = run_world(RANKS, fit_what_keeps_much)[0]
    assert fit_what_keeps_much() == launched


def test_classes_and_functions_stay_the_callers_own():
    class Best(cx.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.best = copy.deepcopy(self.model)
            self.found = scale

    class Scaled(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) * scale()

    def scale() -> float:
        return 1.0

    best, model, forward = Best(), Scaled(FEATURES, CLASSES), Scaled.forward
    trainer_of(model).fit(X, Y, callbacks=[best], **SETTINGS)
    assert type(best.best) is Scaled
    assert Scaled.forward is forward
    assert best.found is scale


def helper() -> int:
    return 1


class WeightKeeper(cx.callbacks.Callback):
    """Keeps things in the ways in which people do."""

    def __init__(self, model: nn.Module) -> None:
        self.best = model.state_dict()  # in the model's own memory
        self.first = self.last = {}
        self.settings = {"function": helper, "count": 0}
        self.dates = np.array(["2026-11-23"], dtype="datetime64[D]")
        self.call = self.on_epoch_end

    def on_train_begin(self, logs: Any = None) -> None:
        self.losses: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])
        self.settings["count"] += 1
        if epoch == 0:
            self.best, self.first = copy.deepcopy(self.model.state_dict()), {"epoch": 0}
        else:
            self.last = {"epoch": epoch}
        self.live = self.model.state_dict()
        self.empty = torch.empty(3, device="meta")


def test_what_was_put_in_the_place_of_something_else_is_not_copied_into_it():
    model = make_model()
    keeper, trainer = WeightKeeper(model), trainer_of(model)
    trainer.fit(X, Y, callbacks=[keeper], **SETTINGS)
    first = keeper.losses
    assert fingerprint(model) != fingerprint(make_model())
    assert any((keeper.best[name] != value).any() for name, value in model.state_dict().items())
    assert (keeper.first, keeper.last) == ({"epoch": 0}, {"epoch": 1})
    assert keeper.settings == {"function": helper, "count": 2}
    assert keeper.live["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert keeper.call == keeper.on_epoch_end
    trainer.fit(X, Y, callbacks=[keeper], **SETTINGS)
    assert len(first) == 2
    assert keeper.losses != first


class Growing(nn.Module):
    """Makes a layer when it first sees what it is given, and drops a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.normal: nn.Module | None = None
        self.register_buffer("once", torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        if self.normal is None:
            self.normal = nn.BatchNorm1d(FEATURES, affine=False)
        self.once = None
        return self.layer(self.normal(rows))


def test_a_layer_that_training_has_made_comes_back():
    model = Growing()
    trainer_of(model).fit(X, Y, **SETTINGS)
    assert isinstance(model.normal, nn.BatchNorm1d)
    assert model.normal.num_batches_tracked >= 10
    assert model.once is None


def fit_by_a_rate_that_is_a_tensor() -> list[Any]:
    model, rate = make_model(), torch.tensor(0.01)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    trainer = cx.DistributedTrainer(
        model, "cross_entropy", optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    )
    for _ in range(2):
        trainer.fit(X, Y, **SETTINGS)
    return [fingerprint(model), float(rate), type(optimizer.param_groups[0]["lr"]).__name__]


@pytest.mark.nightly
def test_a_learning_rate_that_is_a_tensor_stays_one():
    assert fit_by_a_rate_that_is_a_tensor() == run_world(RANKS, fit_by_a_rate_that_is_a_tensor)[0]


class Tally:
    def __init__(self) -> None:
        self.count = 0


class Tallying(cx.callbacks.Callback):
    def __init__(self, tally: Tally, average: Any) -> None:
        self.tally = tally
        self.average = average

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.tally.count += 1
        self.average.update_parameters(self.model)


def test_objects_that_callbacks_have_are_the_callers_own():
    model = make_model()
    tally, average = Tally(), torch.optim.swa_utils.AveragedModel(model)
    callbacks = [Tallying(tally, average), Tallying(tally, average)]
    trainer = trainer_of(model)
    for number in (1, 2):
        trainer.fit(X, Y, callbacks=callbacks, **SETTINGS)
        assert tally.count == 4 * number
        assert average.n_averaged == 4 * number
        assert all(each.tally is tally and each.average is average for each in callbacks)
    assert any((average.module[0].weight != make_model()[0].weight).reshape(-1))


class Pair(cx.callbacks.Callback):
    def __init__(self, log: list[int]) -> None:
        self.log = log

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.log.append(epoch)


def test_callbacks_of_the_trainer_and_of_the_fit_share_what_they_share():
    log: list[int] = []
    trainer_of(callbacks=[Pair(log)]).fit(X, Y, callbacks=[Pair(log)], **SETTINGS)
    assert log == [0, 0, 1, 1]


class Staying(cx.callbacks.Callback):
    """Draws, asks, or whatever needs the process of its user."""

    stays_in_notebook = True

    def __init__(self, fails_at: int = -1) -> None:
        self.calls: list[Any] = []
        self.window = (row for row in ())  # cannot be sent
        self.fails_at = fails_at

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append((os.getpid(), self.params["epochs"], self.trainer))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append((epoch, logs["loss"]))
        if epoch == self.fails_at:
            raise ZeroDivisionError("a typo")


@pytest.mark.parametrize("of", ["the fit", "the trainer"])
def test_a_callback_may_stay_where_it_is(of):
    staying = Staying()
    trainer = trainer_of(callbacks=[staying] if of == "the trainer" else [])
    history = trainer.fit(X, Y, callbacks=[staying] if of == "the fit" else [], **SETTINGS)
    epochs = list(enumerate(history.train_losses))
    assert staying.calls == [(os.getpid(), 2, trainer), *epochs]
    assert staying.model is trainer.model


def test_a_callback_that_stays_hears_of_the_start_and_of_each_checkpoint(tmp_path):
    heard: list[Any] = []
    staying = cx.callbacks.LambdaCallback(on_fit_start=heard.append, on_checkpoint=heard.append)
    staying.stays_in_notebook = True
    saving = {"checkpoint_every_n_epochs": 1, "checkpoint_dir": str(tmp_path)}
    trainer_of().fit(X, Y, callbacks=[staying], **SETTINGS, **saving)
    assert heard == [False, *sorted(tmp_path.glob("epoch-*.ckpt"))]
    assert len(heard) == 3


def test_an_error_of_a_callback_that_stays_ends_the_fit_and_keeps_what_was_trained():
    trainer = trainer_of()
    with pytest.raises(ZeroDivisionError, match="a typo"):
        trainer.fit(X, Y, callbacks=[Staying(fails_at=1)], **{**SETTINGS, "epochs": 10**6})
    assert len(trainer.history.train_losses) == trainer.epoch >= 2


class Asking(Staying):
    def __init__(self, ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self.ask = ask

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(self.ask(self.trainer))


@pytest.mark.nightly
def test_a_callback_that_stays_may_predict_by_itself_and_is_refused_the_workers():
    trainer = trainer_of()
    expected, asking = trainer.predict(X), Asking(lambda trainer: trainer.predict(X, distributed=False))
    with one_process():
        trainer.fit(X, Y, callbacks=[asking], **SETTINGS)
    assert torch.equal(asking.calls[1], expected)
    with pytest.raises(cx.ConfigError, match="predict was called by a callback that stays in the notebook"):
        trainer.fit(X, Y, callbacks=[Asking(lambda trainer: trainer.predict(X))], **{**SETTINGS, "epochs": 10**6})


@pytest.mark.nightly
def test_workers_predict_to_a_folder_and_count_steps_and_a_call_with_callbacks_runs_here(tmp_path, capsys):
    trainer = trainer_of()
    read = trainer.predict(X, batch_size=3, output_dir=tmp_path)
    assert started() == pids()
    with one_process():
        alone = trainer_of(trainer.model)
        alone._state.config = cx.DistributedTrainingConfig()
        expected = alone.predict(X, batch_size=3)
    assert torch.equal(read[:], expected)
    assert torch.equal(trainer.predict(X, batch_size=3, steps=2), expected[:6])
    capsys.readouterr()
    assert trainer.evaluate(X, Y, batch_size=3, steps=5, return_dict=True, verbose=1).keys() == {"loss", "accuracy"}
    assert capsys.readouterr().out.startswith("evaluate  loss ")
    seen: list[int] = []
    hook = cx.callbacks.LambdaCallback(on_predict_batch_end=lambda batch, logs: seen.append(batch))
    assert torch.equal(trainer.predict(X, batch_size=10, callbacks=hook), trainer.predict(X, batch_size=10))
    assert seen == list(range(5))


class Enough(Staying):
    def __init__(self, keras: bool) -> None:
        super().__init__()
        self.keras = keras

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        (self.model if self.keras else self.trainer).stop_training = True

    def close(self) -> None:
        self.calls.append("closed")


@pytest.mark.parametrize("keras", [False, by_night(True)])
def test_a_callback_that_stays_may_end_the_fit(keras):
    trainer, enough = trainer_of(), Enough(keras)
    history = trainer.fit(X, Y, callbacks=[enough], **{**SETTINGS, "epochs": 10**6})
    assert 1 <= len(history.train_losses) == trainer.epoch
    assert enough.calls[-1] == "closed"
    assert len(trainer.fit(X, Y, **SETTINGS).train_losses) == 2


class NextEpoch(cx.callbacks.Callback):
    """Creates a file in a worker when the second epoch has begun."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.trainer.epoch == 1:
            self.path.touch()


class EnoughInNextEpoch(Staying):
    """Asks to stop while the workers are in the next epoch, maybe after its user has pressed Ctrl-C."""

    def __init__(self, path: Path, is_interrupted: bool) -> None:
        super().__init__()
        self.path = path
        self.is_interrupted = is_interrupted

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        wait_until(self.path.exists)
        if self.is_interrupted and epoch == 0:
            os.kill(os.getpid(), signal.SIGINT)
        self.trainer.stop_training = True


@pytest.mark.parametrize("is_interrupted", [False, by_night(True)])
def test_workers_are_interrupted_once_however_many_ask_to_stop(is_interrupted, tmp_path, monkeypatch):
    sent: list[Any] = []
    send = Pool._send

    def record(pool: Pool, message: Job | Signal) -> None:
        sent.append(message)
        send(pool, message)

    monkeypatch.setattr(Pool, "_send", record)
    path = tmp_path / "next"
    callbacks = [NextEpoch(path), EnoughInNextEpoch(path, is_interrupted)]
    trainer = trainer_of()
    with contextlib.redirect_stderr(io.StringIO()):
        history = trainer.fit(X, Y, callbacks=callbacks, **{**SETTINGS, "epochs": 10**6})
    assert [each for each in sent if isinstance(each, Signal)] == [Signal(signal.SIGINT)]
    assert 1 <= len(history.train_losses) == trainer.epoch


class Choosy(Staying):
    def set_params(self, params: dict[str, Any]) -> None:
        raise cx.ConfigError("not with these")


@pytest.mark.nightly
def test_a_callback_that_stays_may_refuse():
    trainer = trainer_of()
    with pytest.raises(cx.ConfigError, match="not with these"):
        trainer.fit(X, Y, callbacks=[Choosy()], **{**SETTINGS, "epochs": 10**6})


def stay_in_world() -> int:
    staying = Staying()
    trainer_of().fit(X, Y, callbacks=[staying], **SETTINGS)
    return len(staying.calls)


def test_a_callback_that_would_stay_is_called_on_ranks_that_were_launched():
    assert run_world(RANKS, stay_in_world) == [3, 3]


def test_who_refers_to_a_list_of_a_callback_sees_it_filled():
    log: list[float] = []

    class Logging(cx.callbacks.Callback):
        def __init__(self, log: list[float]) -> None:
            self.log = log
            self.temporary = 1

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.log.append(logs["loss"])
            if epoch == 0:
                del self.temporary

    logging = Logging(log)
    history = trainer_of().fit(X, Y, callbacks=iter([logging]), **SETTINGS)
    assert log == history.train_losses
    assert logging.log is log
    assert "temporary" not in vars(logging)


class Keeping(cx.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs = epoch + 1
        self.error = OwnError(1, 2)
        self.rows = (row for row in ())


def test_what_cannot_come_back_is_named_and_the_rest_comes():
    keeping, trainer = Keeping(), trainer_of()
    with pytest.warns(UserWarning, match=r"callback 0 \(Keeping\) has changed .* which cannot be sent back") as told:
        trainer.fit(X, Y, callbacks=[keeping], **SETTINGS)
    assert {re.search(r"changed \.(\w+) ", str(each.message))[1] for each in told} == {"error", "rows"}
    assert (keeping.epochs, trainer.epoch) == (2, 2)


def test_a_subclass_of_the_trainer_does_its_own_once():
    class Halving(cx.DistributedTrainer):
        def predict(self, X: Any, **keywords: Any) -> Any:  # noqa: N803
            return super().predict(X / 2, **keywords)

    model = make_model()
    trainer = Halving(model, "cross_entropy")
    trainer._state.config = cx.DistributedTrainingConfig(num_processes=RANKS)
    assert torch.equal(trainer.predict(X), model(X / 2).detach())


class Stepping(cx.DistributedTrainer):
    """Learns from a teacher that it holds besides its model, and counts."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        with seeded():
            self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.calls = 0

    def train_step(self, batch: Any) -> Any:
        self.calls += 1
        result = super().train_step(batch)
        result["loss"] = result["loss"] + nn.functional.mse_loss(result["output"], self.teacher(batch[0]))
        return result

    def predict_step(self, batch: Any) -> Tensor:
        output: Tensor = super().predict_step(batch)
        return output.softmax(1)


def fit_by_steps() -> Any:
    model = make_model()
    trainer = Stepping(model, "cross_entropy", torch.optim.Adam(model.parameters(), 1e-2))
    history = trainer.fit(X, Y, **SETTINGS).history
    return fingerprint(model), history, trainer.calls, trainer.predict(X).tolist()


def test_steps_of_the_user_s_own_run_in_the_workers():
    launched = run_world(RANKS, fit_by_steps)[0]
    found = fit_by_steps()
    assert found == launched
    assert found[2] == 2 * 5


def test_a_forked_child_leaves_its_parents_workers_alone():
    before = started()
    child = os.fork()
    if child == 0:
        os._exit(len(pids()))
    assert os.waitpid(child, 0)[1] == 0
    assert len(trainer_of().fit(X, Y, **SETTINGS).train_losses) == 2
    assert pids() == before


def test_checkpoints_are_made_where_the_caller_is_and_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole, parts = trainer_of(), trainer_of()
    whole.fit(X, Y, **{**SETTINGS, "epochs": 3})
    parts.fit(X, Y, **SETTINGS, checkpoint_every_n_epochs=1, checkpoint_dir="kept")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["epoch-0001.ckpt", "epoch-0002.ckpt"]
    again = trainer_of()
    again.fit(X, Y, **{**SETTINGS, "epochs": 3}, checkpoint_dir="kept", resume="auto")
    assert fingerprint(again.model) == fingerprint(whole.model)
    again.save_checkpoint("now.ckpt")
    other = trainer_of()
    other.load_checkpoint("now.ckpt")
    assert fingerprint(other.model) == fingerprint(whole.model)


def test_settings_of_the_process_are_those_of_its_workers():
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(FEATURES, CLASSES)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = False
        trainer_of(model, optimizer="sgd").fit(X.double(), Y, **SETTINGS, callbacks=[Requiring(torch.float64, "high")])
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
    trainer_of().fit(X, Y, **SETTINGS, callbacks=[Requiring(torch.float32)])


class Requiring(cx.callbacks.Callback):
    def __init__(self, dtype: torch.dtype, precision: str = "highest") -> None:
        self.dtype, self.precision = dtype, precision

    def on_train_begin(self, logs: Any = None) -> None:
        assert torch.zeros(1).dtype == self.dtype
        assert torch.get_float32_matmul_precision() == self.precision  # it raises where names are mixed
        assert torch.backends.cudnn.allow_tf32 == (self.precision == "highest")


# --- workers stay -----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_more_processes_than_cores_are_warned_of(monkeypatch):
    monkeypatch.setattr(worker_cache, "usable_cores", lambda variables: 1)
    cx.finalize()
    with pytest.warns(UserWarning, match="num_processes=2, but this process may use 1 core"):
        started()


@pytest.mark.nightly
def test_calls_use_the_same_workers():
    before = started()
    trainer = trainer_of()
    trainer.fit(X, Y, **SETTINGS)
    trainer.evaluate(X, Y)
    trainer.predict(X)
    assert len(before) == RANKS
    assert pids() == before


def test_workers_are_named_in_the_list_of_processes():
    for pid in started():
        assert Path(f"/proc/{pid}/comm").read_text() == "cyxtrain worker\n"


@pytest.mark.nightly
@pytest.mark.parametrize("change", ["variable", by_night("number"), by_night("module")])
def test_workers_are_started_anew_where_they_would_differ(change, tmp_path, monkeypatch):
    trainer, before, settings = trainer_of(), started(), dict(SETTINGS)
    if change == "variable":
        monkeypatch.setenv("MY_SETTING", "1")
    elif change == "number":
        settings["num_processes"] = 3
    else:
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "edited_by_its_user.py").write_text("VALUE = 1\n")
        __import__("edited_by_its_user")
        trainer.predict(X)
        assert pids() == before
        (tmp_path / "edited_by_its_user.py").write_text("VALUE = 22\n")
        os.utime(tmp_path / "edited_by_its_user.py", (1, 1))
    trainer.fit(X, Y, **settings)
    assert not set(pids()) & set(before)
    assert len(pids()) == settings["num_processes"]
    sys.modules.pop("edited_by_its_user", None)
    monkeypatch.undo()


@pytest.mark.nightly
def test_ranks_of_a_launcher_are_used_and_no_worker():
    text, _ = run_world(RANKS, fit_shown)
    assert "world      2 ranks, as launched: ignored num_processes=4" in text


def fit_shown() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer_of().fit(X, Y, **{**SETTINGS, "verbose": True, "num_processes": 4, "epochs": 1})
    assert worker_cache.workers._pool is None
    return out.getvalue()


@pytest.mark.nightly
def test_data_are_in_memory_once():
    class Measuring(cx.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            lines = Path("/proc/self/smaps_rollup").read_text()
            self.private = 1024 * sum(int(kb) for kb in re.findall(r"Private_(?:Clean|Dirty): +(\d+)", lines))

    def private(count: int) -> int:
        measuring = Measuring()
        rows = np.ones((count, 1000), "float32")
        model = nn.Linear(1000, 2)
        trainer_of(model).fit(rows, np.zeros(count, "int64"), callbacks=[measuring], **{**SETTINGS, "epochs": 1})
        return measuring.private

    few, many = private(100), private(25_000)  # 0.4 and 100 MB
    assert many - few < 30e6


# --- what is seen -----------------------------------------------------------------------------------------------------


class Printing(cx.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        print(f"epoch {epoch} on {cx.get_rank()}")
        print("no end", end="", file=sys.stderr)


@pytest.mark.nightly
def test_why_workers_are_started_is_said(monkeypatch):
    started()
    monkeypatch.setenv("MY_OTHER_SETTING", "1")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer_of().fit(X, Y, **{**SETTINGS, "verbose": True})
        trainer_of().fit(X, Y, **{**SETTINGS, "verbose": True})
    said = [line for line in out.getvalue().splitlines() if line.startswith("workers")]
    why = "because the environment has changed: MY_OTHER_SETTING"
    assert said == [f"workers    2 processes are starting, {why}; they stay for the next calls"]


@pytest.mark.nightly
def test_what_workers_write_is_seen_before_the_call_returns():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        trainer_of().fit(X, Y, callbacks=[Printing()], **{**SETTINGS, "epochs": 1})
    assert sorted(out.getvalue().splitlines()) == ["[rank 1] epoch 0 on 1", "epoch 0 on 0"]
    assert sorted(err.getvalue().splitlines()) == ["[rank 1] no end", "no end"]


def test_the_caller_shows_how_far_it_is():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer_of().fit(X, Y, **{**SETTINGS, "verbose": True})
    lines = out.getvalue().splitlines()
    assert "world      2 ranks" in lines
    assert [line[:9] for line in lines[-2:]] == ["epoch 1/2", "epoch 2/2"]


# --- what goes wrong --------------------------------------------------------------------------------------------------


class Striking(cx.callbacks.Callback):
    """Sends a signal to the process that has started the workers."""

    def __init__(self, number: int = signal.SIGINT, step: int = 7) -> None:
        self.number = number
        self.step = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.trainer.step == self.step and cx.get_rank() == 0:
            os.kill(os.getppid(), self.number)


def test_an_interrupted_notebook_has_what_was_trained_and_no_process(monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    before, trainer = started(), trainer_of()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        history = trainer.fit(X, Y, callbacks=[Striking()], **{**SETTINGS, "epochs": 100})
    assert "stopping after this step; interrupt again to stop at once" in told.getvalue()
    assert history is trainer.history
    assert len(history.train_losses) == trainer.epoch >= 1
    assert 7 <= trainer.step < 500
    assert not any(runs(pid) for pid in before)
    assert len(trainer.fit(X, Y, **SETTINGS).train_losses) == 2


class OwnError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.first = first


def test_an_error_of_a_worker_is_raised_as_itself():
    class CellError(ValueError):
        pass

    def fail() -> None:
        raise CellError("banana")

    trainer = trainer_of(Broken(fail))
    before = fingerprint(trainer.model)
    with pytest.raises(CellError, match=r"^banana") as caught:
        trainer.fit(X, Y, callbacks=[Begin()], **SETTINGS)
    told = str(caught.value.__cause__)
    assert "on rank 1 of 2:" in told
    assert "in fail\n    raise CellError" in told
    assert "cyxtrain/training/step.py" not in told
    assert fingerprint(trainer.model) == before
    assert pids() == []


def test_a_fit_that_is_not_told_of_processes_has_none():
    trainer = trainer_of()  # here, where workers have ended: joining a world ends them
    with one_process():
        trainer.fit(X, Y, epochs=1, verbose=False)
    assert trainer.history.world_size == 1


class Failing(cx.callbacks.Callback):
    def __init__(self, how: Callable[[], Any]) -> None:
        self.how = how

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2 and cx.get_rank() == 1:
            self.how()


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["raises", by_night("is killed")])
def test_what_was_trained_until_an_error_is_kept(how):
    def fail() -> None:
        if how == "raises":
            raise ZeroDivisionError("a typo")
        os.kill(os.getpid(), signal.SIGKILL)

    whole, trainer = trainer_of(), trainer_of()
    whole.fit(X, Y, **SETTINGS)
    lost = r"^rank 1 has exited: its worker process ended \(exit code 137: SIGKILL"
    error, says = (ZeroDivisionError, "a typo") if how == "raises" else (cx.PeerLostError, lost)
    with pytest.raises(error, match=says):
        trainer.fit(X, Y, callbacks=[Failing(fail)], **{**SETTINGS, "epochs": 4})
    assert (trainer.epoch, len(trainer.history.train_losses)) == (2, 2)
    assert fingerprint(trainer.model) == fingerprint(whole.model)


def fail_oddly() -> None:
    raise OwnError(1, 2)


@pytest.mark.nightly
def test_an_error_with_a_constructor_of_its_own_is_raised_as_itself():
    with pytest.raises(OwnError, match="1 and 2") as caught:
        trainer_of(Broken(fail_oddly)).fit(X, Y, callbacks=[Begin()], **SETTINGS)
    assert caught.value.first == 1


@pytest.mark.nightly
def test_what_is_refused_is_refused_as_ever_and_workers_stay():
    before = started()
    with pytest.raises(cx.ConfigError, match="X and y have different lengths: 50 and 10") as caught:
        trainer_of().fit(X, Y[:10], **SETTINGS)
    assert caught.value.__cause__ is None  # all is said
    with pytest.raises(cx.ConfigError, match="evaluate has no argument 'shuffle'"):
        trainer_of().evaluate(X, Y, shuffle=True)
    with pytest.raises(cx.ConfigError, match="Did you mean 'epochs'"):
        trainer_of().fit(X, Y, epoch=3, num_processes=RANKS)
    with pytest.raises(cx.ConfigError, match="num_processes must be at least 1"):
        trainer_of().fit(X, Y, num_processes=0)
    trainer = trainer_of()
    with pytest.raises(cx.NonFiniteError, match="The step was not taken"):
        trainer.fit(X * float("nan"), Y, **SETTINGS)
    assert pids() == before


@pytest.mark.nightly
def test_what_one_rank_refuses_is_its_own_error():
    with pytest.raises(cx.ConfigError, match=r"^the model cannot take X.*banana") as caught:
        trainer_of(Refusing()).fit(X, Y, **SETTINGS)
    told = str(caught.value.__cause__)
    assert "on rank 1 of 2" in told
    assert "cyxtrain/training/" not in told
    assert "contextlib" not in told


class Refusing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        if cx.get_rank() == 1:
            raise ValueError("banana")
        return super().forward(rows)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("what", "named"),
    [
        (
            {"X": (row for row in [(X, Y)])},
            "X cannot be sent to worker processes: TypeError: cannot pickle 'generator'",
        ),
        ({"X": X, "y": Y, "callbacks": [Noting()]}, "the callback Noting cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_named(what, named):
    for callback in what.get("callbacks", ()):
        callback.lock = (row for row in ())
    before = started()
    with pytest.raises(cx.ConfigError, match=named):
        trainer_of().fit(**what, **SETTINGS)
    assert pids() == before


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_killed_is_named_and_the_next_call_starts_others(rank):
    trainer = trainer_of(Broken(lambda: os.kill(os.getpid(), signal.SIGKILL), rank))
    with pytest.raises(
        cx.PeerLostError, match=rf"^rank {rank} has exited: its worker process ended .*137: SIGKILL"
    ) as caught:
        trainer.fit(X, Y, callbacks=[Begin()], **SETTINGS)
    assert caught.value.rank == rank
    assert pids() == []
    assert len(trainer_of().fit(X, Y, **SETTINGS).train_losses) == 2


@pytest.mark.nightly
def test_a_worker_that_is_killed_between_two_calls_is_replaced():
    before = started()
    os.kill(before[1], signal.SIGKILL)
    wait_until(lambda: worker_cache.workers._pool._has_ended)
    assert len(trainer_of().fit(X, Y, **SETTINGS).train_losses) == 2
    assert not set(pids()) & set(before)


# --- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_an_interrupted_program_has_what_was_trained_and_hears_of_it():
    trainer = trainer_of()
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(KeyboardInterrupt):
        trainer.fit(X, Y, callbacks=[Striking()], **{**SETTINGS, "epochs": 100})
    assert trainer.step >= 7
    assert pids() == []


class Interrupting(nn.Linear):
    """Interrupts the caller from rank 0, while no fit hears signals."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        if cx.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGINT)
        return super().forward(rows)


@pytest.mark.parametrize("call", ["predict", by_night("evaluate"), by_night("fit")])
def test_what_has_nothing_to_keep_is_interrupted_at_once(call):
    trainer, before = trainer_of(Interrupting()), started()
    with pytest.raises(KeyboardInterrupt):
        getattr(trainer, call)(*((X,) if call == "predict" else (X, Y)), **(SETTINGS if call == "fit" else {}))
    assert not any(runs(pid) for pid in before)


class Late:
    """Is taken in, and meanwhile its user presses stop."""

    def __getstate__(self) -> dict[str, Any]:
        return {"made": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not process_env.is_launched():
            os.kill(os.getpid(), signal.SIGINT)


class Leaving(cx.callbacks.Callback):
    def on_train_end(self, logs: Any = None) -> None:
        self.late = Late()


@pytest.mark.nightly
def test_an_interrupt_that_comes_when_all_is_done_loses_nothing_and_hits_no_other_call():
    trainer, before = trainer_of(), started()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(X, Y, callbacks=[Leaving()], **SETTINGS)
    assert (trainer.epoch, len(trainer.history.train_losses)) == (2, 2)
    assert len(trainer.fit(X, Y, **SETTINGS).train_losses) == 2
    assert pids() == before


# --- programs ---------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, torch
from torch import nn
import cyxtrain as cx

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    def forward(self, rows):
        return self.layers(rows)

torch.manual_seed(3)
X, y, net = torch.randn(60, 4), torch.randint(3, (60,)), Net()
trainer = cx.DistributedTrainer(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters(), 1e-2))
settings = dict(batch_size=4, verbose=False, num_processes=2)
"""


def program(source: str, *before: str, **options: Any) -> subprocess.Popen[bytes]:
    script = Path.cwd() / "train.py"
    script.write_text(PROGRAM + textwrap.dedent(source))
    variables = {**os.environ, "PYTHONPATH": str(LIBRARY)}
    command = [*before, sys.executable, str(script)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.nightly
def test_a_program_without_a_guard_gets_what_the_launcher_gets(folder):
    source = """
        trainer.fit(X, y, epochs=3, **settings)
        if trainer.is_master():
            print(torch.cat([p.detach().flatten() for p in net.parameters()]).numpy().tobytes().hex())
    """
    launcher = [str(Path(__file__).parents[3] / "launch_distributed.sh"), "2"]
    found = []
    for before in ([], launcher):
        out, errors = program(source, *before).communicate(timeout=6 * SECONDS)
        assert out, errors.decode()
        found.append(out.decode().split()[-1])
    assert found[0] == found[1]


FIGHT = """
    class Here(cx.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3 and cx.get_rank() == 1:
                print(os.getpid(), os.getppid(), flush=True)
    trainer.fit(X, y, epochs=10**6, callbacks=[Here()], checkpoint_every_n_epochs=10**6, **settings)
"""


@pytest.mark.nightly
def test_workers_end_with_a_program_that_is_killed(folder):
    with program(FIGHT) as run:
        pid, parent = map(int, run.stdout.readline().split()[-2:])
        assert parent == run.pid
        os.kill(run.pid, signal.SIGKILL)
        wait_until(lambda: not runs(pid))
        run.communicate()


CHILD = """
trainer.config.num_processes = 2
trainer.predict(X)
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
"""


@pytest.mark.nightly
def test_workers_end_with_a_program_whose_child_lives_on(folder):
    with program(CHILD + textwrap.dedent(FIGHT), stdin=subprocess.PIPE) as run:
        pid = int(run.stdout.readline().split()[-2])
        os.kill(run.pid, signal.SIGKILL)
        wait_until(lambda: not runs(pid))


@pytest.mark.nightly
def test_a_program_that_is_told_to_end_makes_a_checkpoint(folder):
    with program(FIGHT) as run:
        pid = int(run.stdout.readline().split()[-2])
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=SECONDS)
        assert run.returncode == 128 + signal.SIGTERM
        assert [path.suffix for path in (folder / "checkpoints").iterdir()] == [".ckpt"]
        assert not runs(pid)


class Unfreeze(cx.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model[0].requires_grad_(True)
            self.trainer.optimizer.add_param_group({"params": [*self.model[0].parameters()], "lr": 0.05})


@pytest.mark.nightly
def test_a_group_that_a_callback_adds_comes_back() -> None:
    found = []
    for num_processes in (1, RANKS):
        model = make_model()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9)
        trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, callbacks=[Unfreeze()])
        trainer.fit(X, Y, epochs=2, effective_batch_size=8, num_processes=num_processes, verbose=False)
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
        assert model[0].weight.requires_grad
        found.append(flat(model.parameters()))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-6)
