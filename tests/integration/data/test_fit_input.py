"""Claims about what `fit` is given: every form that holds numbers works, and goes on where the last fit ended."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from fitting import FEATURES, adam, fingerprint, make_model, make_rows, run_world, seeded
from markers import by_night, nightly_where
from rank_processes import run_ranks, values
from torch import Tensor, nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

INPUTS, TARGETS = make_rows(12)


def trained(inputs: Any = INPUTS, targets: Any = TARGETS, loss_fn: Any = "cross_entropy", **keywords: Any) -> str:
    """Returns a hash of what a fit makes of the small model."""
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 5, "verbose": False} | keywords
    model = make_model(outputs=settings.pop("outputs", 3))
    cx.DistributedTrainer(model, loss_fn, adam(model)).fit(inputs, targets, **settings)
    return fingerprint(model)


def strange_arrays(array: np.ndarray, folder: Any) -> dict[str, Any]:
    """Returns the same numbers in every form in which they come."""
    read_only = array.copy()
    read_only.flags.writeable = False
    np.save(folder / "rows.npy", array)
    record = np.zeros(len(array), dtype=[("flag", "u1"), ("rows", array.dtype, array.shape[1:])])
    record["rows"] = array
    return {
        "tensor": torch.from_numpy(array),
        "a list of lists": array.tolist(),
        "read-only": read_only,
        "mapped from disk": np.load(folder / "rows.npy", mmap_mode="r"),
        "backwards": array[::-1].copy()[::-1],
        "backwards in every axis": np.flip(np.flip(array).copy()),
        "columns first": np.asfortranarray(array),
        "a view with gaps": np.repeat(array, 2, axis=0)[::2],
        "a field of records": record["rows"],
        "swapped bytes": array.astype(array.dtype.newbyteorder()),
        "a tensor that asks for gradients": torch.from_numpy(array.copy()).requires_grad_(array.dtype.kind == "f"),
    }


@pytest.mark.usefixtures("alone")
def test_arrays_of_every_kind_train_the_same_model(tmp_path):
    expected = trained()
    assert trained(INPUTS.numpy(), TARGETS.numpy()) == expected
    for name, inputs in strange_arrays(INPUTS.numpy(), tmp_path).items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert trained(inputs) == expected, name
    for name, targets in strange_arrays(TARGETS.numpy(), tmp_path).items():
        assert trained(targets=targets) == expected, name


@pytest.mark.usefixtures("alone")
def test_memory_order_changes_no_bit_of_evaluation_and_prediction(tmp_path):
    # A model may ask for contiguous rows, as view() does.
    model = nn.Sequential(nn.Flatten(), make_model())
    trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
    expected = trainer.predict(INPUTS, batch_size=5)
    for name, inputs in strange_arrays(INPUTS.numpy(), tmp_path).items():
        np.testing.assert_array_equal(trainer.predict(inputs, batch_size=5), expected, err_msg=name)
        assert trainer.evaluate(inputs, TARGETS) == trainer.evaluate(INPUTS, TARGETS), name


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", ["float16", by_night("float32"), by_night("float64"), "longdouble"])
def test_floats_of_any_width_become_those_of_the_model(dtype):
    rounded = INPUTS.numpy().astype(np.float16)  # so that every width can hold the numbers
    assert trained(rounded.astype(dtype)) == trained(torch.from_numpy(rounded).float())


@pytest.mark.usefixtures("alone")
@nightly_where(lambda dtype: dtype not in ("int8", "uint64"))
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_class_numbers_of_any_whole_type(dtype):
    assert trained(targets=TARGETS.numpy().astype(dtype)) == trained()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", ["bool", by_night("uint8"), by_night("int32"), "float64"])
def test_binary_targets_of_any_type(dtype):
    binary = (TARGETS > 0).reshape(-1, 1)
    expected = trained(targets=binary.float(), loss_fn="bce_with_logits", outputs=1)
    assert trained(targets=binary.numpy().astype(dtype), loss_fn="bce_with_logits", outputs=1) == expected
    two_classes = trained(targets=binary[:, 0].long())
    assert trained(targets=binary[:, 0].numpy().astype("bool")) == two_classes


@pytest.mark.usefixtures("alone")
def test_bytes_are_images_and_wider_whole_numbers_are_tokens():
    images = np.arange(12 * FEATURES, dtype=np.uint8).reshape(12, FEATURES)
    assert trained(images) == trained(images.astype(np.float32))
    assert trained(images > 20) == trained((images > 20).astype(np.float32))

    def of_tokens(dtype: str) -> str:
        with seeded():
            model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
        tokens = np.arange(24, dtype=dtype).reshape(12, 2) % 9
        cx.DistributedTrainer(model, "cross_entropy", adam(model)).fit(tokens, TARGETS, epochs=1, verbose=False)
        return fingerprint(model)

    assert len({of_tokens(dtype) for dtype in ("int32", "int64", "uint16", "uint32")}) == 1


@pytest.mark.usefixtures("alone")
def test_all_ways_of_calling_are_one():
    config = cx.DistributedTrainingConfig(epochs=2, batch_size=5, verbose=False)
    ways = [
        ((INPUTS, TARGETS, config), {}),
        ((INPUTS, TARGETS), {"config": config}),
        ((), {"x": INPUTS, "y": TARGETS, "config": config}),
        ((INPUTS,), {"y": TARGETS, "epochs": 2, "batch_size": 5, "verbose": 0}),
        ((INPUTS, TARGETS, INPUTS[:3], TARGETS[:3], config), {}),
        ((INPUTS, TARGETS, config), {"validation_data": (INPUTS[:3], TARGETS[:3])}),
        ((INPUTS, TARGETS, config), {"X_val": INPUTS[:3], "y_val": TARGETS[:3], "callbacks": []}),
    ]
    found = []
    for positional, keywords in ways:
        model = make_model()
        history = cx.DistributedTrainer(model, "cross_entropy", adam(model)).fit(*positional, **dict(keywords))
        found.append((fingerprint(model), len(history.train_losses), len(history.val_losses)))
    assert found == [(trained(), 2, 0)] * 4 + [(trained(), 2, 2)] * 3
    assert config == cx.DistributedTrainingConfig(epochs=2, batch_size=5, verbose=False)


@pytest.mark.usefixtures("alone")
def test_keywords_override_the_config_and_the_batch_size_that_was_asked_for_last_rules():
    config = cx.DistributedTrainingConfig(epochs=7, effective_batch_size=6, seed=3, verbose=False)
    model = make_model()
    history = cx.DistributedTrainer(model, "cross_entropy", adam(model)).fit(
        INPUTS, TARGETS, config, epochs=1, batch_size=4
    )
    assert len(history.train_losses) == 1
    assert history.effective_batch_size == 4
    assert (config.epochs, config.effective_batch_size) == (7, 6)


@pytest.mark.usefixtures("alone")
def test_the_validation_split_is_the_last_fraction_before_shuffling():
    split = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd")
    history = split.fit(INPUTS, TARGETS, epochs=2, batch_size=4, validation_split=0.25, verbose=False)
    given = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd")
    expected = given.fit(INPUTS[:9], TARGETS[:9], INPUTS[9:], TARGETS[9:], epochs=2, batch_size=4, verbose=False)
    assert fingerprint(split.model) == fingerprint(given.model)
    assert (history.train_losses, history.val_losses) == (expected.train_losses, expected.val_losses)
    assert history.val_losses[-1] == split.evaluate(INPUTS[9:], TARGETS[9:]).loss


class Watching(nn.Module):
    """Remembers the rows that it was trained on: the first number of each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()
        self.seen: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += inputs[:, 0].tolist()
        return self.body(inputs)


@pytest.mark.usefixtures("alone")
def test_fitting_again_goes_on_with_the_next_epochs():
    whole, parts = Watching(), Watching()
    once = cx.DistributedTrainer(whole, "cross_entropy", adam(whole)).fit(INPUTS, TARGETS, epochs=3, verbose=False)
    trainer = cx.DistributedTrainer(parts, "cross_entropy", adam(parts))
    first = trainer.fit(INPUTS, TARGETS, epochs=1, verbose=False)
    second = trainer.fit(INPUTS, TARGETS, epochs=2, verbose=False)
    assert trainer.epoch == 3
    assert (first.epochs, second.epochs, once.epochs) == ([1], [2, 3], [1, 2, 3])
    assert fingerprint(parts) == fingerprint(whole)
    assert first.train_losses + second.train_losses == once.train_losses
    orders = [tuple(parts.seen[first : first + 12]) for first in range(0, 36, 12)]
    assert len(set(orders)) == 3
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(INPUTS[:, 0].tolist()))}


@pytest.mark.usefixtures("alone")
def test_without_shuffling_the_order_is_that_of_the_rows():
    model = Watching()
    cx.DistributedTrainer(model, "cross_entropy").fit(INPUTS, TARGETS, epochs=2, shuffle=False, verbose=False)
    assert model.seen == INPUTS[:, 0].tolist() * 2


@pytest.mark.usefixtures("alone")
def test_an_epoch_that_an_error_ends_does_not_count():
    model = make_model()
    # A loss of one's own is not known to take class numbers: the probe sees the first rows only.
    loss_fn = lambda output, target: nn.functional.cross_entropy(output, target)  # noqa: E731
    trainer = cx.DistributedTrainer(model, loss_fn, adam(model))
    bad = TARGETS.clone()
    bad[7] = 9  # no such class
    with pytest.raises(IndexError):
        trainer.fit(INPUTS, bad, epochs=2, batch_size=4, shuffle=False, verbose=False)
    assert trainer.epoch == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert trainer.fit(INPUTS, TARGETS, epochs=1, verbose=False).epochs == [1]


@pytest.mark.usefixtures("alone")
def test_flags_and_generators_are_handed_back():
    model = nn.Sequential(make_model(), nn.BatchNorm1d(3))
    model[1].eval()
    model[0][0].bias.requires_grad_(False)
    trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
    before = [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate(), torch.get_num_threads()]
    environment = dict(os.environ)
    with torch.no_grad():
        trainer.fit(INPUTS, TARGETS, epochs=1, verbose=False)
        assert not torch.is_grad_enabled()
    after = [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate(), torch.get_num_threads()]
    assert after == before
    assert [model.training, model[0].training, model[1].training] == [True, True, False]
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["0.0.bias"]
    assert os.environ == environment
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_without_init_it_joins_from_the_environment_also_alone():
    assert not cx.is_initialized()
    try:
        trained()
        assert cx.is_initialized()
        assert cx.get_world_size() == 1
    finally:
        cx.finalize()


def fit_without_init() -> list[Any]:
    assert not cx.is_initialized()
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
    history = trainer.fit(INPUTS, TARGETS, epochs=1, batch_size=3, verbose=trainer.is_master() and 0)
    return [history.world_size, history.effective_batch_size, trainer.get_rank(), fingerprint(model)]


def test_without_init_every_rank_joins_from_the_environment():
    first, second = values(run_ranks(2, fit_without_init))
    assert first[:3] == [2, 6, 0]
    assert second == [2, 6, 1, first[3]]


def fit_dropout() -> str:
    with seeded():
        model = nn.Sequential(make_model(), nn.Dropout(0.5))
        cx.DistributedTrainer(model, "cross_entropy", adam(model)).fit(INPUTS, TARGETS, epochs=1, verbose=False)
    return fingerprint(model)


def test_random_layers_leave_the_same_model_on_every_rank():
    first, second = run_world(2, fit_dropout)
    assert first == second
