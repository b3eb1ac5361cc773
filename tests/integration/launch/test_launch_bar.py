"""The progress bar of rank 0 below the lines of all ranks, where the launcher's output is a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCHER, SECONDS, environment, write_script

from cyxtrain.workers import output

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")

# Rank 1 prints in each step, in which rank 0 draws.
TRAIN = """
    import threading
    import torch
    import cyxtrain as cx

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(4, 3)

        def forward(self, inputs):
            threading.Event().wait(0.03)
            if rank == 1 and self.training:
                print("a step")
            return self.body(inputs)

    with cx.init():
        model = Slow()
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), lr=0.1))
        inputs, targets = torch.ones(40, 4), torch.zeros(40, dtype=torch.int64)
        trainer.fit(inputs, targets, epochs=2, batch_size=2, validation_data=(inputs[:8], targets[:8]))
        print("trained")
"""


def shown_in_terminal(columns: int, *command: str) -> str:
    """Return all that a command writes to a terminal, once it has ended with success."""
    import fcntl
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = environment(TERM="xterm-256color", PYTHONUTF8="1")
    pieces: list[bytes] = []
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(ours, 4096):
                pieces.append(piece)
        assert process.wait(SECONDS) == 0, b"".join(pieces).decode()
    os.close(ours)
    return b"".join(pieces).decode()


def screen(text: str) -> list[str]:
    """Return the lines that are left of what was written to a terminal."""
    lines, column = [""], 0
    for piece in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+|\x1b", text):
        if piece == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif piece == "\r":
            column = 0
        elif piece == "\n":
            lines.append("")
        else:
            lines[-1] = lines[-1][:column] + piece + lines[-1][column + len(piece) :]
            column += len(piece)
    return lines


@pytest.mark.nightly
def test_a_terminal_has_the_bar_of_rank_0_and_whole_lines_of_all_ranks(tmp_path: Path) -> None:
    text = shown_in_terminal(80, *LAUNCHER, "2", write_script(tmp_path, TRAIN))
    bars = re.findall(r"epoch [12]/2  [━┄][^\r\n\x1b]*", text)
    assert max(map(len, bars)) < 80
    assert [bar for bar in bars if re.search(r"[━┄]  [1-9]\d?/10  loss \d\.\d{4}  accuracy \d\.\d{4}", bar)], bars
    assert "━" not in "".join(re.findall(r"\[rank \d\] [^\r\n]*", text))
    *lines, last = screen(text)
    assert last == ""
    assert [line for line in lines if not re.match(r"\[rank [01]\] ", line)] == []
    assert lines.count("[rank 1] a step") >= 20
    own = [line for line in lines if line.startswith("[rank 0] ")]  # what does not fit continues in a second line
    assert max(map(len, own)) <= 80
    assert re.findall(r"epoch \d/2|ms/step", " ".join(own)) == ["epoch 1/2", "ms/step", "epoch 2/2", "ms/step"]
    assert {"[rank 0] trained", "[rank 1] trained"} <= set(lines)


def test_only_rank_0_is_told_of_the_terminal_and_a_dumb_one_shows_no_bar(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print(os.environ['CYXTRAIN_BAR_COLUMNS'])")
    for before, columns in (((), "99"), (("env", "TERM=dumb"), "0")):
        found = screen(shown_in_terminal(100, *before, *LAUNCHER, "2", script))
        assert sorted(filter(None, found)) == [f"[rank 0] {columns}", "[rank 1] 0"]


def test_the_terminal_of_a_single_rank_is_as_wide_as_the_launchers(tmp_path: Path) -> None:
    source = "print([os.get_terminal_size(number).columns for number in range(3)], file=sys.stderr)\nopen(2, 'w')"
    assert screen(shown_in_terminal(93, *LAUNCHER, "1", write_script(tmp_path, source))) == ["[93, 93, 93]", ""]


def test_a_bar_is_the_last_complete_state_of_an_unfinished_line() -> None:
    assembler = output.LineAssembler(clock=iter([0.0, *[1e6] * 9]).__next__, keeps_bar=True)
    found = []
    for data in (b"10%\r2", b"0%\r", b"a line of the program\n", b"30%\r", b" \r", b"done\n40%\r", b"the end"):
        found.append((assembler.feed(data), assembler.bar.strip()))
    assert found == [
        ([], b"10%"),
        ([], b"20%"),
        ([b"a line of the program"], b""),
        ([], b"30%"),
        ([], b""),
        ([b"done"], b"40%"),
        ([], b"40%"),
    ]
    assert assembler.finish() == [b"the end"]


def test_a_bar_that_was_blanked_leaves_no_line() -> None:
    assembler = output.LineAssembler(keeps_bar=True)
    assert assembler.feed(b"10%\r \r") + assembler.finish() == []


class Screen:
    """Keeps all that is written to it."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, data: bytes) -> int:
        self.written += data.decode()
        return len(data)


def test_lines_are_written_above_the_bar_on_either_stream() -> None:
    out, columns = Screen(), 8
    terminal = output.Terminal(out, out, lambda: columns)
    terminal.show_bar("━━┄┄ 2/4, too long".encode())
    assert screen(out.written) == ["━━┄┄ 2/4"]
    terminal.write_out(b"[rank 1] one\n")
    terminal.write_err(b"[rank 1] two\n")
    assert screen(out.written) == ["[rank 1] one", "[rank 1] two", "━━┄┄ 2/4"]
    columns = 4  # the window has become narrower
    terminal.show_bar("━━━┄ 3/4".encode())
    assert screen(out.written)[2:] == ["━━━┄"]
    terminal.show_bar(b" ")
    terminal.write_out(b"[rank 0] three\n")
    assert screen(out.written)[2:] == ["[rank 0] three", ""]


def test_without_a_bar_no_code_is_written() -> None:
    out = Screen()
    terminal = output.Terminal(out, out)
    terminal.show_bar(b"")
    terminal.write_out(b"a line\n")
    assert out.written == "a line\n"


def test_the_codes_for_the_bar_go_to_stdout_alone() -> None:
    out, err = Screen(), Screen()
    terminal = output.Terminal(out, err, lambda: 79)
    terminal.show_bar(b"2/4")
    terminal.write_err(b"an error\n")
    assert err.written == "an error\n"
