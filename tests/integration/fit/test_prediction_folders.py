"""Claims about `predict(output_dir=...)`: what is in the folder, how it continues after a kill, and how it is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import killed_predictions
import numpy as np
import pytest
import torch
from fitting import adam, everywhere, make_model, make_rows, one_process, run_world, seeded
from killed_predictions import BATCH, ROWS
from markers import by_night
from rank_processes import (
    run_ranks,
    values,
)
from refusals import refusal
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import cyxtrain as cx
from cyxtrain.training.outside_fit import saved_predictions

pytestmark = pytest.mark.usefixtures("rank_server")


def trainer_of(model: nn.Module | None = None) -> cx.DistributedTrainer:
    model = make_model() if model is None else model
    return cx.DistributedTrainer(model, "mse", adam(model))


def content_of(folder: str | Path) -> dict[str, str]:
    """Returns a hash of each file of a folder, hidden ones too."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())}


@dataclasses.dataclass
class Out:
    scores: Tensor
    more: tuple[Tensor, None, Tensor]


class Several(nn.Module):
    """Returns several parts: one of other rows in each batch, whole numbers, and the states of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.cell = nn.LSTM(1, 3, num_layers=2, batch_first=True)

    def forward(self, words: Tensor) -> Any:
        output, (state, _) = self.cell(words[..., None])
        return {"output": output, "named": Out(words.sum(1), (output.argmax(-1), None, state))}


def sentences(size: int) -> DataLoader[Any]:
    rows = [torch.arange(1.0, 2 + row * 3 % 5) for row in range(size)]
    return DataLoader(rows, 2, collate_fn=lambda some: pad_sequence(some, batch_first=True))  # type: ignore[arg-type]


def plain(output: Any) -> Any:
    if isinstance(output, dict):
        return {name: plain(part) for name, part in output.items()}
    if dataclasses.is_dataclass(output):
        return plain(vars(output))
    if isinstance(output, (tuple, list)):
        return [plain(part) for part in output]
    return output if output is None else (type(output).__name__, str(output.dtype), output.tolist())


def predict_several(folder: str, sizes: tuple[int, ...]) -> list[Any]:
    found = []
    for size in sizes:
        loader = sentences(size)
        for number, pad_value in enumerate((None, -1.0)):
            where = f"{folder}/{size}-{number}"
            read = trainer_of(Several()).predict(loader, output_dir=where, pad_value=pad_value)
            found.append(plain(read[:]) == plain(trainer_of(Several()).predict(loader, pad_value=pad_value)))
            stream = trainer_of(Several()).predict(lambda loader=loader: iter(loader), output_dir=f"{where}-stream")
            found.append(plain(stream[:]) == plain(trainer_of(Several()).predict(loader)))
    array = make_rows(7)[0].numpy()
    read = trainer_of().predict(array, output_dir=f"{folder}/array", batch_size=2)
    found += [plain(read[:]) == plain(trainer_of().predict(array, batch_size=2)), type(read[3]) is np.ndarray]
    return found


@pytest.mark.parametrize(("world_size", "sizes"), [(2, (7,)), by_night(2, (1,)), by_night(4, (1, 7))])
def test_a_folder_has_what_predict_returns_and_the_same_files_on_any_number_of_ranks(world_size, sizes, tmp_path):
    contents = []
    for ranks in (1, world_size):
        for found in everywhere(ranks, predict_several, str(tmp_path / str(ranks)), sizes):
            assert found == [True] * (4 * len(sizes) + 2)
        contents.append({path.name: content_of(path) for path in sorted((tmp_path / str(ranks)).iterdir())})
    assert contents[0] == contents[1]
    assert len(contents[0]) == 4 * len(sizes) + 1


def test_rows_are_read_by_number_by_slice_and_one_after_the_other(tmp_path):
    with one_process():
        expected = trainer_of(Several()).predict(sentences(9))
        trainer_of(Several()).predict(sentences(9), output_dir=tmp_path)
    read = cx.open_predictions(tmp_path)
    assert len(read) == 9
    assert repr(read) == f"Predictions(9 rows in {tmp_path})"
    row = read[-2]
    assert list(row) == ["output", "named"]
    assert torch.equal(row["output"], expected["output"][7])
    assert torch.equal(row["named"]["scores"], expected["named"].scores[7])
    assert torch.equal(row["named"]["more"][2], expected["named"].more[2][:, 7])
    assert [len(each["output"]) for each in read] == [len(each) for each in expected["output"]]
    some = read[[8, 0, np.int64(3)]]
    assert torch.equal(some["named"]["scores"], expected["named"].scores[[8, 0, 3]])
    assert torch.equal(read[1:8:3]["named"]["more"][2], expected["named"].more[2][:, 1:8:3])
    assert read[5:5]["named"]["scores"].shape == (0,)
    again = pickle.loads(pickle.dumps(read))
    assert plain(again[4]) == plain(read[4])
    batches = DataLoader([each["scores"] for each in (read[row]["named"] for row in range(9))], 4)
    assert [len(batch) for batch in batches] == [4, 4, 1]
    with pytest.raises(IndexError):
        read[9]
    mask = np.arange(9) % 4 == 0
    for chosen in (mask, mask.tolist(), torch.from_numpy(mask), torch.tensor([0, 4, -1])):
        assert plain(read[chosen]) == plain(read[[0, 4, 8]])
    assert len(read[[]]["named"]["scores"]) == 0
    for wrong in ([True, False], [1.5], "text", [[1, 2]], 1.5):
        with pytest.raises(IndexError, match="give a row's number, a slice, a list of numbers or a bool per row"):
            read[wrong]


def test_a_shard_has_as_many_batches_as_fit_into_its_bytes_and_is_written_at_once(tmp_path, monkeypatch):
    class Files(cx.callbacks.Callback):
        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(len(list(tmp_path.glob("shard-*.npy"))))

    seen: list[int] = []
    monkeypatch.setattr(saved_predictions, "SHARD_BYTES", 2 * 3 * 3 * 4)  # two batches of 3 rows of 3 numbers
    monkeypatch.setattr(saved_predictions, "_FEWEST_SHARDS", 1)
    with one_process():
        trainer_of().predict(make_rows(20)[0], batch_size=3, output_dir=tmp_path, callbacks=Files())
    assert seen == [0, 0, 1, 1, 2, 2, 3]
    assert sorted(np.load(path).shape for path in tmp_path.glob("*.npy")) == [(2, 3), (6, 3), (6, 3), (6, 3)]


def test_bfloat16_is_written_as_float32_and_read_as_it_was(tmp_path):
    with one_process():
        model = make_model().bfloat16()
        read = trainer_of(model).predict(make_rows(3)[0], output_dir=tmp_path)
        assert torch.equal(read[:], trainer_of(model).predict(make_rows(3)[0]))
    assert np.load(next(tmp_path.glob("*.npy"))).dtype == np.float32


class NoNumbers(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = super().forward(x)
        return {"scores": scores, "none": scores[:, :0]}


def test_an_output_without_numbers_is_read_as_it_was(tmp_path):
    with one_process():
        read = trainer_of(NoNumbers(4, 3)).predict(make_rows(5)[0], batch_size=2, output_dir=tmp_path)
    assert read[:]["none"].shape == (5, 0)
    assert read[4]["none"].shape == (0,)
    assert read[4]["scores"].shape == (3,)


def fill_the_disk(folder: str) -> list[Any]:
    """Writes files that may not become large enough, then again without a limit."""
    import resource

    rows, kept = make_rows(200)[0], resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1300, kept[1]))
    try:
        trainer_of().predict(rows, batch_size=100, output_dir=folder)
    except cx.CheckpointError as error:
        found: list[Any] = [str(error)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    again = trainer_of().predict(rows, batch_size=100, output_dir=folder)
    return [*found, sorted(os.listdir(folder))[0], torch.equal(again[:], trainer_of().predict(rows, batch_size=100))]


@pytest.mark.skipif(os.name == "nt", reason="there is no such limit")
@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_full_disk_is_an_error_on_every_rank_and_the_next_call_continues(world_size, tmp_path):
    for found in everywhere(world_size, fill_the_disk, str(tmp_path)):
        assert found[0].startswith(f"Cannot write predictions {tmp_path}/shard-00000")
        assert found[1:] == ["index.json", True]


def predict_to_a_store(folder: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CYXTRAIN_STAGING_DIR", f"{folder}/staging")
        rows = make_rows(130)[0]
        url = f"local://{folder}/there"
        read = trainer_of().predict(rows, batch_size=2, output_dir=url)
        here = trainer_of().predict(rows, batch_size=2, output_dir=f"{folder}/here")
        again = pickle.loads(pickle.dumps(cx.open_predictions(url)))
        found = [repr(again), torch.equal(read[:], here[:]), torch.equal(again[[129, 0, 77]], here[[129, 0, 77]])]
        return [*found, refusal(trainer_of().predict, rows + 1, batch_size=2, output_dir=url)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_store_has_the_files_of_a_folder(world_size, tmp_path):
    for name, *are_same, words in everywhere(world_size, predict_to_a_store, str(tmp_path)):
        assert name == f"Predictions(130 rows in local://{tmp_path}/there)"
        assert are_same == [True, True]
        assert f"output_dir local://{tmp_path}/there has other predictions: the given X" in words
    assert content_of(tmp_path / "there") == content_of(tmp_path / "here")
    assert not [*(tmp_path / "staging").iterdir()]


def test_a_store_without_predictions_is_refused_by_its_url(tmp_path):
    with pytest.raises(cx.ConfigError, match=r"^local://.*/none has no index\.json of predictions"):
        cx.open_predictions(f"local://{tmp_path}/none")


# --- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="ranks are killed by POSIX signals here")
@pytest.mark.parametrize(
    ("kind", "victim", "then"),
    [
        ("arrays", -1, 2),
        by_night("arrays", 1, 2),
        by_night("arrays", 0, 1),
        by_night("stream", -1, 2),
        by_night("stream", 0, 3),
        by_night("arrays in a store", -1, 1),
    ],
)
def test_a_killed_prediction_continues_with_the_shards_that_are_missing(kind, victim, then, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    kind, _, in_store = kind.partition(" ")
    place = f"local://{killed}" if in_store else str(killed)
    staging = {"CYXTRAIN_STAGING_DIR": f"{tmp_path}/staging"}
    values(run_ranks(2, killed_predictions.predict, str(whole), kind, 0))
    ends = run_ranks(2, killed_predictions.predict, place, kind, 20, victim, **staging)
    assert "Killed" in {ended.kind for ended in ends}
    with pytest.raises(cx.ConfigError, match=r"predict has not finished\. Call it again with output_dir="):
        cx.open_predictions(killed)
    before = content_of(killed)
    finished = {int(name[6:12]) for name in before if name.endswith(".json") and name.startswith("shard")}
    assert 0 < len(finished) < len(list(whole.glob("shard-*.json")))
    found = values(run_ranks(then, killed_predictions.predict, place, kind, 0, **staging))
    assert content_of(killed) == content_of(whole)
    group = json.loads((whole / "index.json").read_text())["batches_per_shard"]
    assert group == (2 if kind == "arrays" else 16)
    firsts = make_rows(ROWS)[0][::BATCH, 0].tolist()
    missing = [first for number, first in enumerate(firsts) if number // group not in finished]
    assert sorted(batch for rank in found for batch in rank) == sorted(missing)


def stop_and_continue(folder: str) -> list[Any]:
    class Stops(cx.callbacks.Callback):
        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5 and cx.get_rank() == cx.get_world_size() - 1:
                self.trainer.stop_predicting = True

    rows = make_rows(130)[0]
    first = trainer_of().predict(rows, batch_size=1, output_dir=folder, callbacks=Stops())
    expected = trainer_of().predict(rows, batch_size=1)
    found = [len(first), torch.equal(first[:], expected[: len(first)])]
    again = trainer_of().predict(rows, batch_size=1, output_dir=folder)
    return [*found, len(again), torch.equal(again[:], expected)]


@pytest.mark.parametrize(("world_size", "rows"), [by_night(1, 3), (2, 6)])
def test_a_callback_ends_it_with_the_first_shards_and_the_next_call_continues(world_size, rows, tmp_path):
    for found in everywhere(world_size, stop_and_continue, str(tmp_path)):
        assert found == [rows, True, 130, True]


# --- what is refused --------------------------------------------------------------------------------------------------


def refuse(folder: str) -> dict[str, str]:
    rows, place = make_rows(9)[0], f"{folder}/right"
    own = f"{folder}/rank{cx.get_rank()}"
    Path(f"{folder}/other").mkdir(exist_ok=True)
    Path(f"{folder}/other/notes.txt").touch()
    trainer_of().predict(rows, output_dir=place)
    trainer_of().predict(lambda: iter(rows.split(3)), output_dir=f"{folder}/steps", steps=2)
    other = make_model()
    with torch.no_grad():
        other[0].bias[1] += 1e-6
    loader = DataLoader(torch.utils.data.TensorDataset(rows + cx.get_rank()), 3)
    ways = {
        "weights": lambda: trainer_of(other).predict(rows, output_dir=place),
        "rows": lambda: trainer_of().predict(rows[:8], output_dir=place),
        "values": lambda: trainer_of().predict(rows + 1, output_dir=place),
        "batches": lambda: trainer_of().predict(rows, output_dir=place, batch_size=3),
        "files": lambda: trainer_of().predict(rows, output_dir=f"{folder}/other"),
        "no path": lambda: trainer_of().predict(rows, output_dir=3),  # type: ignore[arg-type]
        "steps": lambda: trainer_of().predict(lambda: iter(rows.split(3)), output_dir=f"{folder}/steps"),
        "own folders": lambda: trainer_of().predict(rows, output_dir=own),
        "own rows": lambda: trainer_of().predict(lambda: iter(loader), output_dir=f"{folder}/new"),
        "one rank": lambda: trainer_of().predict(rows, output_dir=place if cx.get_rank() else None),
    }
    found = {}
    for name, way in ways.items():
        try:
            found[name] = f"returned {way()}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    alone = trainer_of().predict(rows, output_dir=f"{own}-alone", distributed=False)
    found["alone"] = str(torch.equal(alone[:], trainer_of().predict(rows)))
    return found


def test_other_predictions_and_folders_that_ranks_do_not_share_are_refused_by_name(tmp_path):
    for rank, found in enumerate(run_world(2, refuse, str(tmp_path))):
        prefix = "ConfigError: " + ("" if rank == 0 else "rank 0: ")
        here = f"{prefix}output_dir {tmp_path}/right has other predictions: "
        assert found["weights"].startswith(f"{here}the weights' hash was ")
        assert found["weights"].endswith(". Choose another folder, or delete that one.")
        assert found["rows"].startswith(f"{here}the given X: shape was [9, 4], and now is [8, 4].")
        assert found["values"].startswith(f"{here}the given X: hash of its values was ")
        assert found["batches"].startswith(f"{here}the batch size was 64, and now is 3.")
        assert found["files"].startswith(f"{prefix}output_dir {tmp_path}/other has files (['notes.txt']) and no index")
        assert found["no path"].startswith("ConfigError: predict.output_dir must be a path, got 3.")
        assert found["own folders"].startswith("ConfigError: rank 1 differs from rank 0 in the folder output_dir (")
        assert "output_dir needs samples that all ranks share, and each has its own" in found["own rows"]
        assert "rank 1 differs from rank 0 in whether output_dir is given: True on rank 1" in found["one rank"]
        assert "the first batch was " in found["steps"]
        assert found["alone"] == "True"


def test_a_folder_without_predictions_is_refused(tmp_path):
    (tmp_path / "index.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(cx.ConfigError, match=r"has no index\.json of predictions: .* writes it"):
            cx.open_predictions(folder)


class Wrong(nn.Module):
    """Returns something that `predict` cannot use."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.output = output

    def forward(self, rows: Tensor) -> Any:
        return self.output


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (torch.tensor(1.0), r"a tensor of shape \[\]"),
        ([[1, 2], [3]], "int as output"),
        ("yes", "str"),
        ({"scores": torch.zeros(4, 1), "name": "x"}, "str as output"),
    ],
)
def test_output_without_rows_is_refused_before_a_folder_is_made(output, what, tmp_path):
    trainer = cx.DistributedTrainer(Wrong(output), "mse", "sgd")
    with one_process(), pytest.raises(cx.ConfigError, match=f"samples it returned {what}"):
        trainer.predict(torch.zeros(4, 3), output_dir=tmp_path / "predictions")
    assert not (tmp_path / "predictions").exists()
