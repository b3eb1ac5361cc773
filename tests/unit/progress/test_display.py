"""What one sees while a fit runs: the bar at several widths, what happens between steps, and lines without a bar."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from cyxtrain.environment.process_env import bar_columns
from cyxtrain.progress import display as module
from cyxtrain.progress.display import Clock, Display, LauncherDisplay, PlainDisplay, TerminalDisplay, make_display, pace

MEASURED = {"loss": 0.1234, "accuracy": 0.9, "top5": 0.99}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]")

BARS = {
    40: "epoch 3/12  ━━━┄┄┄┄┄┄┄┄┄┄┄  2/8  0:01:00",
    80: "epoch 3/12  ━━┄┄┄┄┄┄┄┄┄  2/8  loss 0.1234  accuracy 0.9000  top5 0.9900  0:01:00",
    120: f"epoch 3/12  ━━━━━━{'┄' * 18}  2/8  loss 0.1234  accuracy 0.9000  top5 0.9900  64 samples/s  0:01:00",
}


class FakeClock:
    """A clock that stands still until a test sets it forward."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def in_terminal(columns: int, clock: Clock) -> Display:
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, color_system=None, width=columns, _environ={"TERM": "xterm"})
    return TerminalDisplay(terminal, clock)


def train_two_steps(display: Display, clock: FakeClock, steps: int | None = 8) -> None:
    display.begin_epoch(3, 12, steps)
    for _ in range(2):
        clock.now += 10.0
        display.step(640, lambda: MEASURED)


def drawn(text: str) -> list[str]:
    """Return all that was written between control codes."""
    return [piece.rstrip() for piece in CONTROL.split(text) if piece.strip()]


@pytest.fixture(params=["terminal", "launcher"])
def make(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Callable[[int, Clock], Any]:
    """Make a display, and a function that returns all that it has written."""

    def made(columns: int, clock: Clock) -> tuple[Display, Callable[[], str]]:
        if request.param == "launcher":
            return LauncherDisplay(columns, clock), lambda: capsys.readouterr().out
        display = in_terminal(columns, clock)
        return display, display._console.file.getvalue

    return made


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_count_and_the_time_left_are_never_cut(make, columns):
    clock = FakeClock()
    display, written = make(columns, clock)
    train_two_steps(display, clock)
    assert drawn(written())[-1] == BARS[columns]
    assert len(BARS[columns]) <= columns
    display.close()


EPOCH_LINE = """\
epoch 3/12  loss 0.1234  accuracy 0.9000  f1 0.5000  precision 0.6000
            recall 0.7000  val_loss 0.2000  val_accuracy 0.8000
            12 s, 3.4 ms/step, 18,800 samples/s
"""
HEADER = """\
batch      16 per rank in micro-batches of 8, 16 effective
hint       float32_precision='high' lets matrix products use TF32: about 8 times
           as fast on this GPU, 10 bits of mantissa
"""


def test_lines_of_a_terminal_are_wrapped_between_numbers_and_between_words(capsys):
    display = in_terminal(80, FakeClock())
    hint = "float32_precision='high' lets matrix products use TF32: about 8 times as fast on this GPU, 10 bits of "
    display.header([("batch", "16 per rank in micro-batches of 8, 16 effective"), ("hint", f"{hint}mantissa")])
    assert capsys.readouterr().out == HEADER
    display.begin_epoch(3, 12, None)
    numbers = {"loss": 0.1234, "accuracy": 0.9, "f1": 0.5, "precision": 0.6, "recall": 0.7, "val_loss": 0.2}
    text = module.numbers({**numbers, "val_accuracy": 0.8})
    display.end_epoch(f"{text}  12 s, 3.4 ms/step, 18,800 samples/s")
    assert display._console.file.getvalue().endswith(EPOCH_LINE)
    wide = in_terminal(140, FakeClock())
    wide.begin_epoch(3, 12, None)
    wide.end_epoch(text)
    assert wide._console.file.getvalue().endswith(f"epoch 3/12  {text}\n")


SETS = """\
epoch 3/12  loss 0.1000  12 s, 3.4 ms/step, 18,800 samples/s
  val_near        loss 0.5000  accuracy 0.5000  f1 0.5000  auc 0.5000
                  top_2 0.5000
  val_hospital_b  loss 0.2500  accuracy 0.2500  f1 0.2500  auc 0.2500
                  top_2 0.2500  mine 1.0000
"""


def test_several_sets_have_a_line_each_and_a_number_stands_once(make):
    values = {"near": 0.5, "hospital_b": 0.25}
    names = ("loss", "accuracy", "f1", "auc", "top_2")
    validated = {f"val_{each}_{name}": value for each, value in values.items() for name in names}
    validated = {**{f"val_{name}": 0.5 for name in names}, **validated, "val_hospital_b_mine": 1.0}
    after = "12 s, 3.4 ms/step, 18,800 samples/s"
    display, written = make(80, FakeClock())
    display.begin_epoch(3, 12, None)
    display.end_epoch(module.around_validation("loss 0.1000", validated, [*values], after))
    assert written().endswith(SETS)
    assert max(map(len, SETS.splitlines())) <= 80 - len("[rank 0] ")
    assert module.around_validation("loss 0.1000", {}, [*values], after) == f"loss 0.1000  {after}"
    assert module.around_validation("step 4", {"val_loss": 0.5}, [""]) == "step 4  val_loss 0.5000"


def test_without_a_number_of_steps_there_are_numbers_alone(make):
    clock = FakeClock()
    display, written = make(120, clock)
    train_two_steps(display, clock, steps=None)
    assert drawn(written())[-1] == "epoch 3/12  2  loss 0.1234  accuracy 0.9000  top5 0.9900  64 samples/s"
    display.close()


def test_validating_and_saving_are_drawn(make):
    clock = FakeClock()
    display, written = make(60, clock)
    train_two_steps(display, clock, steps=2)
    display.phase("validating", 0, 40)  # at once
    display.phase("validating", 1, 40)  # too early
    clock.now += module.REFRESH_SECONDS
    display.phase("validating", 2, 40)
    display.end_epoch("loss 0.1")
    display.phase("saving")
    display.close()
    bar = f"epoch 3/12  {'━' * 24}  2/2  "
    expected = [f"{bar}validating 0/40", f"{bar}validating 2/40", "epoch 3/12  loss 0.1", f"{bar}saving"]
    found = drawn(written())
    shown = [line for number, line in enumerate(found) if line != found[number - 1]]  # rich draws the last bar again
    assert shown[-4:] == expected


def test_an_epoch_too_short_for_a_bar_draws_no_phase(make):
    clock = FakeClock()
    display, written = make(80, clock)
    display.begin_epoch(1, 2, 3)
    for _ in range(3):
        clock.now += 0.01
        display.step(8, lambda: MEASURED)
    display.phase("validating", 0, 2)
    display.phase("saving")
    display.close()
    assert {line.split("  ", 2)[2] for line in drawn(written())} == {"0/3"}


def test_an_epoch_that_resumes_counts_its_earlier_steps(make):
    clock = FakeClock()
    display, written = make(80, clock)
    display.begin_epoch(1, 2, 10, 7)
    clock.now += 5.0
    display.step(8, lambda: {"loss": 0.5})
    line = drawn(written())[-1]
    assert line == f"epoch 1/2  {'━' * 19}{'┄' * 5}  8/10  loss 0.5000  2 samples/s  0:00:10"
    display.close()


def test_a_bar_for_the_launcher_ends_with_a_carriage_return_and_is_blanked(capsys):
    clock = FakeClock()
    display = LauncherDisplay(30, clock)
    display.begin_epoch(1, 2, 4)
    print("a line of the program")
    display.end_epoch("loss 0.1")
    display.close()
    bar = f"epoch 1/2  {'┄' * 14}  0/4\r"
    assert capsys.readouterr().out == f"{bar}a line of the program\n \repoch 1/2  loss 0.1\n"


def test_a_line_every_30_seconds_without_a_bar(capsys):
    clock = FakeClock()
    display = PlainDisplay(clock)
    display.begin_epoch(1, 5, 100)
    for _ in range(100):
        clock.now += 1.0
        display.step(64, lambda: {"loss": 0.25})
        if clock.now == 70.0:
            display.line("batch 70/100  loss 0.2600")
    display.phase("validating", 3, 40)
    clock.now += module.LINE_SECONDS
    display.phase("validating", 4, 40)
    display.end_epoch("loss 0.2")
    assert capsys.readouterr().out.splitlines() == [
        "epoch 1/5  batch 30/100  loss 0.2500  64 samples/s  0:01:10 left",
        "epoch 1/5  batch 60/100  loss 0.2500  64 samples/s  0:00:40 left",
        "epoch 1/5  batch 70/100  loss 0.2600",
        "epoch 1/5  batch 100/100  loss 0.2500  64 samples/s",
        "epoch 1/5  batch 100/100  validating 4/40",
        "epoch 1/5  loss 0.2",
    ]


def test_characters_that_an_encoding_lacks_are_replaced(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="iso-8859-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    clock = FakeClock()
    train_two_steps(LauncherDisplay(40, clock), clock)
    written = stdout.buffer.getvalue().decode("ascii")
    assert written.split("\r")[-2] == "epoch 3/12  ###-----------  2/8  0:01:00"


def test_the_launchers_bar_is_for_its_rank_0_unless_the_program_redirects_stdout(monkeypatch, capsys):
    assert bar_columns({}) == bar_columns({"CYXTRAIN_BAR_COLUMNS": "0"}) == 0
    monkeypatch.setenv("CYXTRAIN_BAR_COLUMNS", "79")
    assert type(make_display(True)) is PlainDisplay  # pytest has redirected it
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)
    assert type(make_display(True)) is LauncherDisplay
    assert type(make_display(False)) is Display


@pytest.mark.parametrize(
    ("seconds", "steps", "rows", "expected"),
    [
        (12.24, 3600, 230_000, "12 s, 3.4 ms/step, 18,791 samples/s"),
        (0.05, 45, 1440, "0.05 s, 1.1 ms/step, 28,800 samples/s"),
        (3725.0, 1000, 64_000, "1:02:05, 3,725.0 ms/step, 17 samples/s"),
    ],
)
def test_an_epoch_has_its_time_and_that_of_a_step(seconds, steps, rows, expected):
    assert pace(seconds, steps, rows) == expected
