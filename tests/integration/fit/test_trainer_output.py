"""Claims about what a training shows: rank 0 explains the run and its epochs, and nobody else says a word."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fitting import adam, make_model, make_rows, one_process, run_world
from markers import by_night
from torch import Tensor, nn

import cyxtrain as cx
from cyxtrain.progress.display import CellDisplay, CellText

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS, VALIDATION = make_rows(20), make_rows(6, seed=1)
EPOCH_LINE = re.compile(
    r"epoch (\d)/(\d)  loss (\d\.\d{4})  accuracy (\d\.\d{4})"
    r"  val_loss \d\.\d{4}  val_accuracy \d\.\d{4}  [\d.]+ s, [\d.]+ ms/step, [\d,]+ samples/s"
)


def trainer_of(model: nn.Module | None = None, loss_fn: Any = "cross_entropy") -> cx.DistributedTrainer:
    model = make_model() if model is None else model
    return cx.DistributedTrainer(model, loss_fn, adam(model))


def fit_shown(rows: tuple[Tensor, Tensor] = ROWS, **keywords: Any) -> tuple[str, dict[str, Any]]:
    """Returns what a fit prints where there is no terminal, and its history."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        history = trainer_of().fit(*rows, **{"epochs": 2, "batch_size": 4, "validation_data": VALIDATION} | keywords)
    return out.getvalue(), history.to_dict()


def show_all() -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        "plain": fit_shown(),
        "quiet": fit_shown(verbose=False),
        "kerass quiet": fit_shown(verbose=0),
        "with steps": fit_shown(log_every_n_steps=2, validation_data=None, shuffle=False),
        "steps, quiet": fit_shown(log_every_n_steps=2, verbose=False),
        "uneven": fit_shown(effective_batch_size=3, epochs=1),
    }


@pytest.fixture(scope="module")
def shown() -> list[dict[str, tuple[str, dict[str, Any]]]]:
    return run_world(2, show_all)


def test_the_header_has_a_line_for_each_fact(shown):
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in shown[0]["plain"][0].splitlines()[:8])
    assert list(facts) == ["cyxtrain", "world", "backend", "batch", "steps", "data", "device", "model"]
    assert facts["world"] == "2 ranks"
    assert facts["backend"] == "cpu (cyxtrain's ring, unix)"
    assert facts["batch"] == "4 per rank, 8 effective"
    assert facts["steps"] == "3 steps per epoch, epochs 1 to 2"
    assert facts["data"] == "20 samples, and 6 samples for validation"
    assert facts["device"] == "cpu, 1 thread per rank"
    assert facts["model"] == "Sequential, 67 parameters"
    assert "\nbatch      1 or 2 per rank, 3 effective\n" in shown[0]["uneven"][0]


def test_a_line_per_epoch_without_a_terminal(shown):
    text, history = shown[0]["plain"]
    lines = text.splitlines()[9:]
    found = [EPOCH_LINE.fullmatch(line) for line in lines]
    assert len(found) == 2
    assert all(found), lines
    assert [match.groups() for match in found if match] == [
        (str(epoch), "2", f"{loss:.4f}", f"{accuracy:.4f}")
        for epoch, loss, accuracy in zip((1, 2), history["train_losses"], history["train_accuracies"], strict=True)
    ]
    assert "\x1b" not in text
    assert "\r" not in text


def test_nothing_is_shown_on_other_ranks_or_where_it_shall_be_quiet(shown):
    assert {name: text for name, (text, _) in shown[1].items() if text} == {}
    for name in ("quiet", "kerass quiet", "steps, quiet"):
        assert shown[0][name][0] == ""


def test_steps_show_the_loss_over_all_ranks(shown):
    # One process with the joined batch has seen the same rows, and so has the same numbers.
    with one_process():
        expected, _ = fit_shown(log_every_n_steps=2, validation_data=None, shuffle=False, effective_batch_size=8)
    texts = (shown[0]["with steps"][0], expected)
    ours, theirs = ([line for line in text.splitlines() if "  batch " in line] for text in texts)
    assert [line.partition("  loss")[0] for line in ours] == [
        f"epoch {each}" for each in ("1/2  batch 2/3", "2/2  batch 1/3", "2/2  batch 3/3")
    ]
    assert ours == theirs
    assert re.fullmatch(r"epoch 1/2  batch 2/3  loss \d\.\d{4}  accuracy \d\.\d{4}", ours[0])


def test_the_history_is_the_same_on_every_rank_times_included(shown):
    for name, (_, history) in shown[0].items():
        assert shown[1][name][1] == history
    history = shown[0]["plain"][1]
    assert history["world_size"] == 2
    assert history["effective_batch_size"] == 8
    assert history["total_time_seconds"] > 0
    assert history["samples_per_second"] > 0
    assert [len(history[name]) for name in ("train_losses", "val_losses", "val_accuracies", "epochs")] == [2] * 4


def test_a_loss_of_ones_own_is_said_to_be_taken_for_a_mean():
    def own(output: Any, target: Any) -> Any:
        return nn.functional.cross_entropy(output, target)

    def pair(output: Any, target: Any) -> Any:
        return own(output, target) * len(target), len(target)

    with one_process():
        texts = []
        for loss_fn in (own, pair, nn.CrossEntropyLoss()):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                trainer_of(loss_fn=loss_fn).fit(*ROWS, epochs=1)
            texts.append(out.getvalue())
    assert ["custom loss: assumed to be a mean over samples" in text for text in texts] == [True, False, False]


class TwoOutputs(nn.Module):
    """Returns its output under two names, or its loss where it is given targets."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, inputs: Any, targets: Any = None) -> Any:
        output = self.body(inputs)
        if targets is not None:
            return nn.functional.cross_entropy(output, targets)
        return {"a": output, "b": output}


def test_the_header_tells_of_a_models_own_loss_and_of_targets_that_no_loss_takes(capsys):
    inputs, targets = ROWS
    with one_process():
        cx.DistributedTrainer(TwoOutputs()).fit(inputs, targets, epochs=1)
        assert "the model's own loss: assumed to be a mean over samples" in capsys.readouterr().out
        trainer = cx.DistributedTrainer(TwoOutputs(), {"a": "cross_entropy"})
        trainer.fit(inputs, {"a": targets, "c": targets}, epochs=1)
        assert "parts of y that loss_fn has no loss for: c" in capsys.readouterr().out


def test_the_header_names_one_epoch_and_a_list(capsys):
    with one_process():
        trainer_of().fit(torch.utils.data.DataLoader([*zip(*ROWS, strict=True)], batch_size=4), epochs=1)
    shown = capsys.readouterr().out
    assert "5 steps per epoch, epoch 1\n" in shown
    assert "data       20 samples of a list, in their own order\n" in shown


def test_the_header_separates_thousands_of_virtual_ranks():
    with one_process():
        shown, _ = fit_shown(make_rows(1000), virtual_ranks=1000, batch_size=1, max_steps=1, validation_data=None)
    assert "slices     1,000 slices on 1 rank, 1,000 on each" in shown
    assert "bits       the same on 1 to 1,000 ranks;" in shown


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[Callable[[], str]]:
    """Makes standard output a terminal; what is called afterwards returns all that came out of it."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, True)
    pieces: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(ours, 4096):
                pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    before, sizes = sys.stdout, {name: os.environ.get(name) for name in ("COLUMNS", "LINES", "TERM")}
    os.environ.update(COLUMNS=str(columns), LINES="24", TERM="xterm-256color")
    try:
        with os.fdopen(theirs, "w") as stream:
            sys.stdout = stream
            yield lambda: b"".join(pieces).decode()
    finally:
        sys.stdout = before
        for name, value in sizes.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        reader.join()
        os.close(ours)


def fit_in_terminal(columns: int, fails: bool = False) -> str:
    """Returns all that a fit of half a second writes to a terminal."""

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.steps = make_model(), 0

        def forward(self, inputs: Any) -> Any:
            self.steps += self.training
            threading.Event().wait(0.03 if self.training else 0)
            if fails and self.steps == 10:
                raise ValueError("no more")
            return self.body(inputs)

    with terminal(columns) as written:
        with contextlib.suppress(ValueError):
            trainer_of(Slow()).fit(*ROWS, epochs=2, batch_size=2, log_every_n_steps=4)
        assert type(sys.stdout) is io.TextIOWrapper  # rich has handed it back
    return written()


def screen(text: str) -> list[str]:
    """Returns the lines that are left on the screen: what was erased is gone."""
    lines, row = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if piece == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif re.fullmatch(r"\x1b\[\d*A", piece):
            row -= int(piece[2:-1] or 1)
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not piece.startswith("\x1b") and piece != "\r":
            lines[row] += piece
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("columns", [80, by_night(120)])
def test_a_terminal_has_a_bar_with_loss_accuracy_rate_and_remaining_time(columns):
    with one_process():
        text = fit_in_terminal(columns)
    bars = re.findall(r"epoch 1/2 [^\r\n]*samples/s[^\r\n]*", re.sub(r"\x1b\[[0-9;]*m", "", text))
    assert bars, text
    numbers = r"loss \d\.\d{4} +accuracy \d\.\d{4} +[\d,]+ samples/s"
    assert re.search(rf"epoch 1/2 .+ \d+/10 +{numbers} +\d:\d\d:\d\d", "\n".join(bars)), bars
    assert max(len(bar.rstrip()) for bar in bars) <= columns
    left = screen(text)
    assert len(left) == 9 + 5 + 2  # the header; a line for every fourth of twenty steps; one per epoch
    assert not [line for line in left if "━" in line]
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0  # the cursor is hidden, and shown again


def test_an_error_leaves_the_terminal_clean():
    with one_process():
        text = fit_in_terminal(100, fails=True)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0
    assert not [line for line in screen(text) if "━" in line]


def show_in_terminal() -> str:
    return fit_in_terminal(100)


def test_only_rank_0_has_a_bar():
    first, second = run_world(2, show_in_terminal)
    assert "━" in first
    assert second == ""


@pytest.mark.parametrize(("settings", "said"), [({"checkpoint_dir": "kept"}, True), ({}, False)])
def test_a_folder_for_checkpoints_that_nobody_asks_for_is_said(settings, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with one_process():
        cx.DistributedTrainer(make_model(), "cross_entropy").fit(*make_rows(8), epochs=1, **settings)
    assert ("checkpoint_every_n_epochs is not" in capsys.readouterr().out) == said


class Handle:
    """What IPython's display() gives: it keeps every state of one output."""

    def __init__(self) -> None:
        self.states: list[CellText] = []

    def update(self, shown: CellText) -> None:
        self.states.append(shown)


def test_a_notebooks_cell_has_one_output_that_is_rewritten():
    handle = Handle()
    display = CellDisplay(handle)
    display.header([("world", "2 ranks")])
    display.begin_epoch(1, 2, 10)
    display.draw(5, "loss 0.5")
    display.line("batch 5/10  a < b")
    display.end_epoch("loss 0.4")
    display.begin_epoch(2, 2, None)
    display.draw(3, "loss 0.3")
    display.close()
    texts = [repr(state) for state in handle.states]
    assert texts[0] == "world      2 ranks"
    assert texts[2].splitlines()[1] == f"epoch 1/2  {'━' * 12}{'┄' * 12}  5/10  loss 0.5"
    assert texts[-2].splitlines()[-1] == "epoch 2/2  3  loss 0.3"
    assert texts[-1].splitlines() == ["world      2 ranks", "epoch 1/2  batch 5/10  a < b", "epoch 1/2  loss 0.4"]
    assert "a &lt; b" in handle.states[-1]._repr_html_()
    assert "font-family:monospace" in handle.states[-1]._repr_html_()  # the columns line up where a page sets no font


def header_in_cell(cell: int, *facts: tuple[str, str]) -> list[str]:
    handle = Handle()
    display = CellDisplay(handle, cell)
    for fact in facts:
        display.header([fact])
    display.begin_epoch(1, 1, 10)
    display.header([("best", "epoch 1")])
    lines = repr(handle.states[-1]).splitlines()
    return [line for line in lines if not line.startswith("epoch ")]  # the bar, where a machine is slow


def test_a_second_fit_in_a_cell_prints_what_differs_from_the_header_of_the_first():
    model, steps, more = ("model", "Linear"), ("steps", "3"), ("steps", "4")
    best = "best       epoch 1"
    assert header_in_cell(7, model, steps)[:2] == ["model      Linear", "steps      3"]
    assert header_in_cell(7, model, steps) == ["as above   model", "as above   steps", best]
    assert header_in_cell(7, model, more) == ["as above   model", "steps      4", best]
    assert header_in_cell(7, model, steps) == ["as above   model", "steps      3", best]
    assert header_in_cell(8, model, steps)[:2] == ["model      Linear", "steps      3"]
