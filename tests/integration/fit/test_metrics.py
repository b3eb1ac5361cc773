"""Metrics over the rows of all ranks are scikit-learn's over all rows; they are where losses are, and resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import CLASSES, everywhere, make_model, make_rows, one_process, run_world, seeded
from kept_worlds import close_worlds
from lazy import LazyModule
from markers import by_night
from refusals import refuses
from torch import nn
from torch.nn import functional

import cyxtrain as cx
from cyxtrain.metrics.metric import LibraryMetric
from cyxtrain.world import runtime

pytestmark = pytest.mark.usefixtures("rank_server")
expected: Any = LazyModule("sklearn.metrics")
stats: Any = LazyModule("scipy.stats")
torchmetrics: Any = LazyModule("torchmetrics")
ROWS = 23  # of these ranks get other numbers of batches, and the last one is short
OF_TWO = [
    *("f1", "precision", "recall", "specificity", "jaccard", "auc", "average_precision", "cohen_kappa", "matthews"),
    *("calibration_error", "f1_macro", "precision_weighted", "recall_per_class", "specificity_per_class"),
]
OF_CLASSES = [*OF_TWO, "top_2", "f1_micro", "f1_weighted", "f1_per_class", "jaccard_per_class", "auc_per_class"]
OF_LABELS = ["f1", "precision_micro", "recall_weighted", "jaccard", "auc", "average_precision_per_class"]
OF_NUMBERS = ["mae", "mse", "rmse", "r2", "mape", "msle", "explained_variance", "pearson", "spearman"]


def confidence(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric of one's own: a number per row."""
    return output.softmax(1).max(1).values


def rights(output: torch.Tensor, target: torch.Tensor) -> Any:
    return (output.argmax(1) == target).float().mean()


def evaluated(kind: str) -> dict[str, float]:
    """What a trainer says of rows, in batches of 4."""
    model, loss, rows, names = task(kind)
    metrics: Any = {name: name for name in names}
    if kind == "classes":
        metrics |= {
            "confidence": confidence,
            "rights": rights,
            "their_jaccard": torchmetrics.JaccardIndex("multiclass", num_classes=CLASSES),
            "their_f1": torchmetrics.F1Score("multiclass", num_classes=CLASSES, average=None),
        }
    trainer = cx.DistributedTrainer(model, loss, "sgd", metrics=metrics)
    return dict(trainer.evaluate(*rows, batch_size=4))


def task(kind: str) -> tuple[nn.Module, Any, tuple[torch.Tensor, torch.Tensor], list[str]]:
    inputs, classes = make_rows(ROWS)
    if kind == "classes":
        return make_model(), nn.CrossEntropyLoss(), (inputs, classes), OF_CLASSES
    with seeded():
        model = nn.Linear(4, 1)
    two = (classes[:, None] > 0).float()
    if kind == "logits":
        return model, nn.BCEWithLogitsLoss(), (inputs, two), OF_TWO
    if kind == "probabilities":
        return nn.Sequential(model, nn.Sigmoid()), nn.BCELoss(), (inputs, two), OF_TWO
    if kind == "labels":
        labels = (inputs[:, :3] + 0.3 * inputs.roll(1, 0)[:, :3] > 0).float()
        return make_model(), nn.BCEWithLogitsLoss(), (inputs, labels), OF_LABELS
    if kind == "two numbers":
        with seeded():
            model = nn.Linear(4, 2)
    numbers = inputs[:, : 2 if kind == "two numbers" else 1].round().abs() + 1  # some are equal
    return nn.Sequential(model, nn.Softplus()), nn.MSELoss(), (inputs, numbers), OF_NUMBERS


SUMS_OF_FRACTIONS = [*OF_NUMBERS, "calibration_error", "confidence", "rights"]


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 3])
def test_metrics_that_count_or_rank_have_the_bits_of_one_process_and_others_its_rounding(world_size):
    kinds = ("classes", "logits", "labels", "two numbers")
    [alone] = everywhere(1, evaluated_kinds, kinds)
    for found in everywhere(world_size, evaluated_kinds, kinds):
        for name, value in found.items():
            if name.split()[-1] in SUMS_OF_FRACTIONS:
                assert value == pytest.approx(alone[name], rel=1e-12, nan_ok=True), name
            else:
                assert value == alone[name] or math.isnan(alone[name]), name


def evaluated_kinds(kinds: tuple[str, ...]) -> dict[str, float]:
    return {f"{kind} {name}": value for kind in kinds for name, value in evaluated(kind).items()}


def by_scikit_learn(kind: str) -> dict[str, float]:
    model, _, (inputs, targets), _ = task(kind)
    with torch.no_grad():
        output = model(inputs).double()
    truth: Any = targets.numpy()
    if "number" in kind:
        return of_numbers(truth.astype(float), output.numpy())
    if kind == "labels":
        return of_labels(truth, output.sigmoid().numpy())
    several = kind == "classes"
    if several:
        scores, said, average = output.softmax(1).numpy(), output.argmax(1).numpy(), "macro"
    else:
        truth = truth[:, 0].astype(int)
        scores = (output.sigmoid() if kind == "logits" else output).numpy()[:, 0]
        said, average = (scores > 0.5).astype(int), "binary"
    ranked = {"multi_class": "ovr", "average": "macro"} if several else {}
    found = {
        "f1": expected.f1_score(truth, said, average=average, zero_division=0),
        "precision": expected.precision_score(truth, said, average=average, zero_division=0),
        "recall": expected.recall_score(truth, said, average=average, zero_division=0),
        "jaccard": expected.jaccard_score(truth, said, average=average),
        "auc": expected.roc_auc_score(truth, scores, **ranked),
        "average_precision": expected.average_precision_score(
            functional.one_hot(targets).numpy() if several else truth, scores
        ),
        "cohen_kappa": expected.cohen_kappa_score(truth, said),
        "matthews": expected.matthews_corrcoef(truth, said),
        "f1_macro": expected.f1_score(truth, said, average="macro", zero_division=0),
        "precision_weighted": expected.precision_score(truth, said, average="weighted", zero_division=0),
        **per_class("recall", expected.recall_score(truth, said, average=None, zero_division=0)),
    }
    matrix = expected.multilabel_confusion_matrix(truth, said)
    specificity = matrix[:, 0, 0] / matrix[:, 0].sum(1)
    found["specificity"] = specificity.mean() if several else specificity[1]
    found |= per_class("specificity", specificity)
    confidence, right = (scores.max(1), said == truth) if several else (scores, truth)
    found["calibration_error"] = calibration_error(confidence, right)
    if several:
        found["top_2"] = expected.top_k_accuracy_score(truth, scores, k=2)
        found["confidence"] = float(scores.max(1).mean())
        found["rights"] = expected.accuracy_score(truth, said)
        found["their_jaccard"] = found["jaccard"]
        found["f1_micro"] = expected.f1_score(truth, said, average="micro")
        found["f1_weighted"] = expected.f1_score(truth, said, average="weighted", zero_division=0)
        each = expected.f1_score(truth, said, average=None, zero_division=0)
        found |= per_class("f1", each) | per_class("their_f1", each)
        found |= per_class("jaccard", expected.jaccard_score(truth, said, average=None))
        found |= per_class("auc", [expected.roc_auc_score(truth == n, scores[:, n]) for n in range(CLASSES)])
    return found


def per_class(name: str, values: Any) -> dict[str, float]:
    return {f"{name}_class_{number}": float(value) for number, value in enumerate(values)}


def calibration_error(confidence: Any, right: Any) -> float:
    places = np.minimum((confidence * 15).astype(int), 14)
    gaps = [abs(right[places == n].sum() - confidence[places == n].sum()) for n in range(15)]
    return float(sum(gaps) / len(confidence))


def of_labels(truth: Any, scores: Any) -> dict[str, float]:
    said = scores > 0.5
    return {
        "f1": expected.f1_score(truth, said, average="macro"),
        "precision_micro": expected.precision_score(truth, said, average="micro"),
        "recall_weighted": expected.recall_score(truth, said, average="weighted"),
        "jaccard": expected.jaccard_score(truth, said, average="macro"),
        "auc": expected.roc_auc_score(truth, scores),
        **per_class("average_precision", expected.average_precision_score(truth, scores, average=None)),
    }


def of_numbers(truth: Any, said: Any) -> dict[str, float]:
    columns = range(truth.shape[1])
    return {
        "mae": expected.mean_absolute_error(truth, said),
        "mse": expected.mean_squared_error(truth, said),
        "rmse": expected.root_mean_squared_error(truth, said),
        "r2": expected.r2_score(truth, said),
        "mape": expected.mean_absolute_percentage_error(truth, said),
        "msle": expected.mean_squared_log_error(truth, said),
        "explained_variance": expected.explained_variance_score(truth, said),
        "pearson": float(np.mean([stats.pearsonr(truth[:, n], said[:, n])[0] for n in columns])),
        "spearman": float(np.mean([stats.spearmanr(truth[:, n], said[:, n])[0] for n in columns])),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "classes",
        by_night("probabilities"),
        by_night("logits"),
        by_night("labels"),
        by_night("numbers"),
        by_night("two numbers"),
    ],
)
@pytest.mark.parametrize("world_size", [2, by_night(4)])
def test_every_metric_is_scikit_learns_on_any_number_of_ranks(world_size, kind):
    wanted = by_scikit_learn(kind)
    [alone] = everywhere(1, evaluated, kind)
    for name, value in wanted.items():
        assert alone[name] == pytest.approx(value, abs=1e-6), name
    for found in run_world(world_size, evaluated, kind):
        assert {name: found[name] for name in wanted} == pytest.approx({n: alone[n] for n in wanted}, abs=1e-12)


def few_rows() -> dict[str, float]:
    """Three rows for four ranks: one has none."""
    inputs, _ = make_rows(ROWS)
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd", metrics=["f1", "auc", confidence])
    return dict(trainer.evaluate(inputs[:3], torch.tensor([0, 1, 2]), batch_size=1))


@pytest.mark.nightly
def test_ranks_without_a_row_take_part():
    [alone] = everywhere(1, few_rows)
    for found in run_world(4, few_rows):
        assert found == pytest.approx(alone)


def few_numbers(batch_size: int) -> dict[str, float]:
    """Three rows of two numbers, in batches for fewer ranks than there are."""
    model, loss, (inputs, targets), names = task("two numbers")
    trainer = cx.DistributedTrainer(model, loss, "sgd", metrics=names)
    return dict(trainer.evaluate(inputs[:3], targets[:3], batch_size=batch_size))


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 3), by_night(4, 1)])
def test_ranks_without_a_row_take_part_in_sums_of_several_outputs(world_size, batch_size):
    [alone] = everywhere(1, few_numbers, batch_size)
    for found in run_world(world_size, few_numbers, batch_size):
        assert found == pytest.approx(alone, nan_ok=True)  # a correlation with equal targets


def fit(**more: Any) -> cx.DistributedTrainer:
    model = make_model()
    trainer = cx.DistributedTrainer(
        model,
        "cross_entropy",
        torch.optim.SGD(model.parameters(), 0.1),
        metrics=more.pop("metrics", ["f1", "auc", "top_2", confidence]),
    )
    given = {"epochs": 2, "effective_batch_size": 8, "verbose": False, "validation_data": make_rows(9, seed=1)}
    trainer.fit(*make_rows(40), **{**given, **more})
    return trainer


def fit_measured(**more: Any) -> dict[str, list[float]]:
    return fit(**more).history.history


@pytest.mark.parametrize("world_size", [2, by_night(4)])
def test_history_has_metrics_of_training_and_validation_the_same_on_any_number_of_ranks(world_size):
    [alone] = everywhere(1, fit_measured)
    names = ["loss", "accuracy", "f1", "auc", "top_2", "confidence"]
    validated = [f"val_{name}" for name in names[2:]]
    assert list(alone) == ["loss", "accuracy", "val_loss", "val_accuracy", *names[2:], *validated, "learning_rate"]
    for found in run_world(world_size, fit_measured):
        for name, values in alone.items():
            assert found[name] == pytest.approx(values, rel=1e-4), name


def test_a_history_with_metrics_is_written_and_read():
    with one_process():
        history = fit().history
    assert cx.TrainingHistory.from_json(history.to_json()) == history
    header, *lines = history.to_csv().splitlines()
    assert header.split(",")[5:7] == ["train_f1", "train_auc"]
    assert header.endswith("val_confidence,learning_rate")
    assert float(lines[1].split(",")[5]) == history.metrics["f1"][1]
    assert "val_auc" in repr(history)
    for wrong in ({"metrics": 3}, {"metrics": {"f1": ["x"]}}):
        with pytest.raises(cx.ConfigError, match="numbers"):
            cx.TrainingHistory.from_dict(wrong)


def resume_each(folder: str, ranks: int) -> list[dict[str, list[float]]]:
    found = [fit_measured(checkpoint_every_n_steps=3, checkpoint_dir=folder)]
    return found + [fit_measured(resume=str(path)) for path in sorted(Path(folder).glob("step-*.ckpt"))]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_metrics_go_on_in_the_middle_of_an_epoch(world_size, tmp_path):
    for whole, *resumed in everywhere(world_size, resume_each, str(tmp_path), world_size):
        assert len(resumed) == 3
        for found in resumed:
            assert found == whole


@pytest.mark.nightly
def test_metrics_go_on_on_another_number_of_ranks(tmp_path):
    [whole, *_] = run_world(3, fit_with_checkpoints, str(tmp_path))
    path = str(sorted(tmp_path.glob("step-*.ckpt"))[0])
    for world_size in (1, 2):
        close_worlds()  # what resumes is another process
        for found in everywhere(world_size, go_on_from, path):
            for name, values in whole.items():
                assert found[name] == pytest.approx(values, rel=1e-4), name


def fit_with_checkpoints(folder: str) -> dict[str, list[float]]:
    return fit_measured(checkpoint_every_n_steps=3, checkpoint_dir=folder)


def go_on_from(path: str) -> dict[str, list[float]]:
    return fit_measured(resume=path)


def test_the_best_and_early_stopping_go_by_metrics(tmp_path):
    class Reading(cx.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert {"f1", "val_f1"} <= set(logs)

    with one_process():
        early = cx.callbacks.EarlyStopping("val_f1", patience=9)
        fit(metrics=["f1"], callbacks=[early, Reading()], keep_best="val_f1", checkpoint_dir=str(tmp_path))
        assert early._sign == -1.0  # more is better
        assert (tmp_path / "best.ckpt").exists()
        for given, words in (
            ({"keep_best": "f1s"}, "keep_best='f1s': no such metric in this run. Did you mean 'f1'"),
            ({"keep_best": "val_f1", "validation_data": None}, "keep_best='val_f1' needs validation data"),
            ({"callbacks": [cx.callbacks.EarlyStopping("auc")]}, "this fit has no metric named 'auc'"),
        ):
            with pytest.raises(cx.ConfigError, match=words):
                fit(**{"metrics": ["f1"], "checkpoint_dir": str(tmp_path), **given})


def test_lines_and_batch_logs_have_metrics(capsys):
    read: list[dict[str, float]] = []

    class Reading(cx.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            read.append(dict(logs))

    with one_process():
        fit(callbacks=[Reading()], verbose=True, log_every_n_steps=2)
    out = capsys.readouterr().out
    assert "batch 2/5  loss" in out
    assert "val_f1 0." in out
    assert list(read[0]) == ["loss", "accuracy", "f1", "auc", "top_2", "confidence", "learning_rate"]


def test_what_a_user_computes_alone_is_of_all_rows():
    model, loss, rows, _ = task("classes")
    with one_process():
        trainer = cx.DistributedTrainer(model, loss, "sgd", metrics="f1")
        assert trainer.evaluate(*rows, distributed=False) == trainer.evaluate(*rows)
        assert trainer.evaluate(*rows)["f1"] == pytest.approx(by_scikit_learn("classes")["f1"])


def pairs(output: Any, target: Any) -> tuple[torch.Tensor, int]:
    return output.sum(), 2 * len(target)


def test_a_function_may_return_a_sum_and_its_weight():
    _, loss, rows, _ = task("classes")
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), loss, "sgd", metrics=[pairs])
        value = trainer.evaluate(*rows, batch_size=5)["pairs"]
        assert value == pytest.approx(float(make_model()(rows[0]).sum()) / (2 * ROWS), rel=1e-5)


def trainer_with(metrics: Any, kind: str = "classes") -> cx.DistributedTrainer:
    model, loss, _, _ = task(kind)
    return cx.DistributedTrainer(model, loss, "sgd", metrics=metrics)


def fit_with(metrics: Any, kind: str = "classes") -> None:
    trainer_with(metrics, kind).fit(*task(kind)[2], epochs=1, verbose=False)


def of_three(name: str) -> Any:
    return getattr(torchmetrics, name)("multiclass", num_classes=CLASSES)


test_what_is_no_metric_is_refused_by_the_trainer = refuses(
    (lambda: trainer_with("f1_score"), "no metric 'f1_score'. Did you mean 'f1'"),
    (lambda: trainer_with([torchmetrics.F1Score]), "got the class F1Score: pass an instance"),
    (lambda: trainer_with([3]), "metrics takes names, functions .* got 3"),
    (lambda: trainer_with(["f1", "f1"]), "two named 'f1'"),
    (lambda: trainer_with({"loss": confidence}), "'loss' needs another name"),
    (lambda: trainer_with({"val_mine": confidence}), "'val_mine' needs another name"),
)
test_what_does_not_fit_the_model_is_refused_by_fit = refuses(
    (lambda: fit_with(["mae"]), "'mae' is for numbers, and the targets are classes"),
    (lambda: fit_with(["top_9"]), "'top_9' needs at least 9 classes, and the model has 3"),
    (lambda: fit_with(["f1"], "numbers"), "'f1' is for classes"),
    (lambda: fit_with(["top_2"], "logits"), "'top_2' is for classes"),
    (lambda: fit_with(["cohen_kappa"], "labels"), "is for one class per sample, and the targets are several labels"),
    (lambda: fit_with({"bad": lambda o, t: torch.ones(7)}), "bad must return a number per sample, or their mean"),
    (lambda: fit_with({"odd": lambda o, t: 1 / 0}), "the metric odd cannot take .* division by zero"),
    (lambda: fit_with([torchmetrics.MeanSquaredError()]), "metric mean_squared_error cannot take"),
    (lambda: fit_with([of_three("ConfusionMatrix")]), r"confusion_matrix has shape \[3, 3\], and the history takes a"),
    (lambda: fit_with([of_three("ROC")]), "metric multiclass_roc has 3 parts, and the hist"),
    (lambda: fit_with([torchmetrics.text.BLEUScore()]), r"bleuscore cannot take .* of all: cx\.metrics\.WholeSet"),
    (lambda: fit_with({"odd": unjoinable()}), "keeps lists .seen. that the ranks .*WholeSet"),
    (lambda: fit_with({"odd": of_three("Accuracy") + 1.0}), "is made of other metrics"),
)


def test_numpy_is_no_trouble():
    model, loss, (inputs, targets), _ = task("numbers")
    with one_process():
        trainer = cx.DistributedTrainer(model, loss, "sgd", metrics="mae")
        found = trainer.evaluate(inputs.numpy(), targets.numpy().astype(np.float64))
        assert found["mae"] == pytest.approx(by_scikit_learn("numbers")["mae"], rel=1e-6)


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_lines_in_the_middle_of_an_epoch_change_no_number(world_size):
    for often, never in zip(
        everywhere(world_size, fit_with_lines, 1), everywhere(world_size, fit_with_lines, 0), strict=True
    ):
        assert often == never


def fit_with_lines(every: int) -> dict[str, list[float]]:
    return fit_measured(log_every_n_steps=every, metrics=["f1", "top_2", confidence])


def test_a_direction_that_nobody_has_said_is_asked_for(tmp_path):
    def dice(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == target).float()

    given = {"metrics": {"dice": dice}, "checkpoint_dir": str(tmp_path)}
    early = cx.callbacks.EarlyStopping
    with one_process():
        with pytest.raises(cx.ConfigError, match='it is unknown whether larger is better: set mode="min"'):
            fit(**given, callbacks=[early("dice")])
        with pytest.raises(cx.ConfigError, match=r"keep_best='val_dice': it is unknown.*higher_is_better = True"):
            fit(**given, keep_best="val_dice")
        falling = early("dice", mode="min")
        fit(**given, callbacks=[falling])
        assert falling._sign == 1.0
        dice.higher_is_better = True  # type: ignore[attr-defined]
        growing = early("dice")
        fit(**given, callbacks=[growing], keep_best="val_dice")
        assert growing._sign == -1.0


def unjoinable() -> Any:
    """Return a metric that keeps the values of batches in a list."""

    class Listing(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("seen", default=[], dist_reduce_fx=None)

        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            self.seen.append(output.mean())

        def compute(self) -> torch.Tensor:
            return torch.stack(self.seen).mean()

    return Listing()


def test_classes_without_a_row_have_no_part_in_what_is_ranked():
    model, loss, (inputs, classes), _ = task("classes")
    few = classes.clamp(max=CLASSES - 2)
    with one_process(), torch.no_grad():
        found = cx.DistributedTrainer(model, loss, "sgd", metrics=["auc"]).evaluate(inputs, few)["auc"]
        scores = model(inputs).double().softmax(1).numpy()
    each = [expected.roc_auc_score(few.numpy() == number, scores[:, number]) for number in range(CLASSES - 1)]
    assert found == pytest.approx(np.mean(each), abs=1e-6)


@pytest.mark.parametrize("name", ["auc", "average_precision", "auc_weighted", "auc_per_class"])
def test_what_is_ranked_is_nan_without_a_row_that_counts(name):
    model, _, (inputs, classes), _ = task("classes")
    loss = nn.CrossEntropyLoss(ignore_index=CLASSES - 1)
    with one_process():
        trainer = cx.DistributedTrainer(model, loss, "sgd", metrics=[name])
        found = trainer.evaluate(inputs, torch.full_like(classes, CLASSES - 1))
    own = [value for key, value in found.to_dict().items() if key.startswith(name.removesuffix("_per_class"))]
    assert len(own) == (CLASSES if name.endswith("per_class") else 1)
    assert all(map(math.isnan, own))


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_the_area_under_the_curve_is_nan_if_all_rows_are_of_one_class(label):
    model, loss, (inputs, targets), _ = task("logits")
    with one_process():
        trainer = cx.DistributedTrainer(model, loss, "sgd", metrics=["auc"])
        assert math.isnan(trainer.evaluate(inputs, torch.full_like(targets, label))["auc"])


@pytest.mark.parametrize(
    "targets", [(0, 1, 1), by_night((0, 0, 1)), (1, 1, 1), by_night((0, 0, 0)), by_night((1, 0, 1))]
)
@pytest.mark.parametrize("predicted", [(1, 1, 1), by_night((0, 0, 0)), (0, 1, 1), by_night((1, 1, 0))])
def test_the_coefficient_of_matthews_is_scikit_learns_also_of_one_class(targets, predicted):
    scores = torch.tensor(predicted).double() * 2 - 1
    with one_process():
        for output, loss in (
            (scores[:, None], "bce_with_logits"),
            (torch.stack([-scores, scores], 1), "cross_entropy"),
        ):
            y = torch.tensor(targets)
            trainer = cx.DistributedTrainer(nn.Identity(), loss, metrics=["matthews"])
            found = trainer.evaluate(output, y[:, None].double() if output.shape[1] == 1 else y)["matthews"]
            assert found == pytest.approx(expected.matthews_corrcoef(targets, predicted), abs=1e-12)


def test_several_outputs_are_averaged_as_scikit_learn_does():
    inputs, _ = make_rows(ROWS)
    targets = torch.stack([inputs.sum(1), 5 * inputs[:, 0]], 1)
    with seeded():
        model = nn.Linear(4, 2)
    with one_process(), torch.no_grad():
        found = cx.DistributedTrainer(model, nn.MSELoss(), "sgd", metrics=["rmse", "r2"]).evaluate(inputs, targets)
        said = model(inputs).numpy()
    assert found["rmse"] == pytest.approx(expected.root_mean_squared_error(targets.numpy(), said), rel=1e-6)
    assert found["r2"] == pytest.approx(expected.r2_score(targets.numpy(), said), rel=1e-6)


def test_a_metric_may_look_at_several_targets():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 1)

        def forward(self, x):
            return self.last(x), self.last(-x)

    def error(output: Any, target: Any) -> torch.Tensor:
        return (output[0] - target[0]).abs()[:, 0]

    inputs, _ = make_rows(ROWS)
    target = inputs.sum(1, keepdim=True)
    with one_process(), torch.no_grad():
        trainer = cx.DistributedTrainer(Two(), lambda o, t: (o[0] - t[0]).square().mean(), "sgd", metrics=[error])
        found = trainer.evaluate(inputs, (target, target))["error"]
        assert found == pytest.approx(float((trainer.model(inputs)[0] - target).abs().mean()), rel=1e-5)


def test_logs_of_a_batch_compute_only_what_is_read():
    calls: list[int] = []

    class Counting(torchmetrics.MeanMetric):
        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            super().update(output.mean())

        def compute(self) -> torch.Tensor:
            calls.append(1)
            return super().compute()

    class Reading(cx.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert logs["loss"] > 0
            if batch == 2:
                assert logs["counting"] == logs["counting"]

    with one_process():
        fit(metrics=[Counting()], callbacks=[Reading()], epochs=1, validation_data=None)
    assert len(calls) == 3  # when it was tried, in the third step, at the end of the epoch


def test_what_needs_more_rows_is_no_number_yet():
    model, loss, (inputs, targets), _ = task("numbers")
    with one_process():
        trainer = cx.DistributedTrainer(model, loss, "sgd", metrics=["r2"])
        assert math.isnan(trainer.evaluate(inputs[:1], targets[:1])["r2"])


def means_of_three_or_more() -> list[float]:
    """A mean that needs three samples, over all ranks, after the first sample of each rank and after the second."""

    def compute(self: Any) -> torch.Tensor:
        if self.weight < 3:
            raise ValueError("three samples are needed")
        return self.mean_value / self.weight

    world = runtime.join_if_nobody_has()
    metric = LibraryMetric("mean", type("OfThree", (torchmetrics.MeanMetric,), {"compute": compute})())
    found = []
    for value in (1.0, 2.0):
        metric.add(torch.tensor([value + world.rank]), torch.ones(1), 1)
        found += metric.over_ranks(world)
    return found


def test_a_metric_that_needed_more_samples_continues_with_those_of_its_own_rank():
    for found in run_world(2, means_of_three_or_more):
        assert found == [pytest.approx(math.nan, nan_ok=True), 2.0]


class ReturnsColumn(nn.Module):
    """Returns its loss, and a prediction per sample in a column, for a y without one."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        pred = self.layer(x)
        return {"loss": (pred[:, 0] - labels).square().mean(), "pred": pred}


def test_metrics_of_numbers_compare_a_column_sample_by_sample():
    inputs, _ = make_rows(ROWS)
    targets = inputs.sum(1).abs()
    model = ReturnsColumn()
    with one_process():
        trainer = cx.DistributedTrainer(model, None, "sgd", metrics={"pred": ["mae", "mse", "mape", "rmse"]})
        found = dict(trainer.evaluate(inputs, targets, batch_size=4))
    predicted = model.layer(inputs)[:, 0].detach().double().numpy()
    wanted = targets.double().numpy()
    assert found["pred_mae"] == pytest.approx(expected.mean_absolute_error(wanted, predicted))
    assert found["pred_mse"] == pytest.approx(expected.mean_squared_error(wanted, predicted))
    assert found["pred_mape"] == pytest.approx(expected.mean_absolute_percentage_error(wanted, predicted))
    assert found["pred_rmse"] == pytest.approx(expected.root_mean_squared_error(wanted, predicted))


def test_micro_batches_do_not_keep_their_graphs():
    held: list[bool] = []

    def watch(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        held.append(output.requires_grad or output.grad_fn is not None)
        return output.mean()

    with one_process():
        fit(metrics=[watch], accumulation_steps=4)
    assert held
    assert not any(held)


class Tokens(nn.Module):
    """Scores of words with the classes in a dimension; as transformers do, with its own loss."""

    def __init__(self, dim: int, has_loss: bool = False) -> None:
        super().__init__()
        with seeded():
            self.scores = nn.Embedding(CLASSES, CLASSES)
        self.dim, self.has_loss = dim, has_loss

    def forward(self, words: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        scores = self.scores(words)
        if self.has_loss:
            loss = None if labels is None else functional.cross_entropy(scores.transpose(1, 2), labels)
            return {"loss": loss, "logits": scores}
        return scores.movedim(-1, self.dim)


def evaluate_tokens() -> list[dict[str, float]]:
    generator = torch.Generator().manual_seed(3)
    words, labels = torch.randint(CLASSES, (2, ROWS, 5), generator=generator)
    labels[:, 3:] = -100
    labels[5] = -100
    given: list[Any] = [(Tokens(1), "cross_entropy", (words, labels))]
    given.append((Tokens(-1), lambda scores, y: functional.cross_entropy(scores.transpose(1, 2), y), (words, labels)))
    given.append((Tokens(-1, has_loss=True), None, ({"words": words, "labels": labels},)))
    found = []
    for model, loss, data in given:
        trainer = cx.DistributedTrainer(model, loss, "sgd", metrics=["f1", "top_2", "auc"])
        found.append(
            {name: each for name, each in dict(trainer.evaluate(*data, batch_size=4)).items() if name != "loss"}
        )
    with torch.no_grad():
        scores = Tokens(-1)(words)[labels >= 0].softmax(-1)
    truth, said = labels[labels >= 0], scores.argmax(-1)
    auc = expected.roc_auc_score(truth, scores, multi_class="ovr")
    f1, accuracy = expected.f1_score(truth, said, average="macro"), expected.accuracy_score(truth, said)
    return [
        {"accuracy": accuracy, "f1": f1, "top_2": expected.top_k_accuracy_score(truth, scores, k=2), "auc": auc},
        *found,
    ]


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_metrics_of_tokens_leave_out_padding_wherever_the_classes_are_and_whose_loss_it_is(world_size):
    for right, *found in everywhere(world_size, evaluate_tokens):
        for each in found:
            assert each == pytest.approx(right, rel=1e-6)
