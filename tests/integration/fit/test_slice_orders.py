"""Claims about the trial of two slices in both orders: with virtual_ranks, state that forward keeps is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fitting import CLASSES, FEATURES, everywhere, fingerprint, make_model, make_rows, one_process, seeded
from markers import by_night, nightly_where
from refusals import refusal, refuses
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS = 24
SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 3, "verbose": False}


class Keeping(nn.Module):
    """A layer, and a way to keep something from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()


class Carried(Keeping):
    """Carries its state on, as a recurrent model between parts of a text."""

    state: Tensor | float = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.body(inputs) + self.state
        self.state = 0.1 * scores.detach()
        return scores


class CarriedInBuffer(Keeping):
    """Carries its state in a buffer, which each slice of a step finds alike."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.body(inputs) + self.state
        self.state = 0.1 * scores.detach().mean(0)
        return scores


class Graph(Keeping):
    """Carries its state on with its graph."""

    state: Tensor | float = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.body(inputs) + self.state
        self.state = scores
        return scores


class Counter(Keeping):
    """Scales its output by the number of its calls."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        scores: Tensor = self.body(inputs) * (1 + 0.01 * self.calls)
        return scores


class Drawing(Keeping):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.body(inputs + torch.randn(FEATURES, generator=self.generator))
        return scores


class First(Keeping):
    """Centers by the mean of the first rows that it gets."""

    mean: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = inputs.mean(0)
        scores: Tensor = self.body(inputs - self.mean)
        return scores


class Rounded(torch.autograd.Function):
    """Passes its input on; its gradient has an error in its last bits, another one in each call."""

    calls = 0

    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Rounded.calls += 1
        return gradient * (1 + 1e-6 * Rounded.calls)


class Unsteady(Keeping):
    """Has a kernel whose gradients differ between two calls."""

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = Rounded.apply(self.body(inputs))
        return scores


class Usual(nn.Module):
    """Convolutions, batch norm, dropout, and noise: each slice has its own random numbers and buffers."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            convolution = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2))
            self.layers = nn.Sequential(convolution, nn.Flatten(), nn.Linear(4 * FEATURES, CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers((inputs + 0.1 * torch.randn_like(inputs))[:, None])
        return scores


class Attentive(nn.Module):
    """An embedding, and attention with dropout; `Renormed` has max_norm, which writes to the weight in forward."""

    max_norm: float | None = None

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.embedding = nn.Embedding(9, 8, max_norm=self.max_norm)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        numbers = inputs.abs().mul(2).long().clamp(max=8)
        scores: Tensor = self.head(self.layer(self.embedding(numbers)).mean(1))
        return scores


class Renormed(Attentive):
    max_norm = 1.0


def fit(model: nn.Module, loss: Any = "cross_entropy", **more: Any) -> cx.DistributedTrainer:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    trainer = cx.DistributedTrainer(model, loss, optimizer)
    trainer.fit(*make_rows(ROWS), **{**SETTINGS, "virtual_ranks": 4, **more})
    return trainer


def refused(kind: type[nn.Module]) -> tuple[str, bool]:
    """Returns the error, and whether the refused fit has left model and generator as they were."""
    torch.manual_seed(7)
    model = kind()
    before = [fingerprint(model), torch.get_rng_state().tolist(), torch.get_num_threads()]
    words = refusal(fit, model)
    return words, before == [fingerprint(model), torch.get_rng_state().tolist(), torch.get_num_threads()]


ORDER = "in a slice if another one is computed before it"


@nightly_where(lambda kind, world_size: world_size > 1 and kind is not Carried)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", [Carried, Counter, Drawing, First])
def test_state_that_forward_keeps_is_refused(kind, world_size):
    for words, is_unchanged in everywhere(world_size, refused, kind):
        for part in ("virtual_ranks=4", "and the loss differs by up to", ORDER):
            assert part in words
        assert "Begin anew in each forward; or keep it in a buffer (register_buffer)" in words
        assert is_unchanged


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_kernel_that_adds_in_any_order_is_refused_by_the_name_of_its_gradient(world_size):
    for words, _ in everywhere(world_size, refused, Unsteady):
        assert "and the gradient of body.0.weight differs by up to" in words
        assert "a kernel adds in any order" in words


def test_weights_that_forward_writes_to_are_refused():
    with one_process():
        words, is_unchanged = refused(Renormed)
    assert "and forward or backward writes to embedding.weight: " in words
    assert is_unchanged


def test_a_graph_that_is_kept_is_refused():
    with one_process():
        words, _ = refused(Graph)
    assert words.startswith("virtual_ranks computes the slices of a step one after the other, and that failed")
    assert "second time" in words


def kept_by_loss() -> str:
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        return nn.functional.cross_entropy(output, target) * len(calls)

    return refusal(fit, make_model(), loss)


def test_a_loss_that_keeps_something_is_refused():
    with one_process():
        assert "and the loss differs by up to" in kept_by_loss()


def trained(kind: type[nn.Module], **more: Any) -> str:
    model = kind()
    fit(model, **more)
    return fingerprint(model)


@nightly_where(lambda kind, world_size: world_size > 1 and kind is not Usual)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", [Usual, Attentive, CarriedInBuffer])
def test_random_numbers_and_buffers_are_not_refused(kind, world_size):
    assert all(isinstance(found, str) for found in everywhere(world_size, trained, kind))


@pytest.mark.parametrize("more", [{"batch_size": 1}, {"precision": "bf16"}, {"accumulation_steps": 2}])
def test_settings_are_not_refused(more):
    with one_process():
        assert trained(Usual, **more)


def test_data_of_other_kinds_are_not_refused():
    inputs, targets = make_rows(ROWS)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=3, shuffle=True)
    batches = [(inputs[first : first + 3], targets[first : first + 3]) for first in range(0, ROWS, 3)]
    for data in (loader, lambda: iter(batches)):
        with one_process():
            model = Usual()
            trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
            history = trainer.fit(data, epochs=1, verbose=False, virtual_ranks=4)
        assert math.isfinite(history.train_losses[0])


def gathering(output: Tensor, target: Tensor) -> Tensor:
    everything = cx.all_gather_with_grad(output)
    return nn.functional.cross_entropy(output, target) + everything.mean()


def with_two_optimizers() -> None:
    model = make_model()
    optimizers = {"first": torch.optim.SGD(model[0].parameters()), "last": torch.optim.SGD(model[2].parameters())}
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizers=optimizers)
    trainer.fit(*make_rows(ROWS), **SETTINGS, virtual_ranks=4)


test_what_needs_no_trial_is_refused_before_it = refuses(
    (lambda: fit(make_model(), gathering), "all_gather_with_grad needs all samples of a step at once"),
    (with_two_optimizers, "several optimizers update in turns, which is not divided into slices"),
)


def calls_of(**more: Any) -> tuple[int, int]:
    """Returns how often the model was called before training, and how many samples it then had at most."""
    rows: list[int] = []
    model = make_model()
    model.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    before = []
    callback = cx.callbacks.LambdaCallback(on_train_begin=lambda logs=None: before.extend(rows))
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    trainer.fit(*make_rows(ROWS), **SETTINGS, callbacks=[callback], **more)
    return len(before), max(before)


def test_it_costs_four_forwards_of_a_micro_batch():
    with one_process():
        without = calls_of()
        assert calls_of(virtual_ranks=4) == (without[0] + 4, without[1])
