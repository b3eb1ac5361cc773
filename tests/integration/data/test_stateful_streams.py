"""Streams with a state: a checkpoint keeps it, and a fit that resumes reads few samples again, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import FEATURES, everywhere, fingerprint, flat, keep_only, make_model, make_rows, one_process
from kept_worlds import close_worlds
from markers import by_night
from refusals import warning_texts
from torch.utils.data import IterableDataset

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
BATCH, BATCHES = 4, 12
INPUTS, TARGETS = make_rows(BATCH * BATCHES)
SAVED = 18
"""Steps of one rank at the checkpoint: in the middle of the second epoch."""


class Stream:
    """Batches with noise, which continue from a state; counts those that it has given."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"given": 0}
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        while self.state["given"] < BATCHES:
            first = BATCH * self.state["given"]
            self.state["given"] += 1
            self.read += 1
            yield self.made(slice(first, first + BATCH))
        self.state["given"] = 0

    def made(self, rows: slice) -> Any:
        noise = torch.randn(BATCH, FEATURES) * float(np.random.rand())
        return INPUTS[rows] + 0.1 * noise, TARGETS[rows]

    def state_dict(self) -> dict[str, Any]:
        return self.state  # it changes as the stream goes on

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Losing(Stream):
    """As one with a shuffle buffer, whose rows are not in its state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = {"given": state["given"] + bool(state["given"])}


class Drawing(Stream):
    """With a generator of its own in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(1)

    def made(self, rows: slice) -> Any:
        return INPUTS[rows] + torch.randn(FEATURES, generator=self.own), TARGETS[rows]

    def state_dict(self) -> dict[str, Any]:
        return {**self.state, "own": self.own.get_state().tolist(), 5: (1.5, None, float("inf"))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state[5] == (1.5, None, float("inf"))
        self.state = {"given": state["given"]}
        self.own.set_state(torch.tensor(state["own"], dtype=torch.uint8))


class Opaque(Stream):
    """With a state that no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {**self.state, "other": torch.zeros(2)}


class Broken(Stream):
    """Begins anew in each pass, and has no state."""

    def __iter__(self) -> Iterator[Any]:
        self.state = {"given": 0}
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state now")


class Samples(Stream, IterableDataset[Any]):
    """One row after the other, with or without noise."""

    def __init__(self, noise: float = 0.1) -> None:
        super().__init__()
        self.noise = noise

    def __iter__(self) -> Iterator[Any]:
        while self.state["given"] < BATCH * BATCHES:
            row = self.state["given"]
            self.state["given"] += 1
            self.read += 1
            yield INPUTS[row] + self.noise * torch.randn(FEATURES), TARGETS[row]
        self.state["given"] = 0


def fit(data: Any, folder: str, resume: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(cx.get_rank() + 100 * (resume is not None))
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.Adam(model.parameters(), 0.01))
    saving = {"checkpoint_every_n_steps": 2, "checkpoint_dir": folder, "resume": resume, "verbose": False}
    with warning_texts() as texts:
        history = trainer.fit(data, **{"epochs": 3, **saving, **settings})
    return {
        "bits": fingerprint(model),
        "parameters": flat(model.parameters()),
        "history": history.history,
        "read": getattr(data, "read", 0),
        "warned": [text for text in texts if "state" in text],
    }


def fit_kind(kind: type[Stream], *arguments: Any) -> dict[str, Any]:
    return fit(kind(), *arguments)


def resumed(world_size: int, step: int, function: Any, folder: Path, settings: Any, *first: Any) -> list[Any]:
    """Returns (whole, resumed) of each rank; `first`: the function's first arguments."""
    whole = everywhere(world_size, function, *first, str(folder), None, settings)
    keep_only(folder, step)
    close_worlds()  # what resumes is another process
    again = everywhere(world_size, function, *first, str(folder), "auto", settings)
    for before, after in zip(whole, again, strict=True):
        assert before["bits"] == after["bits"]
        assert before["history"] == after["history"]
    return [*zip(whole, again, strict=True)]


LEFT = 3 * BATCHES - SAVED
CASES = {
    Stream: (LEFT, ""),
    Drawing: (LEFT, ""),
    Samples: (BATCH * LEFT, ""),
    Losing: (
        LEFT + SAVED - BATCHES,
        "X cannot continue from its state in the checkpoint (it gives other samples",
    ),
    Opaque: (LEFT + SAVED - BATCHES, "'the state_dict of X.data.state.other' is a Tensor"),
    Broken: (LEFT + SAVED - BATCHES, ""),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_stream_resumes_from_its_state_or_is_read_again_with_the_same_bits(kind, tmp_path):
    expected, words = CASES[kind]
    [(whole, again)] = resumed(1, SAVED, fit_kind, tmp_path, {"batch_size": BATCH}, kind)
    more = 2 * (BATCH if kind is Samples else 1)  # the first batch, and the last step again
    if kind is Losing:
        more += 1
    assert expected <= again["read"] <= expected + more
    warned = [*whole["warned"], *again["warned"]]
    assert all(words in text for text in warned)
    assert bool(warned) == bool(words)


def fit_own(folder: str, resume: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    return fit(Stream(), folder, resume, settings)


@pytest.mark.parametrize(
    ("settings", "step", "expected"),
    [
        ({"sharded_data": False}, 8, 3 * BATCHES - 16),
        by_night({"sharded_data": True}, SAVED, LEFT),
        by_night({"sharded_data": False, "steps_per_epoch": 4, "checkpoint_every_n_epochs": 1}, 10, 2 * BATCHES - 20),
        by_night({"sharded_data": False, "accumulation_steps": 2}, 4, 3 * BATCHES - 16),
    ],
)
def test_two_ranks_resume_from_the_state(settings, step, expected, tmp_path):
    for _, again in resumed(2, step, fit_own, tmp_path, settings):
        assert expected <= again["read"] <= expected + 5
        assert again["warned"] == []


def test_an_epoch_that_ends_within_the_data_keeps_the_state(tmp_path):
    settings = {"steps_per_epoch": 5, "checkpoint_every_n_steps": 0, "checkpoint_every_n_epochs": 1}
    with one_process():
        whole = fit_own(str(tmp_path), None, settings)
        for path in tmp_path.glob("*.ckpt"):
            if path.name != "epoch-0002.ckpt":
                path.unlink()
        again = fit_own(str(tmp_path), "auto", settings)
    assert again["bits"] == whole["bits"]
    assert 5 <= again["read"] <= 5 + 2


def test_shared_data_resume_from_the_state_on_another_number_of_ranks(tmp_path):
    settings = {"sharded_data": False}
    whole = everywhere(2, fit_own, str(tmp_path), None, settings)
    keep_only(tmp_path, 8)
    with one_process():
        again = fit_own(str(tmp_path), "auto", settings)
    np.testing.assert_allclose(again["parameters"], whole[0]["parameters"], atol=1e-6)
    assert 3 * BATCHES - 16 <= again["read"] <= 3 * BATCHES - 16 + 3
    assert again["warned"] == []


# --- readers --------------------------------------------------------------------------------------------------------

READ: list[int] = []


class Part:
    """The rows of a reader, which continue from a state."""

    def __init__(self, reader: int, readers: int) -> None:
        self.rows = range(reader, BATCH * BATCHES, readers)
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        while self.given < len(self.rows):
            row = self.rows[self.given]
            self.given += 1
            READ.append(row)
            yield INPUTS[row] + 0.1 * torch.randn(FEATURES), TARGETS[row]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def part(reader: int, readers: int) -> Part:
    return Part(reader, readers)


def fit_parts(folder: str, resume: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    READ.clear()
    found = fit(part, folder, resume, {"readers": 4, "effective_batch_size": 8, "epochs": 2, **settings})
    return {**found, "read": [*READ]}


@pytest.mark.parametrize(("before", "after"), [(2, 2), by_night(1, 4), by_night(4, 1)])
def test_readers_resume_from_their_states_on_any_number_of_ranks(before, after, tmp_path):
    whole = everywhere(before, fit_parts, str(tmp_path), None, {})
    keep_only(tmp_path, 10)  # 4 of 6 steps of the second epoch
    close_worlds()
    again = everywhere(after, fit_parts, str(tmp_path), "auto", {})
    if before == after:
        assert [each["bits"] for each in again] == [each["bits"] for each in whole]
    np.testing.assert_allclose(again[0]["parameters"], whole[0]["parameters"], atol=1e-6)
    assert [each["warned"] for each in again] == [[]] * after
    assert 16 <= sum(len(each["read"]) for each in again) <= 16 + 2 * 8  # the first step, and the last one again


# --- other people's data --------------------------------------------------------------------------------------------


def fit_loader(workers: int, noise: float, folder: str, resume: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = Samples(noise)
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    found = fit(StatefulDataLoader(data, BATCH, **more), folder, resume, settings)
    return {**found, "read": data.read}


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_stateful_data_loader_resumes_from_its_state(workers, noise, world_size, tmp_path):
    pytest.importorskip("torchdata.stateful_dataloader")
    step = {1: SAVED, 2: 8}[world_size]
    found = resumed(world_size, step, fit_loader, tmp_path, {"sharded_data": False}, workers, noise)
    for rank, (_, again) in enumerate(found):
        # Workers draw numbers that no state has.
        assert bool(again["warned"]) == (workers > 0 and noise > 0 and rank == 0)
        if not workers:
            assert again["read"] <= BATCH * (LEFT + 6)


def fit_hugging_face(shuffles: bool, folder: str, resume: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    import datasets

    read: list[int] = []

    def noted(row: dict[str, Any]) -> dict[str, Any]:
        read.append(int(row["label"]))
        return row

    rows = {"input": INPUTS.numpy(), "label": TARGETS.numpy()}
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=6).map(noted).with_format("torch")
    if shuffles:
        stream = stream.shuffle(seed=1, buffer_size=10)
    found = fit(stream, folder, resume, {"batch_size": BATCH, "sharded_data": False, **settings})
    return {**found, "read": len(read)}


@pytest.mark.nightly
@pytest.mark.parametrize("readers", [None, 2])
@pytest.mark.parametrize("shuffles", [False, True])
def test_a_stream_of_hugging_face_resumes_from_its_state_unless_it_has_a_shuffle_buffer(
    shuffles, readers, tmp_path, monkeypatch
):
    pytest.importorskip("datasets")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a progress bar, also a disabled one, leaves a thread
    settings = {} if readers is None else {"readers": readers, "effective_batch_size": BATCH, "sharded_data": None}
    [(_, again)] = resumed(1, SAVED, fit_hugging_face, tmp_path, settings, shuffles)
    assert ["shuffle buffer" in text for text in again["warned"]] == [True] * shuffles
    if not shuffles:
        assert again["read"] <= BATCH * (LEFT + 4)
