"""Claims about virtual_ranks: the same bits on any number of ranks, for models, data and settings of many kinds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, fingerprint, keep_only, run_new_world, run_world, seeded
from markers import needs_compiler
from refusals import ending, refusal, refuses
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint
from cyxtrain.training.inputs import plan
from cyxtrain.training.inputs.virtual_ranks import check_data_and_step

pytestmark = pytest.mark.usefixtures("rank_server")
V = 8
ROWS = 250
"""Not a multiple of V x the batch size: the last step of an epoch has uneven slices."""
TIMES = ("seconds", "time", "per_second")


def rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 12, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def mlp() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))


class Convnet(nn.Module):
    """Convolutions, batch norm, and a constant buffer that its slices do not change."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            convolution = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU())
            self.layers = nn.Sequential(convolution, nn.Flatten(), nn.Linear(40, 3))
        self.register_buffer("mask", torch.full((3,), torch.finfo(torch.float32).min))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            inputs = inputs + 0.01 * torch.randn(len(inputs), 12)  # augmentation
        scores: Tensor = self.layers(inputs[:, None])
        return scores


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


class Logging(cx.callbacks.Callback):
    """Logs numbers outside of slices, and draws one there."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        self.trainer.log("drawn", float(torch.rand(())))
        self.trainer.log("count", 1, reduce="sum")


def case(name: str) -> tuple[nn.Module, Any, tuple[Any, ...], dict[str, Any]]:
    """Returns (model, loss, data, settings)."""
    if name == "mlp":
        return mlp(), nn.CrossEntropyLoss(), rows(), {"callbacks": [Logging()]}
    if name == "convnet":
        return Convnet(), nn.CrossEntropyLoss(), rows(), {"accumulation_steps": 2, "batch_size": 6}
    if name == "tokens":
        more = {"clip_norm": 0.5, "warmup_steps": 3, "precision": "bf16", "batch_size": 2}
        return Masked(), token_loss, tokens(), more
    if name == "loader":
        data = DataLoader(TensorDataset(*rows()), batch_size=4, shuffle=True)
        return mlp(), nn.CrossEntropyLoss(), (data,), {}
    if name == "stream":
        inputs, targets = rows()
        batches = [(inputs[first : first + 4], targets[first : first + 4]) for first in range(0, ROWS, 4)]
        return mlp(), nn.CrossEntropyLoss(), (lambda: iter(batches),), {}
    if name == "readers":
        return mlp(), nn.CrossEntropyLoss(), (read,), {"readers": 16}
    if name == "weights":
        weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(3))
        return mlp(), nn.CrossEntropyLoss(), rows(), {"sample_weight": weights}
    if name == "fp16":
        more = {"precision": "fp16", "amp": cx.AMPConfig(initial_scale=2.0**20)}
        return mlp(), nn.CrossEntropyLoss(), rows(), more
    assert name == "unused"
    return Unused(), nn.CrossEntropyLoss(), rows(), {}


class Unused(nn.Module):
    """A layer is used in the slices that have a large number, another one in none."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.always, self.seldom, self.never = nn.Linear(12, 3), nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.always(inputs)
        return scores + self.seldom(inputs) if inputs.max() > 2.5 else scores


def read(reader: int, readers: int) -> Any:
    inputs, targets = rows()
    return zip(inputs[reader::readers], targets[reader::readers], strict=True)


def train(name: str, **more: Any) -> tuple[cx.DistributedTrainer, cx.TrainingHistory]:
    model, loss, data, settings = case(name)
    trainer = cx.DistributedTrainer(model, loss, torch.optim.Adam(model.parameters(), 1e-2), metrics=[seen])
    fit = {"epochs": 2, "batch_size": 4, "verbose": False, "virtual_ranks": V, **settings, **more}
    return trainer, trainer.fit(*data, **fit)


def seen(output: Tensor, target: Tensor) -> Tensor:
    return output.reshape(len(output), -1).sum(1)


def bits(name: str, **more: Any) -> str:
    """Returns a hash of weights, buffers, optimizer, history and generator of a fit."""
    torch.manual_seed(5)
    trainer, history = train(name, **more)
    if name == "mlp":
        for _ in range(2):
            trainer.train_on_batch(*rows(37))
    numbers = {each: value for each, value in history.history.items() if not any(word in each for word in TIMES)}
    state = trainer.optimizer.state_dict()["state"]
    found = [fingerprint(trainer.model), json.dumps(numbers, sort_keys=True)]
    for number in sorted(state):
        found += [str(value.tolist()) for _, value in sorted(state[number].items())]
    return hashlib.sha256("".join(found).encode()).hexdigest()[:12]


def bits_of(names: list[str], more: dict[str, Any]) -> dict[str, str]:
    return {name: bits(name, **more) for name in names}


def on(ranks: int, names: list[str], **more: Any) -> dict[str, str]:
    """Returns the hash of each fit on some ranks, which all have the same."""
    found = everywhere(ranks, bits_of, names, more)
    assert all(each == found[0] for each in found)
    return found[0]


DAILY = ["mlp", "convnet"]
OTHERS = ["tokens", "loader", "stream", "readers", "weights", "fp16", "unused"]


def test_two_models_have_the_same_bits_on_1_2_3_and_8_ranks():
    without = [on(ranks, DAILY, virtual_ranks=None, effective_batch_size=32) for ranks in (1, 2)]
    assert all(without[0][name] != without[1][name] for name in DAILY)
    assert on(1, DAILY) == on(2, DAILY) == on(3, DAILY) == on(8, DAILY)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*DAILY, *OTHERS])
def test_every_kind_has_the_same_bits_on_1_to_8_ranks(name):
    found = {ranks: on(ranks, [name])[name] for ranks in (1, 2, 3, 4, 6, 8)}
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("name", OTHERS)
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


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_the_number_of_ranks_changes_three_times_in_a_run(tmp_path, seed):
    """As if the run was killed after some step: of the steps that came after it, nothing is left."""
    random = np.random.default_rng(seed)
    name = str(random.choice(["mlp", "convnet", "tokens", "loader", "stream", "readers", "weights"]))
    whole = on(1, [name])[name]
    length = 2 * 8  # an epoch has eight steps, or fewer
    for step in sorted(random.choice(range(1, length - 1), 3, replace=False)):
        ranks = int(random.integers(1, 9))
        everywhere(ranks, resumed, str(tmp_path), name, 1)
        for path in tmp_path.glob("*.ckpt"):
            if step_of(path) > step:
                path.unlink()
    ranks = int(random.integers(1, 9))
    assert everywhere(ranks, resumed, str(tmp_path), name, 1) == [whole] * ranks


def step_of(path: Path) -> int:
    return read_checkpoint(path).position["step"]


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
    (of_compiled(lambda model: model[0].compile(dynamic=True)), "a compiled model may choose kernels by the shapes"),
    (of_compiled(torch.compile), "give it as it is, with compile=True"),
    (with_optimizer(lambda model: torch.optim.LBFGS(model.parameters())), "evaluates the loss several times"),
)


def test_kernels_of_an_accelerator_that_may_differ_are_refused(monkeypatch):
    config = cx.DistributedTrainingConfig(virtual_ranks=V)
    off = SimpleNamespace(gathers=False, optimizes=False, device=torch.device("cuda"))
    data: Any = SimpleNamespace(loss=off, call=off, placement=off)
    feed: Any = SimpleNamespace(has_own_data=False)
    assert "torch.use_deterministic_algorithms(True) first" in refusal(check_data_and_step, config, data, feed)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check_data_and_step(config, data, feed)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert "set torch.backends.cudnn.benchmark = False" in refusal(check_data_and_step, config, data, feed)


def refused() -> str:
    with pytest.raises(cx.ConfigError) as error:
        train("mlp", virtual_ranks=2)
    return str(error.value)


def test_more_ranks_than_virtual_ranks_are_refused_on_all():
    for words in everywhere(3, refused):
        assert "virtual_ranks=2, and there are 3 ranks" in words
        assert "Start at most 2, or set virtual_ranks=3" in words


def test_evaluate_and_predict_have_the_same_bits():
    one, *_ = everywhere(1, evaluated)
    for found in everywhere(3, evaluated):
        assert found == one


def evaluated() -> list[Any]:
    trainer, _ = train("convnet", epochs=1)
    predicted = np.asarray(trainer.predict(rows()[0]))
    return [*trainer.evaluate(*rows()), hashlib.sha256(predicted.tobytes()).hexdigest()]
