"""Claims about losses with their own weight: over tokens, and several losses that are added."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, flat, one_process, run_world, seeded
from markers import by_night, nightly_where
from refusals import refuses
from torch import Tensor, nn
from torch.nn import functional

import cyxtrain as cx
from cyxtrain.metrics.loss import Loss

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS, LENGTH, WORDS, IGNORED = 21, 5, 7, -100
EFFECTIVE, EPOCHS = 8, 2  # batches of 8, 8 and 5
FACTORS = {"token": 0.25, "size": 3.0}


def make_texts() -> tuple[Tensor, Tensor]:
    """Returns words and labels, padded by -100: in batch 0 rank 1 of 2 has none, in batch 1 a micro-batch."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    for row in range(ROWS):
        labels[row, 1 + row % LENGTH :] = IGNORED
    labels[[1, 3, 5, 7, 8, 9]] = IGNORED
    return words, labels


class Tagger(nn.Module):
    """Says a word and a size for each word."""

    def __init__(self, answer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.register_buffer("version", torch.zeros(1))  # ranks share buffers once in a step, whatever counts
        with seeded():
            self.embedding, self.token, self.size = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS), nn.Linear(4, 1)
        self.double()
        self.answer = answer

    def forward(self, words: Tensor, labels: Any = None) -> Any:
        hidden = self.embedding(words).tanh()
        outputs = {"token": self.token(hidden).transpose(1, 2), "size": self.size(hidden.mean(1))}
        return outputs if self.answer is None else self.answer(outputs, labels)


def token_pair(outputs: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Returns (sum, weight), by way of a mean that is 0 / 0 if no label counts."""
    logits = outputs["token"] if isinstance(outputs, dict) else outputs
    labels = labels["token"] if isinstance(labels, dict) else labels
    count = (labels != IGNORED).sum()
    return functional.cross_entropy(logits, labels) * count, count


def size_mean(outputs: Any, labels: Any) -> Tensor:
    return outputs["size"].square().mean() + outputs["size"].mean()


def both(labels: Tensor) -> dict[str, Tensor]:
    return {"token": labels, "size": (labels != IGNORED).sum(1, keepdim=True).double() / LENGTH}


Parts = dict[str, tuple[Tensor, Any]]
Problem = tuple[Callable[[], nn.Module], Any, Any, Callable[[Any, Any], Parts]]


def only_tokens(outputs: Any, labels: Any) -> Parts:
    return {"token": token_pair(outputs, labels)}


def tokens_and_size(outputs: Any, labels: Any) -> Parts:
    return {"token": token_pair(outputs, labels), "size": (size_mean(outputs, labels), 1)}


def tokens_and_error(outputs: Any, labels: Any) -> Parts:
    error = functional.mse_loss(outputs["size"], labels["size"])
    return {"token": token_pair(outputs, labels), "size": (error, 1)}


def of_model(answer: Callable[..., Any]) -> Callable[[], nn.Module]:
    return functools.partial(Tagger, answer)


PROBLEMS: dict[str, Problem] = {
    "a loss_fn's pair": (Tagger, token_pair, None, only_tokens),
    "a model's pair": (of_model(token_pair), None, None, only_tokens),
    "a pair under loss": (
        of_model(lambda *given: {"loss": token_pair(*given), "size": size_mean(*given), "logits": given[0]["token"]}),
        *(None, None, only_tokens),
    ),
    "an object's pair": (
        of_model(lambda *given: SimpleNamespace(loss=token_pair(*given), logits=given[0])),
        *(None, None, only_tokens),
    ),
    "losses that a model returns": (
        of_model(lambda *given: {"token": token_pair(*given), "size": size_mean(*given)}),
        *(None, FACTORS, tokens_and_size),
    ),
    "a loss for each output": (
        Tagger,
        {"token": nn.CrossEntropyLoss(), "size": "mse"},
        *(FACTORS, tokens_and_error),
    ),
    "a loss of one's own for each output": (Tagger, {"token": token_pair, "size": "mse"}, FACTORS, tokens_and_error),
}
DICTIONARIES = ("a loss for each output", "a loss of one's own for each output")
NIGHTLY = ("a loss_fn's pair", "an object's pair", "a loss of one's own for each output")
DAILY = tuple(name for name in PROBLEMS if name not in NIGHTLY)


def data_of(name: str) -> tuple[Tensor, Any]:
    words, labels = make_texts()
    return words, both(labels) if name in DICTIONARIES else labels


def rows_of(labels: Any, rows: Any) -> Any:
    return {name: part[rows] for name, part in labels.items()} if isinstance(labels, dict) else labels[rows]


def joined(parts: Parts) -> tuple[Any, dict[str, Any]]:
    """Returns (loss, mean of each part) of one batch."""
    means = {name: total / weight for name, (total, weight) in parts.items()}
    factors = FACTORS if len(parts) > 1 else {}
    return sum(factors.get(name, 1.0) * mean for name, mean in means.items()), means


def fit_all(names: tuple[str, ...], accumulation_steps: int) -> dict[str, Any]:
    found = {}
    for name in names:
        make, loss_fn, loss_weights, _ = PROBLEMS[name]
        model, (words, labels) = make(), data_of(name)
        optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.5)
        trainer = cx.DistributedTrainer(model, loss_fn, optimizer, loss_weights=loss_weights)
        settings = {"epochs": EPOCHS, "effective_batch_size": EFFECTIVE, "accumulation_steps": accumulation_steps}
        history = trainer.fit(words, labels, shuffle=False, verbose=False, **settings)
        evaluations = [dict(trainer.evaluate(words, labels, batch_size=size)) for size in (1, 4, 96)]
        found[name] = {
            "parameters": flat(model.parameters()),
            "history": {key: values for key, values in history.history.items() if "time" not in key},
            "evaluations": evaluations,
        }
    return found


@functools.cache
def by_hand(name: str) -> tuple[Any, Any]:
    """Returns (parameters, the means over all rows) of a loop with whole batches."""
    make, _, _, parts = PROBLEMS[name]
    model, (words, labels) = make(), data_of(name)
    model.answer = None
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.5)
    for _, first in itertools.product(range(EPOCHS), range(0, ROWS, EFFECTIVE)):
        rows = slice(first, first + EFFECTIVE)
        optimizer.zero_grad()
        joined(parts(model(words[rows]), rows_of(labels, rows)))[0].backward()
        optimizer.step()
    with torch.no_grad():
        loss, means = joined(parts(model(words), labels))
    return flat(model.parameters()), {"loss": loss.item(), **{key: mean.item() for key, mean in means.items()}}


@functools.cache
def found_on(world_size: int, accumulation_steps: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    return everywhere(world_size, fit_all, names, accumulation_steps)


@nightly_where(
    lambda name, world_size, accumulation_steps: (world_size, accumulation_steps) != (2, 4) or name in NIGHTLY
)
@pytest.mark.parametrize("accumulation_steps", [1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", PROBLEMS)
def test_terms_are_divided_by_the_weight_of_all_ranks_and_micro_batches(name, world_size, accumulation_steps):
    parameters, means = by_hand(name)
    names = NIGHTLY if name in NIGHTLY else DAILY
    ranks = found_on(world_size, accumulation_steps, names)
    for found in ranks:
        np.testing.assert_allclose(found[name]["parameters"], parameters, rtol=0, atol=1e-12)
        assert repr(found[name]["history"]) == repr(ranks[0][name]["history"])
        for evaluation in found[name]["evaluations"]:
            assert evaluation["loss"] == pytest.approx(means["loss"], rel=1e-12)
    shown = ranks[0][name]["history"]
    first = found_on(1, 1, names)[0][name]["history"]
    assert {key: shown[key] for key in first} == {key: pytest.approx(first[key], rel=1e-12) for key in first}


def test_history_and_evaluate_have_each_of_several_losses():
    names = {"losses that a model returns": ("token", "size"), DICTIONARIES[0]: ("token_loss", "size_loss")}
    for name, (token, size) in names.items():
        found, (_, means) = found_on(1, 1, DAILY)[0][name], by_hand(name)
        evaluation = found["evaluations"][0]
        assert (evaluation[token], evaluation[size]) == pytest.approx((means["token"], means["size"]), rel=1e-12)
        numbers = [found["history"][key] for key in ("loss", token, size)]
        for loss, *each in zip(*numbers, strict=True):
            assert loss == pytest.approx(FACTORS["token"] * each[0] + FACTORS["size"] * each[1], rel=1e-12)


def test_a_scalar_beside_the_loss_is_shown_and_not_trained():
    found = found_on(1, 1, DAILY)[0]["a pair under loss"]
    assert len(found["history"]["size"]) == EPOCHS
    assert "logits" not in found["history"]
    np.testing.assert_array_equal(found["parameters"], found_on(1, 1, DAILY)[0]["a model's pair"]["parameters"])


def test_a_step_in_which_no_label_counts_leaves_the_model_as_it_was():
    with one_process():
        model, (words, labels) = Tagger(token_pair), make_texts()
        before = flat(model.parameters())
        trainer = cx.DistributedTrainer(model, None, torch.optim.SGD(model.parameters(), 0.1))
        history = trainer.fit(words, torch.full_like(labels, IGNORED), epochs=1, verbose=False)
    np.testing.assert_array_equal(flat(model.parameters()), before)
    assert np.isnan(history.train_losses[0])


class Heads(nn.Module):
    """Two outputs: the second is NaN in validation."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        b = self.b(x)
        return {"a": self.a(x), "b": b if self.training else b * torch.nan}


def validated_with_a_nan() -> list[float]:
    model = Heads()
    x = torch.ones(8, 4)
    y = {"a": torch.ones(8, 1), "b": torch.ones(8, 1)}
    trainer = cx.DistributedTrainer(model, {"a": "mse", "b": "mse"}, torch.optim.SGD(model.parameters(), 0.01))
    history = trainer.fit(x, y, x, y, epochs=1, batch_size=4, verbose=False)
    return [*history.train_losses, *history.val_losses, trainer.evaluate(x, y).loss]


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_nan_in_one_of_several_losses_is_one_in_their_sum(world_size):
    for trained, validated, evaluated in everywhere(world_size, validated_with_a_nan):
        assert np.isfinite(trained)
        assert np.isnan([validated, evaluated]).all()


def test_only_a_loss_of_weight_0_is_left_out_of_the_sum():
    loss = Loss({"a": "mse", "b": "mse"})
    nan = float("nan")
    for values, weights, expected in (
        ((1.0, 2.0), (3.0, 3.0), 3.0),
        ((1.0, nan), (3.0, 0.0), 1.0),
        ((1.0, nan), (3.0, 3.0), nan),
        ((nan, nan), (0.0, 0.0), nan),
        ((float("inf"), -float("inf")), (1.0, 1.0), nan),
    ):
        means = {"a_loss": values[0], "b_loss": values[1]}
        found = loss.combined(means, {"a_loss": weights[0], "b_loss": weights[1]})
        assert found == pytest.approx(expected, nan_ok=True), (values, weights)


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_one_loss_is_multiplied_by_a_number(world_size):
    assert run_world(world_size, halved) == [None] * world_size


def halved() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, classes = torch.randn(21, 4, generator=generator), torch.randint(3, (21,), generator=generator)
    found = []
    for loss_weights, rate in ((None, 0.1), (0.5, 0.2)):  # a power of two: exact
        with seeded():
            model = nn.Linear(4, 3)
        sgd = torch.optim.SGD(model.parameters(), rate)
        trainer = cx.DistributedTrainer(model, functional.cross_entropy, sgd, loss_weights=loss_weights)
        history = trainer.fit(rows, classes, epochs=2, effective_batch_size=8, verbose=False)
        evaluation = trainer.evaluate(rows, classes, verbose=False)
        found.append((history.train_losses, history.train_accuracies, evaluation, flat(model.parameters())))
    (losses, accuracies, (loss, accuracy), parameters), half = found
    np.testing.assert_array_equal(half[3], parameters)
    np.testing.assert_allclose(half[0], np.array(losses) / 2, rtol=1e-12)
    assert (half[1], half[2].accuracy) == (accuracies, accuracy)
    np.testing.assert_allclose(half[2].loss, loss / 2, rtol=1e-12)


def test_an_output_without_a_loss_is_not_trained():
    words, labels = make_texts()
    with one_process():
        trainer = cx.DistributedTrainer(Tagger(), {"token": None, "size": "mse"}, loss_weights={"token": 2.0})
        assert "size: mse" in repr(trainer)
        history = trainer.fit(words, {"size": both(labels)["size"]}, epochs=1, batch_size=8, verbose=False)
    assert "size_loss" in history.history
    assert "token_loss" not in history.history


def mean_unless_full(outputs: Any, labels: Tensor) -> Any:
    """Return (sum, weight) of a whole batch alone."""
    total, count = token_pair(outputs, labels)
    return (total, count) if len(labels) == 8 else total / count


def fit_tagger(loss_fn: Any, labels: Any, model: nn.Module | None = None, **options: Any) -> None:
    trainer = cx.DistributedTrainer(model or Tagger(), loss_fn, **options)
    trainer.fit(WORDS_OF_ROWS, labels, batch_size=8, verbose=False)


def weigh(loss_fn: Any, loss_weights: Any) -> None:
    cx.DistributedTrainer(Tagger(), loss_fn, loss_weights=loss_weights)


WORDS_OF_ROWS, LABELS_OF_ROWS = make_texts()
SIZES = both(LABELS_OF_ROWS)["size"]
NAMED = PROBLEMS["losses that a model returns"][0]
test_what_cannot_be_weighed_is_refused_before_training = refuses(
    (lambda: weigh("mse", {"size": 2.0}), "give loss_fn as a dictionary"),
    (lambda: weigh({"size": "mse"}, {"sizes": 2.0}), "loss_fn has no output 'sizes'"),
    (lambda: weigh({"size": "mse"}, {"size": "2"}), "must be a dictionary of numbers"),
    (lambda: weigh(None, 2.0), "or a number for one loss_fn"),
    (lambda: weigh({"size": "mse"}, 2.0), "must be a dictionary of numbers"),
    (lambda: weigh(["mse", "mse"], [0.1, 0.2]), "give loss_fn as a dictionary, .*loss_weights={"),
    (lambda: weigh({}, None), "empty dictionary"),
    (lambda: weigh({"size": None}, None), "empty dictionary"),
    (lambda: weigh({"size": "mes"}, None), "no loss 'mes'"),
    (lambda: fit_tagger({"size": "mse"}, LABELS_OF_ROWS), "y must have the keys of loss_fn"),
    (lambda: fit_tagger(None, LABELS_OF_ROWS, NAMED(), loss_weights={"sise": 1.0}), "no entry 'sise'"),
    (lambda: fit_tagger({"height": "mse"}, {"height": SIZES}), r"no part 'height', .* it has token, size"),
    (lambda: fit_tagger(mean_unless_full, LABELS_OF_ROWS), r"was \(sum, weight\) in the dry run, and is a mean"),
)


# --- steps in which nothing counts ------------------------------------------------------------------------------------

# Steps of 4 rows: in the second one nothing counts, in the third one the first row alone.
FEW_ROWS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)).double()
FEW_LABELS = torch.tensor([0, 2, 0, 2, 1, 1, 1, 1, 0, 1, 1, 1, 2, 2, 0, 0])
NOT_COUNTED = 1


class Small(nn.Module):
    def __init__(self, answer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        with seeded():
            self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.answer = answer

    def forward(self, x: Tensor, labels: Any = None) -> Any:
        output = self.layers(x)
        return output if self.answer is None else self.answer(output, labels)


def sum_of_counted(output: Tensor, labels: Tensor) -> Any:
    total = functional.cross_entropy(output, labels, ignore_index=NOT_COUNTED, reduction="sum")
    return total, (labels != NOT_COUNTED).sum()


def mean_of_counted(output: Tensor, labels: Tensor) -> Any:
    count = (labels != NOT_COUNTED).sum()
    return functional.cross_entropy(output, labels, ignore_index=NOT_COUNTED) * count, count  # 0 / 0 of nothing


def step_of(loss: Callable[..., Any], *, optimizes: bool) -> Any:
    def train_step(trainer: cx.DistributedTrainer, batch: Any) -> Any:
        found = loss(trainer.model(batch[0]), batch[1])
        if optimizes:
            trainer.optimize(found)
        return {"loss": found}

    return train_step


Form = tuple[Callable[..., Any] | None, Any, Any]
"""What the model returns, the loss_fn and the train_step."""
FORMS: dict[str, Form] = {
    "ignore_index": (None, nn.CrossEntropyLoss(ignore_index=NOT_COUNTED), None),
    "class weights": (None, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0, 1]).double()), None),
    "(sum, weight)": (None, sum_of_counted, None),
    "(0 / 0, 0)": (None, mean_of_counted, None),
    "a model's pair": (sum_of_counted, None, None),
    "a model's 0 / 0": (lambda *given: {"loss": mean_of_counted(*given)}, None, None),
    "several losses": (lambda *given: {"a": mean_of_counted(*given)}, None, None),
    "a step": (None, None, step_of(mean_of_counted, optimizes=False)),
    "optimize": (None, None, step_of(sum_of_counted, optimizes=True)),
    "optimize of 0 / 0": (None, None, step_of(mean_of_counted, optimizes=True)),
}


def fit_few(form: Form, labels: Tensor, make: Any, factor: Any = None, **settings: Any) -> tuple[Any, int, float]:
    answer, loss, step = form
    model = Small(answer)
    optimizer = make(model.parameters())
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    trainer = cx.DistributedTrainer(model, loss, optimizer, scheduler=rates, train_step=step, loss_weights=factor)
    given = {"epochs": 1, "effective_batch_size": 4, "shuffle": False, "verbose": False}
    trainer.fit(FEW_ROWS, labels, **given, **settings)
    return flat(model.parameters()).tolist(), trainer.step, optimizer.param_groups[0]["lr"]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.1)


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (adamw, {}),
    "clip_value": (momentum, {"clip_value": 0.1}),
    "clip_norm": (momentum, {"clip_norm": 0.5}),
    "clip_adaptive": (momentum, {"clip_adaptive": 0.1}),
    "accumulation": (momentum, {"accumulation_steps": 2}),
}


def fit_forms(way: str) -> dict[str, Any]:
    make, settings = WAYS[way]
    forms = {name: form for name, form in FORMS.items() if way != "accumulation" or "optimize" not in name}
    return {name: fit_few(form, FEW_LABELS, make, **settings) for name, form in forms.items()}


@nightly_where(lambda world_size, way: world_size == 1 or way != "adamw")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_in_which_nothing_counts_is_taken_alike_in_every_form(way, world_size):
    forms = everywhere(world_size, fit_forms, way)[0]
    expected, steps, rate = forms["ignore_index"]
    for name, (parameters, *others) in forms.items():
        np.testing.assert_allclose(parameters, expected, rtol=1e-12, err_msg=name)
        assert (name, others) == (name, [steps, rate])


def of_pairs(nothing: str, *, gathers: bool = False, scale: float = 1.0) -> Callable[..., Any]:
    """Returns a loss of the rows with a label, which is a constant in a batch without any."""

    def loss(output: Tensor, labels: Tensor) -> Any:
        others = cx.all_gather_with_grad(output) if gathers else output
        found = labels != NOT_COUNTED
        leaf = torch.zeros((), requires_grad=True)
        constants = {"a tensor": torch.zeros(()), "a number": 0.0, "a leaf": leaf}
        if not found.any():
            return constants.get(nothing, others.sum() * 0)
        return (output[found] @ others.T if gathers else output[found]).square().sum() / len(labels) * scale

    return loss


def fit_constants() -> list[dict[str, Any]]:
    found = []
    for nothing, gathers in itertools.product(("a graph", "a tensor", "a number", "a leaf"), (False, True)):
        loss = of_pairs(nothing, gathers=gathers)
        own = step_of(loss, optimizes=False)
        forms: dict[str, Form] = {"loss_fn": (None, loss, None)}
        if nothing != "a number":  # a model and a step return tensors
            forms |= {"model": (loss, None, None), "step": (None, None, own)}
        more = {"accumulation_steps": 1 if gathers else 2}
        fits = {name: fit_few(form, FEW_LABELS, momentum, **more) for name, form in forms.items()}
        halved = of_pairs(nothing, gathers=gathers, scale=2.0)
        fits["factor"] = fit_few((None, halved, None), FEW_LABELS, momentum, 0.5, **more)
        if not gathers and nothing != "a number":
            fits["optimize"] = fit_few((None, None, step_of(loss, optimizes=True)), FEW_LABELS, momentum)
        found.append(fits)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_is_a_constant_in_a_step_counts_as_zero(world_size):
    found = everywhere(world_size, fit_constants)[0]
    for expected, others in zip([*found[:2]] * 4, found, strict=True):
        for name, (parameters, *more) in others.items():
            np.testing.assert_allclose(parameters, expected["loss_fn"][0], rtol=1e-12, err_msg=name)
            assert more == [*expected["loss_fn"][1:]]


# --- PyTorch's default type ------------------------------------------------------------------------------------------


def bias_by_default_dtype() -> list[list[float]]:
    """Returns the bias after a step whose labels are more than float16 can count, for some default types."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        torch.manual_seed(0)
        inputs, labels = torch.randn(4, 3, 40_000), torch.randint(0, 2, (4, 40_000))
        labels[:, ::7] = NOT_COUNTED
        model = torch.nn.Conv1d(3, 2, 1)
        trainer = cx.DistributedTrainer(
            model, torch.nn.CrossEntropyLoss(ignore_index=NOT_COUNTED), torch.optim.SGD(model.parameters(), 1.0)
        )
        torch.set_default_dtype(dtype)
        try:
            trainer.fit(
                inputs, labels, epochs=1, batch_size=2 // cx.get_world_size(), accumulation_steps=2, verbose=False
            )
        finally:
            torch.set_default_dtype(torch.float32)
        assert model.bias is not None
        found.append(model.bias.tolist())
    return found


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_labels_are_counted_alike_whatever_pytorchs_default_type_is(world_size: int) -> None:
    for first, *others in everywhere(world_size, bias_by_default_dtype):
        assert others == [first] * 3


def pair_of_marked(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counts = targets > 0
    return (outputs.float() * 5 * counts).sum(), counts.sum()


def overflowing(as_view: bool) -> str:
    """Returns the error of a fit in float16, whose second step has one sample that counts, of a large gradient."""
    model = nn.Linear(1, 1, bias=False).half()
    nn.init.ones_(model.weight)
    x, y = torch.ones(16, 1).half(), torch.ones(16, 1).half()
    x[9], y[8:], y[9] = 30000, 0, 1
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    settings = cx.DDPConfig(gradient_as_bucket_view=as_view)
    trainer = cx.DistributedTrainer(model, pair_of_marked, optimizer, ddp_config=settings)
    try:
        trainer.fit(x, y, epochs=1, effective_batch_size=8, accumulation_steps=2, shuffle=False, verbose=False)
    except cx.NonFiniteError as error:
        assert model.weight.isfinite().all()
        return str(error)
    return ""


@pytest.mark.parametrize("as_view", [True, by_night(False)])
def test_gradients_that_the_division_by_the_weight_makes_infinite_are_not_taken(as_view):
    """Before it they are 18,750, and 8 times as much after it: beyond 65,504."""
    for error in run_world(2, overflowing, as_view):
        assert "step 2 (2 in all): the gradients of weight are not finite in the average over ranks" in error
