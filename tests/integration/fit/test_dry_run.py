"""Claims about the dry run of `fit`, and about the modes of a model: both belong to the user."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import FEATURES, everywhere, make_model, make_rows, one_process, run_world, seeded
from markers import by_night
from refusals import refusal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import cyxtrain as cx
from cyxtrain.callbacks import Callback

pytestmark = pytest.mark.usefixtures("rank_server")


class Changing(nn.Module):
    """Changes in forward and backward whatever a module can."""

    cache: Tensor | None
    of_all = 0

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.body, self.norm = nn.Linear(FEATURES, 3), nn.BatchNorm1d(3, affine=False)
            self.words = nn.Embedding(4, 3, max_norm=0.1).requires_grad_(False)
        self.register_buffer("cache", None, persistent=False)
        self.plain, self.calls, self.seen = torch.zeros(2), 0, [torch.ones(1)]
        self.generator, self.numbers, self.dice = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.hooked = 0
        self.body.weight.register_hook(self._step)
        self.body.bias.register_post_accumulate_grad_hook(self._bias_step)

    def _step(self, gradient: Tensor) -> None:
        self.hooked += 1
        self.body.weight.data.sub_(1.0)

    def _bias_step(self, bias: Tensor) -> None:
        bias.data.add_(1.0)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        Changing.of_all += 1
        self.seen.append(inputs)
        self.plain += 1
        self.cache = inputs.detach().sum(0)
        self.lazy = nn.Identity()
        random.random(), np.random.rand(), torch.rand(1), torch.rand(1, generator=self.generator)
        self.numbers.random(), self.dice.random()
        inputs.mul_(2)
        self.body.bias.data.mul_(0.5)
        return self.norm(self.body(inputs)) + self.words(torch.zeros(1, dtype=torch.int64))


class Counting(nn.Module):
    """A loss that counts its calls, in a number and in a buffer, and has something to learn."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.modes = 0, set[bool]()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.modes.add(self.training)
        return nn.functional.cross_entropy(output, target)


class Metric:
    """A metric that counts its calls."""

    __name__ = "own"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return output.mean()


class Looking(Callback):
    """Notes what the first step finds."""

    def __init__(self, *owners: Any) -> None:
        self.owners, self.found = owners, ""

    def on_train_begin(self, logs: Any = None) -> None:
        self.found = state_of(*self.owners)


def state_of(*owners: Any) -> str:
    """Returns all that can be seen of modules, metrics and generators."""
    said = []
    for owner in owners:
        for part in owner.modules() if isinstance(owner, nn.Module) else [owner]:
            said += [f"{name}: {value!r}" for name, value in vars(part).items() if not name.startswith("_")]
            said += [f"class {name}: {value}" for name, value in vars(type(part)).items() if isinstance(value, int)]
            if isinstance(part, nn.Module):
                said += [f"{name}: {value!r}" for name, value in (*part._parameters.items(), *part._buffers.items())]
                said += [str([*part._modules])]
                generators = [value for value in vars(part).values() if isinstance(value, torch.Generator)]
                said += [str(generator.get_state().sum()) for generator in generators]
                others = [vars(part).get("numbers"), vars(part).get("dice")]
                said += [repr(each.bit_generator.state) for each in others if isinstance(each, np.random.Generator)]
                said += [repr(each.getstate()) for each in others if isinstance(each, random.Random)]
    return "\n".join([*said, repr(random.getstate()), repr(np.random.get_state()), repr(torch.get_rng_state().sum())])


def traces(*, precision: str = "fp32") -> list[Any]:
    """Returns what is another than before when training begins; whether data and gradient are the same, hooks ran."""
    torch.manual_seed(0)
    inputs, targets = make_rows(20)
    before, model, loss, metric = inputs.clone(), Changing(), Counting(), Metric()
    gradient = model.body.weight.grad = torch.ones_like(model.body.weight)
    looking = Looking(model, loss, metric)
    expected = state_of(model, loss, metric)
    trainer = cx.DistributedTrainer(
        model, loss, lambda p: torch.optim.SGD(p, 0.1), metrics=[metric], callbacks=[looking]
    )
    trainer.fit(inputs, targets, inputs, targets, epochs=1, batch_size=8, verbose=False, precision=precision)
    differences = set(expected.split("\n")) ^ set(looking.found.split("\n"))
    return [sorted(differences), bool((before == inputs).all()), bool((gradient == 1).all()), model.hooked > 0]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_it_leaves_no_trace_in_model_loss_metrics_data_and_generators(world_size: int) -> None:
    for found in everywhere(world_size, traces):
        assert found == [[], True, True, True]


class Noting(nn.Module):
    """Notes the first column of what it is given with gradients, also in the dry run."""

    def __init__(self, seen: list[list[float]]) -> None:
        super().__init__()
        self.body, self.note = make_model(), seen.append

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.note(inputs[:, 0].tolist())
        return self.body(inputs)


def rows_seen() -> list[list[list[float]]]:
    """Returns the batches that the model is given in the dry run and in the first micro-batch, for kinds of data."""
    inputs, targets = make_rows(30)
    pairs = TensorDataset(inputs, targets)
    batches = [(inputs[first : first + 8], targets[first : first + 8]) for first in range(0, 24, 8)]
    given: list[tuple[Any, ...]] = [
        (inputs, targets),
        (DataLoader(pairs, batch_size=8, shuffle=True),),
        (DataLoader(pairs, batch_size=8),),
        (lambda: iter(batches),),
    ]
    found = []
    for data in given:
        seen: list[list[float]] = []
        settings: dict[str, Any] = {} if len(data) == 1 else {"batch_size": 8}
        trainer = cx.DistributedTrainer(Noting(seen), "cross_entropy")
        trainer.fit(*data, epochs=1, accumulation_steps=2, fast_dev_run=True, verbose=False, **settings)
        found.append(seen[:2])
    return found


def test_it_runs_on_the_micro_batch_that_rank_0_gets_first() -> None:
    for dry, first in everywhere(1, rows_seen)[0]:
        assert dry == first
        assert len(dry) == 8
    zero, one = run_world(2, rows_seen)
    for kind in range(3):
        assert zero[kind][0] == zero[kind][1] == one[kind][0] != one[kind][1]


class Scoring(nn.Module):
    """Returns scores, or their loss if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        scores = self.body(inputs)
        return scores if labels is None else nn.functional.cross_entropy(scores, labels)


class AtFirstStep(Callback):
    """Notes what a list holds when the first step begins."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.found = numbers, list[list[int]]()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.found.append([*self.numbers])


def mean_of_rows(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("loss_fn", "batch_size", "profiles", "rows"),
    [
        ("cross_entropy", 10, False, [10]),
        ("cross_entropy", 10, True, [10]),
        (mean_of_rows, 10, False, [10, 8]),  # eight rows together: their outputs have a loss each
        (mean_of_rows, 2, False, [2, 8]),
        (None, 10, False, [10, 8, *[1] * 8]),  # and one by one: the model computes the loss
    ],
)
def test_the_model_runs_once_before_the_first_step_and_on_a_few_rows_if_the_loss_is_the_users(
    loss_fn: Any, batch_size: int, profiles: bool, rows: list[int], tmp_path: Path
) -> None:
    model, calls = Scoring(), list[int]()
    model.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    noting = AtFirstStep(calls)
    trainer = cx.DistributedTrainer(model, loss_fn, "sgd", callbacks=[noting])
    with one_process():
        folder = tmp_path.as_posix() if profiles else False
        trainer.fit(*make_rows(20), epochs=1, batch_size=batch_size, verbose=False, profile=folder)
    assert noting.found[0] == rows


class NoGradient(nn.Module):
    """Its backward fails on rank 1 alone, if at all there."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.detach(), target)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError("no way back")


class WithBroken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, inputs: Tensor) -> Any:
        return Broken.apply(self.body(inputs))


def refusals() -> list[str]:
    """Returns what fit refuses before its first step."""
    inputs, targets = make_rows(20)
    norm = nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3))
    cases: list[tuple[nn.Module, Any, dict[str, Any]]] = [
        (make_model(), NoGradient(), {}),
        (WithBroken(), "cross_entropy", {}),
        (norm, "cross_entropy", {"batch_size": 1}),
    ]
    said = []
    for model, loss, settings in cases:
        trainer = cx.DistributedTrainer(model, loss)
        said.append(refusal(trainer.fit, inputs, targets, epochs=1, verbose=False, **settings))
        assert trainer.step == 0
    return said


def test_what_fails_only_in_training_is_refused_before_the_first_step_on_every_rank() -> None:
    for detached, broken, alone in everywhere(2, refusals):
        assert "does not depend on the model's parameters" in detached
        assert "no gradient of the loss, tried on shape [20, 4]: ValueError: no way back" in broken.replace(
            "[10, ", "[20, "
        )
        assert "a step has 2 samples, so on 2 ranks with micro-batches of up to 1 sample one is a single" in alone


class Derivative(nn.Module):
    """Its output is a derivative of a network by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model(outputs=1)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.requires_grad_(True)
        return torch.autograd.grad(self.body(inputs).sum(), inputs, create_graph=True)[0]


class Auxiliary(nn.Module):
    """A second head, in training mode only, as torchvision's Inception has one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, inputs: Tensor) -> Any:
        output = self.body(inputs)
        return (output, output * 0.5) if self.training else output


class Detector(nn.Module):
    """Returns losses in training mode, and what it finds in evaluation mode, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        output = self.body(inputs)
        return (
            {"loss": nn.functional.cross_entropy(output, targets)} if self.training and targets is not None else output
        )


def both_heads(output: Any, target: Tensor) -> Tensor:
    heads = output if isinstance(output, tuple) else (output,)
    return sum((nn.functional.cross_entropy(head, target) for head in heads), torch.zeros(()))


def outputs_by_mode() -> list[Any]:
    inputs, targets = make_rows(20)
    derivative = cx.DistributedTrainer(Derivative(), "mse")
    history = derivative.fit(inputs, -inputs, inputs, -inputs, epochs=3, batch_size=4, verbose=False)
    losses, given = history.train_losses, derivative.predict(inputs)
    assert not given.requires_grad
    mean = ((given + inputs) ** 2).mean().item()
    assert derivative.evaluate(inputs, -inputs).loss == pytest.approx(mean, rel=1e-5)
    assert history.val_losses[-1] == pytest.approx(mean, rel=1e-5)
    auxiliary = cx.DistributedTrainer(Auxiliary(), both_heads)
    validated = auxiliary.fit(inputs, targets, inputs, targets, epochs=1, batch_size=4, verbose=False).val_losses
    detector = cx.DistributedTrainer(Detector())
    detected = detector.fit(inputs, targets, epochs=2, batch_size=4, verbose=False).train_losses
    with pytest.raises(cx.ConfigError, match=r"validation data: in evaluation mode the model returned .* no loss"):
        detector.fit(inputs, targets, inputs, targets, epochs=1, batch_size=4, verbose=False)
    return [losses[0] > losses[-1], len(validated), detected[0] > detected[-1], detector.predict(inputs).shape[0]]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_models_that_differ_between_the_modes_or_differentiate_in_forward_train(world_size: int) -> None:
    for found in everywhere(world_size, outputs_by_mode):
        assert found == [True, 1, True, 20]


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, inputs: Tensor) -> Any:
        return checkpoint(self.body, inputs.requires_grad_(True), use_reentrant=True)


def test_models_that_cannot_be_asked_for_gradients_or_are_lazy_run_as_they_did() -> None:
    inputs, targets = make_rows(8)
    with one_process():
        trainer = cx.DistributedTrainer(Reentrant(), "cross_entropy")
        assert len(trainer.fit(inputs, targets, epochs=1, verbose=False).train_losses) == 1
        lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
        assert cx.DistributedTrainer(lazy, "cross_entropy").predict(inputs).shape == (8, 2)


def test_a_loss_that_hides_parameters_is_a_warning() -> None:
    hidden = nn.Linear(3, 3)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(hidden(output), target)

    trainer = cx.DistributedTrainer(make_model(), loss)
    with (
        one_process(),
        pytest.warns(UserWarning, match=r"the loss depends on 2 parameters of shape .*nothing trains"),
    ):
        trainer.fit(*make_rows(8), epochs=1, verbose=False)


def with_norm() -> nn.Sequential:
    with seeded():
        return nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 3), nn.Dropout(0.5))


class Modes(Callback):
    """Notes the modes of a model in each step; evaluates between two epochs as some programs do."""

    def __init__(self) -> None:
        self.seen: list[list[bool]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append([part.training for part in self.trainer.model])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trainer.model.eval()


def modes_in_fit() -> list[Any]:
    inputs, targets = make_rows(32)
    frozen = with_norm()
    frozen[0].eval()
    loss, modes = Counting(), Modes()
    loss.train()
    trainer = cx.DistributedTrainer(frozen, loss, callbacks=[modes])
    trainer.fit(inputs * 3 + 2, targets, inputs, targets, epochs=2, batch_size=4, verbose=False)
    same = [modes.seen == [[False, True, True]] * len(modes.seen), frozen[0].running_mean.abs().max().item()]
    back = [part.training for part in frozen]
    whole, others = with_norm().eval(), Modes()
    cx.DistributedTrainer(whole, "cross_entropy", callbacks=[others]).fit(
        inputs, targets, epochs=2, batch_size=4, verbose=False
    )
    trained = [others.seen == [[True] * 3] * len(others.seen), bool(whole[0].running_mean.abs().max() > 0)]
    return [same, back, loss.modes == {True, False}, loss.training, trained, whole.training]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_part_in_evaluation_mode_stays_so_and_a_whole_model_is_trained_in_training_mode(world_size: int) -> None:
    for found in everywhere(world_size, modes_in_fit):
        assert found == [[True, 0.0], [False, True, True], True, True, [True, True], False]


def test_the_header_says_in_which_modes_a_model_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    inputs, targets = make_rows(8)
    for model, expected in (
        (with_norm(), ""),
        (with_norm().eval(), "the model is in evaluation mode, as from_pretrained returns it"),
        (nn.Sequential(with_norm().eval(), nn.Linear(3, 3)), "training, but 0 in evaluation mode, as given"),
    ):
        with one_process():
            cx.DistributedTrainer(model, "cross_entropy").fit(inputs, targets, epochs=1)
        shown = capsys.readouterr().out
        assert (f"mode       {expected}" in shown) if expected else ("mode  " not in shown)
