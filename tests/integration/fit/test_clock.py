"""Where the time of steps goes: measured always, shown by `profile=True`, and told by whoever looks for a slow rank."""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import everywhere, make_model, make_rows, one_process
from markers import by_night
from refusals import warning_texts
from torch.utils.data import Dataset

import cyxtrain as cx
from cyxtrain.callbacks import Callback, ProgressBar, SlowRankMonitor
from cyxtrain.callbacks.monitors import slow_rank
from cyxtrain.environment import accelerator
from cyxtrain.progress.step_timer import PARTS, StepTimer
from cyxtrain.world.world import World

pytestmark = pytest.mark.usefixtures("rank_server")
SLOW_SECONDS = 0.05


def parts(data: float, compute: float, communication: float) -> dict[str, float]:
    third = compute / 3
    return {"data": data, "forward": third, "backward": third, "communication": communication, "optimizer": third}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([parts(1, 9, 1), parts(1, 9, 1)], (None, "")),
        ([parts(1, 9, 11), parts(1, 20, 0)], (1, "compute")),
        ([parts(12, 9, 0), parts(1, 9, 11)], (0, "data")),
        ([parts(5, 9, 20), parts(1, 30, 0), parts(5, 9, 20)], (1, "compute")),
        ([parts(1, 4, 6), parts(1, 4, 6)], (None, "communication")),
        ([parts(1, 4, 6), parts(1, 4, 4)], (None, "")),
        ([parts(1, 9, 2), parts(1, 11, 0)], (None, "")),
    ],
)
def test_the_slow_rank_is_the_one_the_others_wait_for(ranks, expected):
    assert slow_rank(ranks, 1.25) == expected


class FakeEvent:
    """An event of a device that works a step behind the host; the clock is a counter."""

    now = 0.0
    reached = 0.0

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        FakeEvent.now += 1.0
        self.milliseconds = FakeEvent.now

    def query(self) -> bool:
        return FakeEvent.reached >= self.milliseconds

    def synchronize(self) -> None:
        FakeEvent.reached = max(FakeEvent.reached, self.milliseconds)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query()
        return end.milliseconds - self.milliseconds


def test_a_device_is_measured_without_waiting_for_it(monkeypatch):
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    watch = accelerator.Stopwatch(torch.device("cuda", 0))
    for _ in range(3):
        with watch:
            FakeEvent.now += 4.0
    assert watch.take(waits=False) == 0.0
    FakeEvent.reached = 6.0
    assert watch.take(waits=False) == pytest.approx(0.005)
    assert watch.take(waits=True) == pytest.approx(0.01)
    assert watch.take(waits=True) == 0.0


def test_waits_of_a_device_are_taken_out_of_the_part_in_which_the_host_waited_for_it():
    clock = StepTimer(torch.device("cpu"), profiles=False)
    clock.backward.seconds, clock.optimizer.seconds, clock.forward.seconds = 1.0, 2.0, 3.0
    clock.communicated(clock.backward, 4.0)
    with one_process():
        [found] = clock.over_ranks(World())
    assert found == {"data": 0.0, "forward": 2.0, "backward": 0.0, "communication": 4.0, "optimizer": 0.0}


def test_the_time_of_a_part_is_what_it_took_and_waiting_for_others_is_taken_out():
    clock = StepTimer(torch.device("cpu"), profiles=False)
    began = time.perf_counter()
    with clock.backward:
        time.sleep(0.01)
    took = time.perf_counter() - began
    assert 0.01 <= clock.backward.seconds <= took
    before = clock.backward.seconds
    clock.communicated(clock.backward, 0.004)
    assert clock.communication.seconds == 0.004
    assert clock.backward.seconds == before - 0.004
    assert list(clock.data.each([1, 2, 3])) == [1, 2, 3]
    assert clock.data.seconds > 0


class SlowRows(Dataset):
    def __init__(self, seconds: float) -> None:
        self.inputs, self.targets = make_rows(24)
        self.seconds = seconds

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if cx.get_rank() == 1:
            time.sleep(self.seconds)  # this is the slowness that is looked for
        return self.inputs[index], self.targets[index]


class Dawdling(Callback):
    """Makes the steps of rank 1 slow."""

    def on_before_optimizer_step(self, batch: int, logs: Any = None) -> None:
        if cx.get_rank() == 1:
            time.sleep(SLOW_SECONDS)  # as above


def fit_slowly(what: str, who: int | None) -> tuple[list[Any], list[dict[str, float]], list[str]]:
    monitor = SlowRankMonitor()
    callbacks: list[Callback] = [monitor] if who in (None, cx.get_rank()) else []
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy")
    with warning_texts() as said:
        more = {"epochs": 1, "batch_size": 2, "verbose": False}
        if what == "data":
            trainer.fit(SlowRows(SLOW_SECONDS / 2), callbacks=callbacks, **more)
        else:
            trainer.fit(*make_rows(24), callbacks=[*callbacks, Dawdling()], **more)
    return monitor.slow, trainer.step_seconds, [text for text in said if "slow" in text]


@pytest.mark.parametrize(
    ("what", "who"), [("data", None), by_night("compute", None), by_night("compute", 0), by_night("compute", 1)]
)
def test_a_slow_rank_is_named_with_what_it_does_also_where_one_rank_looks(what, who):
    found = everywhere(2, fit_slowly, what, who)
    for rank, (slow, seconds, _) in enumerate(found):
        assert slow == ([(0, 1, what)] if who in (None, rank) else [])
        assert [list(each) for each in seconds] == [list(PARTS)] * 2
        assert seconds[1]["optimizer" if what == "compute" else "data"] >= SLOW_SECONDS
        assert seconds[0]["communication"] >= SLOW_SECONDS / 2
    assert len(found[0][2]) == (who != 1)
    assert all("rank 1 is slow: its step takes" in text for text in found[0][2])
    assert all(("It waits for data" if what == "data" else "It computes") in text for text in found[0][2])
    assert not found[1][2]


def profiled(folder: str, form: str) -> list[str]:
    said = io.StringIO()
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy")
    with contextlib.redirect_stdout(said):
        trainer.fit(*make_rows(40), epochs=2, batch_size=2, profile=folder if form == "path" else True)
    return said.getvalue().splitlines()


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_profile_is_a_trace_of_each_rank_and_a_table(world_size, tmp_path):
    said = everywhere(world_size, profiled, str(tmp_path / "new" / "folder"), "path")
    folder = tmp_path / "new" / "folder"
    names = {"steps.txt", *(f"rank-{rank}.pt.trace.json" for rank in range(world_size))}
    assert {path.name for path in folder.iterdir()} == names
    for rank in range(world_size):
        events = json.loads((folder / f"rank-{rank}.pt.trace.json").read_text())["traceEvents"]
        scopes = {event.get("name") for event in events}
        assert {f"cyxtrain: {name}" for name in PARTS if name != "communication"} <= scopes
        assert "aten::addmm" in scopes
    table = (folder / "steps.txt").read_text().splitlines()
    assert table[0].split()[:6] == ["profile", *PARTS]
    assert [line.split()[1] for line in table[1:]] == [str(rank) for rank in range(world_size)]
    assert all(len(line.split()) == 7 for line in table[1:])
    assert set(table) < set(said[0])
    assert not any(said[1:])


def test_a_folder_that_cannot_be_written_to_costs_the_profile_and_no_training(tmp_path):
    (tmp_path / "file").write_text("")
    with one_process(), pytest.warns(UserWarning, match="the profile could not be written to"):
        assert profiled(str(tmp_path / "file" / "in it"), "path")


def test_a_profile_changes_no_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def parameters(**more: Any) -> list[Any]:
        model = make_model()
        cx.DistributedTrainer(model, "cross_entropy").fit(*make_rows(40), epochs=1, verbose=False, **more)
        return [parameter.tolist() for parameter in model.parameters()]

    with one_process():
        assert parameters() == parameters(profile=True)
    assert Path("profile/steps.txt").exists()
    for path in Path("profile").iterdir():
        path.unlink()
    Path("profile").rmdir()


# --- what is shown and told in between ------------------------------------------------------------------------------


def fit_with_bar(who: int | None, verbose: bool) -> list[str]:
    said = io.StringIO()
    bars = [ProgressBar()] if who in (None, cx.get_rank()) else []
    with contextlib.redirect_stdout(said):
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", callbacks=bars)
        trainer.fit(*make_rows(24), epochs=2, validation_data=make_rows(5), verbose=verbose)
    return [line for line in said.getvalue().splitlines() if line.startswith("epoch")]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_bar_of_ones_own_shows_each_epoch_once_on_rank_0(world_size):
    alone, both = everywhere(world_size, fit_with_bar, None, False), everywhere(world_size, fit_with_bar, None, True)
    assert [line.split()[1] for line in alone[0]] == [line.split()[1] for line in both[0]] == ["1/2", "2/2"]
    assert all("val_loss" in line for line in alone[0])
    assert not any(alone[1:])
    assert not any(both[1:])


class Told(Callback):
    """Notes what it is told of a validation."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_test_begin(self, logs: Any = None) -> None:
        self.told.append("begin")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.told.append(batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.told.append((batch, sorted(logs), logs["loss"]))

    def on_test_end(self, logs: Any = None) -> None:
        self.told.append(("end", logs["loss"]))


def validate(who: int | None) -> list[Any]:
    told = Told()
    callbacks = [told] if who in (None, cx.get_rank()) else []
    trainer = cx.DistributedTrainer(make_model("float64"), "cross_entropy", callbacks=callbacks)
    trainer.fit(*make_rows(8), epochs=1, validation_data=make_rows(20), batch_size=4, verbose=False)
    return told.told


def test_the_batches_of_a_validation_are_told_one_by_one():
    with one_process():
        told = validate(None)
    assert [each[0] if isinstance(each, tuple) else each for each in told] == [
        "begin", 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, "end"
    ]  # fmt: skip
    assert told[2][1] == ["accuracy", "loss"]
    assert told[-2][2] == pytest.approx(told[-1][1], rel=1e-12)  # the mean of all of them


@pytest.mark.parametrize("who", [None, by_night(1)])
def test_each_rank_is_told_of_its_own_batches(who):
    first, second = everywhere(2, validate, who)
    assert [each for each in second if isinstance(each, int)] == [0, 1]
    assert [each for each in first if isinstance(each, int)] == ([0, 1, 2] if who is None else [])


def test_what_was_said_of_slow_ranks_is_kept_in_checkpoints(tmp_path):
    def fit(**more: Any) -> SlowRankMonitor:
        monitor = SlowRankMonitor()
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", callbacks=[monitor])
        monitor.slow = [(0, 1, "data"), (1, None, "communication")] if "resume" not in more else []
        trainer.fit(*make_rows(8), verbose=False, checkpoint_every_n_epochs=1, checkpoint_dir=str(tmp_path), **more)
        return monitor

    with one_process():
        fit(epochs=2)
        assert fit(epochs=3, resume="auto").slow == [(0, 1, "data"), (1, None, "communication")]
