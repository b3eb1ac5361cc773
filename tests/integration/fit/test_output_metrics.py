"""Claims about metrics by output name: each is what a model with this output alone has, on any number of ranks."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import everywhere, make_rows, one_process, run_world, seeded
from lazy import LazyModule
from markers import by_night
from torch import Tensor, nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
torchmetrics: Any = LazyModule("torchmetrics")
ROWS = 23  # of these ranks get other numbers of batches, and the last one is short
Parts = namedtuple("Parts", ["digit", "size", "pair"])


@dataclasses.dataclass
class Output:
    digit: Any
    size: Any
    pair: Any


FORMS: dict[str, Any] = {
    "dictionary": lambda *parts: dict(zip(Parts._fields, parts, strict=True)),
    "dataclass": Output,
    "named tuple": Parts,
    "tuple": lambda *parts: parts,
}


class Heads(nn.Module):
    """Three outputs: classes, a number, and a label of two."""

    def __init__(self, form: str = "dictionary") -> None:
        super().__init__()
        self.form = form
        with seeded():
            self.digit, self.size, self.pair = nn.Linear(4, 3), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        return FORMS[self.form](self.digit(x), self.size(x), self.pair(x))


def rows_of(form: str = "dictionary", count: int = ROWS, seed: int = 0) -> tuple[Tensor, Any]:
    x, classes = make_rows(count, seed)
    return x, FORMS[form](classes, x.sum(1, keepdim=True), (x[:, :1] > 0).float())


LOSSES: dict[str, Any] = {"digit": "cross_entropy", "size": "mse", "pair": "bce_with_logits"}


def confidence(output: Tensor, target: Tensor) -> Tensor:
    return output.softmax(1).max(1).values


def largest(outputs: Any, targets: Any) -> dict[str, float]:
    return {"largest": float(abs(outputs - targets).max()), "rows": len(targets)}


def metrics_of(output: str) -> Any:
    theirs = torchmetrics.F1Score("multiclass", num_classes=3, average=None)
    return {
        "digit": ["accuracy", "f1", "top_2", "auc_per_class", confidence, {"theirs": theirs}],
        "size": ["r2", "mae", cx.metrics.WholeSet(largest), {"most": cx.metrics.WholeSet(lambda o, t: float(o.max()))}],
        "pair": ["accuracy", "auc"],
    }[output]


def evaluated(form: str) -> dict[str, float]:
    names = dict(zip(Parts._fields, (0, 1, 2) if form == "tuple" else Parts._fields, strict=True))
    losses = {names[name]: loss for name, loss in LOSSES.items()}
    metrics = {names[name]: metrics_of(name) for name in LOSSES}
    trainer = cx.DistributedTrainer(Heads(form), losses, "sgd", metrics=metrics)
    return dict(trainer.evaluate(*rows_of(form), batch_size=4, return_dict=True))


@pytest.mark.parametrize(
    ("world_size", "forms"),
    [(2, ("dataclass", "tuple")), *(by_night(world_size, (*FORMS,)) for world_size in (1, 2, 3))],
)
def test_each_is_that_of_a_model_with_this_output_alone(world_size, forms):
    x, answers = rows_of()
    expected: dict[str, float] = {}
    with one_process():
        for name, loss in LOSSES.items():
            alone = cx.DistributedTrainer(getattr(Heads(), name), loss, "sgd", metrics=metrics_of(name))
            measured = dict(alone.evaluate(x, answers[name], batch_size=4))
            expected |= {f"{name}_{own}": each for own, each in measured.items()}
    assert {"digit_accuracy", "digit_auc_class_2", "digit_theirs_class_0", "size_largest", "size_most"} <= {*expected}
    expected |= {"loss": sum(expected[f"{name}_loss"] for name in LOSSES)}
    for form in forms:
        number = {f"{name}_": f"{place}_" for place, name in enumerate(Parts._fields)} if form == "tuple" else {}
        for found in everywhere(world_size, evaluated, form):
            for prefix, place in number.items():
                found = {name.replace(place, prefix, 1): each for name, each in found.items()}
            assert found == pytest.approx(expected, rel=1e-5), form


def fit(**settings: Any) -> cx.DistributedTrainer:
    model = Heads()
    metrics = {"digit": ["accuracy", "f1"], "size": "mae", "both": lambda output, target: output["pair"].square()}
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    trainer = cx.DistributedTrainer(model, LOSSES, sgd, loss_weights={"size": 0.1}, metrics=metrics)
    given = {"epochs": 3, "effective_batch_size": 8, "verbose": False, "validation_data": rows_of(count=9, seed=1)}
    trainer.fit(*rows_of(), **{**given, **settings})
    return trainer


def fit_and_resume(folder: str) -> list[dict[str, list[float]]]:
    """Returns the histories of a fit and of one that resumes in the middle of an epoch."""
    early = cx.callbacks.EarlyStopping("val_digit_accuracy", patience=9)
    settings = {"checkpoint_every_n_steps": 2, "checkpoint_dir": folder, "keep_best": "val_digit_accuracy"}
    whole = fit(**settings, callbacks=[early], load_best=True)
    assert (Path(folder) / "best.ckpt").exists()
    again = fit(resume=str(min(Path(folder).glob("step-*.ckpt"))), callbacks=[early])
    best = whole.evaluate(*rows_of(count=9, seed=1))["digit_accuracy"]
    assert best == max(whole.history.history["val_digit_accuracy"])
    return [whole.history.history, again.history.history]


def test_a_fit_has_them_in_its_history_and_resumes_on_any_number_of_ranks(tmp_path):
    (whole, again), *_ = everywhere(1, fit_and_resume, str(tmp_path / "1"))
    assert whole == again
    named = ["digit_accuracy", "digit_f1", "size_mae", "both"]
    assert [name for name in whole if name in named] == named
    assert {f"val_{name}" for name in named} <= whole.keys()
    for ranks in run_world(2, fit_and_resume, str(tmp_path / "2")):
        for found in ranks:
            assert found.keys() == whole.keys()
            for name, values in whole.items():
                assert found[name] == pytest.approx(values, rel=1e-4), name


def test_lines_of_a_loader_and_a_confusion_matrix_are_of_one_output():
    matrix = cx.metrics.ConfusionMatrix(None)
    with one_process():
        trainer = cx.DistributedTrainer(Heads(), LOSSES, "sgd", metrics={"digit": matrix})
        x, answers = rows_of()
        rows = [(x[n], {name: part[n] for name, part in answers.items()}) for n in range(ROWS)]
        trainer.fit(torch.utils.data.DataLoader(rows, 4), validation_data=(x, answers), epochs=1, verbose=False)
        predicted = trainer.predict(x)["digit"].argmax(1)
    assert matrix.matrix.trace() == int((predicted == answers["digit"]).sum())
    assert matrix.matrix.sum() == ROWS


class OwnLoss(Heads):
    """Computes its loss itself, as models of transformers do."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        loss = None if labels is None else nn.functional.cross_entropy(self.digit(x), labels)
        return {"loss": loss, "logits": self.digit(x)}


def test_a_model_with_a_loss_of_its_own_or_a_function_as_loss_has_them_too():
    x, answers = rows_of()
    with one_process():
        alone = cx.DistributedTrainer(Heads().digit, "cross_entropy", "sgd", metrics="f1").evaluate(x, answers["digit"])
        own = cx.DistributedTrainer(OwnLoss(), None, "sgd", metrics={"logits": ["f1", "accuracy"]})
        measured = own.evaluate({"x": x, "labels": answers["digit"]})
        assert (measured["logits_f1"], measured["logits_accuracy"]) == (alone["f1"], alone["accuracy"])

        def both(output: Any, target: Any) -> Tensor:
            return (output["size"] - target["size"]).square().mean()

        trainer = cx.DistributedTrainer(Heads(), both, "sgd", metrics={"digit": ["accuracy", "f1"], "size": ["mae"]})
        measured = trainer.evaluate(x, answers)
        assert (measured["digit_f1"], measured["digit_accuracy"]) == (alone["f1"], alone["accuracy"])
        assert measured["size_mae"] == pytest.approx(float((trainer.predict(x)["size"] - answers["size"]).abs().mean()))


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"digits": ["f1"]}, r"the model's output has no part 'digits', .* it has digit, size, pair"),
        ({"digit": ["mae"]}, "output 'digit': the metric 'mae' is for numbers"),
        ({"size": ["accuracy"]}, "output 'size': metrics=.'accuracy'.: the targets are numbers"),
        (["f1"], r"compares one output with one y: .* metrics={'digit': \['f1'\]}"),
        (["accuracy"], r"there are several losses, so give it by output name: metrics={'a': \['accuracy'\]}"),
    ],
)
def test_what_does_not_fit_the_outputs_is_refused_before_anything_starts(metrics, words):
    with one_process():
        trainer = cx.DistributedTrainer(Heads(), LOSSES, "sgd", metrics=metrics)
        for call in (trainer.fit, trainer.evaluate):
            with pytest.raises(cx.ConfigError, match=words):
                call(*rows_of(), verbose=False)
        assert trainer.step == 0


def test_what_is_no_metric_or_twice_is_refused_by_the_trainer():
    for metrics, words in (
        ({"digit": ["f1_score"]}, "no metric 'f1_score'. Did you mean 'f1'"),
        ({"digit": [3]}, "metrics takes names"),
        ([{"digit": ["f1"]}, {"digit_f1": "f1"}], "two named 'digit_f1'"),
        ({"val_x": ["f1"]}, "'val_x_f1' needs another name"),
    ):
        with pytest.raises(cx.ConfigError, match=words):
            cx.DistributedTrainer(Heads(), LOSSES, "sgd", metrics=metrics)


def make_heads(config: Any) -> nn.Module:
    return Heads()


def make_data() -> dict[str, Any]:
    return {"train": rows_of(), "test": rows_of(count=9, seed=1)}


def test_a_file_has_several_losses_with_their_weights_and_metrics():
    name = __name__
    values = {
        "model": f"{name}:make_heads",
        "data": {"name": f"{name}:make_data"},
        "loss_fn": {"digit": {"name": "cross_entropy", "label_smoothing": 0.1}, "size": "mse"},
        "loss_weights": {"size": 0.5},
        "metrics": {"digit": ["accuracy", f"{name}:confidence"], "size": "mae"},
        "training": {"epochs": 1, "verbose": False},
    }
    with one_process():
        experiment = cx.Experiment(values)
        history = experiment.fit().history
        assert {"digit_loss", "size_loss", "digit_accuracy", "digit_confidence", "size_mae"} <= history.keys()
        measured = experiment.evaluate()
        assert measured is not None
        assert measured.loss == pytest.approx(measured["digit_loss"] + 0.5 * measured["size_loss"])
