"""Claims about `evaluate` and `predict`: any number of ranks gives what one process gives, in every bit."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from fitting import Floats, adam, fingerprint, make_model, make_rows, one_process, run_world, seeded
from markers import by_night
from torch import Tensor, nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

SIZES = [1, 2, 3, 4, 6, 7, 13]
"""Of batches of 3: less than one, whole ones and parts, on each of two ranks."""
EVERY_SIZE = [*range(1, 51)]
BATCH_SIZES = (3, 64)


def trainer_of(model: nn.Module, loss_fn: Any = "cross_entropy") -> cx.DistributedTrainer:
    return cx.DistributedTrainer(model, loss_fn, adam(model))


def evaluate_all(sizes: list[int]) -> dict[tuple[int, int], tuple[list[float], Floats]]:
    """Evaluates and predicts the first rows, for every size, in small batches and in one."""
    trainer = trainer_of(make_model())
    inputs, targets = make_rows(50)
    found = {}
    for size in sizes:
        for batch_size in BATCH_SIZES:
            evaluation = trainer.evaluate(inputs[:size], targets[:size], batch_size=batch_size)
            rows = trainer.predict(inputs[:size].numpy(), batch_size=batch_size)
            found[size, batch_size] = (list(evaluation), rows)
    return found


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(2, SIZES), by_night(2, EVERY_SIZE), by_night(3, EVERY_SIZE)],
    ids=["2-some", "2-every", "3-every"],
)
def test_n_ranks_equal_one_process_in_every_bit_for_every_size_from_1_to_50(world_size, sizes):
    with one_process():
        alone = evaluate_all(sizes)
    for rank in run_world(world_size, evaluate_all, sizes):
        assert list(rank) == list(alone)
        for case, (evaluation, rows) in rank.items():
            assert evaluation == alone[case][0], case
            np.testing.assert_array_equal(rows, alone[case][1], strict=True)


def test_one_process_gives_what_the_model_gives():
    model = make_model("float64")
    inputs, targets = make_rows(50)
    with one_process(), torch.no_grad():
        output = model(inputs.double())
        loss, accuracy = trainer_of(model).evaluate(inputs, targets, batch_size=7)
        np.testing.assert_allclose(trainer_of(model).predict(inputs), output, rtol=0, atol=1e-15)
    assert loss == pytest.approx(nn.functional.cross_entropy(output, targets).item(), rel=1e-14)
    assert accuracy == (output.argmax(1) == targets).double().mean().item()


def go_alone() -> list[Any]:
    """Rank 0 evaluates and predicts by itself while rank 1 waits in a collective of another kind."""
    trainer = trainer_of(make_model())
    inputs, targets = make_rows(11)
    found: list[Any] = []
    if trainer.is_master():
        found += trainer.evaluate(inputs, targets, batch_size=3, distributed=False)
        found.append(trainer.predict(inputs, batch_size=3, distributed=False).tolist())
    number = torch.ones(1)
    cx.all_reduce(number)
    assert number == 2
    together = [*trainer.evaluate(inputs, targets, batch_size=3), trainer.predict(inputs, batch_size=3).tolist()]
    return [found, together]


def test_one_rank_can_evaluate_alone_while_the_others_do_something_else():
    (alone, together), (nothing, others) = run_world(2, go_alone)
    assert alone == together == others
    assert nothing == []


def test_numpy_in_numpy_out_and_tensor_in_tensor_out():
    model = make_model()
    inputs = make_rows(5)[0]
    with one_process():
        rows, same = trainer_of(model).predict(inputs.numpy()), trainer_of(model).predict(inputs)
        listed = trainer_of(model).predict(inputs.tolist())
    assert isinstance(rows, np.ndarray)
    assert isinstance(same, Tensor)
    assert isinstance(listed, np.ndarray)
    assert rows.dtype == np.float32
    assert rows.shape == same.shape == (5, 3)
    assert not same.requires_grad
    assert torch.equal(torch.from_numpy(rows), same)
    np.testing.assert_array_equal(listed, rows)


def test_a_loss_and_an_accuracy_can_be_unpacked_and_asked_for_by_name():
    with one_process():
        evaluation = trainer_of(make_model()).evaluate(*make_rows(5))
    loss, accuracy = evaluation
    assert (loss, accuracy) == (evaluation.loss, evaluation.accuracy) == (evaluation["loss"], evaluation["accuracy"])
    assert (evaluation[0], evaluation[1]) == evaluation
    assert dict(evaluation) == {"loss": loss, "accuracy": accuracy}
    assert len(evaluation) == 2
    assert repr(evaluation) == f"Evaluation(loss={loss:.6g}, accuracy={accuracy:.6g})"
    assert evaluation != (0.0, 0.0)


def test_a_regression_has_no_accuracy():
    model = make_model(outputs=1)
    inputs, _ = make_rows(5)
    with one_process():
        evaluation = trainer_of(model, "mse").evaluate(inputs, inputs[:, :1])
        history = trainer_of(model, "mse").fit(inputs, inputs[:, :1], epochs=1, validation_split=0.4, verbose=False)
    loss, accuracy = evaluation
    assert (loss, accuracy, evaluation.accuracy) == (evaluation.loss, None, None)
    assert dict(evaluation) == {"loss": loss}
    assert evaluation.loss > 0
    assert (history.train_accuracies, history.val_accuracies) == ([], [])
    assert len(history.train_losses) == len(history.val_losses) == 1


class MutatesItsInput(nn.Module):
    """Works in place, as `nn.ReLU(inplace=True)` in front does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs.mul_(0.5))


def test_a_model_that_changes_its_input_does_not_change_the_callers_arrays():
    inputs, targets = make_rows(7)
    array = inputs.numpy().copy()
    array.flags.writeable = False
    before = inputs.clone()
    with one_process():
        trainer = trainer_of(MutatesItsInput())
        for given in (inputs, array):
            trainer.predict(given, batch_size=7)
            trainer.evaluate(given, targets, batch_size=3)
            trainer.fit(given, targets, epochs=1, batch_size=7, shuffle=False, verbose=False)
    assert torch.equal(inputs, before)
    np.testing.assert_array_equal(array, before)


def test_modes_generators_and_weights_are_handed_back():
    with seeded():
        model = nn.Sequential(make_model(), nn.Dropout(0.5), nn.BatchNorm1d(3))
    model.train()
    model[2].eval()
    inputs, targets = make_rows(9)
    with one_process():
        before = [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]
        first = trainer_of(model).evaluate(inputs, targets, batch_size=2)
        weights = fingerprint(model)
        assert trainer_of(model).evaluate(inputs, targets, batch_size=2) == first  # dropout is off
        trainer_of(model).predict(inputs)
        after = [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]
    assert [module.training for module in model] == [True, True, False]
    assert after == before
    assert fingerprint(model) == weights


def test_the_batch_size_is_that_of_the_last_fit_and_must_be_one():
    seen: list[int] = []
    model = make_model()
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    inputs, targets = make_rows(9)
    with one_process():
        trainer = trainer_of(model)
        trainer.predict(inputs)
        trainer.fit(inputs, targets, epochs=1, batch_size=4, verbose=False)
        seen.clear()
        trainer.predict(inputs)
        assert seen == [2, 4, 4, 1]  # tried on two rows first
        with pytest.raises(cx.ConfigError, match=r"predict\.batch_size"):
            trainer.predict(inputs, batch_size=0)
        with pytest.raises(cx.ConfigError, match=r"evaluate\.batch_size"):
            trainer.evaluate(inputs, targets, batch_size=0)


class Returns(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.body, self.make = make_model(), make

    def forward(self, inputs: Tensor) -> Any:
        return self.make(self.body(inputs))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda output: {"scores": output, "text": "yes"}, "for 4 samples it returned str"),
        (lambda output: (output, output.mean()), r"shape \[\]"),
        (lambda output: (), "tuple"),
        (lambda output: output.sum(), r"shape \[\]"),
        (lambda output: output[:1], r"for 4 samples it returned a tensor of shape \[1, 3\]"),
        (lambda output: output if len(output) == 3 else output.double(), "rows of one kind"),
    ],
)
def test_predict_refuses_what_has_no_row_per_row(make, words):
    with one_process(), pytest.raises(cx.ConfigError, match=words):
        trainer_of(Returns(make)).predict(make_rows(5)[0], batch_size=4 if "one kind" not in words else 3)


Several = namedtuple("Several", ["scores", "more"])


def several_outputs() -> list[Any]:
    found = []
    for make in (
        lambda output: {"scores": output, "more": [output[:, 0], output.argmax(1)]},
        lambda output: (output, output[:, :1]),
        lambda output: Several(output, output[:, :1]),
    ):
        trainer = trainer_of(Returns(make))
        found += [trainer.predict(make_rows(rows)[0].numpy(), batch_size=4) for rows in (1, 9)]
    kinds = [type(each).__name__ for each in found]
    plain = [{"scores": found[1]["scores"].tolist(), "more": [each.tolist() for each in found[1]["more"]]}]
    plain += [[part.tolist() for part in each] for each in found[2:]]
    return [kinds, plain, str(found[1]["more"][1].dtype)]


@pytest.mark.parametrize("world_size", [2, by_night(3)])
def test_several_outputs_come_in_their_form_on_every_rank(world_size):
    with one_process():
        alone = several_outputs()
    assert alone[0] == ["dict", "dict", "tuple", "tuple", "Several", "Several"]
    assert alone[2] == "int64"
    for found in run_world(world_size, several_outputs):
        assert found == alone


def predict_without_the_loss() -> tuple[list[str], list[list[float]]]:
    """Predicts with a model that returns its loss beside its outputs."""
    model = Returns(lambda output: {"loss": output.square().mean(), "scores": output})
    found = trainer_of(model, None).predict(make_rows(5)[0], batch_size=2)
    return list(found), found["scores"].tolist()


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_the_loss_that_a_model_computes_is_no_output(world_size):
    expected = make_model()(make_rows(5)[0]).detach()
    for names, scores in run_world(world_size, predict_without_the_loss):
        assert names == ["scores"]
        np.testing.assert_allclose(scores, expected, rtol=1e-6)
    only_loss = Returns(lambda output: {"loss": output.square().mean()})
    with one_process(), pytest.raises(cx.ConfigError, match="for 5 samples it returned dict"):
        trainer_of(only_loss, None).predict(make_rows(5)[0])


def test_bfloat16_comes_out_of_numpy_as_float32():
    model = make_model().bfloat16()
    inputs = make_rows(3)[0]
    with one_process():
        rows = trainer_of(model).predict(inputs.numpy())
        assert rows.dtype == np.float32
        assert torch.equal(torch.from_numpy(rows), trainer_of(model).predict(inputs).float())


def fail_on_one_rank() -> list[str]:
    """Returns what happens where the model fails on the rows of one rank only, and where calls differ."""
    trainer = trainer_of(make_model())
    inputs, targets = make_rows(6)
    bad = targets.clone()
    bad[5] = 7  # no such class: its batch is the last rank's
    own = make_model()
    with torch.no_grad():
        own[0].weight += cx.get_rank()
    ways = [
        lambda: trainer.evaluate(inputs, bad, batch_size=3),
        lambda: trainer.evaluate(inputs, targets[: 5 + cx.get_rank()]),
        lambda: trainer.evaluate(inputs + cx.get_rank(), targets),
        lambda: trainer.predict(inputs, batch_size=1 + cx.get_rank()),
        lambda: trainer.evaluate(inputs),
        lambda: trainer_of(make_model(outputs=1), "mse").evaluate(inputs, inputs[:, 0], batch_size=2),
        lambda: trainer_of(own).predict(inputs),
    ]
    texts = []
    for way in ways:
        try:
            texts.append(f"returned {way()}")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    trainer.evaluate(inputs, targets)  # the world still works
    return texts


def test_what_is_wrong_on_one_rank_is_an_error_on_every_rank():
    first, second = run_world(2, fail_on_one_rank)
    assert first[0].startswith("ConfigError: y holds class 7 (sample 5), and the model has outputs for classes 0 to 2.")
    assert second[0] == first[0]
    assert first[1].startswith("ConfigError: X and y have different lengths: 6 and 5 samples")
    assert second[1].startswith("ConfigError: rank 0 refuses to start: X and y have different lengths")
    for text in (first, second):
        assert text[2].startswith("ConfigError: rank 1 differs from rank 0 in the given X: hash of its values")
        assert text[3].startswith("ConfigError: rank 1 differs from rank 0 in the batch size: 2 on rank 1, 1 on rank 0")
        assert text[4].startswith("ConfigError: y is missing")
        assert "the loss would compare every sample with every other" in text[5]
        assert text[6].startswith("ConfigError: rank 1 differs from rank 0 in the model's 0.weight: hash of its values")


def use_without_parameters() -> list[Any]:
    inputs, _ = make_rows(7)
    made = [cx.DistributedTrainer(nn.ReLU(), "mse", scheduler="cosine"), cx.DistributedTrainer(nn.ReLU(), "mse", adam)]
    return [[*trainer.evaluate(inputs, inputs), trainer.predict(inputs)] for trainer in made]


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_model_without_parameters_evaluates_and_predicts(world_size):
    inputs, _ = make_rows(7)
    for found in run_world(world_size, use_without_parameters):
        for loss, accuracy, rows in found:
            assert accuracy is None
            np.testing.assert_allclose(loss, float((inputs.relu() - inputs).square().mean()), rtol=1e-6)
            np.testing.assert_array_equal(rows, inputs.relu())
