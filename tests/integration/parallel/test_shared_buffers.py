"""Buffers of any form are the same on all ranks: the mean over rows where they are floating-point, else rank 0's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ddp_models import batch
from fitting import everywhere, flat, make_rows
from kept_worlds import close_worlds, on_ranks
from markers import by_night
from refusals import warning_texts
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import cyxtrain as cx
from cyxtrain.tensors.fingerprint import fingerprint
from cyxtrain.tensors.layouts import is_plain, kind_of, parts_of, write
from cyxtrain.training.model.snapshot import BuffersKept

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.filterwarnings(
        "ignore:Sparse CSR",
        "ignore:torch.quantize_per_tensor",
        "ignore:The PyTorch API of nested",
        "ignore:the buffer expanded",
    ),
]


def make(form: str, value: float) -> Tensor:
    """Returns a tensor of a form that says its value."""
    dense = torch.diag(torch.full((4,), value))
    if form == "other places":
        return torch.full((4, 4), value).to_sparse() if value > 1 else dense.to_sparse()
    forms = {
        "coo": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
        "more in csr": (torch.full((4, 4), value) if value > 1 else dense).to_sparse_csr,
        "expanded": torch.full((1, 4), value).expand(3, 4).detach,
        "overlapping": lambda: torch.full((5,), value).as_strided((4, 2), (1, 1)),
        "with gaps": lambda: torch.full((4, 6), value)[:, ::2],
        "turned": torch.full((2, 3), value).t,
        "of another size": lambda: torch.full((2 if value > 1 else 3, 2), value),
        "empty": lambda: torch.empty(0, 4),
        "empty coo": torch.zeros(3).to_sparse,
        "a number": lambda: torch.tensor(value),
        "boolean": lambda: torch.full((3,), value > 1),
        "complex": lambda: torch.full((3,), complex(value, -value)),
        "sixteen bits": lambda: torch.full((3,), value, dtype=torch.bfloat16),
        "quantised": lambda: torch.quantize_per_tensor(dense, value / 10, 0, torch.qint8),
    }
    return forms[form]()


FORMS = [
    *("coo", "other places", "csr", "more in csr", "csc", "bsr", "expanded", "overlapping", "with gaps"),
    *("of another size", "turned", "empty", "empty coo", "a number", "boolean", "complex", "sixteen bits"),
]
AVERAGED = ("expanded", "overlapping", "with_gaps", "turned", "a_number", "complex", "sixteen_bits", "boolean")
"""Attributes of a `Holder`; the boolean one is the same on all ranks."""


class Holder(nn.Module):
    """Buffers of many forms; a forward that does not need them."""

    def __init__(self, value: float, forms: list[str] = FORMS) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1).double()
        for form in forms:
            self.register_buffer(form.replace(" ", "_"), make(form, value))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def hashes(model: nn.Module) -> list[int]:
    return [fingerprint(buffer) for buffer in model.buffers()]


@on_ranks(2)
def test_buffers_of_every_form_begin_as_rank_0s_and_keep_their_objects():
    forms = [form for form in FORMS if form != "of another size"]  # such models are refused when they are wrapped
    model = Holder(2.0 - cx.get_rank(), forms)
    objects = list(model.buffers())
    cx.DistributedDataParallel(model)
    assert hashes(model) == hashes(Holder(2.0, forms))
    assert all(now is before for now, before in zip(model.buffers(), objects, strict=True))


@on_ranks(2)
def test_what_changes_on_rank_0_comes_to_all_in_every_form():
    model = Holder(1.0)
    ddp = cx.DistributedDataParallel(model)
    if cx.get_rank() == 0:
        for form in FORMS:
            write(getattr(model, form.replace(" ", "_")), make(form, 2.0))
    ddp.sync_buffers()  # no rank has processed a row
    assert hashes(model) == hashes(Holder(2.0))


@on_ranks(2)
def test_what_differs_is_averaged_by_rows_where_it_is_floating_point():
    rank = cx.get_rank()
    model = Holder(1.0)
    ddp = cx.DistributedDataParallel(model)
    ddp(batch(rank, rows=3 - 2 * rank))
    with torch.no_grad():
        for form in AVERAGED:
            write(getattr(model, form), make(form.replace("_", " "), 3.0 + 4 * rank))
    ddp(batch(rank))
    expected = Holder(4.0)  # three rows of 3, and one of 7
    for form in AVERAGED:
        assert torch.equal(getattr(model, form), getattr(expected, form)), form


@on_ranks(2)
def test_a_state_with_a_row_per_sample_is_warned_of_once_by_rank_0_and_a_statistic_is_not():
    model = nn.Sequential(nn.BatchNorm1d(6).double())
    model.register_buffer("hidden", torch.zeros(1, 6, 2))
    model.register_buffer("codes", torch.zeros(5, 2))
    ddp = cx.DistributedDataParallel(model)
    with warning_texts() as said:
        for step in range(3):
            ddp(batch(cx.get_rank() + 10 * step, rows=6))
            for state in (model.hidden, model.codes):
                state.fill_(cx.get_rank())
            ddp.sync_buffers()
    found = [text for text in said if "became their mean" in text]
    assert len(found) == int(cx.is_master())
    assert all(text.startswith("the buffer hidden, of shape (1, 6, 2), differs") for text in found)


@on_ranks(3)
def test_a_rank_without_rows_has_no_weight_even_where_it_holds_no_number():
    rank = cx.get_rank()
    norm = nn.BatchNorm1d(6).double()
    ddp = cx.DistributedDataParallel(norm)
    if rank == 2:
        ddp.share_buffers_once()
        norm.running_mean.fill_(math.inf)
    else:
        ddp(batch(rank, rows=2 + rank))
    ddp.sync_buffers()
    means = [0.1 * batch(rank, rows=2 + rank).mean(0) for rank in range(2)]
    torch.testing.assert_close(norm.running_mean, (2 * means[0] + 3 * means[1]) / 5, rtol=1e-12, atol=1e-12)
    assert norm.num_batches_tracked == 1


@on_ranks(2)
def test_equal_buffers_are_not_touched():
    model = nn.BatchNorm1d(6).double()
    values = [0.1, 1 / 3, -0.0, math.inf, -math.inf, math.nan, torch.finfo(torch.float32).min]
    model.register_buffer("mask", torch.tensor(values))
    model.register_buffer("wide", torch.tensor(values[:6], dtype=torch.float64))
    bits = [model.mask.view(torch.int32).clone(), model.wide.view(torch.int64).clone()]
    ddp = cx.DistributedDataParallel(model)
    for step in range(3):
        ddp(batch(cx.get_rank() + 10 * step, rows=3 + 4 * cx.get_rank()))
    assert torch.equal(model.mask.view(torch.int32), bits[0])
    assert torch.equal(model.wide.view(torch.int64), bits[1])


@on_ranks(2)
def test_what_cannot_be_sent_is_refused_by_name_where_it_differs_and_else_stays():
    cx.DistributedDataParallel(Holder(1.0, ["quantised"]))
    with pytest.raises(cx.ConfigError, match="the buffer quantised differs between ranks, and a quantised tensor"):
        cx.DistributedDataParallel(Holder(1.0 + cx.get_rank(), ["quantised"]))
    with pytest.raises(cx.ConfigError, match=r"coo is float32, sparse_coo, \[4, 4\] on rank 0|sparse_csr"):
        cx.DistributedDataParallel(another_layout())
    cx.barrier()  # the world goes on


def another_layout() -> nn.Module:
    model = Holder(1.0, ["coo"])
    if cx.get_rank() == 1:
        model.register_buffer("coo", make("csr", 1.0))
    return model


def test_tensors_that_cannot_be_taken_apart_are_compared_by_all_that_they_hold():
    def forms(value: float) -> list[Tensor]:
        numbers = torch.full((3,), value)
        channels = (torch.tensor([value / 10, 0.2]), torch.zeros(2, dtype=torch.int64), 0, torch.qint8)
        return [
            torch.nested.nested_tensor([numbers, torch.ones(2)]),
            torch.nested.nested_tensor([numbers, torch.ones(2)], layout=torch.jagged),
            TwoTensor(torch.ones(3), numbers),
            torch.quantize_per_tensor(torch.zeros(3), value / 10, 0, torch.qint8),
            torch.quantize_per_channel(torch.zeros(2, 2), *channels),
            numbers.to_mkldnn(),
        ]

    for one, same, other in zip(forms(1.0), forms(1.0), forms(2.0), strict=True):
        assert fingerprint(one) == fingerprint(same) != fingerprint(other), kind_of(one)
        assert parts_of(one) is None
        assert not is_plain(one)
    assert kind_of(forms(1.0)[2]) == "TwoTensor"


def test_buffers_that_were_made_in_inference_mode_are_written_to():
    with torch.inference_mode():
        model = Holder(1.0, ["a number", "expanded"])
    for form in ("a number", "expanded"):
        write(getattr(model, form.replace(" ", "_")), make(form, 2.0))
    assert hashes(model) == hashes(Holder(2.0, ["a number", "expanded"]))


def test_kept_buffers_come_back_in_every_form():
    model = Holder(1.0, [*FORMS, "quantised"])
    kept, objects = BuffersKept(model), list(model.buffers())
    for _ in range(2):
        kept.keep()
        for form in FORMS:
            write(getattr(model, form.replace(" ", "_")), make(form, 2.0))
        model.quantised = make("quantised", 2.0)
        kept.restore()
        assert hashes(model) == hashes(Holder(1.0, [*FORMS, "quantised"]))
        assert all(now is before for now, before in zip(model.buffers(), objects, strict=True))


# --- fit ------------------------------------------------------------------------------------------------------------


class Means(nn.Module):
    """Keeps moving means of its rows, as batch norm and the codebook of a VQ-VAE do, and a graph of any form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("graph", make(form, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.batches += 1
        dense = parts_of(self.graph)[-1].sum() if self.graph.layout is not torch.strided else self.graph.sum()
        return self.layer(x - self.mean) * (1 + 0 * dense)


def fit(form: str, settings: dict[str, Any]) -> dict[str, Any]:
    model = Means(form)
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    trainer.fit(*make_rows(24), effective_batch_size=6, verbose=False, **{"epochs": 2} | settings)
    bits = [tensor.detach().numpy().tobytes() for tensor in (model.layer.weight, model.mean, model.batches)]
    return {"bits": bits, "mean": flat([model.mean]), "graph": fingerprint(model.graph)}


@pytest.mark.nightly
def test_moving_means_of_a_fit_are_those_of_one_rank_with_the_joined_batch():
    alone = everywhere(1, fit, "expanded", {})[0]
    for world_size in (2, 3):
        for found in everywhere(world_size, fit, "expanded", {}):
            np.testing.assert_allclose(found["mean"], alone["mean"], rtol=1e-5, atol=1e-7)
            assert found["graph"] == alone["graph"]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_fit_with_buffers_of_any_form_is_resumed_bit_for_bit(world_size, tmp_path: Path):
    for form in ("more in csr", "overlapping"):
        for steps in (1, 2):
            settings = {"accumulation_steps": steps, "checkpoint_dir": str(tmp_path / f"{form}{steps}")}
            whole = everywhere(world_size, fit, form, {"accumulation_steps": steps})
            everywhere(world_size, fit, form, settings | {"checkpoint_every_n_steps": 3})
            file = tmp_path / f"{form}{steps}" / "step-00000003.ckpt"
            close_worlds()  # what resumes is another process
            resumed = everywhere(world_size, fit, form, settings | {"resume": str(file)})
            assert [each["bits"] for each in resumed] == [each["bits"] for each in whole]
            assert [each["graph"] for each in resumed] == [each["graph"] for each in whole]
