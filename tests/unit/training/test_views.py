"""What people look at: a model's summary, a history's curves, its view in a notebook."""

from __future__ import annotations

import io
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from fitting import CLASSES, FEATURES, make_model, make_rows, one_process, run_world
from IPython.core.formatters import DisplayFormatter
from rank_processes import rank_server  # noqa: F401 - a fixture
from torch import nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
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
    assert " ".join(last[2:4]) == f"(n, {CLASSES})"
    everything = sum(parameter.numel() for parameter in model.parameters())
    assert f"parameters: {everything:,} (" in text
    assert not any(layer._forward_hooks for layer in model.modules())


def test_a_summary_counts_tied_parameters_once_and_says_what_is_frozen():
    with one_process():
        trainer = cx.DistributedTrainer(Tied(), None, "sgd")
        without = trainer.summary()
        assert "(n" not in without
        text = trainer.summary(make_rows(5)[0])
    shared = FEATURES * FEATURES + FEATURES
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert lines["encode"].endswith(str(shared))
    assert not lines["decode"].rstrip().endswith(str(shared))
    assert f"(n, {FEATURES}), (n, 2)" in lines["model"]
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


def test_a_notebook_that_has_not_loaded_matplotlib_shows_a_picture():
    shown, _ = DisplayFormatter().format(HISTORY.plot())
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
    assert any(f"scores (n, {CLASSES}), x (n, {FEATURES})" in line for line in lines)
    assert any(line.split()[:3] == ["words", "Words", "str"] for line in lines)
