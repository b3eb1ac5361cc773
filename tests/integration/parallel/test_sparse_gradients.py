"""Sparse embeddings train alone and on several ranks, and come to the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ddp_models import assert_same_on_all_ranks
from fitting import everywhere, flat
from kept_worlds import on_ranks
from markers import by_night
from refusals import refusal
from torch import Tensor, nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
WORDS = 12


class Bag(nn.Module):
    """Two tables, one of them summed by bags, and a layer."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, 4, sparse=sparse)
        self.bags = nn.EmbeddingBag(WORDS, 4, mode="sum", sparse=sparse)
        self.last = nn.Linear(4, 3)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.words(tokens).sum(1).tanh() + self.bags(tokens))


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS - 2, (count, 3), generator=generator)  # two words are in no row
    return tokens, torch.randint(3, (count,), generator=generator)


def mean_over_ranks() -> None:
    """Checks each gradient against the dense one, averaged by this wrapper as ever."""
    rank = cx.get_rank()
    found: dict[bool, dict[str, Tensor]] = {}
    for sparse in (True, False):
        model = Bag(sparse=sparse)
        ddp = cx.DistributedDataParallel(model)
        if rank == 0:
            with ddp.no_sync():
                ddp(rows(2)[0]).square().sum().backward()
        for step in range(2):  # the second adds to what has been averaged
            ddp(rows(3 + rank, seed=10 * rank + step)[0]).square().mean().backward()
        found[sparse] = {name: parameter.grad for name, parameter in model.named_parameters()}
        ddp.close()
    for name, gradient in found[True].items():
        assert gradient.is_sparse == (not name.startswith("last")), name
        dense = gradient.to_dense()
        torch.testing.assert_close(dense, found[False][name], rtol=1e-12, atol=1e-12)
        assert_same_on_all_ranks({name: dense})
    assert found[True]["words.weight"].indices().max() < WORDS - 2  # a row that no rank has used does not travel


@on_ranks(2, by_night(3))
def test_sparse_gradients_are_averaged_as_dense_ones_are():
    mean_over_ranks()


@on_ranks(2, backend="gloo")
def test_sparse_gradients_are_averaged_over_gloo_too():
    mean_over_ranks()


@on_ranks(2)
def test_a_table_that_a_rank_does_not_use_and_one_that_is_dense_there():
    table = nn.Embedding(4, 2, sparse=True)
    ddp = cx.DistributedDataParallel(table, find_unused_parameters=True)
    if cx.get_rank() == 0:
        ddp(torch.tensor([1, 1])).sum().backward()
    else:
        ddp.share_buffers_once()
        ddp.average_accumulated()
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0, 1, 0, 0]
    table.zero_grad()
    loss = ddp(torch.tensor([1])).sum()
    loss = loss + table.weight.sum() if cx.get_rank() == 1 else loss  # tied with a layer, say
    loss.backward()
    assert table.weight.grad[:, 0].tolist() == [0.5, 1.5, 0.5, 0.5]
    assert_same_on_all_ranks({"grad": table.weight.grad})
    unused = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Embedding(4, 2, sparse=True)})
    unused.forward = unused["used"].forward
    ddp = cx.DistributedDataParallel(unused)
    with pytest.raises(cx.DistributedTrainingError, match=r"idle\.weight"):
        ddp(torch.ones(3, 2)).sum().backward()
    assert unused["idle"].weight.grad is None


def fit(sparse: bool, optimizer: str, settings: dict[str, Any]) -> tuple[Any, list[float]]:
    model = Bag(sparse=sparse)
    kinds = {
        "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    }
    trainer = cx.DistributedTrainer(model, "cross_entropy", kinds[optimizer])
    history = trainer.fit(*rows(21), epochs=2, effective_batch_size=6, verbose=False, **settings)
    return flat(model.parameters()), history.train_losses


FITS = [
    ("momentum", {}),
    ("adagrad", {"clip_norm": 0.01, "accumulation_steps": 2}),
    ("momentum", {"clip_value": 0.01}),
    ("momentum", {"clip_adaptive": 0.05}),
]


def fits(sparse: bool) -> list[tuple[Any, list[float]]]:
    return [fit(sparse, optimizer, settings) for optimizer, settings in FITS]


@pytest.mark.nightly
def test_fit_with_sparse_embeddings_is_fit_with_dense_ones_on_any_number_of_ranks():
    dense = everywhere(1, fits, False)[0]
    for world_size in (1, 2, 3):
        for found in everywhere(world_size, fits, True):
            for (parameters, losses), (expected, expected_losses), how in zip(found, dense, FITS, strict=True):
                np.testing.assert_allclose(parameters, expected, rtol=0, atol=1e-9, err_msg=f"{world_size} {how}")
                np.testing.assert_allclose(losses, expected_losses, rtol=1e-9)


def skip_pairs(steps: int) -> Any:
    """Tables alone, by SparseAdam, as word vectors are trained."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"word": nn.Embedding(WORDS, 4, sparse=True), "context": nn.Embedding(WORDS, 4, sparse=True)})
    model.forward = lambda pairs: (model["word"](pairs[:, 0]) * model["context"](pairs[:, 1])).sum(1)
    trainer = cx.DistributedTrainer(model, "mse", torch.optim.SparseAdam(list(model.parameters()), 0.01))
    pairs = rows(16)[0][:, :2]
    trainer.fit(pairs, (pairs[:, 0] > 4).float(), epochs=steps, effective_batch_size=8, verbose=False)
    return flat(model.parameters())


def test_word_vectors_train_by_sparse_adam():
    alone = everywhere(1, skip_pairs, 2)[0]
    for found in everywhere(2, skip_pairs, 2):
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-6)


def spoilt() -> str:
    model = Bag(sparse=True)
    with torch.no_grad():
        model.bags.weight[5] = torch.inf
    trainer = cx.DistributedTrainer(model, "cross_entropy", "sgd")
    return refusal(trainer.fit, *rows(21), epochs=1, effective_batch_size=6, verbose=False, error=cx.NonFiniteError)


def test_numbers_that_are_not_finite_are_found_in_sparse_gradients():
    for world_size in (1, 2):
        for text in everywhere(world_size, spoilt):
            assert "parameters are not finite (bags.weight)" in text
