"""Claims about virtual_ranks on unlike machines: ranks that compute differently are refused, a resumed fit warns."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from fitting import fingerprint, keep_only, make_model, make_rows, one_process, run_world
from refusals import ending, warning_texts

import cyxtrain as cx
from cyxtrain.training import header
from cyxtrain.training.inputs.virtual_ranks import check_ranks
from cyxtrain.world import consensus

pytestmark = pytest.mark.usefixtures("rank_server")
ENVIRONMENT = "the environment of MKL, oneDNN and CUDA"
DIFFERENT = {
    "MKL": f"ranks differ in {ENVIRONMENT} (rank 0, 2: without settings; rank 1: MKL_CBWR=COMPATIBLE): start all on",
    "processor": "rank 1: another processor): start all on one kind of machine",
    "oneDNN": "ranks differ in torch.backends.mkldnn.enabled (rank 0, 2: True; rank 1: False)",
}


def computing_with(kind: str) -> AbstractContextManager[Any]:
    """Compute with something different within; "": as it is."""
    if kind == "MKL":
        return mock.patch.dict(os.environ, {"MKL_CBWR": "COMPATIBLE"})
    if kind == "processor":
        return mock.patch.object(consensus, "processor_name", return_value="another processor")
    if kind == "oneDNN":
        return torch.backends.mkldnn.flags(enabled=False)
    return contextlib.nullcontext()


def fit(**more: Any) -> str:
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    trainer.fit(*make_rows(30), **{"epochs": 1, "batch_size": 2, "virtual_ranks": 4, "verbose": False} | more)
    return fingerprint(model)


def ended(kind: str, **more: Any) -> str:
    """Returns how a fit ends in which rank 1 computes differently."""
    with computing_with(kind if cx.get_rank() == 1 else ""):
        return ending(fit, **more)


def ended_without_slices(kind: str) -> str:
    return ended(kind, virtual_ranks=None)


@pytest.mark.parametrize("kind", DIFFERENT)
def test_ranks_that_compute_differently_are_refused_on_all(kind):
    first, *others = run_world(3, ended, kind)
    assert first.startswith("ConfigError: virtual_ranks=4 gives the same bits on any number of ranks, and ranks differ")
    assert DIFFERENT[kind] in first
    assert first.endswith("; or leave virtual_ranks out.")
    assert others == [first] * 2


def test_without_virtual_ranks_they_train():
    found = run_world(2, ended_without_slices, "processor")
    assert all(words.startswith("returned ") for words in found)


def test_all_ranks_with_each_value_are_named():
    alike = {"PyTorch": "2.13", "the processor": "A"}
    check_ranks(8, [alike] * 3)
    words = ending(check_ranks, 8, [alike, {**alike, "the processor": "B"}, alike, {**alike, "the processor": "C"}])
    assert "and ranks differ in the processor (rank 0, 2: A; rank 1: B; rank 3: C): start all" in words


def resumed(folder: str, kind: str = "") -> list[str]:
    """Returns the warnings of a fit that continues from the latest checkpoint."""
    with warning_texts() as warned, computing_with(kind):
        fit(checkpoint_dir=folder, resume="auto")
    return warned


def test_a_resumed_fit_warns_of_what_computes_differently_but_not_of_the_number_of_ranks(tmp_path):
    folder = str(tmp_path)
    with one_process():
        with computing_with("MKL"):
            fit(checkpoint_dir=folder, checkpoint_every_n_steps=2)
        keep_only(tmp_path, 2)
        assert resumed(folder, "MKL") == []
        [words] = resumed(folder)
    assert f"computed differently: {ENVIRONMENT} was MKL_CBWR=COMPATIBLE and is without settings. Numbers" in words
    assert words.endswith("may differ in their last bits, or more, also with virtual_ranks.")
    assert run_world(3, resumed, folder, "MKL") == [[]] * 3


def test_checkpoints_that_do_not_know_what_computed_them_are_resumed(tmp_path, monkeypatch):
    with one_process():
        with monkeypatch.context() as patch:
            patch.setattr(header, "arithmetic_of_rank", lambda device: {})
            fit(checkpoint_dir=str(tmp_path), checkpoint_every_n_steps=2)
        keep_only(tmp_path, 2)
        assert resumed(str(tmp_path)) == []
