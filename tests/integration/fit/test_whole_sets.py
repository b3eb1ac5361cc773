"""Metrics over a whole validation get all rows in order, are the same on every rank, and end all with an error."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import CLASSES, everywhere, make_model, make_rows, one_process, run_world, seeded
from lazy import LazyModule
from markers import by_night
from rank_processes import run_ranks
from refusals import refuses
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
expected: Any = LazyModule("sklearn.metrics")
tensorboard: Any = LazyModule("tensorboard.backend.event_processing.event_accumulator")
ROWS = 23  # of these ranks get other numbers of batches, and the last one is short


def macro_f1(outputs: Any, targets: Any) -> Any:
    return expected.f1_score(targets, outputs.argmax(1), average="macro", zero_division=0)


class Noting:
    """Notes what it is given, and on which rank."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    def __call__(self, outputs: Any, targets: Any) -> dict[str, float]:
        self.seen.append((outputs, targets))
        return {"rows": len(targets), "rank": cx.get_rank()}


def evaluated(kind: str, batch_size: int) -> tuple[dict[str, float], Any, Any, Any]:
    """Return the numbers, what the function was given last, what `predict` returns, and the targets."""
    inputs, classes = make_rows(ROWS)
    noting, data, rows = Noting(), (inputs, classes), inputs
    if kind == "loader":
        data, rows = (DataLoader(TensorDataset(inputs, classes), batch_size),), inputs
    model = Two() if kind == "structure" else make_model()
    loss: Any = own_loss if kind == "structure" else "cross_entropy"
    trainer = cx.DistributedTrainer(model, loss, "sgd", metrics={"noting": cx.metrics.WholeSet(noting)})
    with torch.no_grad():
        found = dict(trainer.evaluate(*data, batch_size=batch_size))
        predicted = trainer.predict(rows, batch_size=batch_size)
    given = noting.seen[-1] if cx.get_rank() == 0 else None
    assert len(noting.seen) == (2 if given else 1)  # when it was tried; over all rows, on rank 0 alone
    predicted = predicted["scores"] if kind == "structure" else predicted
    return found, given, predicted.numpy(), classes.numpy()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"scores": self.net(x), "nothing": None, "half": x.bfloat16()}


def own_loss(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["scores"], target)


@pytest.mark.parametrize(
    ("kind", "batch_size"),
    [("arrays", 4), by_night("structure", 4), by_night("loader", 4), by_night("arrays", 64)],
    ids=["several batches", "structure", "loader", "one batch"],
)
@pytest.mark.parametrize("world_size", [by_night(1), 2, by_night(3)])
def test_it_is_called_once_with_all_rows_in_order_and_the_result_is_on_every_rank(kind, batch_size, world_size):
    ranks = everywhere(world_size, evaluated, kind, batch_size)
    _, given, predicted, classes = ranks[0]
    outputs, targets = given
    assert np.array_equal(targets, classes)
    if kind == "structure":
        assert list(outputs) == ["scores", "nothing", "half"]
        assert outputs["nothing"] is None
        assert outputs["half"].dtype == np.float32
        outputs = outputs["scores"]
    assert isinstance(outputs, np.ndarray)
    assert np.array_equal(outputs, predicted)
    for found, *_ in ranks:
        assert found == ranks[0][0]
        assert found["rows"] == ROWS
        assert found["rank"] == 0


def fit(**more: Any) -> cx.TrainingHistory:
    model = make_model()
    metrics = more.pop("metrics", {"macro_f1": cx.metrics.WholeSet(macro_f1, higher_is_better=True), "f1": "f1"})
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1), metrics=metrics)
    given = {"epochs": 2, "effective_batch_size": 8, "verbose": False, "validation_data": make_rows(9, seed=1)}
    return trainer.fit(*make_rows(40), **{**given, **more})


def fit_measured(**more: Any) -> dict[str, list[float]]:
    return fit(**more).history


@pytest.mark.parametrize("world_size", [by_night(1), 2, by_night(4)])
def test_a_fit_measures_it_in_each_validation_alone(world_size):
    for found in everywhere(world_size, fit_measured):
        assert "macro_f1" not in found
        assert found["val_macro_f1"] == pytest.approx(found["val_f1"], abs=1e-6)
        assert len(found["val_macro_f1"]) == 2


def resume_each(folder: str) -> list[dict[str, list[float]]]:
    found = [fit_measured(checkpoint_every_n_steps=3, checkpoint_dir=folder)]
    return found + [fit_measured(resume=str(path)) for path in sorted(Path(folder).glob("step-*.ckpt"))]


@pytest.mark.nightly
def test_a_resumed_fit_has_the_same_numbers(tmp_path):
    for whole, *resumed in run_world(2, resume_each, str(tmp_path)):
        assert len(resumed) == 3
        assert all(found == whole for found in resumed)


def test_the_best_and_early_stopping_take_it(tmp_path):
    def scores(outputs: Any, targets: Any) -> dict[str, float]:
        return {"a/b": 0.5, "accuracy": 0.25}

    given = {"metrics": [cx.metrics.WholeSet(scores)], "checkpoint_dir": str(tmp_path)}
    early = cx.callbacks.EarlyStopping
    with one_process():
        history = fit(**given, keep_best="val_accuracy", callbacks=[early("val_a/b", mode="max")])
        assert history.val_accuracies == [0.25, 0.25]
        assert (tmp_path / "best.ckpt").exists()
        with pytest.raises(cx.ConfigError, match=r"keep_best='val_a/b': it is unknown.*higher_is_better = True"):
            fit(**given, keep_best="val_a/b")
        with pytest.raises(cx.ConfigError, match=r"no metric named 'a/b'\. Did you mean 'val_a/b'"):
            fit(**given, callbacks=[early("a/b")])
        scores.higher_is_better = True  # type: ignore[attr-defined]
        growing = early("val_a/b")
        given["metrics"] = [cx.metrics.WholeSet(scores)]
        fit(**given, keep_best="val_a/b", callbacks=[growing])
        assert growing._sign == -1.0


def broken(outputs: Any, targets: Any) -> float:
    raise ValueError(f"no BLEU of {len(targets)} rows")


def failing() -> tuple[str, str, int]:
    try:
        fit(metrics={"bleu": cx.metrics.WholeSet(broken)})
    except cx.DistributedTrainingError as error:
        return type(error).__name__, str(error), error.failures[0].traceback.count("in broken")
    except ValueError as error:
        return type(error).__name__, str(error), 1
    raise AssertionError


def test_an_error_in_it_is_raised_on_every_rank_with_the_users_frame():
    first, second = run_world(2, failing)
    assert first == ("ValueError", "no BLEU of 9 rows", 1)
    assert second == ("DistributedTrainingError", "rank 0: ValueError: no BLEU of 9 rows", 1)


def exiting(outputs: Any, targets: Any) -> float:
    raise SystemExit(3) if len(targets) > 2 else ValueError


def evaluate_and_exit() -> None:
    metric = cx.metrics.WholeSet(exiting)
    with cx.init():
        cx.DistributedTrainer(make_model(), "cross_entropy", metrics=metric).evaluate(*make_rows(9))


def test_an_exit_in_it_ends_the_other_ranks_with_the_reason():
    first, second = run_ranks(2, evaluate_and_exit)
    assert first.kind == "SystemExit"
    assert second.kind == "DistributedTrainingError"
    assert "rank 0 has failed: SystemExit: 3" in second.message


class StopIn(cx.callbacks.Callback):
    """Rank 1 is told to stop within the validation."""

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if cx.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(folder: str) -> tuple[Any, int]:
    noting = Noting()
    try:
        fit(
            metrics=[cx.metrics.WholeSet(noting)],
            validation_data=make_rows(40, seed=1),
            validation_batch_size=4,
            callbacks=[StopIn()],
            checkpoint_dir=folder,
            checkpoint_every_n_epochs=1,
        )
    except SystemExit as error:
        return error.code, len(noting.seen)
    raise AssertionError


@pytest.mark.skipif(os.name == "nt", reason="these ranks get POSIX signals")
def test_a_fit_that_stops_within_the_validation_computes_nothing_of_a_part(tmp_path):
    assert run_world(2, stopped, str(tmp_path)) == [(143, 1), (143, 1)]  # when it was tried


class OwnSteps(cx.DistributedTrainer):
    def train_step(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])  # without an output

    def test_step(self, batch: Any) -> Any:
        scores = self.model(batch[0])
        return {"loss": nn.functional.cross_entropy(scores, batch[1]), "output": scores}


def test_a_step_of_ones_own_gives_it_the_output():
    metrics = [cx.metrics.WholeSet(macro_f1)]
    with one_process():
        trainer = OwnSteps(make_model(), None, "sgd", metrics=metrics)
        rows = make_rows(9)
        history = trainer.fit(*rows, validation_data=rows, epochs=1, verbose=False)
        scores = trainer.model(rows[0]).detach().numpy()
        assert history.metrics["val_macro_f1"] == [macro_f1(scores, rows[1].numpy())]
        with pytest.raises(cx.ConfigError, match=r"the metrics macro_f1 compare outputs with y.*no \"output\""):
            cx.DistributedTrainer(make_model(), None, "sgd", metrics=metrics, train_step=only_loss).evaluate(*rows)


def only_loss(trainer: Any, batch: Any) -> Any:
    return trainer.model(batch[0]).mean()


def wrong_name(outputs: Any, targets: Any) -> float:
    return outputs.argmaxx(1)  # type: ignore[no-any-return]


def measure(function: Any, **more: Any) -> None:
    fit(metrics={"bleu": cx.metrics.WholeSet(function, **more)}, epochs=1)


def draw(loss: str, *class_names: str) -> None:
    inputs, classes = make_rows(ROWS)
    metric = cx.metrics.ConfusionMatrix(None, class_names or None)
    trainer = cx.DistributedTrainer(make_model(), loss, "sgd", metrics=metric)
    trainer.evaluate(inputs, inputs[:, :3] if loss == "mse" else classes)


test_mistakes_are_refused_before_anything_starts = refuses(
    (
        lambda: measure(wrong_name),
        "metric bleu failed when it was tried on a few samples: AttributeError: .*argmaxx",
    ),
    (lambda: measure(lambda: 3), "the metric bleu failed when it was tried on a few samples: TypeError"),
    (lambda: measure(lambda o, t: o), "the metric bleu must return a number, or numbers by name"),
    (lambda: measure(lambda o, t: {"loss": 3}), "'loss' and names that begin with 'val_' are taken"),
    (lambda: measure(lambda o, t: {"a": "b"}), "must return a number, or numbers by name .* it returned {'a': 'b'}"),
    (lambda: measure("bleu"), r"WholeSet\.function must be a function"),
    (lambda: measure(nn.Linear), r"WholeSet\.function must be a function"),
    (lambda: measure(None), r"WholeSet\.function must be a function"),
    (
        lambda: measure(lambda o, t: 0.0, preprocess=lambda o, t: o.mean()),
        r"bleu needs outputs with one row per sample; .*shape \[\].*preprocess",
    ),
    (lambda: draw("cross_entropy", "a", "b"), "class_names has 2 names, and there are 3 classes"),
    (lambda: draw("mse"), "ConfusionMatrix is for classes"),
)


def compute_metrics(prediction: Any) -> dict[str, Any]:
    """As for Hugging Face's Trainer."""
    logits, labels = prediction
    assert logits is prediction.predictions
    assert labels is prediction.label_ids
    return {"f1": expected.f1_score(labels, np.argmax(logits, axis=-1), average="micro"), "count": labels.size}


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def test_a_compute_metrics_of_hugging_face_is_taken_as_it_is():
    inputs, classes = make_rows(ROWS)
    with one_process():
        trainer = cx.DistributedTrainer(OwnLoss(), None, "sgd", metrics=cx.metrics.WholeSet(compute_metrics))
        found = trainer.evaluate({"x": inputs, "labels": classes}, batch_size=4)
        assert found["count"] == ROWS
        assert found["f1"] == pytest.approx(found.accuracy)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.net = nn.Embedding(20, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        return self.net(words).movedim(-1, 1)


def to_longest(rows: list[int]) -> tuple[Tensor, Tensor]:
    words = pad_sequence([torch.arange(1, 2 + row * 3 % 5) for row in rows], batch_first=True)
    return words, words % CLASSES


def tagged() -> tuple[dict[str, float], Any]:
    noting = Noting()
    trainer = cx.DistributedTrainer(Tagger(), "cross_entropy", "sgd", metrics=cx.metrics.WholeSet(noting))
    return dict(trainer.evaluate(DataLoader(range(9), 2, collate_fn=to_longest))), noting.seen[-1]  # type: ignore[arg-type]


def test_rows_of_different_lengths_are_lists_in_order():
    ranks = run_world(2, tagged)
    outputs, targets = ranks[0][1]
    with one_process():
        alone, given = tagged()
    assert [row.shape for row in outputs] == [row.shape for row in given[0]]
    assert [row.tolist() for row in targets] == [row.tolist() for row in given[1]]
    assert len({row.shape for row in outputs}) > 1
    assert all(found["rows"] == alone["rows"] == 9 for found, _ in ranks)


def largest(output: Tensor, target: Tensor) -> Tensor:
    return output.argmax(1)


def test_what_preprocess_returns_is_gathered_instead_of_the_output():
    noting = Noting()
    metric = cx.metrics.WholeSet(noting, preprocess=largest)
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd", metrics=[metric])
        trainer.evaluate(*make_rows(ROWS), batch_size=4)
        outputs, _ = noting.seen[-1]
        assert (outputs.shape, outputs.dtype) == ((ROWS,), np.int64)


def test_it_is_a_decorator():
    @cx.metrics.WholeSet
    def rows(outputs: Any, targets: Any) -> float:
        return float(len(targets))

    assert rows([0], [0]) == 1
    with one_process():
        assert fit_measured(metrics=[rows])["val_rows"] == [9, 9]


# --- pictures -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def fonts() -> None:
    """matplotlib keeps its fonts' files open from its first picture on."""
    metric = cx.metrics.ConfusionMatrix(None)
    metric(np.zeros(3, int), np.zeros(3, int))
    assert metric.figure is not None
    metric.figure.savefig(io.BytesIO())


def drawn(folder: str) -> tuple[Any, list[str]]:
    metric = cx.metrics.ConfusionMatrix(f"{folder}/new/matrix.png", ["a", "b", "c"])
    history = fit_measured(metrics=[metric], callbacks=[cx.callbacks.TensorBoard(f"{folder}/logs")])
    return metric.matrix, list(history)


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_confusion_matrix_is_of_all_rows_and_a_picture(world_size, tmp_path):
    ranks = everywhere(world_size, drawn, str(tmp_path))
    assert not any("matrix" in name for _, names in ranks for name in names)
    assert (tmp_path / "new" / "matrix.png").read_bytes().startswith(b"\x89PNG")
    _, classes = make_rows(9, seed=1)
    matrix = ranks[0][0]
    assert matrix.sum(1).tolist() == np.bincount(classes, minlength=CLASSES).tolist()
    assert [found is None for found, _ in ranks] == [False, *[True] * (world_size - 1)]
    events = tensorboard.EventAccumulator(str(tmp_path / "logs" / "validation")).Reload()
    assert [image.step for image in events.Images("epoch/confusion_matrix")] == [5, 10]


@pytest.mark.nightly
def test_each_validation_set_has_a_picture(tmp_path):
    metric = cx.metrics.ConfusionMatrix(tmp_path / "matrix.png")
    sets = {"near": make_rows(9, seed=1), "far/b": make_rows(7, seed=2)}
    callbacks = [cx.callbacks.TensorBoard(str(tmp_path / "logs"))]
    with one_process():
        fit_measured(metrics=[metric], callbacks=callbacks, validation_data=sets)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["matrix_far_b.png", "matrix_near.png"]
    assert [*metric.figures] == ["near", "far/b"]
    events = tensorboard.EventAccumulator(str(tmp_path / "logs" / "validation")).Reload()
    assert sorted(events.Tags()["images"]) == ["epoch/confusion_matrix far/b", "epoch/confusion_matrix near"]


def test_its_counts_are_scikit_learns_and_ignored_rows_are_left_out():
    inputs, classes = make_rows(ROWS)
    classes[3] = -100
    metric = cx.metrics.ConfusionMatrix(None)
    with one_process(), torch.no_grad():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd", metrics=metric)
        trainer.evaluate(inputs, classes, batch_size=4)
        said = trainer.model(inputs).argmax(1)
    counts = classes >= 0
    assert metric.matrix is not None
    assert metric.matrix.tolist() == expected.confusion_matrix(classes[counts], said[counts]).tolist()
    assert metric.figure is not None


def matrix_of_many() -> Any:
    metric = cx.metrics.ConfusionMatrix(None)
    trainer = cx.DistributedTrainer(make_model(outputs=100), "cross_entropy", "sgd", metrics=metric)
    inputs, classes = make_rows(4)
    trainer.evaluate(inputs, classes, batch_size=4)  # of two ranks, rank 0 has no batch
    return metric.matrix


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_matrix_has_all_classes_of_the_model(world_size):
    matrix, *_ = everywhere(world_size, matrix_of_many)
    assert (matrix.shape, matrix.sum()) == ((100, 100), 4)


def test_a_matrix_of_two_classes_takes_one_output():
    inputs, classes = make_rows(ROWS)
    metric = cx.metrics.ConfusionMatrix(None)
    with one_process(), torch.no_grad():
        trainer = cx.DistributedTrainer(make_model(outputs=1), "bce_with_logits", "sgd", metrics=metric)
        trainer.evaluate(inputs, (classes[:, None] > 0).float())
        said = trainer.model(inputs)[:, 0] > 0
    assert metric.matrix is not None
    assert metric.matrix.tolist() == expected.confusion_matrix(classes > 0, said).tolist()


def test_a_picture_needs_matplotlib(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(cx.ConfigError, match=r"pip install 'cyxtrain\[plot\]'"):
        cx.metrics.ConfusionMatrix()
