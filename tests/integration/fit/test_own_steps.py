"""Claims about steps of the user's own: `train_step`, `test_step` and `predict_step`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import CLASSES, FEATURES, SaveAt, everywhere, flat, make_model, make_rows, one_process
from markers import by_night, nightly_where
from refusals import refuses, warning_texts
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

Trainer = cx.DistributedTrainer
ROWS, EFFECTIVE = 21, 8  # batches of 8, 8 and 5: on 4 ranks, the last ones are uneven
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
SETTINGS: dict[str, Any] = {"epochs": 2, "effective_batch_size": EFFECTIVE, "verbose": False}
WORLDS = [by_night(1), 2, by_night(4)]


def data() -> tuple[Tensor, Tensor]:
    inputs, targets = make_rows(ROWS)
    return inputs.double(), targets


class Plain(Trainer):
    """Computes what the built-in step does."""

    def train_step(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(self.model(inputs), targets)


class Pairs(Trainer):
    """Computes what the built-in step does with `WEIGHTED`, as (sum, weight)."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        each = functional.cross_entropy(self.model(inputs), targets, weight=WEIGHTED.weight, reduction="none")
        assert WEIGHTED.weight is not None
        return {"loss": (each.sum(), WEIGHTED.weight[targets].sum()), "largest": each.max(), "labels": targets}


class Penalized(Trainer):
    """Adds to the loss of the built-in step."""

    def train_step(self, batch: Any) -> Any:
        result = super().train_step(batch)
        output = result["output"]
        penalty = (output["size"] if isinstance(output, dict) else output).square().mean()
        result["loss"] = result["loss"] + 0.0 * penalty
        return {**result, "penalty": penalty}


class Optimizes(Trainer):
    """Takes the step itself, with the loss of the built-in one, and returns it."""

    def train_step(self, batch: Any) -> Any:
        result = super().train_step(batch)
        self.optimize(result["loss"])
        return result


def given_step(trainer: Trainer, batch: Any) -> Any:
    """Is the built-in step, given as a function."""
    return trainer.train_step(batch)


STEPS: dict[str, tuple[type[Trainer], dict[str, Any], Any]] = {
    "plain": (Plain, {}, "cross_entropy"),
    "pairs": (Pairs, {}, WEIGHTED),
    "super": (Penalized, {}, "cross_entropy"),
    "super, weighted": (Penalized, {}, WEIGHTED),
    "super, weighted, optimized": (Optimizes, {}, WEIGHTED),
    "function": (Trainer, {"train_step": given_step}, "cross_entropy"),
    "several": (Penalized, {}, {"scores": "cross_entropy", "size": "mse"}),
}


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = make_model("float64", CLASSES + 1)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        output = self.body(inputs)
        return {"scores": output[:, :CLASSES], "size": output[:, CLASSES]}


def fitted(name: str, own: bool, **settings: Any) -> dict[str, Any]:
    """Fit with a step of one's own, or with the built-in one."""
    kind, options, loss = STEPS[name]
    inputs, targets = data()
    several = isinstance(loss, dict)
    model = TwoOutputs() if several else make_model("float64")
    given: Any = {"scores": targets, "size": inputs[:, 0]} if several else targets
    make = kind if own else Trainer
    trainer = make(model, loss, torch.optim.SGD(model.parameters(), 0.1), **(options if own else {}))
    history = trainer.fit(inputs, given, validation_data=(inputs, given), **SETTINGS, **settings)
    return {"parameters": flat(model.parameters()), "history": dict(history.history)}


@functools.cache
def built_in(name: str) -> dict[str, Any]:
    with one_process():
        return fitted(name, own=False)


@nightly_where(lambda name: name not in ("plain", "super, weighted, optimized", "several"))
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_computes_the_same_trains_the_same_on_any_number_of_ranks(world_size, name):
    expected = built_in(name)
    for found in everywhere(world_size, fitted, name, True):
        np.testing.assert_allclose(found["parameters"], expected["parameters"], rtol=1e-12)
        shared = expected["history"].keys() - ({"accuracy"} if name in ("plain", "pairs") else set())
        assert shared <= found["history"].keys()
        for each in shared:
            np.testing.assert_allclose(found["history"][each], expected["history"][each], rtol=1e-12)


@pytest.mark.parametrize("settings", [{"accumulation_steps": 2}, {"precision": "bf16"}, {"precision": "fp16"}])
def test_accumulation_and_precision_are_those_of_the_built_in_step(settings):
    with one_process():
        own, built_in = fitted("super", True, **settings), fitted("super", False, **settings)
    np.testing.assert_allclose(own["parameters"], built_in["parameters"], rtol=1e-6)


def with_holes(own: bool) -> Any:
    """Fit on labels of which most do not count: in the second batch, all of the second half."""
    inputs, targets = data()
    targets[torch.arange(ROWS) % 3 > 0] = -100
    targets[12:16] = -100
    model = make_model("float64")
    trainer = (Penalized if own else Trainer)(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    loader = DataLoader([*zip(inputs, targets, strict=True)], EFFECTIVE // cx.get_world_size())
    history = trainer.fit(loader, epochs=2, verbose=False)
    return flat(model.parameters()), history.train_losses, history.train_accuracies


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_the_loss_of_the_built_in_step_keeps_its_weight(world_size):
    with one_process():
        expected = with_holes(False)
    for found in everywhere(world_size, with_holes, True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10)


def weighted(own: bool) -> Any:
    inputs, targets = data()
    model = make_model("float64")
    trainer = (Penalized if own else Trainer)(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    trainer.fit(inputs, targets, sample_weight=torch.arange(ROWS), class_weight={0: 1, 1: 2, 2: 3}, **SETTINGS)
    return flat(model.parameters())


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_weights_of_rows_are_the_third_part_of_a_batch(world_size):
    with one_process():
        expected = weighted(False)
    for found in everywhere(world_size, weighted, True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def seen_batches(given: Any, **keywords: Any) -> list[Any]:
    """Return the batches that a step gets, as the names or types of their parts."""
    seen = []

    def step(trainer: Trainer, batch: Any) -> Tensor:
        parts = batch if isinstance(batch, dict) else dict(enumerate(batch))
        seen.append((type(batch).__name__, {name: tuple(part.shape) for name, part in parts.items()}))
        first = next(iter(parts.values()))
        output: Tensor = trainer.model(first)
        return output.mean()

    Trainer(make_model("float64"), train_step=step).fit(*given, epochs=1, batch_size=21, verbose=False, **keywords)
    return seen[-1:]


def test_a_batch_is_as_the_data_give_it():
    inputs, targets = data()
    rows = [{"words": row, "labels": target} for row, target in zip(inputs, targets, strict=True)]
    unlabelled = [{"words": row} for row in inputs]
    pairs = [*zip(inputs, targets, strict=True)]
    weights = torch.ones(ROWS)
    named = [("dict", {"words": (21, 4), "labels": (21,)})]
    with one_process():
        assert seen_batches((inputs,)) == [("tuple", {0: (21, 4)})]
        assert seen_batches((inputs, targets)) == [("tuple", {0: (21, 4), 1: (21,)})]
        assert seen_batches((inputs, targets), sample_weight=weights) == [("tuple", {0: (21, 4), 1: (21,), 2: (21,)})]
        assert seen_batches((DataLoader(rows, 21),)) == named
        assert seen_batches((lambda: iter([{"words": inputs, "labels": targets}]),)) == named
        assert seen_batches((DataLoader(unlabelled, 21),)) == [("dict", {"words": (21, 4)})]
        assert seen_batches((DataLoader(pairs, 21),)) == [("tuple", {0: (21, 4), 1: (21,)})]


class Everything(Trainer):
    """Has all three steps, for a model without a forward."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        scores = self.model["head"](self.model["body"](inputs))  # type: ignore[index]
        return {"loss": functional.cross_entropy(scores, targets), "output": scores}

    def test_step(self, batch: Any) -> dict[str, Any]:
        assert not torch.is_grad_enabled()
        assert not self.model.training
        result = self.train_step(batch)
        return {**result, "top": result["output"].max(1).values.mean()}

    def predict_step(self, batch: Any) -> Tensor:
        (inputs,) = batch
        scores: Tensor = self.model["head"](self.model["body"](inputs))  # type: ignore[index]
        return scores.softmax(1)


def parts(whole: nn.Sequential) -> nn.ModuleDict:
    return nn.ModuleDict({"body": whole[:2], "head": whole[2]})


def everything() -> dict[str, Any]:
    inputs, targets = data()
    whole = make_model("float64")
    trainer = Everything(parts(whole), optimizer="sgd", metrics=["accuracy", "f1"])
    history = trainer.fit(inputs, targets, validation_data=(inputs, targets), **SETTINGS)
    evaluation = trainer.evaluate(inputs, targets, batch_size=4)
    predicted = trainer.predict(inputs, batch_size=4)
    with torch.no_grad():
        scores = whole(inputs)
    return {
        "names": [*history.history],
        "evaluation": dict(evaluation),
        "expected": {
            "loss": float(functional.cross_entropy(scores, targets)),
            "accuracy": float((scores.argmax(1) == targets).double().mean()),
            "top": float(scores.max(1).values.mean()),
        },
        "difference": float((predicted - scores.softmax(1)).abs().max()),
    }


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_model_without_forward_trains_evaluates_and_predicts_by_steps(world_size):
    for found in everywhere(world_size, everything):
        own = {"loss", "accuracy", "f1"}
        assert {*found["names"]} == {*own, *(f"val_{name}" for name in own), "val_top", "learning_rate"}
        assert found["difference"] < 1e-12
        for name, value in found["expected"].items():
            assert abs(found["evaluation"][name] - value) < 1e-12, name


def test_without_test_step_the_loss_fn_evaluates_or_the_train_step():
    inputs, targets = data()

    def step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        mode = float(trainer.model.training or torch.is_grad_enabled())
        return {"loss": 3 * functional.cross_entropy(trainer.model(batch[0]), batch[1]), "trains": mode}

    with one_process():
        with_loss = Trainer(make_model("float64"), "cross_entropy", "sgd", train_step=step)
        without = Trainer(make_model("float64"), None, "sgd", train_step=step)
        loss = with_loss.evaluate(inputs, targets).loss
        assert dict(without.evaluate(inputs, targets)) == {"loss": pytest.approx(3 * loss), "trains": 0.0}
        history = without.fit(inputs, targets, validation_data=(inputs, targets), **SETTINGS).history
        assert history["trains"] == [1.0, 1.0]
        assert history["val_trains"] == [0.0, 0.0]


def test_what_only_the_validation_measures_may_be_kept_best(tmp_path: Path):
    inputs, targets = data()
    with one_process():
        trainer = Plain(make_model("float64"), "cross_entropy", "sgd")
        history = trainer.fit(
            inputs, targets, validation_data=(inputs, targets), checkpoint_every_n_epochs=1, keep_best="val_accuracy",
            checkpoint_dir=str(tmp_path), callbacks=[cx.callbacks.EarlyStopping("val_accuracy")], **SETTINGS,
        )  # fmt: skip
    assert "accuracy" not in history.history
    assert len(history.val_accuracies) == 2


def test_a_forward_may_be_the_model_s_own_attribute():
    inputs, targets = data()
    body = make_model("float64")
    model = nn.ModuleDict({"body": body})
    model.forward = lambda given: body(given)  # type: ignore[method-assign]
    with one_process():
        trainer = Plain(model, "cross_entropy", "sgd")
        assert trainer.evaluate(inputs, targets).accuracy is not None
        assert trainer.predict(inputs).shape == (ROWS, CLASSES)


def counting_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """Returns numbers of which names and order depend on the rank, the rows and the step."""
    inputs, targets = batch
    losses = functional.cross_entropy(trainer.model(inputs), targets, reduction="none")
    named = {"one": 1.0, "two": 2.0}
    found: dict[str, Any] = dict(reversed(named.items())) if trainer.get_rank() else named
    for label in targets.unique().tolist():
        own = targets == label
        found[f"class_{label}"] = (losses[own].sum(), own.sum())
    if trainer.step >= 2:
        found["late"] = 3.0
    return {"loss": losses.mean(), **found}


def counted() -> list[dict[str, Any]]:
    inputs, targets = data()
    order = targets.argsort(stable=True)  # most batches lack a class
    inputs, targets = inputs[order], targets[order]
    model = make_model("float64")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Trainer(model, None, optimizer, train_step=counting_step, test_step=counting_step)
    settings: dict[str, Any] = {"epochs": 2, "effective_batch_size": 8, "shuffle": False, "verbose": False}
    history = trainer.fit(inputs, targets, validation_data=(inputs, targets), **settings).history
    return [dict(history), dict(trainer.evaluate(inputs, targets, batch_size=3))]


@pytest.mark.parametrize("world_size", WORLDS)
def test_numbers_of_a_step_are_known_by_name_also_if_they_come_late_or_on_one_rank(world_size):
    with one_process():
        expected, evaluated = counted()
    names = {f"class_{label}" for label in data()[1].unique().tolist()} | {"one", "two", "late"}
    assert {*names, *(f"val_{name}" for name in names)} <= expected.keys()
    assert names <= evaluated.keys()
    assert [expected[name][-1] for name in ("one", "val_two", "late")] == [1.0, 2.0, 3.0]
    for history, evaluation in everywhere(world_size, counted):
        assert history.keys() == expected.keys()
        assert evaluation.keys() == evaluated.keys()
        for name in expected:
            np.testing.assert_allclose(history[name], expected[name], rtol=1e-9, err_msg=name)
        for name in evaluated:
            np.testing.assert_allclose(evaluation[name], evaluated[name], rtol=1e-9, err_msg=name)


def step_of_a_rare_class(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """Returns a number that most batches do not have, those of the dry run neither."""
    inputs, targets = batch
    losses = functional.cross_entropy(trainer.model(inputs), targets, reduction="none")
    own = losses[targets == CLASSES - 1]
    return {"loss": losses.mean(), "rare": own.mean() if len(own) else None}


@pytest.mark.parametrize("is_last", [True, False])
def test_a_number_that_only_some_batches_have_may_be_absent_in_the_dry_run_of_training_or_validation(is_last):
    inputs, targets = data()
    order = targets.argsort(stable=True)
    first, other = (inputs[order], targets[order]), (inputs[order.flip(0)], targets[order.flip(0)])
    given = (first, other) if is_last else (other, first)
    with one_process():
        trainer = Trainer(make_model("float64"), None, "sgd", train_step=step_of_a_rare_class)
        settings = {"epochs": 1, "batch_size": 8, "validation_batch_size": 8, "shuffle": False, "verbose": False}
        history = trainer.fit(*given[0], validation_data=given[1], **settings).history
    assert all(math.isfinite(history[name][0]) for name in ("rare", "val_rare"))


def pair_of(trainer: Trainer, batch: Any) -> tuple[Tensor, Tensor]:
    """Returns (sum, weight) of the rows of one class, which many batches do not have."""
    losses = functional.cross_entropy(trainer.model(batch[0]), batch[1], reduction="none")
    counted = (batch[1] == 1).to(losses.dtype)
    return (losses * counted).sum(), counted.sum()


def optimizing_a_pair(trainer: Trainer, batch: Any) -> dict[str, Any]:
    return {"shown": trainer.optimize(pair_of(trainer, batch))}


def losses_of_pairs(step: Callable[[Trainer, Any], Any]) -> list[float]:
    inputs, targets = data()
    order = targets.argsort(stable=True)
    inputs, targets = inputs[order], targets[order]
    model = make_model("float64")
    trainer = Trainer(model, None, torch.optim.SGD(model.parameters(), 0.1), train_step=step)
    before = trainer.evaluate(inputs, targets, batch_size=4).loss
    settings = {"epochs": 2, "effective_batch_size": 8, "shuffle": False, "verbose": False, "validation_batch_size": 4}
    history = trainer.fit(inputs, targets, validation_data=(inputs, targets), **settings)
    return [before, *history.train_losses, *history.val_losses]


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_loss_with_its_weight_is_the_same_number_returned_or_optimized(world_size):
    with one_process():
        expected = losses_of_pairs(pair_of)
    for found in everywhere(world_size, losses_of_pairs, optimizing_a_pair):
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def many_kinds(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """Returns everything that is a number, and much that is none."""
    loss = functional.cross_entropy(trainer.model(batch[0]), batch[1])
    numbers = {"plain": 2, "numpy": np.float32(3.0), "array": np.array(4.0), "flag": True, "flags": torch.tensor(True)}
    others = {"note": "text", "several": torch.ones(3), "one": torch.ones(1), "inner": {"a": 1.0}, "none": None}
    return {"loss": loss, **numbers, **others, **({"late": "text"} if trainer.step else {})}


def kinds_returned() -> tuple[list[dict[str, Any]], list[str]]:
    trainer = Trainer(make_model("float64"), None, "sgd", train_step=many_kinds)
    with warning_texts() as caught:
        found = [dict(trainer.fit(*data(), validation_split=0.4, **SETTINGS).history) for _ in range(2)]
        found.append(dict(trainer.evaluate(*data())))
    return found, [text for text in caught if "left out" in text]


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_what_is_no_number_in_a_step_s_dictionary_is_named_once(world_size):
    (found, warned), *others = everywhere(world_size, kinds_returned)
    for first, second, evaluated in (found, *(own for own, _ in others)):
        for history in (first, second):
            assert history["plain"] == [2.0, 2.0]
            assert history["numpy"] == [3.0, 3.0] == history["val_numpy"]
            assert history["array"] == [4.0, 4.0]
            assert history["flag"] == history["flags"] == [1.0, 1.0]
            assert history.keys().isdisjoint({"note", "several", "one", "inner", "none", "late"})
        assert evaluated == {"loss": evaluated["loss"], **dict.fromkeys(("flag", "flags"), 1.0)} | {
            "plain": 2.0,
            "numpy": 3.0,
            "array": 4.0,
        }
    assert warned == [
        "train_step returned 'note', of type str, which is left out: the history has numbers, by name.",
        *(
            f"train_step returned '{name}', a tensor of shape [{count}], which is left out: return a number of it, "
            'such as its mean, or what metrics take as "output".'
            for name, count in (("several", 3), ("one", 1))
        ),
        "train_step returned 'inner', of type dict, which is left out: return its numbers by name.",
        "train_step returned 'late', of type str, which is left out: the history has numbers, by name.",
    ]
    assert not any(texts for _, texts in others)


def with_numbers(*names: str) -> Callable[..., Any]:
    """Return a step that returns numbers of these names: how many steps there have been."""

    def step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        loss = functional.cross_entropy(trainer.model(batch[0]), batch[1])
        return {"loss": loss, **dict.fromkeys(names, float(trainer.step))}

    return step


def resumed_with(path: str, *names: str, saves: bool = False) -> dict[str, Any]:
    trainer = Trainer(make_model("float64"), None, "sgd", train_step=with_numbers(*names))
    settings: dict[str, Any] = {"callbacks": [SaveAt(path, 2)]} if saves else {"resume": path}
    settings |= {**SETTINGS, "epochs": 1, "effective_batch_size": 7}
    history = trainer.fit(*data(), **settings)
    return dict(history.history)


def resumed_by_name(path: str) -> list[dict[str, Any]]:
    """Save on all ranks after steps 0 and 1 of three, then resume with other numbers."""
    found = [resumed_with(path, "a", "b", saves=True)]
    return [*found, resumed_with(path, "b", "c"), resumed_with(path), resumed_with(path, "c", "a", "b")]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_fit_resumes_where_a_step_returns_numbers_of_other_names(world_size, tmp_path):
    path = str(tmp_path / "middle.ckpt")
    for whole, other, none, more in everywhere(world_size, resumed_by_name, path):
        assert whole["a"] == whole["b"] == [1.0]
        assert (other["a"], other["b"], other["c"]) == ([0.5], [1.0], [2.0])
        assert (none["a"], none["b"]) == ([0.5], [0.5])
        assert (more["a"], more["b"], more["c"]) == ([1.0], [1.0], [2.0])
        assert whole["loss"] == other["loss"] == none["loss"] == more["loss"]
    with one_process():
        found = resumed_with(path, "c", "b")  # on another number of ranks
    assert (found["a"], found["b"], found["c"]) == ([0.5], [1.0], [2.0])


def later_backward(trainer: Trainer, batch: Any) -> Tensor:
    loss = functional.cross_entropy(trainer.model(batch[0]), batch[1])
    if trainer.step >= 2:
        loss.backward(retain_graph=True)
    return loss


class Teaching(Trainer):
    """Holds a teacher and a counter besides the model."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.teacher = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)).double()
        self.calls = 0

    def train_step(self, batch: Any) -> Any:
        self.calls += 1
        with torch.no_grad():
            targets = self.teacher(batch[0])
        return functional.mse_loss(self.model(batch[0]), targets)


def test_the_dry_run_leaves_nothing_behind_in_the_trainer():
    inputs, targets = data()
    with one_process():
        trainer = Teaching(make_model("float64"), optimizer="sgd")
        trainer.fit(inputs, targets, epochs=1, batch_size=7, verbose=False)
        assert trainer.calls == 3
        assert int(trainer.teacher[1].num_batches_tracked) == 3


def called_backward(trainer: Trainer, batch: Any) -> Any:
    loss = functional.cross_entropy(trainer.model(batch[0]), batch[1])
    loss.backward()
    return loss


def called_step(trainer: Trainer, batch: Any) -> Any:
    loss = functional.cross_entropy(trainer.model(batch[0]), batch[1])
    trainer.optimizer.step()
    return loss


def returned(make: Callable[[Tensor], Any]) -> Callable[[Trainer, Any], Any]:
    return lambda trainer, batch: make(functional.cross_entropy(trainer.model(batch[0]), batch[1]))


def failed(trainer: Trainer, batch: Any) -> Any:
    inputs, targets, weights = batch
    return trainer.model(inputs) * targets * weights


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (called_backward, r"train_step called backward\(\): return the loss"),
        (called_step, r"train_step called an optimizer's step\(\): return the loss"),
        (returned(lambda _: None), "train_step returned None, and no loss"),
        (returned(lambda loss: loss.item()), r"train_step returned \d.*, and no loss: return a tensor"),
        (returned(lambda loss: {"total": loss}), "a dictionary with total, and no loss"),
        (returned(lambda loss: loss.expand(3)), r"a tensor of shape \[3\], and no loss"),
        (returned(lambda loss: loss.detach()), "the loss does not depend on the model's parameters"),
        (
            returned(lambda loss: {"loss": loss, "learning_rate": 3.0}),
            "the step returns 'learning_rate': fit records a number",
        ),
        (returned(lambda loss: {"loss": loss, "epoch": 3.0}), "the step returns 'epoch': fit records"),
        (returned(lambda loss: (loss, math.nan)), "its weight is nan: a weight is a count"),
        (failed, r"train_step failed, tried on a batch of shape \[8, 4\]: ValueError: not enough values to unpack"),
    ],
)
def test_steps_that_cannot_work_are_refused_by_name(step, words):
    model = make_model("float64")
    before = flat(model.parameters())
    with one_process(), pytest.raises(cx.ConfigError, match=words):
        Trainer(model, None, "sgd", train_step=step).fit(*data(), **SETTINGS)
    assert (flat(model.parameters()) == before).all()
    assert all(parameter.grad is None for parameter in model.parameters())


def fit_own(trainer: Trainer, **settings: Any) -> None:
    trainer.fit(*data(), **{**SETTINGS, **settings})


def with_loss(loss_fn: Any, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    return kind(make_model("float64"), loss_fn, "sgd", **options)


def pieces() -> nn.ModuleDict:
    return parts(make_model("float64"))


WRONG_WEIGHTS = (None, "3", torch.ones(2), -1.0, math.nan)
test_what_has_no_step_or_no_weight_is_refused_by_name = refuses(
    (lambda: fit_own(Trainer(pieces(), "cross_entropy")), "ModuleDict has no forward, and the trainer no train_step"),
    (
        lambda: Trainer(pieces(), train_step=given_step).predict(data()[0]),
        "ModuleDict has no forward, and the trainer no predict_step",
    ),
    (lambda: Trainer(pieces(), train_step="module:step"), r"train_step must be a function of \(trainer, batch\)"),
    (lambda: Trainer(make_model()).train_step(data()), "train_step is called by fit"),
    (
        lambda: fit_own(with_loss("cross_entropy", Plain, metrics=["f1"])),
        r"the metrics f1 compare outputs with y.*no \"output\"",
    ),
    (lambda: fit_own(with_loss(nn.CrossEntropyLoss(reduction="sum"), Penalized)), r"is a sum \(reduction='sum'\)"),
    (lambda: fit_own(with_loss(None, train_step=later_backward)), r"train_step called backward\(\)"),
    (
        lambda: fit_own(with_loss(None, train_step=later_backward), accumulation_steps=2),
        r"train_step called backward\(\)",
    ),
    *(
        (
            lambda weight=weight: fit_own(with_loss(lambda output, _: (output.sum(), weight))),
            r"its weight is .*: a weight is a count, of samples or tokens",
        )
        for weight in WRONG_WEIGHTS
    ),
)


def resumed(folder: str) -> list[bool]:
    """Return whether a fit from each checkpoint ends as the whole one."""
    results = []
    for path in (None, "step-00000002.ckpt", "epoch-0001.ckpt"):
        trainer = Penalized(make_model("float64"), "cross_entropy", "adam")
        resume = None if path is None else f"{folder}/{path}"
        history = trainer.fit(
            *data(), **SETTINGS, checkpoint_dir=folder, checkpoint_every_n_steps=2, checkpoint_every_n_epochs=1,
            resume=resume,
        )  # fmt: skip
        results.append((flat(trainer.model.parameters()).tolist(), history.history))
        if path is None:
            assert cx.load_weights(make_model("float64"), f"{folder}/epoch-0002.ckpt") == ([], [])  # plain names
    return [each == results[0] for each in results]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_fit_with_a_step_resumes_bit_for_bit(world_size, tmp_path: Path):
    assert everywhere(world_size, resumed, str(tmp_path)) == [[True] * 3] * world_size
