"""Claims about models that divide their loss by `num_items_in_batch`, and losses that are not a mean over samples."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, flat, make_model, make_rows, one_process, seeded
from markers import by_night, nightly_where
from refusals import warning_texts
from torch import Tensor, nn
from torch.nn import functional

import cyxtrain as cx
from cyxtrain.data.batches.batch import Batch
from cyxtrain.metrics.num_items import find_rule

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS, LENGTH, WORDS = 21, 6, 7
EFFECTIVE, EPOCHS = 8, 2  # batches of 8, 8 and 5


def make_texts(ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Returns words and labels: in batch 0 rank 1 of 2 has nothing to count, in batch 1 a micro-batch."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator)
    labels = words.clone()
    for row in range(ROWS):
        labels[row, 2 + 3 * row % (LENGTH - 1) :] = ignored
    labels[[1, 3, 5, 7, 8, 9]] = ignored
    return words, labels


class Language(nn.Module):
    """What all models of this file are: a mean over words, or their sum over num_items_in_batch."""

    ignored, first = -100, 1

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.body = nn.Sequential(nn.Embedding(WORDS, 4), nn.Tanh(), nn.Linear(4, WORDS)).double()
        self.given: list[int] = []

    def loss(self, words: Tensor, labels: Tensor, items: int | None) -> Tensor:
        """Each word predicts the next one, or itself where `first` is 0."""
        scores = self.body(words)[:, : LENGTH - self.first].transpose(1, 2)
        reduction = "mean" if items is None else "sum"
        total = functional.cross_entropy(
            scores, labels[:, self.first :], ignore_index=self.ignored, reduction=reduction
        )
        if self.training and items is not None:
            self.given.append(items)
        return total if items is None else total / items


class Causal(Language):
    """As Hugging Face's language models: whatever it is given by name goes to the loss."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **keywords: Any) -> dict[str, Tensor]:
        if labels is None:
            return {"logits": self.body(input_ids)}
        return {"loss": self.loss(input_ids, labels, keywords.get("num_items_in_batch"))}


class Padded(Language):
    """It names the argument; padding is 0, and each word predicts itself."""

    ignored, first = 0, 0

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: int | None = None) -> Tensor:
        return self.loss(input_ids, labels, num_items_in_batch)


class Required(Causal):
    """It cannot do without the argument."""

    def forward(self, input_ids: Tensor, labels: Tensor, *, num_items_in_batch: int) -> dict[str, Tensor]:
        return {"loss": self.loss(input_ids, labels, num_items_in_batch)}


MODELS = {"**kwargs": (Causal, -100), "by name": (Padded, 0), "required": (Required, -100)}


def fit_all(accumulation_steps: int) -> dict[str, Any]:
    found = {}
    for name, (make, ignored) in MODELS.items():
        model, (words, labels) = make(), make_texts(ignored)
        trainer = cx.DistributedTrainer(model, None, torch.optim.SGD(model.parameters(), 0.3, momentum=0.5))
        data = ({"input_ids": words}, {"labels": labels})
        settings = {"epochs": EPOCHS, "effective_batch_size": EFFECTIVE, "accumulation_steps": accumulation_steps}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            history = trainer.fit(*data, shuffle=False, verbose=False, **settings)
        found[name] = {
            "parameters": flat(model.parameters()),
            "losses": history.train_losses,
            "evaluations": [trainer.evaluate(*data, batch_size=size).loss for size in (1, 4, 13, 96)],
            "given": list(dict.fromkeys(model.given)),
        }
    return found


@functools.cache
def by_hand(name: str) -> tuple[Any, float, list[int]]:
    """Returns (parameters, loss of all rows, what counts in each batch) of a loop with whole batches."""
    make, ignored = MODELS[name]
    model, (words, labels) = make(), make_texts(ignored)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.5)
    for _, first in itertools.product(range(EPOCHS), range(0, ROWS, EFFECTIVE)):
        rows = slice(first, first + EFFECTIVE)
        optimizer.zero_grad()
        model.loss(words[rows], labels[rows], None).backward()
        optimizer.step()
    batches = [labels[first : first + EFFECTIVE, model.first :] for first in range(0, ROWS, EFFECTIVE)]
    counts = [int((batch != ignored).sum()) for batch in batches]
    return flat(model.parameters()), model.loss(words, labels, None).item(), counts


@functools.cache
def found_on(world_size: int, accumulation_steps: int) -> list[dict[str, Any]]:
    return everywhere(world_size, fit_all, accumulation_steps)


@nightly_where(lambda world_size, accumulation_steps: (world_size, accumulation_steps) not in ((1, 1), (2, 4)))
@pytest.mark.parametrize("accumulation_steps", [1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "required"])
def test_a_model_is_given_what_counts_on_all_ranks_and_micro_batches(name, world_size, accumulation_steps):
    parameters, loss, counts = by_hand(name)
    for found in (rank[name] for rank in found_on(world_size, accumulation_steps)):
        np.testing.assert_allclose(found["parameters"], parameters, rtol=0, atol=1e-12)
        assert found["evaluations"] == [pytest.approx(loss, rel=1e-12)] * 4
        assert found["losses"] == pytest.approx(found_on(1, 1)[0][name]["losses"], rel=1e-12)
        assert set(found["given"]) <= set(counts)
    assert found_on(world_size, accumulation_steps)[0][name]["given"] == counts


@pytest.mark.parametrize(("world_size", "steps"), [(2, 4), by_night(1, 4), by_night(3, 1)])
def test_a_model_that_needs_the_number_is_given_what_trainers_count(world_size, steps):
    one = found_on(1, 1)[0]["required"]
    found = found_on(world_size, steps)[0]["required"]
    np.testing.assert_allclose(found["parameters"], one["parameters"], rtol=0, atol=1e-12)
    assert found["given"] == one["given"]
    assert [*found["evaluations"], *one["evaluations"]] == [pytest.approx(one["evaluations"][0], rel=1e-12)] * 8


def test_the_rule_is_that_of_the_model():
    labels = torch.full((4, 12), -100)
    for row, length in enumerate((12, 11, 8, 7)):
        labels[row, :length] = row
    batches = [Batch(0, labels, {"labels": labels}), Batch(0, labels[:1], {"labels": labels[:1]})]
    for counts, name in (
        ([34, 11], "y['labels'][..., 1:] != -100"),
        ([38, 12], "y['labels'] != -100"),
        ([4, 1], "rows"),
    ):
        rule = find_rule(batches, counts)
        assert rule is not None
        assert rule.name == name
    assert find_rule(batches, [35, 11]) is None


# --- warnings -------------------------------------------------------------------------------------------------------


class Auxiliary(Causal):
    """A part of its loss is not divided by the number, as the routers' of a mixture of experts."""

    def loss(self, words: Tensor, labels: Tensor, items: int | None) -> Tensor:
        return super().loss(words, labels, items) + self.body[2].weight.square().mean()


class Halved(Causal):
    """It returns (mean, weight) in the place of (sum, weight)."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return {"loss": (self.loss(input_ids, labels, None), (labels[..., self.first :] != -100).sum())}


class Deaf(Causal):
    """It takes whatever it is given, and does not look at it."""

    def loss(self, words: Tensor, labels: Tensor, items: int | None) -> Tensor:
        return super().loss(words, labels, None)


class Classifier(nn.Module):
    """As BERT's: takes whatever it is given, and its loss is a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(make_model(), nn.Dropout(0.5))

    def forward(self, inputs: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(self.body(inputs), labels)}


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"a": self.body(inputs)}


class Noisy(nn.Module):
    """Chance decides about its loss, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs + torch.randn_like(inputs)).square().mean()


def pairs(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def tagger() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))


def over_words(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2), target, ignore_index=0)


def warned(model: nn.Module, loss_fn: Any, *data: Any) -> str:
    """Returns what fit warns of, and that it does so before the first step."""
    trainer = cx.DistributedTrainer(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    with warning_texts() as caught:
        trainer.fit(*data, epochs=1, batch_size=8, verbose=False)
    return "\n".join(caught)


WORDS_AND_LABELS = make_texts()
HUGGING = ({"input_ids": WORDS_AND_LABELS[0]}, {"labels": WORDS_AND_LABELS[1]})
DIVIDED = "it is (mean, weight) where fit expects (sum, weight)"
UNEQUAL: dict[str, tuple[Callable[[], nn.Module], Any, tuple[Any, ...], str]] = {
    "a lambda": (tagger, over_words, make_texts(0), "Return (sum, weight) from loss_fn"),
    "a sum": (
        make_model,
        lambda o, y: functional.cross_entropy(o, y, reduction="sum"),
        make_rows(20),
        "sum over samples",
    ),
    "class weights": (
        make_model,
        lambda output, y: functional.cross_entropy(output, y, torch.tensor([1.0, 2.0, 9.0])),
        make_rows(20),
        "not a mean over samples",
    ),
    "pairs": (make_model, pairs, make_rows(20), "cx.all_gather_with_grad"),
    "a model that ignores the number": (Deaf, None, HUGGING, "let forward divide the sum by an argument num_items"),
    "a mean in a pair": (make_model, lambda o, y: (functional.cross_entropy(o, y), len(o)), make_rows(20), DIVIDED),
    "a mean over words in a pair": (tagger, lambda o, y: (over_words(o, y), (y != 0).sum()), make_texts(0), DIVIDED),
    "a mean in one of several pairs": (
        Named,
        {"a": lambda o, y: (functional.cross_entropy(o, y), len(o))},
        (make_rows(20)[0], {"a": make_rows(20)[1]}),
        "'a_loss', a loss, of 8 samples is (",
    ),
    "a mean in the model's pair": (Halved, None, HUGGING, DIVIDED),
    "a part of the loss": (Auxiliary, None, HUGGING, "which is not a whole number"),
}
EQUAL: dict[str, tuple[Callable[[], nn.Module], Any, tuple[Any, ...]]] = {
    "a mean": (make_model, lambda output, y: functional.cross_entropy(output, y).mul(2), make_rows(20)),
    "one number per row": (make_model, lambda output, y: output.square().mean(1), make_rows(20)),
    "a pair": (tagger, lambda o, y: (over_words(o, y) * (y != 0).sum(), (y != 0).sum()), make_texts(0)),
    "torch's own": (make_model, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 9.0])), make_rows(20)),
    "a classifier that takes **kwargs": (
        Classifier,
        None,
        ({"inputs": make_rows(20)[0]}, {"labels": make_rows(20)[1]}),
    ),
    "chance": (Noisy, None, make_rows(20)[:1]),
    "full texts": (tagger, over_words, (WORDS_AND_LABELS[0], WORDS_AND_LABELS[0])),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_loss_that_is_no_mean_over_rows_is_a_warning_with_the_remedy(name):
    make, loss_fn, data, words = UNEQUAL[name]
    with one_process():
        assert words in warned(make(), loss_fn, *data)


@pytest.mark.parametrize("name", EQUAL)
def test_a_loss_whose_weight_is_known_is_no_warning(name):
    make, loss_fn, data = EQUAL[name]
    with one_process():
        assert warned(make(), loss_fn, *data) == ""


def test_a_negative_weight_is_refused_before_the_first_step():
    model, (inputs, classes) = make_model(), make_rows(20)
    trainer = cx.DistributedTrainer(model, lambda o, y: (functional.cross_entropy(o, y, reduction="sum"), -len(o)))
    with one_process(), pytest.raises(cx.ConfigError, match="its weight is -8"):
        trainer.fit(inputs, classes, epochs=1, batch_size=8, verbose=False)


def fit_lambda() -> list[str]:
    with warning_texts() as caught:
        model = tagger()
        cx.DistributedTrainer(model, over_words).fit(*make_texts(0), epochs=1, batch_size=8, verbose=False)
    return caught


def test_only_rank_0_warns():
    first, second = everywhere(2, fit_lambda)
    assert len(first) == 1
    assert second == []


def amp_steps() -> list[Any]:
    """Returns what two steps of two micro-batches come to, of rows that do not count alike."""
    words, labels = make_texts()
    model = Causal().float()
    optimizer = functools.partial(torch.optim.SGD, lr=0.3)
    amp = cx.DistributedAMPTrainer(model, accumulation_steps=2, optimizer=optimizer)
    rank, world_size = cx.get_rank(), cx.get_world_size()
    for first in (0, 4, 8, 12):
        own = slice(first + rank, first + 4, world_size)
        amp.training_step({"input_ids": words[own], "labels": labels[own]})
    return [flat(model.parameters()), amp.step]


def test_the_loop_in_16_bits_weighs_by_what_a_model_counts():
    (one, steps), *_ = everywhere(1, amp_steps)
    assert steps == 2
    for parameters, _ in everywhere(2, amp_steps):
        np.testing.assert_allclose(parameters, one, rtol=0, atol=2e-4)
    model, (words, labels) = Causal().float(), make_texts()
    for rows in (slice(0, 8), slice(8, 16)):
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model.loss(words[rows], labels[rows], None)
        loss.backward()
        torch.optim.SGD(model.parameters(), 0.3).step()
    np.testing.assert_allclose(one, flat(model.parameters()), rtol=0, atol=2e-4)
