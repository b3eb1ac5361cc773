"""Claims about a fit that goes on from a checkpoint: it ends as the one that was never interrupted."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import shutil
import signal
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fitting import (
    CLASSES,
    FEATURES,
    everywhere,
    fingerprint,
    make_model,
    make_rows,
    one_process,
    run_new_world,
    run_world,
    seeded,
)
from markers import by_night, nightly_where
from refusals import warning_texts
from torch import nn

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import CheckpointState, read_checkpoint
from cyxtrain.checkpoint.folder import CheckpointFolder
from cyxtrain.data.rng import generators_as_json
from cyxtrain.data.sharding import ranks_with_rows
from cyxtrain.training.resume import start_or_resume

pytestmark = [pytest.mark.usefixtures("rank_server")]

ROWS, BATCH = 55, 5
"""On two and three ranks the last step of an epoch is uneven, and no rank is left with one row (batch norm)."""


class Noisy(nn.Module):
    """Draws from all three generators in each training forward, and notes which rows it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, CLASSES)
        )
        self.seen: list[float] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += rows[:, 0].tolist()
            rows = rows + 0.1 * random.random() + 0.1 * np.random.rand()
        return self.layers(rows)


def make_trainer(seed: int) -> cx.DistributedTrainer:
    """The same model everywhere; but where a process begins must not matter, so every one begins elsewhere."""
    with seeded():
        model = Noisy()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return cx.DistributedTrainer(model, nn.CrossEntropyLoss(), optimizer)


def train(trainer: cx.DistributedTrainer, folder: str, **settings: Any) -> dict[str, Any]:
    trainer.model.seen.clear()
    given = {"epochs": 3, "batch_size": BATCH, "validation_data": make_rows(11, seed=1), "checkpoint_dir": folder}
    history = trainer.fit(*make_rows(ROWS), **{"verbose": False, **given, **settings})
    return {
        "bits": fingerprint(trainer.model),
        "history": history.history,
        "epochs": history.epochs,
        "seen": list(trainer.model.seen),
        "epoch": trainer.epoch,
    }


def train_anew(seed: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    return train(make_trainer(seed + cx.get_rank()), folder, **settings)


def without(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in names}


def steps_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.ckpt"))


def resume_from_each(folder: str, seed: int, every: int = 1) -> dict[str, dict[str, Any]]:
    """Returns what a fit comes to that resumes from each checkpoint, or from every so many; they end with the last."""
    paths = [path for path in sorted(Path(folder).iterdir()) if path.suffix == ".ckpt"][::-every]
    return {path.name: train_anew(seed + number, folder, {"resume": path}) for number, path in enumerate(paths)}


@pytest.mark.parametrize(("world_size", "every"), [(2, 7), *(by_night(world_size, 1) for world_size in (1, 2, 3))])
def test_a_fit_resumed_after_any_step_ends_as_the_one_that_was_not_interrupted(world_size, every, tmp_path):
    whole = run_world(world_size, train_anew, 1, str(tmp_path), {"checkpoint_every_n_steps": 1})
    plain = run_world(world_size, train_anew, 2, str(tmp_path / "none"), {})
    assert whole == plain  # saving changes nothing
    steps = len(steps_in(tmp_path))
    assert steps == 3 * -(-ROWS // (BATCH * world_size))
    resumed = run_new_world(world_size, resume_from_each, str(tmp_path), 10, every)
    for name in resumed[0]:
        for rank in range(world_size):
            found = resumed[rank][name]
            assert without(found, "seen") == without(whole[rank], "seen"), (name, rank)
            # It did what was left, and nothing else.
            assert found["seen"] == whole[rank]["seen"][len(whole[rank]["seen"]) - len(found["seen"]) :], name
        done = read_checkpoint(tmp_path / name).position
        left = ROWS * 3 - done["epoch"] * ROWS - done["samples"]
        assert sum(len(resumed[rank][name]["seen"]) for rank in range(world_size)) == left, name


@pytest.mark.parametrize("kind", ["arrays", "function"])
def test_a_fit_resumed_after_the_last_step_of_an_epoch_continues_in_the_middle_of_the_data(kind, tmp_path):
    inputs, targets = make_rows(ROWS)
    parts = zip(inputs.split(BATCH), targets.split(BATCH), strict=True)
    data = (inputs, targets) if kind == "arrays" else (functools.partial(iter, list(parts)),)

    def fitted(path: Path | None = None) -> str:
        trainer = make_trainer(0)
        given = {"epochs": 3, "steps_per_epoch": 4, "checkpoint_every_n_steps": 4, "checkpoint_dir": str(tmp_path)}
        trainer.fit(*data, verbose=False, resume=path, **given | ({} if kind == "function" else {"batch_size": BATCH}))
        return fingerprint(trainer.model)

    with one_process():
        whole = fitted()
        paths = steps_in(tmp_path)
        assert [read_checkpoint(path).position["step"] for path in paths] == [4, 8, 12]
        assert [fitted(path) for path in paths] == [whole] * 3


class Disturbs(cx.callbacks.Callback):
    """Changes in place, when training begins, what a checkpoint has."""

    def on_train_begin(self, logs: Any = None) -> None:
        for parameter, state in self.trainer.optimizer.state.items():
            parameter.data.fill_(7)
            for value in state.values():
                value.fill_(7)
        for buffer in self.model.buffers():
            buffer.fill_(7)


def test_what_a_callback_changes_in_place_when_training_begins_is_restored(tmp_path):
    with one_process():
        whole = train_anew(1, str(tmp_path), {"checkpoint_every_n_steps": 4})
        path = tmp_path / "step-00000004.ckpt"
        resumed = train_anew(2, str(tmp_path), {"resume": path, "callbacks": Disturbs()})
    assert without(resumed, "seen") == without(whole, "seen")


class Looks(cx.callbacks.Callback):
    """Counts the checkpoints in memory after step 10."""

    def __init__(self, ignored: list[CheckpointState]) -> None:
        self.ignored = ignored
        self.found: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"average": torch.zeros(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = weakref.ref(state["average"])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.trainer.step == 10:
            left = [each for each in checkpoints_in_memory() if not any(each is other for other in self.ignored)]
            self.found.append(len(left))


def checkpoints_in_memory() -> list[CheckpointState]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is CheckpointState]


@pytest.mark.nightly
def test_a_resumed_fit_lets_go_of_its_checkpoint(tmp_path):
    with one_process():
        looks = Looks(checkpoints_in_memory())
        settings = {"epochs": 1, "checkpoint_every_n_steps": 9, "callbacks": looks}
        train_anew(1, str(tmp_path), settings)
        looks.found.clear()
        train_anew(2, str(tmp_path), {**settings, "resume": tmp_path / "step-00000009.ckpt"})
    assert looks.found == [0]
    assert looks.loaded() is None
    assert not looks.trainer._state.kept


class Begins(cx.callbacks.Callback):
    """Counts steps, adds the first layer to the optimizer, and saves when training begins."""

    def __init__(self, saves: str) -> None:
        self.saves = saves
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def on_train_begin(self, logs: Any = None) -> None:
        if self.saves:
            self.trainer.save_checkpoint(self.saves)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            self.trainer.optimizer.add_param_group({"params": [*self.model[0].parameters()], "lr": 0.02})

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1


def fit_begun(folder: str, resume: str | None = None, saves: str = "") -> list[Any]:
    """Fits a model whose gradients are compressed, with feedback from step to step; five steps an epoch."""
    with seeded():
        model = nn.Sequential(nn.Linear(FEATURES, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, CLASSES))
    optimizer = torch.optim.SGD([*model[2:].parameters()], 0.05, momentum=0.9)
    compressed = cx.DDPConfig(compression="powersgd")
    trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, ddp_config=compressed)
    begins = Begins(saves)
    given = {"epochs": 2, "effective_batch_size": 8, "verbose": False, "checkpoint_every_n_steps": 3}
    history = trainer.fit(*make_rows(40), **given, checkpoint_dir=folder, resume=resume, callbacks=begins)
    return [fingerprint(model), begins.steps, history.train_losses]


@pytest.mark.nightly
def test_what_is_saved_when_training_begins_again_is_what_the_fit_continues_from(tmp_path):
    whole = run_new_world(2, fit_begun, str(tmp_path / "whole"))
    path = str(tmp_path / "whole" / "step-00000003.ckpt")
    begun = str(tmp_path / "begun.ckpt")
    assert run_new_world(2, fit_begun, str(tmp_path / "saving"), path, begun) == whole
    assert run_new_world(2, fit_begun, str(tmp_path / "again"), begun) == whole
    assert whole[0][1] == 10


def test_another_number_of_ranks_continues_from_it_too(tmp_path):
    run_world(2, fit_begun, str(tmp_path / "whole"))
    path = str(tmp_path / "whole" / "step-00000003.ckpt")
    begun = str(tmp_path / "begun.ckpt")
    with one_process():
        alone = fit_begun(str(tmp_path / "saving"), path, begun)
        assert fit_begun(str(tmp_path / "again"), begun) == alone


def test_a_checkpoint_of_other_ranks_is_saved_as_one_of_theirs(tmp_path):
    run_world(2, train_anew, 1, str(tmp_path), {"epochs": 1, "checkpoint_every_n_steps": 2})
    with one_process():
        for source, target in (("step-00000002", "second"), ("second", "third")):
            trainer = make_trainer(0)
            trainer.load_checkpoint(tmp_path / f"{source}.ckpt")
            trainer.save_checkpoint(tmp_path / f"{target}.ckpt")
    assert read_checkpoint(tmp_path / "third.ckpt").world_size == 2


HOOKS = ("on_train_batch_end", "on_test_begin", "on_test_end", "on_validation_end", "on_epoch_end")


class SavesIn(cx.callbacks.Callback):
    """Saves in each hook where an epoch ends; stops in `stops_in`, by a signal."""

    def __init__(self, folder: str, step: int, stops_in: str = "") -> None:
        self.folder, self.step, self.stops_in = folder, step, stops_in
        for hook in HOOKS:
            setattr(self, hook, functools.partial(self.save, hook))

    def save(self, hook: str, *_: Any) -> None:
        if self.trainer.step == self.step and hook == self.stops_in:
            os.kill(os.getpid(), signal.SIGINT)
        elif self.trainer.step == self.step and not self.stops_in:
            self.trainer.save_checkpoint(f"{self.folder}/{hook}.ckpt")


class Drawn(torch.utils.data.Sampler):
    """Draws each epoch's order from a generator that continues."""

    def __init__(self) -> None:
        self.drawn = np.random.RandomState(5)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(self.drawn.permutation(ROWS).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn.set_state(state["drawn"])


def own_batches() -> Any:
    """Each rank's own, and more on rank 0 than on others."""
    inputs, targets = make_rows(ROWS, seed=cx.get_rank())
    left = ROWS - 2 * BATCH * cx.get_rank()
    return zip(inputs[:left].split(BATCH), targets[:left].split(BATCH), strict=True)


def fit_of(kind: str, **more: Any) -> Any:
    inputs, targets = make_rows(ROWS)
    parts = list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), BATCH, sampler=Drawn())
    stream, alike = functools.partial(iter, parts), {"sharded_data": False}
    data, settings = {
        "arrays": ((inputs, targets), {"batch_size": BATCH, "validate_every_n_steps": 1}),
        "loader": ((loader,), {}),
        "function": ((stream,), alike),
        "steps": ((stream,), {**alike, "steps_per_epoch": len(parts) // cx.get_world_size()}),
        "own": ((own_batches,), {"sharded_data": True, "max_steps": 2 * len(parts)}),
    }[kind]
    trainer = make_trainer(0)
    trainer.fit(*data, **{"epochs": 2, "validation_data": make_rows(11, seed=1), "verbose": False, **settings, **more})
    return trainer.step, fingerprint(trainer.model), trainer.history.history, trainer.history.validations


def resumed_from_hooks(kind: str, folder: str) -> tuple[Any, dict[str, Any]]:
    """Returns the outcome of a fit, and by hook that of a fit resumed from what the hook saved at an epoch's end."""
    whole = fit_of(kind)
    assert fit_of(kind, callbacks=[SavesIn(folder, whole[0] // 2)]) == whole
    return whole, {hook: fit_of(kind, resume=f"{folder}/{hook}.ckpt") for hook in HOOKS}


@nightly_where(lambda kind, world_size: (kind, world_size) != ("own", 1))
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["arrays", "loader", "function", "steps", "own"])
def test_a_fit_resumed_from_wherever_an_epoch_ends_trains_no_step_twice(kind, world_size, tmp_path):
    whole, resumed = everywhere(world_size, resumed_from_hooks, kind, str(tmp_path))[0]
    for hook, found in resumed.items():
        assert found == whole, hook


@pytest.mark.skipif(os.name == "nt", reason="a POSIX signal")
def test_a_stream_stopped_in_the_validation_of_an_epoch_continues_with_the_next_one(tmp_path):
    kept: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1, "resume": "auto"}
    with one_process():
        whole = fit_of("function")
        with pytest.raises(KeyboardInterrupt):
            fit_of("function", **kept, callbacks=[SavesIn("", whole[0] // 2, stops_in="on_test_begin")])
        assert fit_of("function", **kept) == whole


@pytest.mark.skipif(os.name == "nt", reason="a POSIX signal")
def test_a_fit_stopped_before_its_first_step_leaves_a_checkpoint_in_its_own_folder(tmp_path, capsys):
    first, second = str(tmp_path / "first"), tmp_path / "second"
    kept: dict[str, Any] = {"checkpoint_dir": str(second), "checkpoint_every_n_epochs": 1}
    with one_process():
        whole = fit_of("arrays", callbacks=[SavesIn(first, 5)])
        stops = SavesIn("", 5, stops_in="on_test_begin")
        with pytest.raises(KeyboardInterrupt):
            fit_of("arrays", resume=f"{first}/on_train_batch_end.ckpt", callbacks=[stops], verbose=True, **kept)
        assert f"a checkpoint is in {second}" in " ".join(capsys.readouterr().out.split())
        assert [path.name for path in second.iterdir()] == ["step-00000005.ckpt"]
        assert fit_of("arrays", resume="auto", **kept) == whole


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_complete_fit_continued_from_another_folder_leaves_a_checkpoint_in_its_own(world_size, tmp_path):
    settings = {"checkpoint_every_n_epochs": 3}
    run_world(world_size, train_anew, 1, str(tmp_path / "first"), settings)
    resumed = {**settings, "resume": tmp_path / "first" / "epoch-0003.ckpt"}
    run_new_world(world_size, train_anew, 2, str(tmp_path / "second"), resumed)
    written = (tmp_path / "second" / "epoch-0003.ckpt").stat().st_mtime_ns
    run_new_world(world_size, train_anew, 3, str(tmp_path / "second"), {**settings, "resume": "auto"})
    assert (tmp_path / "second" / "epoch-0003.ckpt").stat().st_mtime_ns == written


def test_a_fit_that_stops_says_that_its_checkpoint_could_not_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    settings = {"checkpoint_every_n_epochs": 1, "max_time_seconds": 1e-6, "verbose": True}
    with one_process(), pytest.warns(UserWarning, match="Cannot write checkpoint"):
        train_anew(0, str(tmp_path / "file"), settings)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"its checkpoint could not be written to {tmp_path / 'file'}" in shown


def quiet_model() -> nn.Module:
    """Without anything random, and without batch norm: N ranks equal one."""
    with seeded():
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


class Watched(nn.Module):
    """Notes which rows it has seen."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self.seen: list[float] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.seen += rows[:, 0].tolist()
        return self.inner(rows)


def train_quietly(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    model = Watched(quiet_model())
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), 1e-2))
    given = {"epochs": 3, "batch_size": 3, "verbose": False, "checkpoint_dir": folder}
    history = trainer.fit(*make_rows(ROWS), **{**given, **settings})
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    return {
        "weights": weights,
        "losses": history.train_losses,
        "seen": model.seen,
        "size": history.effective_batch_size,
    }


def joined(ranks: list[dict[str, Any]], sizes: list[int]) -> list[list[float]]:
    """Returns the rows of each step, of all ranks together."""
    steps, positions = [], [0] * len(ranks)
    for size in sizes:
        rows = []
        for rank, found in enumerate(ranks):
            dealt = ranks_with_rows(size, max(sizes), len(ranks))  # of the last step, fewer than there are
            count = len(range(rank, size, dealt)) if rank < dealt else 0
            rows += found["seen"][positions[rank] : positions[rank] + count]
            positions[rank] += count
        steps.append(sorted(rows))
    return steps


def resume_quietly_from(folder: str, steps: list[int]) -> list[dict[str, Any]]:
    paths = [Path(folder, f"step-{step:08d}.ckpt") for step in steps]
    return [train_quietly(folder, {"resume": path}) for path in paths]


@pytest.mark.parametrize("world_size", [by_night(1), 2, by_night(3)])
def test_on_another_number_of_ranks_the_same_samples_come_in_the_same_order(world_size, tmp_path):
    whole = run_world(4, train_quietly, str(tmp_path), {"checkpoint_every_n_steps": 1})
    assert whole[0]["size"] == 12
    sizes = [12, 12, 12, 12, 7] * 3
    steps = [2, 5, 9, 12]
    ranks = run_world(world_size, resume_quietly_from, str(tmp_path), steps)
    for number, step in enumerate(steps):
        resumed = [found[number] for found in ranks]
        assert resumed[0]["size"] == 12
        assert joined(resumed, sizes[step:]) == joined(whole, sizes)[step:]
        np.testing.assert_allclose(resumed[0]["weights"], whole[0]["weights"], rtol=0, atol=1e-5)
        assert resumed[0]["losses"] == pytest.approx(whole[0]["losses"], abs=1e-6)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def resume_after_damage(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    with warning_texts() as caught:
        found = train_quietly(folder, settings)
    return {**found, "warnings": [text for text in caught if "ckpt" in text]}


def test_auto_takes_the_newest_that_is_intact_and_names_those_that_it_skips(tmp_path):
    whole = run_world(2, train_quietly, str(tmp_path), {"checkpoint_every_n_steps": 4})
    steps = sorted(tmp_path.glob("step-*"))
    assert len(steps) == 30 // 4
    for path in (tmp_path / "epoch-0003.ckpt", steps[-1], steps[-2]):
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 4
        path.write_bytes(content)
    steps[-3].write_bytes(steps[-3].read_bytes()[:-40])
    (tmp_path / ".step-00000028.ckpt.0123abcd.cyxtrain-tmp").write_bytes(b"left by a kill")
    first, second = run_new_world(
        2, resume_after_damage, str(tmp_path), {"checkpoint_every_n_steps": 4, "resume": "auto"}
    )
    assert second["warnings"] == []  # rank 0 reads
    for path in (tmp_path / "epoch-0003.ckpt", steps[-1], steps[-2]):
        assert [str(path) in text for text in first["warnings"]].count(True) == 1
    for name in ("weights", "losses"):
        assert first[name] == second[name] == whole[0][name]
    assert len(first["seen"]) + len(second["seen"]) == 3 * ROWS - (ROWS + 6 * 6)
    assert files(tmp_path) == ["epoch-0003.ckpt", *(path.name for path in steps)]


def test_auto_with_nothing_to_resume_begins(tmp_path):
    with one_process():
        begun = train_quietly(str(tmp_path / "none"), {"resume": "auto"})
        assert begun == train_quietly(str(tmp_path / "none"), {})


def test_a_later_run_in_the_same_folder_is_the_newer_one(tmp_path):
    with one_process():
        train_quietly(str(tmp_path), {"checkpoint_every_n_epochs": 1, "epochs": 3})
        train_quietly(str(tmp_path), {"checkpoint_every_n_epochs": 1, "epochs": 1, "seed": 7})
        found = CheckpointFolder(tmp_path).newest_first()
        assert [one.path.name for one in found] == ["epoch-0001.ckpt", "epoch-0003.ckpt", "epoch-0002.ckpt"]


def test_only_the_last_and_the_best_stay(tmp_path):
    with one_process():
        trainer = make_trainer(0)
        settings = {"checkpoint_every_n_epochs": 1, "keep_last": 2, "keep_best": "val_loss", "epochs": 6}
        history = train(trainer, str(tmp_path), **settings)["history"]
        assert files(tmp_path) == ["best.ckpt", "epoch-0005.ckpt", "epoch-0006.ckpt"]
        best = read_checkpoint(tmp_path / "best.ckpt")
        assert best.position["epoch"] == 1 + int(np.argmin(history["val_loss"]))
        trainer.load_checkpoint(tmp_path / "best.ckpt")
        assert trainer.epoch == best.position["epoch"]


def refused_folder(folder: str) -> dict[str, Any]:
    model = Watched(quiet_model())
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss())
    given = {"epochs": 1, "batch_size": 3, "checkpoint_every_n_epochs": 1, "verbose": False}
    error = ""
    try:
        trainer.fit(*make_rows(ROWS), **given, checkpoint_dir=folder, on_save_error="raise")
    except cx.CheckpointError as found:
        error = str(found)
    return {"error": error, "seen": model.seen}


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_a_folder_that_takes_nothing_lets_training_go_on_and_says_so(tmp_path):
    (tmp_path / "file").touch()
    with one_process():
        with pytest.warns(UserWarning, match="Cannot write checkpoint") as caught:
            found = train_quietly(str(tmp_path / "file"), {"checkpoint_every_n_epochs": 1})
        assert len(found["losses"]) == 3
        first, last = (str(warning.message) for warning in caught)
        assert first.startswith(f"Cannot write checkpoints to {tmp_path / 'file'}: ")
        assert "choose another folder. Training continues without" in first
        assert last == f"3 checkpoints could not be written to {tmp_path / 'file'}."


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_folder_that_takes_nothing_is_refused_before_the_first_step(world_size, tmp_path):
    (tmp_path / "file").touch()
    for found in everywhere(world_size, refused_folder, str(tmp_path / "file")):
        assert "Cannot write checkpoints to" in found["error"]
        assert found["seen"] == []
    for found in everywhere(world_size, refused_folder, str(tmp_path / "new" / "folder")):
        assert found["error"] == ""
        assert len(found["seen"]) > 0
    assert files(tmp_path / "new" / "folder") == ["epoch-0001.ckpt"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 7}, "seed is 7 and was 42"),
        by_night({"batch_size": 4}, "batch_size is 4 and was 3"),
        by_night({"shuffle": False}, "shuffle is False and was True"),
        ({"validation_split": 0.2}, "validation_split is 0.2 and was 0.0; the training data differ"),
    ],
)
def test_other_samples_than_the_checkpoints_are_refused(settings, message, tmp_path):
    with one_process():
        train_quietly(str(tmp_path), {"checkpoint_every_n_epochs": 1})
        with pytest.raises(cx.ConfigError, match=message):
            train_quietly(str(tmp_path), {"resume": "auto", **settings})


def test_a_fit_hands_the_generators_back_as_it_found_them():
    with one_process():
        trainer = make_trainer(5)
        before = generators_as_json(torch.device("cpu"))
        train(trainer, ".", epochs=1)
        assert generators_as_json(torch.device("cpu")) == before
        with pytest.raises(cx.ConfigError):
            train(trainer, ".", keep_best="val_loss", validation_data=None)
        assert generators_as_json(torch.device("cpu")) == before


def test_a_resumed_fit_may_have_more_epochs_and_a_complete_one_has_nothing_to_do(tmp_path):
    with one_process():
        longer = train_quietly(str(tmp_path / "none"), {"epochs": 5})
        whole = train_quietly(str(tmp_path), {"checkpoint_every_n_epochs": 2})
        again = train_quietly(str(tmp_path), {"resume": "auto"})
        assert again == {**whole, "seen": []}
        more = train_quietly(str(tmp_path), {"resume": "auto", "epochs": 5})
        assert more == {**longer, "seen": longer["seen"][3 * ROWS :]}


def test_what_a_user_has_put_beside_the_checkpoints_stays(tmp_path):
    with one_process():
        train_quietly(str(tmp_path), {"checkpoint_every_n_epochs": 1, "epochs": 2})
        shutil.copy(tmp_path / "epoch-0001.ckpt", tmp_path / "mine.ckpt")
        train_quietly(str(tmp_path), {"checkpoint_every_n_epochs": 1, "epochs": 4, "keep_last": 1, "resume": "auto"})
    assert files(tmp_path) == ["epoch-0004.ckpt", "mine.ckpt"]


def test_going_back_to_an_earlier_checkpoint_leaves_the_later_ones_behind(tmp_path):
    settings = {"checkpoint_every_n_steps": 5, "keep_last": 2}
    with one_process():
        whole = train_quietly(str(tmp_path), {"checkpoint_every_n_steps": 5})
        steps = sorted(tmp_path.glob("step-*"))
        again = train_quietly(str(tmp_path), {**settings, "resume": steps[1], "epochs": 2})
        assert again["losses"] == whole["losses"][:2]
        newest = CheckpointFolder(tmp_path).newest_first()[0]
        assert newest.position["epoch"] == 2
        assert newest.path.name == "epoch-0002.ckpt"
        more = train_quietly(str(tmp_path), {"resume": "auto"})
        assert (more["weights"], more["losses"]) == (whole["weights"], whole["losses"])


def three_fits(folder: Path, first_epochs: int = 1) -> tuple[list[Any], int]:
    """Fits three times in one folder; returns what there was after each, and how many rows have been seen."""
    model = Watched(quiet_model())
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), 1e-2))
    settings = {"batch_size": 3, "verbose": False, "keep_last": 1, "checkpoint_every_n_epochs": 1, "resume": "auto"}
    between = []
    for epochs in (first_epochs, 2, 1):
        history = trainer.fit(*make_rows(ROWS), epochs=epochs, checkpoint_dir=str(folder), **settings)
        found = history.train_losses, trainer.history.train_losses, trainer.epoch, fingerprint(model)
        between.append(found)
    return between, len(model.seen)


def test_a_program_that_runs_again_is_after_each_of_its_fits_where_it_was(tmp_path):
    with one_process():
        whole, rows = three_fits(tmp_path)
        assert rows == 4 * ROWS
        assert files(tmp_path) == ["epoch-0001.ckpt", "epoch-0003.ckpt", "epoch-0004.ckpt"]  # one of each fit
        assert three_fits(tmp_path) == (whole, 0)
        (tmp_path / "epoch-0004.ckpt").unlink()
        assert three_fits(tmp_path) == (whole, ROWS)
        # Of the second fit nothing is left: it begins again, and what came after it is not gone on from.
        (tmp_path / "epoch-0003.ckpt").unlink()
        assert three_fits(tmp_path) == (whole, 3 * ROWS)
        # More epochs of the first: what came after its end is another training.
        longer, rows = three_fits(tmp_path, first_epochs=2)
        assert rows == 4 * ROWS
        assert longer == three_fits(tmp_path / "elsewhere", first_epochs=2)[0]


def resume_the_best(folder: str, on_save_error: str) -> list[Any]:
    """Returns the losses, what is warned of, and the error."""
    settings = {"epochs": 2, "checkpoint_every_n_epochs": 1, "keep_best": "loss", "resume": "auto"}
    losses: list[float] = []
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            losses = train_quietly(folder, {**settings, "on_save_error": on_save_error})["losses"]
        except cx.CheckpointError as found:
            error = str(found)
    return [losses, [str(each.message) for each in caught if "Cannot write" in str(each.message)], error]


@pytest.mark.parametrize("on_save_error", [by_night("warn"), "raise"])
def test_a_best_checkpoint_that_cannot_be_marked_when_a_fit_resumes_is_an_error_as_others(on_save_error, tmp_path):
    with one_process():
        train_quietly(str(tmp_path), {"epochs": 1, "checkpoint_every_n_epochs": 1, "keep_best": "loss"})
    (tmp_path / "best.ckpt").unlink()
    (tmp_path / "best.ckpt").mkdir()
    first, second = run_new_world(2, resume_the_best, str(tmp_path), on_save_error)
    if on_save_error == "warn":
        assert first[0] == second[0]
        assert len(first[0]) == 2
        assert first[1]
        assert all("best.ckpt" in text and "Training continues without" in text for text in first[1])
    else:
        assert "best.ckpt" in first[2]
        assert second[2] == f"rank 0: {first[2]}"
    assert list(tmp_path.glob(".best*")) == []


def two_fits(folder: Path) -> list[list[float]]:
    trainer = make_trainer(0)
    settings = {"checkpoint_every_n_epochs": 1, "keep_best": "loss", "keep_last": 1, "resume": "auto"}
    return [train(trainer, str(folder), epochs=2, **settings)["history"]["loss"] for _ in range(2)]


def test_a_program_that_runs_again_leaves_the_best_of_its_later_fits_alone(tmp_path):
    with one_process():
        losses = two_fits(tmp_path)
        best = (tmp_path / "best.ckpt").read_bytes()
        assert read_checkpoint(tmp_path / "best.ckpt").position["fits"] == 2
        assert two_fits(tmp_path) == losses
        assert (tmp_path / "best.ckpt").read_bytes() == best


def test_a_fit_that_goes_on_from_a_path_goes_on_from_its_own_checkpoints_when_all_are_started_again(
    tmp_path, monkeypatch
):
    with one_process():
        three_fits(tmp_path / "first")
        from_second = {"resume": tmp_path / "first" / "epoch-0003.ckpt", "epochs": 5, "checkpoint_every_n_epochs": 1}
        monkeypatch.setenv("CYXTRAIN_RUN", "a launch")
        monkeypatch.setattr("cyxtrain.training.trainer._numbers", itertools.count(1))
        whole = train_quietly(str(tmp_path / "named"), from_second)
        assert len(whole["seen"]) == 3 * ROWS
        (tmp_path / "named" / "epoch-0006.ckpt").unlink()
        monkeypatch.setenv("CYXTRAIN_ATTEMPT", "1")
        monkeypatch.setattr("cyxtrain.training.trainer._numbers", itertools.count(1))
        again = train_quietly(str(tmp_path / "named"), from_second)
        assert again == {**whole, "seen": whole["seen"][2 * ROWS :]}


def resumed_in(folder: str) -> list[Any]:
    train_anew(0, folder, {"epochs": 1, "checkpoint_every_n_epochs": 1})
    with pytest.raises(cx.CheckpointError, match=r"There is no checkpoint .*none\.ckpt"):
        train_anew(0, folder, {"resume": f"{folder}/none.ckpt"})
    found = [train_anew(0, folder, {"epochs": 2, "resume": "auto"})]
    return [*found, train_anew(0, folder, {"epochs": 2, "resume": f"{folder}/epoch-0001.ckpt"})]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such a name")
def test_a_folder_whose_name_is_not_utf_8_is_resumed_from(tmp_path):
    for auto, named in run_world(2, resumed_in, os.path.join(tmp_path, os.fsdecode(b"r\xe9sultats"))):
        assert auto == named
        assert auto["epoch"] == 2


class FailIn(cx.callbacks.Callback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch:
            raise ZeroDivisionError


def fit_best_in_epoch_3(folder: Path, *epochs: int, fails_in: int = -1, **settings: Any) -> tuple[Any, ...]:
    """Fits for so many epochs in each call; the third one of all has the lowest loss."""
    offsets = [9.0, 9.0, 0.0, 20.0, 40.0]
    model = make_model()

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets) + offsets[trainer.epoch]

    trainer = cx.DistributedTrainer(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    given = {"batch_size": BATCH, "verbose": False, "checkpoint_every_n_epochs": 1, "checkpoint_dir": str(folder)}
    given |= {"callbacks": [FailIn(fails_in)], **settings}
    with contextlib.suppress(ZeroDivisionError):
        for each in epochs:
            trainer.fit(*make_rows(ROWS), epochs=each, **given)
    return fingerprint(model), trainer._state.run["id"], trainer._state.next_fit()


def test_a_fit_that_resumed_from_a_path_keeps_its_best_checkpoint_when_the_launcher_restarts_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CYXTRAIN_RUN", "a launch")
    settings = {"resume": tmp_path / "first" / "epoch-0002.ckpt", "keep_best": "loss", "load_best": True}
    found = []
    with one_process():
        fit_best_in_epoch_3(tmp_path / "first", 1, 1)
        for attempt, fails_in in enumerate((3, 4, -1)):
            monkeypatch.setenv("CYXTRAIN_ATTEMPT", str(attempt))
            monkeypatch.setattr("cyxtrain.training.trainer._numbers", itertools.count(1))
            found.append(fit_best_in_epoch_3(tmp_path / "named", 4, fails_in=fails_in, **settings))
    best = read_checkpoint(tmp_path / "named" / "best.ckpt")
    assert best.position["epoch"] == 3
    assert {run for _, run, _ in found} == {best.run["id"]}
    assert [number for _, _, number in found] == [(2, 1), (2, 1), (3, 5)]
    with one_process():
        again = make_model()
        cx.load_weights(again, tmp_path / "named" / "best.ckpt")
    assert found[-1][0] == fingerprint(again)


def looked_into_after_a_restart(folder: str) -> list[str]:
    train_anew(0, folder, {"epochs": 1, "checkpoint_every_n_epochs": 1})
    restarted = mock.patch.dict(os.environ, {"CYXTRAIN_RUN": "a launch", "CYXTRAIN_ATTEMPT": "1"})
    with restarted, mock.patch.object(start_or_resume, "look_into", wraps=start_or_resume.look_into) as look_into:
        train_anew(0, folder, {"resume": f"{folder}/epoch-0001.ckpt"})
    return [str(call.args[0]) for call in look_into.call_args_list]


def test_after_a_restart_rank_0_alone_looks_into_the_named_checkpoint(tmp_path):
    looked = run_new_world(2, looked_into_after_a_restart, str(tmp_path))
    assert looked == [[str(tmp_path / "epoch-0001.ckpt")], []]


def test_a_refused_resume_leaves_the_trainer_as_it_was(tmp_path):
    with one_process():
        trainer = make_trainer(0)
        for _ in range(2):
            train(trainer, str(tmp_path), epochs=1, checkpoint_every_n_epochs=1)
        before = trainer._state.next_fit()
        with pytest.raises(cx.ConfigError, match="seed is 7"):
            train(trainer, str(tmp_path), resume=tmp_path / "epoch-0001.ckpt", seed=7)
        assert trainer._state.next_fit() == before == (3, 2)


def test_fewer_epochs_than_are_complete_leave_nothing(tmp_path, capsys):
    with one_process():
        train_quietly(str(tmp_path), {"checkpoint_every_n_epochs": 1})
        capsys.readouterr()
        train_quietly(str(tmp_path), {"resume": "auto", "epochs": 1, "verbose": True})
    shown = capsys.readouterr().out
    assert "no epoch left" in shown
    assert "nothing is left to train: to continue, raise epochs" in " ".join(shown.split())


class Interrupts(cx.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.skipif(os.name == "nt", reason="a POSIX signal")
def test_the_newest_is_gone_on_with_where_a_fit_was_begun_again_after_a_stop(tmp_path):
    with one_process():
        model = Watched(quiet_model())
        trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), 1e-2))
        given = {"batch_size": 3, "verbose": False, "checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1}
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(*make_rows(ROWS), **given, epochs=3, callbacks=[Interrupts()])
        assert trainer.epoch == 1
        history = trainer.fit(*make_rows(ROWS), **given, epochs=2)
        again = train_quietly(str(tmp_path), {"resume": "auto", "epochs": 2})
        assert (again["losses"], again["seen"]) == (history.train_losses, [])


def test_a_fit_says_that_later_ones_have_left_checkpoints_too(tmp_path, capsys):
    with one_process():
        three_fits(tmp_path)
        capsys.readouterr()
        train_quietly(str(tmp_path), {"resume": "auto", "epochs": 1, "verbose": True})
    assert "2 checkpoints of later calls of fit there" in " ".join(capsys.readouterr().out.split())


def test_other_data_are_refused(tmp_path):
    with one_process():
        train_quietly(str(tmp_path), {"checkpoint_every_n_epochs": 1})
        model = quiet_model()
        trainer = cx.DistributedTrainer(Watched(model), nn.CrossEntropyLoss())
        with pytest.raises(cx.ConfigError, match="the training data differ"):
            trainer.fit(*make_rows(ROWS, seed=3), batch_size=3, checkpoint_dir=str(tmp_path), resume="auto")
        given = {"batch_size": 3, "checkpoint_dir": str(tmp_path), "resume": "auto", "verbose": False}
        with pytest.raises(cx.ConfigError, match="the validation data differ"):
            trainer.fit(*make_rows(ROWS), **given, validation_data=make_rows(5, seed=3))
        train_quietly(str(tmp_path), {"checkpoint_every_n_epochs": 1, "validation_data": make_rows(5, seed=3)})
        with pytest.raises(cx.ConfigError, match="the validation data differ: none are given"):
            trainer.fit(*make_rows(ROWS), **given)


def test_a_fit_that_was_refused_can_be_called_again_and_resumes(tmp_path):
    with one_process():
        whole = train_quietly(str(tmp_path), {"checkpoint_every_n_steps": 4, "epochs": 2})
        trainer = cx.DistributedTrainer(Watched(quiet_model()), nn.CrossEntropyLoss())
        given = {"epochs": 2, "batch_size": 3, "verbose": False, "checkpoint_dir": str(tmp_path), "resume": "auto"}
        with pytest.raises(cx.ConfigError, match="seed is 7"):
            trainer.fit(*make_rows(ROWS), **given, seed=7)
        assert trainer.fit(*make_rows(ROWS), **given).train_losses == whole["losses"]
        assert trainer.model.seen == []
