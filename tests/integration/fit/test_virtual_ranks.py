"""Claims about virtual_ranks: the same bits on any number of ranks, for models, data and settings of many kinds."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transport_ranks
from fitting import everywhere, fingerprint, keep_only, run_new_world, run_world, seeded
from markers import by_night, needs_compiler
from rank_processes import run_ranks, values
from refusals import ending, refusal, refuses, warning_texts
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import cyxtrain as cx
from cyxtrain.data.rng import CPU, generators_as_json
from cyxtrain.training.inputs import plan
from cyxtrain.training.inputs.virtual_ranks import check_data_and_step

pytestmark = pytest.mark.usefixtures("rank_server")
V = 8
ROWS = 250
"""Not a multiple of V x the batch size: the last step of an epoch has uneven slices."""
TIMES = ("seconds", "time", "per_second")


def rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    """Returns digits: X (count, 64), from 0 to 1, and y (count,), 0 to 9."""
    (inputs, targets), _ = cx.datasets.load_digits()
    return torch.from_numpy(inputs[:count]), torch.from_numpy(targets[:count])


def mlp() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))


class Convnet(nn.Module):
    """Convolutions, batch norm, and a constant buffer that its slices do not change."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            convolution = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
            self.layers = nn.Sequential(convolution, nn.Flatten(), nn.Linear(144, 10))
        self.register_buffer("mask", torch.full((3,), torch.finfo(torch.float32).min))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            inputs = inputs + 0.01 * torch.randn_like(inputs)
        scores: Tensor = self.layers(inputs)
        return scores


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    """Augmented digits: each is shifted at random whenever it is loaded."""

    def __init__(self) -> None:
        self.rows = rows()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.rows
        shift = int(torch.randint(-1, 2, ()))
        return inputs[number].view(8, 8).roll(shift, 1).flatten(), targets[number]


class Masked(nn.Module):
    """A Transformer layer with dropout, whose loss is a mean over the tokens that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.embedding = nn.Embedding(9, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.head = nn.Linear(16, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer(self.embedding(tokens), src_key_padding_mask=tokens == 0))
        return scores


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    found = torch.randint(1, 9, (60, 7), generator=generator)
    lengths = torch.randint(1, 8, (60, 1), generator=generator)
    found[torch.arange(7) >= lengths] = 0
    return found, torch.where(found == 0, -100, found)


def token_loss(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="sum")
    return total, (targets != -100).sum()


class Watching(cx.callbacks.Callback):
    """Draws and logs outside of slices, and keeps the state of the generators there after the latest step."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = ""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        self.trainer.log("drawn", float(torch.rand(())) + float(np.random.rand()) + random.random())
        self.trainer.log("count", 1, reduce="sum")
        self.generators = json.dumps(generators_as_json(CPU))

    def on_test_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        self.trainer.log("tested", 0.1)  # a tenth, by samples: another order of addition changes the sum

    def on_test_end(self, logs: dict[str, Any]) -> None:
        self.trainer.log("tests", 1, reduce="sum")


def penalized(trainer: cx.DistributedTrainer, batch: Any) -> dict[str, Tensor]:
    """A step of the user's own, which draws, logs, and returns a loss, another number and the output."""
    inputs, targets = batch
    scores = trainer.model(inputs + 0.1 * torch.randn_like(inputs))
    penalty = 0.01 * scores.square().mean()
    trainer.log("largest", scores.max(), reduce="max")
    return {"loss": nn.functional.cross_entropy(scores, targets) + penalty, "penalty": penalty, "output": scores}


def case(name: str) -> tuple[nn.Module, Any, tuple[Any, ...], dict[str, Any]]:
    """Returns (model, loss, data, settings)."""
    if name in ("mlp", "own"):
        return mlp(), nn.CrossEntropyLoss(), rows(), {}
    if name == "convnet":
        return Convnet(), nn.CrossEntropyLoss(), (Shifted(),), {"accumulation_steps": 2, "batch_size": 6}
    if name == "tokens":
        more = {"clip_norm": 0.5, "warmup_steps": 3, "precision": "bf16", "batch_size": 2}
        return Masked(), token_loss, tokens(), {**more, "validation_data": tokens()}
    if name == "loader":
        data = DataLoader(TensorDataset(*rows()), batch_size=4, shuffle=True)
        return mlp(), nn.CrossEntropyLoss(), (data,), {}
    if name == "stream":
        return mlp(), nn.CrossEntropyLoss(), (stream,), {"validation_data": stream}
    if name == "readers":
        return mlp(), nn.CrossEntropyLoss(), (read,), {"readers": 16, "validation_data": read}
    if name == "weights":
        weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(3))
        return mlp(), nn.CrossEntropyLoss(), rows(), {"sample_weight": weights}
    if name == "fp16":
        more = {"precision": "fp16", "amp": cx.AMPConfig(initial_scale=2.0**20)}
        return mlp(), nn.CrossEntropyLoss(), rows(), more
    assert name == "unused"
    return Unused(), nn.CrossEntropyLoss(), rows(), {}


class Unused(nn.Module):
    """A layer is used in the slices that have dark digits, another one in none."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.always, self.seldom, self.never = nn.Linear(64, 10), nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.always(inputs)
        return scores + self.seldom(inputs) if inputs.mean() > 0.32 else scores


def stream() -> Any:
    inputs, targets = rows()
    return ((inputs[first : first + 4], targets[first : first + 4]) for first in range(0, ROWS, 4))


def read(reader: int, readers: int) -> Any:
    inputs, targets = rows()
    return zip(inputs[reader::readers], targets[reader::readers], strict=True)


def train(name: str, **more: Any) -> tuple[cx.DistributedTrainer, cx.TrainingHistory]:
    model, loss, data, settings = case(name)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    own: dict[str, Any] = {"train_step": penalized} if name == "own" else {}
    metrics: list[Any] = [spread] if name == "tokens" else [spread, "calibration_error"]
    trainer = cx.DistributedTrainer(model, loss, optimizer, metrics=metrics, callbacks=[Watching()], **own)
    fit = {"epochs": 2, "batch_size": 4, "verbose": False, "virtual_ranks": V, "validation_data": rows(90)}
    return trainer, trainer.fit(*data, **{**fit, **settings, **more})


def spread(output: Tensor, target: Tensor) -> Tensor:
    """Returns numbers of which another order of addition changes the sum."""
    return output.double().reshape(len(output), -1).softmax(1).square().sum(1)


def bits(name: str, **more: Any) -> str:
    """Returns a hash of weights, buffers, optimizer, history and generators, within a fit and after it."""
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    trainer, history = train(name, **more)
    if name == "mlp":
        for _ in range(2):
            trainer.train_on_batch(*rows(37))
    (watching,) = trainer.callbacks
    assert isinstance(watching, Watching)
    numbers = {each: value for each, value in history.history.items() if not any(word in each for word in TIMES)}
    state = trainer.optimizer.state_dict()
    found = [fingerprint(trainer.model), watching.generators]
    found += [json.dumps(each, sort_keys=True) for each in (numbers, state["param_groups"], generators_as_json(CPU))]
    for number in sorted(state["state"]):
        found += [str(value.tolist()) for _, value in sorted(state["state"][number].items())]
    return hashlib.sha256("".join(found).encode()).hexdigest()[:12]


def bits_of(names: list[str], more: dict[str, Any]) -> dict[str, str]:
    return {name: bits(name, **more) for name in names}


def on(ranks: int, names: list[str], **more: Any) -> dict[str, str]:
    """Returns the hash of each fit on some ranks, which all have the same."""
    found = everywhere(ranks, bits_of, names, more)
    assert all(each == found[0] for each in found)
    return found[0]


DAILY = ["mlp", "convnet"]
MODELS = [*DAILY, "tokens", "own"]
KINDS = ["loader", "stream", "readers", "weights", "fp16", "unused"]


def test_two_models_have_the_same_bits_on_1_2_3_and_8_ranks():
    more = {"virtual_ranks": None, "effective_batch_size": 32}
    without = [everywhere(ranks, bits_of, DAILY, more)[0] for ranks in (1, 2)]
    assert all(without[0][name] != without[1][name] for name in DAILY)
    assert on(1, DAILY) == on(2, DAILY) == on(3, DAILY) == on(8, DAILY)


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_the_same_bits_on_1_to_8_ranks(name):
    found = {ranks: on(ranks, [name])[name] for ranks in (1, 2, 3, 4, 6, 8)}
    assert len(set(found.values())) == 1, found


TRANSPORTS = {
    "tcp": ({"CYXTRAIN_TRANSPORT": "tcp"}, "tcp", False),
    "unix": ({"CYXTRAIN_TRANSPORT": "unix", "CYXTRAIN_CHECKSUMS": "1"}, "unix", False),
    "shared memory": ({"CYXTRAIN_TRANSPORT": "unix"}, "unix", True),
}
"""Variables, and what the ring then has: the transport, and whether ranks share memory."""


def joined(name: str, more: dict[str, Any]) -> tuple[str, str, bool]:
    """Returns the hash of a fit in a new world, and how the world's ranks are connected."""
    with cx.init():
        engine = transport_ranks.group().group.engine
        shares_memory = engine.selector.shares_memory and engine.persistent.can_share_memory
        return bits(name, **more), engine.transport, shares_memory


@pytest.mark.nightly
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_transport_has_the_same_bits_on_1_to_8_ranks(name, transport, accumulation):
    variables, connected, shares = TRANSPORTS[transport]
    more = {"accumulation_steps": accumulation}
    one = on(1, [name], **more)[name]
    for ranks in (2, 3, 4, 6, 8):
        found = values(run_ranks(ranks, joined, name, more, seconds=90.0, **variables))
        assert found == [(one, connected, shares)] * ranks


@pytest.mark.parametrize("name", ["tokens", "own", *KINDS])
def test_every_kind_has_the_same_bits_on_1_and_3_ranks(name):
    assert on(1, [name]) == on(3, [name])


@pytest.mark.nightly
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 13])
def test_any_number_of_virtual_ranks_is_a_tree(count):
    found = {ranks: on(ranks, ["convnet"], virtual_ranks=count)["convnet"] for ranks in (1, 2, 3, 5) if ranks <= count}
    assert len(set(found.values())) == 1, found


@pytest.mark.nightly
@needs_compiler
@pytest.mark.timeout(600)
def test_a_compiled_model_has_the_same_bits_on_1_and_3_ranks():
    """Not of a bare Sequential, which PyTorch runs as it is; always in new processes, as compiling leaves workers."""
    one, *three = [found for ranks in (1, 3) for found in run_world(ranks, bits_of, ["convnet"], COMPILED, seconds=280)]
    assert three == [one] * 3


@pytest.mark.nightly
@needs_compiler
@pytest.mark.timeout(300)
def test_a_compiled_model_with_too_many_shapes_ends_the_fit():
    [words] = run_new_world(1, with_few_shapes, seconds=200)
    assert "FailOnRecompileLimitHit" in words


def with_few_shapes() -> str:
    with torch.compiler.config.patch(recompile_limit=1):
        return ending(bits, "convnet", **COMPILED)


COMPILED = {"compile": True}


def test_layers_are_compiled_alike_on_any_number_of_ranks(monkeypatch):
    found: list[int] = []
    monkeypatch.setattr(plan, "compiles_by_layer", lambda *arguments: found.append(arguments[-1]))
    everywhere(1, train, "mlp")
    assert found == [V]


def resumed(folder: str, name: str = "mlp", every: int = 5) -> str:
    """Returns the hash of a fit that continues from the latest checkpoint, which other ranks may have made."""
    return bits(name, checkpoint_dir=folder, checkpoint_every_n_steps=every, resume="auto")


def saved(folder: str) -> str:
    return bits("mlp", checkpoint_dir=folder, checkpoint_every_n_steps=5)


@pytest.mark.parametrize(("before", "after"), [(1, 3), pytest.param(3, 1, marks=pytest.mark.nightly), (3, 2)])
def test_a_fit_resumes_in_mid_epoch_on_another_number_of_ranks(tmp_path, before, after):
    whole, *_ = everywhere(before, saved, str(tmp_path))
    keep_only(tmp_path, 5)
    assert everywhere(after, resumed, str(tmp_path)) == [whole] * after


class Killed(cx.callbacks.Callback):
    """Kills a rank after a step, before its checkpoint need be complete."""

    def __init__(self, victim: int, after: int) -> None:
        super().__init__()
        self.victim, self.after = victim, after

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        if self.trainer.step == self.after and cx.get_rank() == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)


def continued(folder: str, name: str, killed: tuple[int, int] | None) -> str:
    """Continues a fit in a new world; returns its hash, unless a rank is killed after a step."""
    callbacks = [] if killed is None else [Killed(*killed)]
    with cx.init():
        return bits(name, checkpoint_dir=folder, checkpoint_every_n_steps=1, resume="auto", callbacks=callbacks)


@functools.cache
def whole(name: str) -> str:
    return on(1, [name])[name]


def check_chain(folder: str, name: str, worlds: Sequence[int], steps: Sequence[int], seed: int = 0) -> None:
    """Runs a fit on worlds of these sizes, one after the other; in each but the last one, a rank is killed."""
    generator = random.Random(seed)
    for ranks, step in zip(worlds, steps, strict=False):
        victim = generator.randrange(ranks)
        outcomes = run_ranks(ranks, continued, folder, name, (victim, step))
        assert all(each.error is not None for each in outcomes)
        assert outcomes[victim].kind == "Killed", outcomes[victim].traceback
    ranks = worlds[-1]
    assert values(run_ranks(ranks, continued, folder, name, None)) == [whole(name)] * ranks


@pytest.mark.nightly
def test_the_number_of_ranks_changes_from_8_to_3_to_1_to_4_in_a_run_that_is_killed(tmp_path):
    check_chain(str(tmp_path), "mlp", [8, 3, 1, 4], [4, 9, 13])


LENGTHS = {"convnet": 6, "tokens": 8}
"""Steps of two epochs; of the other fits 16."""


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(50))
def test_the_number_of_ranks_changes_three_times_in_a_run(tmp_path, seed):
    generator = random.Random(seed)
    name = generator.choice(["mlp", "convnet", "tokens", "own", "loader", "stream", "readers", "weights"])
    steps = sorted(generator.sample(range(1, LENGTHS.get(name, 16)), 3))
    worlds = [generator.randint(1, V)]
    while len(worlds) < 4:
        worlds.append(generator.choice([ranks for ranks in range(1, V + 1) if ranks != worlds[-1]]))
    check_chain(str(tmp_path), name, worlds, steps, seed)


def refusal_of(**more: Any) -> Callable[[], object]:
    return lambda: train("mlp", **more)


def of_compiled(compiled: Callable[[nn.Sequential], Any]) -> Callable[[], object]:
    def call() -> object:
        model = mlp()
        assert isinstance(model, nn.Sequential)
        whole = compiled(model) or model
        return cx.DistributedTrainer(whole, nn.CrossEntropyLoss(), "sgd").fit(*rows(), epochs=1, virtual_ranks=V)

    return call


def with_optimizer(make: Callable[[nn.Module], Any]) -> Callable[[], object]:
    def call() -> object:
        model = mlp()
        return cx.DistributedTrainer(model, nn.CrossEntropyLoss(), make(model)).fit(*rows(), epochs=1, virtual_ranks=V)

    return call


test_refused = refuses(
    (lambda: train("stream", sharded_data=True), "each rank its own data"),
    (refusal_of(compile="max-autotune"), "chooses kernels by their time"),
    (refusal_of(virtual_ranks=251), "virtual_ranks=251, and an epoch has 250 samples: .* Set at most 250"),
    (of_compiled(lambda model: model[0].compile(dynamic=True)), "a compiled model may choose kernels by the shapes"),
    (of_compiled(torch.compile), "give it as it is, with compile=True"),
    (with_optimizer(lambda model: torch.optim.LBFGS(model.parameters())), "evaluates the loss several times"),
)


def test_kernels_of_an_accelerator_that_may_differ_are_refused(monkeypatch):
    config = cx.DistributedTrainingConfig(virtual_ranks=V)
    off = SimpleNamespace(gathers=False, optimizes=False, device=torch.device("cuda"))
    data: Any = SimpleNamespace(loss=off, call=off, placement=off)
    feed: Any = SimpleNamespace(has_own_data=False, steps_per_epoch=None, rows_of=lambda steps: None)
    assert "torch.use_deterministic_algorithms(True) first" in refusal(check_data_and_step, config, data, feed)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check_data_and_step(config, data, feed)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert "set torch.backends.cudnn.benchmark = False" in refusal(check_data_and_step, config, data, feed)


def refused_own_data() -> tuple[str, list[str]]:
    def own() -> Any:
        yield torch.full((4, 64), float(cx.get_rank())), torch.zeros(4, dtype=torch.int64)

    trainer = cx.DistributedTrainer(mlp(), "cross_entropy", "sgd")
    with warning_texts() as texts:
        words = refusal(trainer.fit, own, epochs=1, virtual_ranks=2, verbose=False)
    return words, texts


def test_data_of_each_rank_s_own_are_refused_without_advice_to_set_sharded_data():
    for words, texts in everywhere(2, refused_own_data):
        assert "each rank has its own data: give all ranks the same batches" in words
        assert texts == []


def refused() -> str:
    with pytest.raises(cx.ConfigError) as error:
        train("mlp", virtual_ranks=2)
    return str(error.value)


def test_more_ranks_than_virtual_ranks_are_refused_on_all():
    for words in everywhere(3, refused):
        assert "virtual_ranks=2, and there are 3 ranks" in words
        assert "Start at most 2, or set virtual_ranks=3" in words


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("convnet", 3),
        *(by_night(name, ranks) for name in ("mlp", "tokens", "own", "stream", "readers") for ranks in (2, 3, 8)),
    ],
)
def test_evaluate_and_predict_have_the_same_bits(name, ranks):
    one, *_ = everywhere(1, evaluated, name)
    for found in everywhere(ranks, evaluated, name):
        assert found == one


def evaluated(name: str) -> list[str]:
    trainer, _ = train(name, epochs=1)
    inputs, targets = tokens() if name == "tokens" else rows()
    data = {"stream": (stream,), "readers": (read,)}.get(name, (inputs, targets))
    predicted = trainer.predict(inputs).float().numpy()
    return [json.dumps(trainer.evaluate(*data).to_dict()), hashlib.sha256(predicted.tobytes()).hexdigest()]
