"""What X and y may be: several arrays in dictionaries, tuples and lists, with rows that count more or less."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from fitting import CLASSES, FEATURES, everywhere, fingerprint, flat, make_rows, one_process, run_world, seeded
from markers import by_night
from refusals import refusal, refuses
from torch import nn
from torch.nn import functional

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS = 41  # no multiple of a step
Pair = namedtuple("Pair", ["left", "right"])
FIT = {"epochs": 2, "effective_batch_size": 6, "shuffle": True, "verbose": False}


class TwoInputs(nn.Module):
    """Two parts of a row, in their own arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(3, 8)
        self.last, self.more = nn.Linear(8, CLASSES), nn.Linear(8, 1)

    def hidden(self, left, right):
        return torch.tanh(self.first(left) + self.second(right.float()))

    def forward(self, left, right):
        return self.last(self.hidden(left, right))


class OneArgument(TwoInputs):
    """The same, in one."""

    def forward(self, both):
        return super().forward(*(both.values() if isinstance(both, dict) else both))


class AnyNames(TwoInputs):
    def forward(self, **parts):
        return super().forward(parts["left"], parts["right"])


class TwoOutputs(TwoInputs):
    """Two heads, for two targets."""

    def forward(self, left, right):
        hidden = self.hidden(left, right)
        return {"kind": self.last(hidden), "size": self.more(hidden)}


class OwnLoss(TwoInputs):
    def forward(self, left, right, labels=None):
        output = super().forward(left, right)
        return output if labels is None else functional.cross_entropy(output, labels)


class OwnLossOfALabel(TwoInputs):
    def forward(self, left, right, label=None):
        output = super().forward(left, right)
        return output if label is None else functional.cross_entropy(output, label)


def parts(rows: int = ROWS, seed: int = 0) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    """Two parts of each row, the second in whole numbers, and its class."""
    inputs, targets = make_rows(rows, seed=seed)
    return inputs, np.random.RandomState(seed).randint(0, 9, (rows, 3)), targets


def trained(model: type[nn.Module], inputs: Any, targets: Any, loss: Any = "cross_entropy", **more: Any) -> Any:
    with seeded():
        made = model()
    trainer = cx.DistributedTrainer(made, loss, torch.optim.SGD(made.parameters(), 0.1))
    history = trainer.fit(inputs, targets, **{**FIT, **more})
    return trainer, history


def forms() -> dict[str, tuple[type[nn.Module], Any]]:
    left, right, _ = parts()
    return {
        "by name": (TwoInputs, {"right": right, "left": left}),
        "any names": (AnyNames, {"left": left, "right": right}),
        "one after the other": (TwoInputs, (left, right)),
        "as a list": (TwoInputs, [left, right]),
        "as a named tuple": (TwoInputs, Pair(left, right)),
        "a dictionary, whole": (OneArgument, {"left": left, "right": right}),
        "a tuple, whole": (OneArgument, (left, right)),
    }


@pytest.mark.parametrize("form", forms())
def test_each_form_of_two_inputs_trains_the_same_model(form):
    model, inputs = forms()[form]
    _, _, targets = parts()
    with one_process():
        reference, _ = trained(TwoInputs, (parts()[0], parts()[1]), targets)
        trainer, history = trained(model, inputs, targets)
        assert fingerprint(trainer.model) == fingerprint(reference.model)
        assert len(history.train_losses) == len(history.train_accuracies) == 2
        output = trainer.predict(inputs)
        assert output.shape == (ROWS, CLASSES)
        assert isinstance(output, torch.Tensor)  # as the first of them is
        assert trainer.evaluate(inputs, targets) == reference.evaluate((parts()[0], parts()[1]), targets)


def test_numpy_arrays_alone_give_numpy():
    left, right, targets = parts()
    with one_process():
        trainer, _ = trained(TwoInputs, {"left": left.numpy(), "right": right}, targets.numpy())
        assert isinstance(trainer.predict({"left": left.numpy(), "right": right}), np.ndarray)


def two_heads(output: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(output["kind"], target["kind"]) + functional.mse_loss(
        output["size"], target["size"]
    )


def fit_two_heads() -> tuple[Any, list[float]]:
    left, right, kinds = parts()
    targets = {"kind": kinds, "size": 0.1 * left.sum(1, keepdim=True).double()}
    inputs = {"left": left, "right": right}
    trainer, history = trained(TwoOutputs, inputs, targets, two_heads, validation_split=0.2)
    return flat(trainer.model.parameters()), history.train_losses + history.val_losses


def fit_weighted(kind: str) -> tuple[Any, list[float]]:
    """With weights per row, in several kinds of losses."""
    left, right, targets = parts()
    weights = np.linspace(0.0, 3.0, ROWS)
    ignoring = targets.clone()
    ignoring[::7] = -100
    losses: dict[str, tuple[Any, torch.Tensor]] = {
        "mean": (nn.CrossEntropyLoss(), targets),
        "sum": (nn.CrossEntropyLoss(reduction="sum"), targets),
        "classes": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])), targets),
        "ignoring": (nn.CrossEntropyLoss(label_smoothing=0.1), ignoring),
        "elements": (nn.MSELoss(), functional.one_hot(targets, CLASSES)),
        "own": (lambda output, target: functional.cross_entropy(output, target, reduction="none"), targets),
    }
    loss, given = losses[kind]
    trainer, history = trained(
        TwoInputs,
        (left, right),
        given,
        loss,
        sample_weight=weights,
        validation_data=((left[:9], right[:9]), given[:9], weights[:9]),
        **({"learning_rate_scaling": None} if kind != "sum" else {"clip_norm": 1.0}),
    )
    evaluation = trainer.evaluate((left, right), given, sample_weight=weights)
    return flat(trainer.model.parameters()), [*history.train_losses, *history.val_losses, evaluation.loss]


@pytest.mark.parametrize("world_size", [2, by_night(4)])
def test_two_targets_with_a_loss_of_ones_own_on_any_number_of_ranks(world_size):
    [(parameters, losses)] = everywhere(1, fit_two_heads)
    assert losses[1] < losses[0]
    for found in run_world(world_size, fit_two_heads):
        assert abs(found[0] - parameters).max() < 1e-5
        assert found[1] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        "mean",
        by_night("classes"),
        by_night("own"),
        *map(by_night, ("sum", "ignoring", "elements")),
    ],
)
@pytest.mark.parametrize("world_size", [2, by_night(4)])
def test_rows_with_weights_on_any_number_of_ranks(world_size, kind):
    [(parameters, losses)] = everywhere(1, fit_weighted, kind)
    for found in run_world(world_size, fit_weighted, kind):
        assert abs(found[0] - parameters).max() < 1e-5
        assert found[1] == pytest.approx(losses, rel=1e-5)


def by_hand(weigh: Any, loss: Any) -> Any:
    """One epoch without shuffling, with `weigh(losses of rows, weights, targets)` as each step's loss."""
    left, right, targets = parts()
    weights = torch.linspace(0.0, 3.0, ROWS)
    with seeded():
        model = TwoInputs()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for first in range(0, ROWS, 6):
        rows = slice(first, first + 6)
        optimizer.zero_grad()
        each = loss(model(left[rows], torch.from_numpy(right[rows])), targets[rows])
        weigh(each, weights[rows], targets[rows]).backward()
        optimizer.step()
    return flat(model.parameters())


def test_weights_multiply_the_loss_of_their_rows_as_keras_has_it():
    left, right, targets = parts()
    given = {"epochs": 1, "shuffle": False, "sample_weight": np.linspace(0.0, 3.0, ROWS)}
    of_classes = torch.tensor([1.0, 2.0, 0.5])
    with one_process():
        plain, _ = trained(TwoInputs, (left, right), targets, **given)
        expected = by_hand(
            lambda each, weights, _: (each * weights).mean(),
            lambda output, target: functional.cross_entropy(output, target, reduction="none"),
        )
        assert abs(flat(plain.model.parameters()) - expected).max() < 1e-6
        classes, _ = trained(TwoInputs, (left, right), targets, nn.CrossEntropyLoss(weight=of_classes), **given)
        expected = by_hand(
            lambda each, weights, target: (each * weights).sum() / of_classes[target].sum(),
            lambda output, target: functional.cross_entropy(output, target, of_classes, reduction="none"),
        )
        assert abs(flat(classes.model.parameters()) - expected).max() < 1e-6


def test_weights_of_classes_are_weights_of_their_rows():
    left, right, targets = parts()
    factors = {0: 1.0, 1: 4.0, 2: 0.25}
    rows = np.linspace(0.5, 2.0, ROWS)
    with one_process():
        for given, expected in (({}, np.ones(ROWS)), ({"sample_weight": rows}, rows)):
            found, _ = trained(
                TwoInputs,
                (left, right),
                targets,
                class_weight=factors,
                validation_data=((left, right), targets),
                **given,
            )
            weights = expected * np.array([factors[int(number)] for number in targets])
            same, _ = trained(
                TwoInputs, (left, right), targets, sample_weight=weights, validation_data=((left, right), targets)
            )
            assert fingerprint(found.model) == fingerprint(same.model)
            assert found.history.val_losses == same.history.val_losses  # validation is not weighed by class


def test_all_rows_with_weight_one_are_rows_without():
    left, right, targets = parts()
    with one_process():
        plain, _ = trained(TwoInputs, (left, right), targets)
        ones, _ = trained(TwoInputs, (left, right), targets, sample_weight=np.ones(ROWS))
    assert abs(flat(plain.model.parameters()) - flat(ones.model.parameters())).max() < 1e-6
    assert plain.history.train_losses == pytest.approx(ones.history.train_losses, rel=1e-6)


def test_a_model_with_a_loss_of_its_own_gets_y_where_it_takes_it():
    left, right, targets = parts()
    with one_process():
        for inputs in ({"left": left, "right": right}, (left, right)):
            trainer, _ = trained(OwnLoss, inputs, targets, None)
            reference, _ = trained(OwnLoss, inputs, targets)
            assert abs(flat(trainer.model.parameters()) - flat(reference.model.parameters())).max() < 1e-6
        trainer, _ = trained(OwnLoss, {"left": left, "right": right, "labels": targets}, None, None)
        assert abs(flat(trainer.model.parameters()) - flat(reference.model.parameters())).max() < 1e-6


def test_a_model_with_a_loss_of_its_own_may_call_y_as_a_batch_may():
    left, right, targets = parts()
    with one_process():
        reference, _ = trained(OwnLoss, {"left": left, "right": right}, targets, None)
        trainer, _ = trained(OwnLossOfALabel, {"left": left, "right": right}, targets, None)
    assert fingerprint(trainer.model) == fingerprint(reference.model)


def test_a_fit_of_several_inputs_resumes(tmp_path):
    left, right, targets = parts()
    kept = {"checkpoint_every_n_steps": 3, "checkpoint_dir": str(tmp_path), "sample_weight": np.arange(ROWS) / ROWS}
    with one_process():
        whole, _ = trained(TwoInputs, {"left": left, "right": right}, targets, **kept)
        path = sorted(tmp_path.glob("step-*.ckpt"))[1]
        again, _ = trained(TwoInputs, {"left": left, "right": right}, targets, **{**kept, "resume": str(path)})
        assert fingerprint(again.model) == fingerprint(whole.model)
        with pytest.raises(cx.ConfigError, match="the training data differ"):
            trained(
                TwoInputs,
                {"left": left, "right": right},
                targets,
                **{**kept, "sample_weight": None, "resume": str(path)},
            )


LEFT, RIGHT, TARGETS = parts(12)


def sparse_eye() -> Any:
    from scipy import sparse

    return sparse.eye(12, format="csr")


def fit_parts(inputs: Any = (LEFT, RIGHT), targets: Any = TARGETS, loss: Any = "cross_entropy", **more: Any) -> None:
    trained(TwoInputs, inputs, targets, loss, **more)


test_what_cannot_be_rows_is_refused = refuses(
    (lambda: fit_parts({"left": LEFT, "right": RIGHT[:5]}), r"X\['left'\] and X\['right'\] have different .* 12 and 5"),
    (lambda: fit_parts(targets=TARGETS[:5]), r"X\[0\] and y have different lengths: 12 and 5"),
    (lambda: fit_parts({1: LEFT}), "keys must be strings, got 1"),
    (lambda: fit_parts({}), "X has no samples"),
    (lambda: fit_parts({"left": LEFT, "right": "text"}), r"X\['right'\]"),
    (lambda: fit_parts(targets={"a": TARGETS}), "CrossEntropyLoss compares one output with one y, and y has 1 parts"),
    (lambda: fit_parts(torch.eye(12).to_sparse()), r"X is a sparse tensor, .*: give X.to_dense\(\)"),
    (lambda: fit_parts(sparse_eye()), r"X is a csr_\w+, .*: give X.toarray\(\)"),
    (lambda: fit_parts(validation_data=((LEFT, RIGHT),)), "or .X_val, y_val, sample_weight."),
)
test_weights_that_cannot_be_are_refused = refuses(
    (lambda: fit_parts(sample_weight=np.ones(5)), "X.0. and sample_weight have different lengths"),
    (lambda: fit_parts(sample_weight=np.ones((12, 1))), "one number per sample, shape"),
    (lambda: fit_parts(sample_weight=-np.ones(12)), "must not be negative"),
    (lambda: fit_parts(class_weight={0: 1.0}), "for class 1, 2, which y holds; it has one for class 0"),
    (lambda: fit_parts(class_weight={0: 1.0, 1: "x", 2: 1.0}), "numbers of at least 0, got 'x'"),
    (lambda: fit_parts(class_weight=[1.0, 2.0]), r"must be a dictionary, as dict"),
    (lambda: fit_parts(targets=LEFT, class_weight={0: 1.0}), "class_weight needs one class number per sample"),
    (
        lambda: fit_parts(loss=lambda *pair: functional.cross_entropy(*pair), sample_weight=np.ones(12)),
        r"loss_fn must return one per sample, shape \(6,\) .* shape \[\]",
    ),
    (lambda: trained(OwnLoss, (LEFT, RIGHT), TARGETS, None, sample_weight=np.ones(12)), "this model computes its own"),
)


def test_rows_of_a_part_that_are_not_finite_are_named():
    left = LEFT.clone()
    left[7, 0] = float("nan")
    with (
        one_process(),
        pytest.warns(UserWarning, match=r"sample 7 of X\['left'\] holds nan"),
        pytest.raises(cx.NonFiniteError, match=r"X\['left'\] holds NaN or infinities \(sample 7\)"),
    ):
        trained(TwoInputs, {"left": left, "right": RIGHT}, TARGETS)


class Masked(nn.Module):
    """Uses truths as a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x, mask):
        assert mask.dtype is torch.bool
        return self.last(x.masked_fill(mask, 0.0))


def test_truths_among_several_inputs_stay_a_mask():
    left, _, targets = parts()
    with one_process():
        trained(Masked, {"x": left, "mask": left > 1.0}, targets)


def test_the_class_that_does_not_count_needs_no_weight():
    left, right, targets = parts()
    ignoring = targets.clone()
    ignoring[::3] = -100
    with one_process():
        weights = dict.fromkeys(range(CLASSES), 2.0)
        trained(TwoInputs, (left, right), ignoring, class_weight=weights)


def weigh_differently() -> str:
    left, right, targets = parts()
    rare = targets.clone()
    rare[5] = 2
    factors = {0: 1.0, 1: 1.0, 2: 1.0 + cx.get_rank()}
    return refusal(trained, TwoInputs, (left, right), rare, class_weight=factors)


def test_ranks_with_other_weights_are_refused():
    for text in run_world(2, weigh_differently):
        assert "differs from rank 0 in class_weight" in text


def test_floats_that_become_others_are_said(capsys):
    left, right, targets = parts()
    with one_process():
        trained(TwoInputs, (left.double(), right), targets, verbose=True)
        assert f"data {ROWS} samples, float64 becomes the model's float32 " in " ".join(capsys.readouterr().out.split())
        trained(TwoInputs, (left, right), targets, verbose=True)
        assert "becomes" not in capsys.readouterr().out
