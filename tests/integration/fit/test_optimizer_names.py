"""Every optimizer of torch.optim has a name, in code and in YAML, and trains alike on any number of ranks."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, flat, make_model, make_rows, one_process
from markers import by_night
from torch import nn

import cyxtrain as cx
from cyxtrain.optim.optimizers import OPTIMIZERS

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS = make_rows(21)
FIT: dict[str, Any] = {"epochs": 2, "effective_batch_size": 8, "verbose": False}
DENSE = [name for name in OPTIMIZERS if name not in ("sparseadam", "lbfgs")]  # test_optimizers.py trains with LBFGS


def train(name: str) -> Any:
    trainer = cx.DistributedTrainer(make_model("float64"), "cross_entropy", name)
    trainer.fit(ROWS[0].double(), ROWS[1], **FIT)
    return flat(trainer.model.parameters())


def train_all(names: list[str]) -> dict[str, Any]:
    return {name: train(name) for name in names}


def test_every_class_of_pytorch_has_a_name_in_any_case():
    classes = vars(torch.optim).values()
    found = {each.__name__ for each in classes if inspect.isclass(each) and issubclass(each, torch.optim.Optimizer)} - {
        "Optimizer",
        "Muon",
    }
    assert {name.lower() for name in found} == {*OPTIMIZERS}
    for name in found - {"SparseAdam"}:
        assert type(cx.DistributedTrainer(make_model(), "cross_entropy", name).optimizer).__name__ == name


@pytest.mark.parametrize("names", [["adamw", "sgd", "nadam", "adafactor"], by_night(DENSE)], ids=["some", "all"])
def test_each_trains_alike_on_any_number_of_ranks(names):
    with one_process():
        alone = train_all(names)
    together = everywhere(2, train_all, names)[1]
    start = flat(make_model("float64").parameters())
    for name in names:
        assert np.abs(alone[name] - start).max() > 1e-4, name
        np.testing.assert_allclose(together[name], alone[name], rtol=1e-6, atol=1e-9, err_msg=name)


def test_sparse_adam_is_for_sparse_gradients_and_muon_for_matrices():
    sparse = nn.EmbeddingBag(5, 3, sparse=True)
    with one_process():
        trainer = cx.DistributedTrainer(sparse, "cross_entropy", "SparseAdam")
        losses = trainer.fit(
            torch.arange(10).reshape(5, 2) % 5, torch.arange(5) % 3, **{**FIT, "epochs": 9}
        ).train_losses
        assert losses[-1] < losses[0]
        with pytest.raises(cx.ConfigError, match=r"'sparseadam' takes sparse .* 0\.weight, .* have dense ones"):
            cx.DistributedTrainer(make_model(), "cross_entropy", "sparseadam")
        with pytest.raises(cx.ConfigError, match="Muon is for weight matrices of hidden layers"):
            cx.DistributedTrainer(make_model(), "cross_entropy", "muon")


def test_a_name_works_in_yaml():
    values = {"model": {"name": "mlp", "inputs": 64, "outputs": 10}, "data": "digits", "loss_fn": "cross_entropy"}
    optimizer = cx.Experiment({**values, "optimizer": {"name": "NADAM", "lr": 0.1}}).trainer.optimizer
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.NAdam, 0.1)
