"""Claims about the history: nothing is lost on the way out and back, and people can read it."""

import csv
import io
import json
import math

import numpy as np
import pytest

from cyxtrain.checkpoint.remote_files import read_text_of
from cyxtrain.errors import ConfigError
from cyxtrain.progress.history import DistributedTrainingHistory, TrainingHistory, record_epoch, record_validation


def history(num_epochs=3, first=1):
    return TrainingHistory(
        train_losses=[1 / (3 + epoch) for epoch in range(num_epochs)],
        train_accuracies=[epoch / 100 for epoch in range(num_epochs)],
        val_losses=[0.1 + 0.2 + epoch for epoch in range(num_epochs)],
        total_time_seconds=12.34,
        samples_per_second=4567.8,
        effective_batch_size=128,
        world_size=2,
        epochs=list(range(first, first + num_epochs)),
    )


def test_both_names_are_one_class():
    assert DistributedTrainingHistory is TrainingHistory


def test_a_dictionary_comes_back_equal_and_is_independent():
    original = history()
    values = original.to_dict()
    assert TrainingHistory.from_dict(values) == original
    values["train_losses"].append(1.0)
    assert len(original.train_losses) == 3


def test_json_comes_back_bit_for_bit():
    original = history()
    assert TrainingHistory.from_json(original.to_json()) == original


def test_numbers_that_are_not_finite_survive_strict_json():
    original = TrainingHistory(train_losses=[math.nan, math.inf, -math.inf, 1.0], samples_per_second=math.inf)
    text = original.to_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    read = TrainingHistory.from_json(text)
    assert math.isnan(read.train_losses[0])
    assert read.train_losses[1:] == [math.inf, -math.inf, 1.0]
    assert read.samples_per_second == math.inf


def test_an_epoch_of_which_no_row_counted_leaves_the_lists_alike():
    history = TrainingHistory()
    for epoch, (loss, accuracy) in enumerate([(math.nan, math.nan), (0.5, 0.25), (math.nan, math.nan)], 1):
        measured = {"loss": loss, "accuracy": accuracy, "val_loss": 1.0, "val_accuracy": math.nan}
        record_epoch(history, epoch, 10 * epoch, measured)
    assert [str(value) for value in history.train_accuracies] == ["nan", "0.25", "nan"]
    assert [str(value) for value in history.train_losses] == ["nan", "0.5", "nan"]
    assert (history.epochs, history.val_losses, history.val_accuracies) == ([1, 2, 3], [1.0] * 3, [])


@pytest.mark.parametrize("first", [1, 3])
def test_validations_within_an_epoch_are_drawn_where_they_came(first):
    history = TrainingHistory()
    for epoch in (first, first + 1):
        for step in (10 * epoch - 5, 10 * epoch):
            record_validation(history, step, epoch, {"loss": 1 / step})
        record_epoch(history, epoch, 10 * epoch, {"loss": 1.0, "val_loss": 1 / (10 * epoch)})
    training, validation = history.plot().axes[0].lines
    assert list(training.get_xdata()) == [first, first + 1]
    assert list(validation.get_xdata()) == [first - 0.5, first, first + 0.5, first + 1]
    assert list(validation.get_ydata()) == [row["val_loss"] for row in history.validations]


def test_sets_of_validation_share_the_panel_of_what_they_measure():
    metrics = {name: [1.0] for name in ("val_near_loss", "val_far_loss", "val_near_f1", "own_loss", "val_own_loss")}
    drawn = TrainingHistory(train_losses=[1.0], val_losses=[1.0], metrics=metrics).plot()
    curves = {axes.get_title(): [line.get_label() for line in axes.lines] for axes in drawn.axes if axes.get_visible()}
    assert curves == {
        "loss": ["training", "validation", "near", "far"],
        "near_f1": ["validation"],
        "own_loss": ["training", "validation"],
    }
    assert all(len({line.get_color() for line in axes.lines}) == len(axes.lines) for axes in drawn.axes)


def test_files_hold_what_the_calls_return(tmp_path):
    original = history()
    path = tmp_path / "history.json"
    assert original.to_json(path) == path.read_text()
    assert TrainingHistory.from_json(path) == TrainingHistory.from_json(str(path)) == original
    table = tmp_path / "history.csv"
    assert original.to_csv(table) == table.read_text()


def test_files_go_to_a_store_and_come_back():
    original = history()
    original.to_json("memory://histories/a.json")
    assert TrainingHistory.from_json("memory://histories/a.json") == original
    assert original.to_csv("memory://histories/a.csv") == read_text_of("memory://histories/a.csv")
    with pytest.raises(ConfigError, match="cannot read memory://histories/none: there is no such file"):
        TrainingHistory.from_json("memory://histories/none")


def test_csv_has_a_row_per_epoch_and_empty_cells_for_what_is_missing():
    original = history(num_epochs=2, first=4)
    original.val_losses.pop()
    rows = list(csv.DictReader(io.StringIO(original.to_csv())))
    assert [row["epoch"] for row in rows] == ["4", "5"]
    assert [float(row["train_loss"]) for row in rows] == original.train_losses
    assert [row["val_loss"] for row in rows] == [repr(original.val_losses[0]), ""]
    assert [row["val_accuracy"] for row in rows] == ["", ""]


def test_kerass_history_has_the_lists_that_are_not_empty():
    original = history()
    assert original.history == {
        "loss": original.train_losses,
        "accuracy": original.train_accuracies,
        "val_loss": original.val_losses,
    }
    assert TrainingHistory().history == {}


def test_a_short_history_is_shown_completely():
    lines = repr(history(num_epochs=10)).splitlines()
    assert lines[0].split() == ["epoch", "loss", "accuracy", "val_loss"]
    assert [line.split()[0] for line in lines[1:-1]] == [str(epoch) for epoch in range(1, 11)]
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[-1] == ("TrainingHistory: 10 epochs in 12.3 s, 4,568 samples/s, effective batch size 128 on 2 ranks")


def test_a_long_history_shows_its_first_and_last_epochs():
    lines = repr(history(num_epochs=1000, first=7)).splitlines()
    shown = [line.split()[0] for line in lines[1:-1]]
    assert shown == ["7", "8", "9", "10", "11", "...", "1003", "1004", "1005", "1006"]


def test_an_empty_history_can_be_shown_and_written():
    assert repr(TrainingHistory()).startswith("TrainingHistory: 0 epochs")
    assert len(TrainingHistory().to_csv().splitlines()) == 1
    assert TrainingHistory.from_json(TrainingHistory().to_json()) == TrainingHistory()


def test_a_history_made_by_hand_counts_its_epochs_from_1():
    assert [line.split(",")[0] for line in TrainingHistory([0.5, 0.25]).to_csv().splitlines()] == ["epoch", "1", "2"]


def test_csv_of_a_history_made_by_hand_has_its_metrics_and_its_validations():
    made = TrainingHistory(val_losses=[0.25], metrics={"f1": [0.5, 0.75]})
    made.validations = [{"step": 3, "epoch": 1, "val_loss": np.float32(0.5)}, {"step": 6, "epoch": 1, "val_loss": 0.25}]
    assert made.to_csv().splitlines() == [
        "epoch,step,train_loss,train_accuracy,val_loss,val_accuracy,train_f1",
        "1,3,,,0.5,,",
        "1,6,,,0.25,,0.5",
        "2,,,,,,0.75",
    ]


@pytest.mark.parametrize(
    ("validation", "missing"),
    [({"epoch": 1, "val_loss": 0.5}, "no 'step'"), ({"val_loss": 0.5}, "no 'step' and no 'epoch'")],
)
def test_a_validation_made_by_hand_without_its_place_is_refused(validation, missing):
    made = TrainingHistory([0.5], steps=[6], validations=[{"step": 3, "epoch": 1}, validation])
    for call in (made.to_csv, made.plot):
        with pytest.raises(ConfigError, match=rf"TrainingHistory.validations\[1\] has {missing}: give each"):
            call()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_loses": []}, "train_losses"),
        ({"train_losses": 1.0}, "list"),
        ({"train_losses": ["much"]}, "numbers"),
        ({"world_size": None}, "numbers"),
    ],
)
def test_what_is_no_history_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        TrainingHistory.from_dict(values)


@pytest.mark.parametrize("text", ["{", '{"train_losses": [nan]}'])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ConfigError, match="JSON"):
        TrainingHistory.from_json(text)


def test_json_that_is_no_object_is_refused(tmp_path):
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"list\.json"):
        TrainingHistory.from_json(path)
