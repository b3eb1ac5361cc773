"""`compile=` runs the model by torch.compile, trains as without it, and hands the model back as it was."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deep_model import make_deep
from fitting import adam, flat, make_model, make_rows, one_process, run_world
from markers import by_night, needs_compiler
from torch import Tensor, nn

import cyxtrain as cx
from cyxtrain.errors import ConfigError
from cyxtrain.training.model import compile
from cyxtrain.training.model.compile import layers_of, recomputed

pytestmark = [pytest.mark.usefixtures("rank_server"), pytest.mark.timeout(300)]
COMPILED = cx.DistributedTrainingConfig(compile=True)


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


# In their own processes: PyTorch's compiler leaves workers behind.
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
    with recomputed(layers_of(model, [])), compile.compiled(model, COMPILED):
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
        for asked in (True, "reduce-overhead"):
            words = rf"^compile={asked!r}: .*no compiler of C\+\+ was found\. It needs"
            with pytest.raises(ConfigError, match=words):
                trainer.fit(*make_rows(4), compile=asked)


def test_what_the_user_has_compiled_stays_compiled():
    model = make_model()
    model.compile()  # nothing is compiled before it runs
    own = model._compiled_call_impl
    with compile.compiled(model, COMPILED):
        assert model._compiled_call_impl is own
    assert model._compiled_call_impl is own


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The mode of each call of torch.compile, which compiles nothing."""
    found: list[object] = []

    def take(function: Any, mode: object = None) -> Any:
        found.append(mode)
        return function

    monkeypatch.setattr(torch, "compile", take)
    return found


@pytest.mark.parametrize(
    ("asked", "mode", "words"), [(True, None, ""), ("max-autotune", "max-autotune", " (max-autotune)")]
)
def test_a_mode_is_passed_on_and_the_header_tells_it(modes, capsys, asked, mode, words):
    model = make_model()
    with one_process():
        cx.DistributedTrainer(model, nn.CrossEntropyLoss(), "sgd").fit(*make_rows(4), epochs=1, compile=asked)
    assert modes == [None, mode]  # the first one was a try
    assert f"parameters, compiled{words}\n" in capsys.readouterr().out
    assert model._compiled_call_impl is None


def test_virtual_ranks_compile_each_shape_by_itself(monkeypatch):
    found: list[dict[str, Any]] = []

    def take(function: Any, **options: Any) -> Any:
        found.append({**options, "fails": torch.compiler.config.fail_on_recompile_limit_hit})
        return function

    monkeypatch.setattr(torch, "compile", take)
    model = make_model()
    with one_process():
        trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), "sgd")
        trainer.fit(*make_rows(8), epochs=1, batch_size=2, compile=True, virtual_ranks=2, verbose=False)
    assert found == [{"fails": False}, {"dynamic": False, "fails": True}]  # the first one was a try
    assert model._compiled_call_impl is None
    assert not torch.compiler.config.fail_on_recompile_limit_hit


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


class Deep(nn.Module):
    """A stem, three layers in a list, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(4, 4), nn.ModuleList(Layer() for _ in range(3)), nn.Linear(4, 3)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def nodes_of(tensor: Tensor) -> Iterator[Any]:
    """The nodes of a backward, each once."""
    seen, queue = set(), [tensor.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [following for following, _ in node.next_functions]
            yield node


def backward_of_compiled(by_layer: bool) -> dict[str, Any]:
    """How far gradients are from those of the model as it is, and in which order they and compiled backwards came."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    torch.manual_seed(0)
    model, rows, events = Deep(), torch.randn(16, 4), []
    model(rows).square().sum().backward()
    usual = [parameter.grad for parameter in model.parameters()]
    with compile.compiled(model, COMPILED, by_layer=by_layer):
        compiled = [name for name, part in model.named_modules() if part._compiled_call_impl is not None]
        model.zero_grad()
        loss = model(rows).square().sum()
        for node in nodes_of(loss):
            if "Compiled" in node.name():
                node.register_prehook(lambda _: events.append("backward"))
        hooks = [
            p.register_post_accumulate_grad_hook(lambda _: events.append("gradient")) for p in model.layers.parameters()
        ]
        loss.backward()
    assert all(part._compiled_call_impl is None for part in model.modules())
    assert len(hooks) == events.count("gradient")
    pairs = zip(usual, model.parameters(), strict=True)
    return {
        "error": max(float((one - two.grad).abs().max()) for one, two in pairs),
        "events": events,
        "compiled": compiled,
    }


@pytest.mark.nightly
def test_gradients_of_layers_that_are_compiled_one_by_one_arrive_while_backward_runs():
    whole, by_layer = (run_world(1, backward_of_compiled, each, seconds=100)[0] for each in (False, True))
    assert whole["compiled"] == [""]
    assert by_layer["compiled"] == ["layers.0", "layers.1", "layers.2"]
    assert max(whole["error"], by_layer["error"]) < 1e-5
    assert whole["events"] == ["backward", *["gradient"] * 12]
    assert by_layer["events"] == ["backward", *["gradient"] * 4] * 3


@pytest.mark.parametrize(
    ("model", "mode", "device", "world_size", "expected"),
    [
        (Deep(), True, "cuda", 2, True),
        (Deep(), "max-autotune-no-cudagraphs", "cuda", 2, True),
        (Deep(), "reduce-overhead", "cuda", 2, False),  # one graph of all is what is asked for
        (Deep(), False, "cuda", 2, False),
        (Deep(), True, "cuda", 1, False),
        (Deep(), True, "cpu", 2, False),
        (make_model(), True, "cuda", 2, False),  # single operations, which are fused with each other
    ],
)
def test_layers_are_compiled_one_by_one_where_gradients_travel_from_accelerators(
    monkeypatch, model, mode, device, world_size, expected
):
    monkeypatch.setattr(compile, "check_compiler", lambda *_: None)
    assert compile.compiles_by_layer(model, mode, torch.device(device), world_size) is expected


class Graphs:
    """A stand-in for CUDA graphs: when a step begins, what the one before gave is overwritten."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.marks = self.ends = 0

    def mark(self) -> None:
        self.marks += 1
        for tensor in self.given:
            tensor.fill_(float("nan"))
        self.given.clear()

    def end(self) -> None:
        self.ends += 1

    def give(self, tensor: Tensor) -> None:
        self.given.append(tensor.data)


class Replayed(nn.Module):
    """A model of whose outputs and gradients a graph keeps the memory; it may give its own loss."""

    def __init__(self, graphs: Graphs, outputs: int, own_loss: bool) -> None:
        super().__init__()
        self.net, self._graphs, self._own_loss = make_model(outputs=outputs), graphs, own_loss
        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: graphs.give(each.grad))

    def forward(self, x, y=None):
        output = self.net(x)
        if self._own_loss and y is not None:
            loss, weight = (
                nn.functional.cross_entropy(output, y, reduction="sum"),
                (output[:, 0].detach() * 0 + 1).sum(),
            )
            self._graphs.give(loss)
            self._graphs.give(weight)
            return loss, weight
        self._graphs.give(output)
        return output


def history_of(graphs: Graphs, kind: str) -> list[Any]:
    """What a fit and an evaluation of the same model come to; what is predicted leaves a GPU at once."""
    x, y = make_rows(40)
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 4, "accumulation_steps": 2, "verbose": False}
    if kind == "binary":
        y = (y > 0).float().reshape(-1, 1)
    outputs = 1 if kind == "binary" else 3
    loss = {"own": None, "classes": "cross_entropy", "binary": "bce_with_logits"}[kind]
    metrics = ["auc"] if kind == "binary" else None
    trainer = cx.DistributedTrainer(Replayed(graphs, outputs, kind == "own"), loss, "sgd", metrics=metrics)
    history = trainer.fit(x, y, validation_data=(x, y), **settings)
    values = [history.history[name] for name in sorted(history.history)]
    return [*values, trainer.evaluate(x, y).loss]


@pytest.mark.parametrize("kind", [by_night("own"), "classes", by_night("binary")])
def test_what_outlives_a_step_is_copied_out_of_cuda_graphs(monkeypatch, kind):
    with one_process():
        usual = history_of(Graphs(), kind)
        graphs = Graphs()
        for owner in ("environment.accelerator", "training.model.compile"):
            monkeypatch.setattr(f"cyxtrain.{owner}.may_use_cuda_graphs", lambda _: True)
        monkeypatch.setattr("cyxtrain.metrics.accumulator._on_host", lambda number: number)  # sums wait, as on a GPU
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", graphs.mark)
        monkeypatch.setattr("cyxtrain.environment.torch_compat.unmark_cuda_graph_steps", graphs.end)
        found = history_of(graphs, kind)
    assert found == usual
    # 5 steps of 2 micro-batches and 10 batches of validation in each of 2 epochs, then an evaluation.
    assert graphs.marks == 2 * (5 + 10) + 10
    assert graphs.ends == 5


def marks_after(device: str) -> list[int]:
    from torch._inductor.cudagraph_trees import MarkStepBox

    found = []
    for _ in compile.marked_steps([0], torch.device(device)):
        found.append(MarkStepBox.mark_step_counter)
    return [*found, MarkStepBox.mark_step_counter]


@pytest.mark.nightly
def test_pytorch_is_told_of_steps_on_cuda_alone_and_finds_them_by_itself_afterwards():
    assert run_world(1, marks_after, "cuda") == [[-1, 0]]
    assert run_world(1, marks_after, "cpu") == [[0, 0]]
