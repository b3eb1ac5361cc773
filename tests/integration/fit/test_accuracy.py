"""Accuracy is measured where targets are classes, of those that count; where it was asked for and is none, it is
refused; a user's own function may have any name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fitting import CLASSES, make_model, make_rows, one_process, run_world
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import cyxtrain as cx
from cyxtrain.metrics.accuracy import Accuracy
from cyxtrain.metrics.find_accuracy import find_accuracy
from cyxtrain.metrics.loss import Loss

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS, TOKENS, WORDS = 20, 6, 5


def tokens() -> tuple[Tensor, Tensor]:
    """Returns words (20, 6), and labels (20, 6), of which a third is padding, -100."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
    labels = words.clone()
    labels[torch.rand(ROWS, TOKENS, generator=generator) < 1 / 3] = -100
    return words, labels


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Tagger(nn.Module):
    """As Hugging Face's models: takes labels, returns its loss and logits; `shift`: as their causal ones."""

    def __init__(self, shift: bool = False, smoothing: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.table = nn.Embedding(WORDS, WORDS)
        self.shift, self.smoothing = shift, smoothing

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.table(input_ids)
        scores, right = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
        loss = functional.cross_entropy(scores.flatten(0, 1), right.flatten(), label_smoothing=self.smoothing)
        return Output(loss, logits)


def by_hand(model: Tagger) -> float:
    words, labels = tokens()
    logits = model.table(words)
    scores, right = (logits[:, :-1], labels[:, 1:]) if model.shift else (logits, labels)
    counted = right != -100
    return float((scores.argmax(-1) == right)[counted].double().mean())


def measured(model: nn.Module, loss_fn: Any, *data: Any, **more: Any) -> dict[str, float]:
    trainer = cx.DistributedTrainer(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), **more)
    trainer.fit(*data, epochs=1, batch_size=4, verbose=False)
    return dict(trainer.evaluate(*data))


def measured_tokens() -> list[tuple[float, float]]:
    found = []
    words, labels = tokens()
    for shift in (False, True):
        model = Tagger(shift)
        result = measured(model, None, {"input_ids": words}, labels)
        found.append((result["accuracy"], by_hand(model)))
    own = nn.Embedding(WORDS, WORDS)

    def flat_loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    result = measured(own, flat_loss, words, labels, metrics=["accuracy"])
    counted = labels != -100
    found.append((result["accuracy"], float((own(words).argmax(-1) == labels)[counted].double().mean())))
    return found


class Whole(Tagger):
    """It takes its batch as one dictionary."""

    def forward(self, batch: dict[str, Tensor]) -> Output:
        return super().forward(batch["input_ids"], batch["labels"])


def exact(output: Output, target: Tensor) -> Tensor:
    return ((output.logits.argmax(-1) == target) & (target != -100)).sum(1).double()


def measured_in_x() -> list[tuple[list[str], float, float, float]]:
    """Returns names of a fit's history, accuracy and a function's mean of its evaluation, and accuracy by hand."""
    words, labels = tokens()
    arrays = {"input_ids": words, "labels": labels}
    rows = [{"input_ids": word, "labels": label} for word, label in zip(words, labels, strict=True)]
    batches = DataLoader(rows, 4)  # type: ignore[arg-type]
    found = []
    for model, data in ((Tagger(), batches), (Tagger(), arrays), (Whole(), arrays), (Tagger(shift=True), arrays)):
        trainer = cx.DistributedTrainer(model, None, torch.optim.SGD(model.parameters(), 0.1), metrics=[exact])
        history = trainer.fit(data, epochs=1, batch_size=4, verbose=False).history
        evaluation = trainer.evaluate(data)
        found.append(([*history], evaluation["accuracy"], evaluation["exact"], by_hand(model)))
    model = Tagger()
    assert "accuracy" in measured(
        model, None, {name: each.numpy() for name, each in arrays.items()}, metrics=["accuracy"]
    )
    return found


def test_labels_among_the_inputs_of_a_model_with_its_own_loss_are_what_a_loader_gives():
    with one_process():
        alone = measured_in_x()
    for found in (alone, *run_world(2, measured_in_x)):
        for names, accuracy, mean, expected in found:
            assert names == ["loss", "accuracy", "exact", "learning_rate"]
            assert accuracy == pytest.approx(expected, abs=1e-12)
            assert mean > 0


def test_accuracy_of_logits_and_labels_counts_no_padding_and_follows_the_models_shift():
    with one_process():
        alone = measured_tokens()
    for found in (alone, *run_world(2, measured_tokens)):
        assert [ours for ours, _ in found] == pytest.approx([theirs for _, theirs in found], abs=1e-12)


def without_padding(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0)


def plain(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def test_a_loss_that_comes_near_a_cross_entropy_by_chance_shows_no_accuracy():
    """A new model's loss is near ln(classes) in every layout: 1 of 20 came within a thousandth of a wrong one."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        scores = 0.1 * torch.randn(16, 8, 11, generator=generator)
        target = torch.randint(11, (16, 8), generator=generator)
        target[torch.rand(16, 8, generator=generator) < 0.3] = 0
        padded, exact = (
            find_accuracy(Loss(each), scores, target, each(scores, target), asked=False)
            for each in (without_padding, plain)
        )
        assert (padded, exact) == (None, Accuracy("", -1)), seed
    full = target.clamp_min(1)  # the class that the loss ignores is not among these rows
    assert find_accuracy(Loss(without_padding), scores, full, without_padding(scores, full), asked=False) is None
    same = torch.zeros_like(scores)  # every layout explains it
    assert find_accuracy(Loss(plain), same, target, plain(same, target), asked=False) is None
    half = scores.bfloat16()
    assert find_accuracy(Loss(plain), 30 * half, target, plain(30 * half, target), asked=False) == Accuracy("", -1)


def shifted(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def test_a_factor_of_the_loss_does_not_hide_the_accuracy():
    words, labels = tokens()
    table = nn.Embedding(WORDS, WORDS)
    with one_process():
        plain, weighed = (
            cx.DistributedTrainer(table, shifted, "sgd", loss_weights=factor).evaluate(words, labels)
            for factor in (None, 0.5)
        )
    assert weighed.accuracy == plain.accuracy
    assert plain.accuracy is not None
    assert weighed.loss == pytest.approx(plain.loss / 2)


def test_accuracy_of_one_hot_targets_is_that_of_the_largest():
    inputs, classes = make_rows(ROWS)
    one_hot = functional.one_hot(classes, CLASSES).float()
    with one_process():
        for loss_fn in ("cross_entropy", "mse", lambda output, target: (output - target).square().mean()):
            model = make_model()
            result = measured(model, loss_fn, inputs, one_hot, metrics=["accuracy"])
            assert result["accuracy"] == float((model(inputs).argmax(1) == classes).double().mean())
        assert "accuracy" not in measured(make_model(), "mse", inputs, one_hot)  # nobody has asked


def test_accuracy_that_was_asked_for_and_is_none_is_refused():
    inputs, _ = make_rows(ROWS)
    words, labels = tokens()
    refused: list[tuple[Any, ...]] = [
        (make_model(), "mse", inputs, inputs[:, :CLASSES], "the targets are numbers"),
        (make_model(outputs=1), "mse", inputs, inputs[:, :1], "the targets are numbers"),
        (Tagger(smoothing=0.5), None, {"input_ids": words}, labels, "the loss is not a plain cross-entropy"),
    ]
    with one_process():
        for model, loss_fn, x, y, words_of_it in refused:
            with pytest.raises(cx.ConfigError, match=rf"metrics=\['accuracy'\]: {words_of_it}"):
                measured(model, loss_fn, x, y, metrics=["accuracy"])
        assert "accuracy" not in measured(Tagger(smoothing=0.5), None, {"input_ids": words}, labels)
        trainer = cx.DistributedTrainer(make_model(outputs=1), "mse", "sgd")
        with pytest.raises(cx.ConfigError, match="'accuracy'"):
            trainer.fit(inputs, inputs[:, :1], keep_best="accuracy", epochs=1, verbose=False)


def test_a_regression_has_no_accuracy_and_unpacks_as_it_is():
    inputs, _ = make_rows(ROWS)
    with one_process():
        plain = cx.DistributedTrainer(make_model(outputs=1), "mse", "sgd")
        loss, accuracy = plain.evaluate(inputs, inputs[:, :1])
        assert accuracy is None
        measured = cx.DistributedTrainer(make_model(outputs=1), "mse", "sgd", metrics=["mae"])
        evaluation = measured.evaluate(inputs, inputs[:, :1])
        own, mae = evaluation
        assert (own, evaluation.keys(), evaluation[1]) == (loss, ["loss", "mae"], mae)


def test_a_function_may_have_any_name():
    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        return torch.full((len(output),), 0.25)

    def loss(output: Tensor, target: Tensor) -> float:
        return 2.0

    def val_score(output: Tensor, target: Tensor) -> float:
        return 3.0

    inputs, classes = make_rows(ROWS)
    same = [lambda output, target: 4.0, lambda output, target: 5.0]
    model = make_model()
    with one_process():
        result = measured(model, "cross_entropy", inputs, classes, metrics=[accuracy, loss, val_score, *same])
        assert list(result) == ["loss", "accuracy", "metric_loss", "metric_val_score", "<lambda>", "<lambda>_2"]
        assert list(result.values())[1:] == [0.25, 2.0, 3.0, 4.0, 5.0]
        regression = measured(make_model(outputs=1), "mse", inputs, inputs[:, :1], metrics=[accuracy])
        assert regression["accuracy"] == 0.25
