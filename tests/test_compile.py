"""`compile=True` runs the model by torch.compile, trains as without it, and hands the model back as it was."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from fitting import adam, flat, make_model, make_rows, one_process, run_world
from rank_processes import rank_server  # noqa: F401 - a fixture
from test_recomputing import make_deep
from torch import nn

import cyxtrain as cx
from cyxtrain.errors import ConfigError
from cyxtrain.training import compiling
from cyxtrain.training.recomputing import layers_of, recomputed

pytestmark = [pytest.mark.usefixtures("rank_server"), pytest.mark.timeout(300)]


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "cl"))), reason="there is no C++ compiler"
)


class Watched(nn.Module):
    """Notes whether it is being compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x):
        return self.net(x) if torch.compiler.is_compiling() else self.net(x) + self.as_it_is()

    def as_it_is(self) -> float:
        return 0.0 if self.training else 1e3


def fit(compile_it: bool, effective_batch_size: int = 12) -> Any:
    model = make_model()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), adam(model))
    rows = make_rows(40)
    trainer.fit(*rows, epochs=2, effective_batch_size=effective_batch_size, compile=compile_it, verbose=False)
    assert model._compiled_call_impl is None
    assert list(model.state_dict()) == list(make_model().state_dict())
    return flat(model.parameters())


def losses_of_watched() -> tuple[float, float]:
    """The loss of a validation within a compiled fit, and of an evaluation after it."""
    trainer = cx.DistributedTrainer(Watched(), lambda output, _: output.mean(), "sgd")
    rows = make_rows(8)
    history = trainer.fit(*rows, validation_data=rows, epochs=1, compile=True, verbose=False)
    return history.val_losses[0], trainer.evaluate(*rows).loss


# In processes of their own: PyTorch's compiler leaves workers behind.
@pytest.mark.nightly
@needs_compiler
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_compiled_model_trains_as_it_does_without(world_size):
    with one_process():
        as_it_is = fit(False)
    for found in run_world(world_size, fit, True, seconds=200):
        assert abs(found - as_it_is).max() < 1e-5


@pytest.mark.nightly
@needs_compiler
def test_validation_in_a_fit_is_compiled_and_an_evaluation_after_it_is_not():
    [(within, after)] = run_world(1, losses_of_watched, seconds=200)
    assert abs(within) < 10
    assert after > 100


class Block(nn.Module):
    """Its output tells which of its hidden values were dropped; it cannot be compiled in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm, self.dropout = nn.Parameter(torch.full((8,), 0.5)), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x):
        torch._dynamo.graph_break()
        self.norm(x)
        return self.dropout(torch.tanh(self.weight * x))


def gradients_of_recomputed() -> tuple[float, int]:
    """How far a gradient is from the one that the output shows, and how often running means have changed in 3 steps."""
    block, rows = Block(), torch.randn(16, 8)
    model = nn.Sequential(block)
    with recomputed(layers_of(model, [])), compiling.compiled(model):
        for _ in range(3):
            model.zero_grad()
            output = model(rows)
            output.sum().backward()
    kept = (output != 0) * 2.0
    expected = (kept * (1 - torch.tanh(block.weight * rows) ** 2) * rows).sum(0)
    assert block.weight.grad is not None
    assert block.norm.num_batches_tracked is not None
    return float((expected - block.weight.grad).abs().max()), int(block.norm.num_batches_tracked)


def fit_deep(recompute: bool) -> Any:
    model = make_deep()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1))
    if recompute:
        trainer.enable_gradient_checkpointing()
    history = trainer.fit(*make_rows(40), epochs=2, effective_batch_size=20, compile=True, verbose=False)
    assert all(layer.norm.num_batches_tracked == 4 for layer in model.blocks)
    return history.train_losses


@pytest.mark.nightly
@needs_compiler
def test_layers_of_a_compiled_model_calculate_anew_with_the_same_chance_and_change_no_buffer_twice():
    [(difference, changes)] = run_world(1, gradients_of_recomputed, seconds=200)
    assert difference < 1e-5
    assert changes == 3


@pytest.mark.nightly
@needs_compiler
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_compiled_model_whose_layers_calculate_anew_is_fitted(world_size):
    for losses in run_world(world_size, fit_deep, True, seconds=200):
        assert losses[1] < losses[0]


def test_where_nothing_can_be_compiled_it_is_refused(monkeypatch):
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler of C++ was found\nand much more")

    monkeypatch.setattr(torch, "compile", fail)
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), nn.CrossEntropyLoss(), "sgd")
        with pytest.raises(ConfigError, match=r"compile=True: .*no compiler of C\+\+ was found It needs"):
            trainer.fit(*make_rows(4), compile=True)


def test_what_the_user_has_compiled_stays_compiled():
    model = make_model()
    model.compile()  # nothing is compiled before it runs
    own = model._compiled_call_impl
    with compiling.compiled(model):
        assert model._compiled_call_impl is own
    assert model._compiled_call_impl is own
