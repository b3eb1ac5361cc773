"""What people look at: a model's summary, a history's curves, its view in a notebook."""

from __future__ import annotations

import io
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from fitting import CLASSES, FEATURES, make_model, make_rows, one_process, run_world
from lazy import LazyModule
from markers import by_night
from torch import nn

import cyxtrain as cx
from cyxtrain.checkpoint.remote_files import read_remote

pytestmark = pytest.mark.usefixtures("rank_server")
formatters: Any = LazyModule("IPython.core.formatters")
HISTORY = cx.TrainingHistory(
    train_losses=[0.9, 0.5, float("nan")],
    val_losses=[1.0, 0.7, 0.6],
    train_accuracies=[0.5, 0.75, 0.8],
    metrics={"f1": [0.1, 0.2, 0.3], "val_f1": [0.2, 0.2, 0.2]},
    epochs=[4, 5, 6],
)


@pytest.fixture(scope="module", autouse=True)
def fonts() -> None:
    """matplotlib keeps its fonts' files open from its first picture on."""
    HISTORY.plot().savefig(io.BytesIO())


class Tied(nn.Module):
    """One layer in two places, a frozen one, and one that returns two things."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.frozen = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 2).requires_grad_(False)
        self.decode = self.encode
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x):
        return self.norm(self.decode(self.encode(x))), self.frozen(x)


def test_a_summary_has_each_layer_with_its_output_and_parameters(capsys):
    model = make_model()
    with one_process():
        trainer = cx.DistributedTrainer(model, "cross_entropy", "sgd")
        text = trainer.summary(make_rows(5)[0])
    assert capsys.readouterr().out == text + "\n"
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["layer", "kind", "output", "parameters"]
    linear = next(row for row in rows if "Linear" in row)
    assert linear[0] == "0"
    count = sum(parameter.numel() for parameter in model[0].parameters())
    assert linear[-1] == str(count)
    last = [row for row in rows if "Linear" in row][-1]
    assert " ".join(last[2:4]) == f"(2, {CLASSES})"
    everything = sum(parameter.numel() for parameter in model.parameters())
    assert f"parameters: {everything:,} (" in text
    assert not any(layer._forward_hooks for layer in model.modules())


def test_a_summary_counts_tied_parameters_once_and_says_what_is_frozen():
    with one_process():
        trainer = cx.DistributedTrainer(Tied(), None, "sgd")
        without = trainer.summary()
        assert "(2" not in without
        text = trainer.summary(make_rows(5)[0])
    shared = FEATURES * FEATURES + FEATURES
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert lines["encode"].endswith(str(shared))
    assert not lines["decode"].rstrip().endswith(str(shared))
    assert f"(2, {FEATURES})" in lines["model"]
    assert "(2, 2)" in lines["(2,"]
    assert f"frozen: {2 * FEATURES + 2}" in text
    assert "numbers in buffers: 9" in text


def summarized() -> str:
    return cx.DistributedTrainer(make_model(), "cross_entropy", "sgd").summary()


def test_only_rank_0_shows_it_and_all_get_it():
    first, second = run_world(2, summarized)
    assert first == second


def test_curves_are_drawn_and_written(tmp_path):
    for name in ("curves.png", "curves.svg"):
        figure = HISTORY.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    panels = {axes.get_title(): axes for axes in figure.axes if axes.get_visible()}
    assert list(panels) == ["loss", "accuracy", "f1"]
    training, validation = panels["loss"].lines
    assert list(training.get_xdata()) == [4, 5, 6]
    assert list(validation.get_ydata()) == [1.0, 0.7, 0.6]
    assert len(panels["accuracy"].lines) == 1


@pytest.mark.parametrize(
    ("name", "begin"), [by_night("a.png", b"\x89PNG"), by_night("a.pdf", b"%PDF"), ("a", b"\x89PNG")]
)
def test_curves_are_written_to_a_store(name, begin):
    HISTORY.plot(f"memory://curves/{name}")
    assert read_remote(f"memory://curves/{name}", "plot").startswith(begin)


def test_a_notebook_that_has_not_loaded_matplotlib_shows_a_picture():
    shown, _ = formatters.DisplayFormatter().format(HISTORY.plot())
    assert shown["image/png"].startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_said(monkeypatch):
    with pytest.raises(cx.ConfigError, match="the history has no epoch"):
        cx.TrainingHistory().plot()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "cyxtrain.environment.picture")
    with pytest.raises(cx.ConfigError, match=r"pip install 'cyxtrain\[plot\]'"):
        HISTORY.plot()


def test_a_notebook_shows_curves_without_a_script():
    view = HISTORY._repr_html_()
    root = ElementTree.fromstring(view)
    assert len(root.findall(".//svg")) == 3
    assert [len(line.get("points", "").split()) for line in root.iter("polyline")] == [
        2,
        3,
        3,
        3,
        3,
    ]  # a NaN is no point
    assert "script" not in view
    assert "validation 0.6000" in view
    ElementTree.fromstring(cx.TrainingHistory()._repr_html_())


class Parts(nn.Module):
    """Returns outputs by name, and a layer of it something that is no tensor."""

    class Words(nn.Module):
        def forward(self, x):
            return str(len(x))

    def __init__(self):
        super().__init__()
        self.net, self.words = make_model(), self.Words()

    def forward(self, x):
        self.words(x)
        return {"scores": self.net(x), "x": x}


def test_a_summary_shows_outputs_of_all_kinds():
    with one_process():
        lines = cx.DistributedTrainer(Parts(), "cross_entropy", "sgd").summary(make_rows(5)[0]).splitlines()
    assert f" scores (2, {CLASSES}) " in lines[2]
    assert lines[3].strip() == f"x (2, {FEATURES})"
    assert any(line.split()[:3] == ["words", "Words", "str"] for line in lines)


class Reader(nn.Module):
    """Returns more than fits into a line: the states of an LSTM, and of a transformer."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.memory = nn.LSTM(8, 4, num_layers=3, batch_first=True)
        self.again = self.memory

    def forward(self, x):
        states = self.encoder(x)
        output, memory = self.memory(states)
        return {"output": output, "memory": memory, "each": [states] * 3}


SUMMARY = """\
layer      kind                output            parameters
-----------------------------------------------------------
model      Reader              output (2, 5, 4)       1,744
                               memory (3, 2, 4)
                               memory (3, 2, 4)
                               each (2, 5, 8)
                               and 2 more
  encoder  TransformerEncoder  (2, 5, 8)              1,200
  memory   LSTM                (2, 5, 4)                544
                               (3, 2, 4)
                               (3, 2, 4)
  again    LSTM                (2, 5, 4)
                               (3, 2, 4)
                               (3, 2, 4)

parameters: 1,744 (0.0 MiB), trained: 1,744, frozen: 0"""


def test_a_summary_goes_down_to_a_depth_and_fits_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    rows = np.zeros((3, 5, 8), np.float32)
    with one_process():
        trainer = cx.DistributedTrainer(Reader(), None, "sgd")
        assert trainer.summary(rows, depth=1) == SUMMARY
        assert len(trainer.summary(depth=0).splitlines()) == 5
        whole = trainer.summary(rows).splitlines()
        monkeypatch.setenv("COLUMNS", "120")
        assert "NonDynamicallyQuantizableLinear " in trainer.summary(rows)
        for depth in (-1, True, "2"):
            with pytest.raises(cx.ConfigError, match=r"summary.depth must be a whole number of at least 0"):
                trainer.summary(rows, depth=depth)
    assert max(map(len, whole)) == 80
    assert "          out_proj  NonDynamicallyQuantizableLi...                            72" in whole
    assert whole[-1] == SUMMARY.splitlines()[-1]


def test_a_summary_is_not_shown_again_by_a_prompt_or_a_notebook():
    with one_process():
        text = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd").summary()
    assert repr(text) == ""
    assert formatters.DisplayFormatter().format(text) == ({}, {})
