"""What the launcher leaves out of the ranks' stderr: a mistake that another rank has printed, tracebacks of Ctrl-C."""

from __future__ import annotations

import pytest

from cyxtrain.environment.uncaught import HEADER
from cyxtrain.workers.output import ErrorFilter, is_mistake

FRAME = [b'  File "train.py", line 1, in <module>', b"    trainer.fit(X, y)"]
MESSAGE = b"cyxtrain.errors.ConfigError: epochs is 0"
MISTAKE = [HEADER.encode(), *FRAME, MESSAGE]
FULL = [b"Traceback (most recent call last):", *FRAME]


def filters() -> tuple[ErrorFilter, ErrorFilter]:
    mistakes: dict[bytes, str] = {}
    return ErrorFilter("rank 0", mistakes), ErrorFilter("rank 1", mistakes)


@pytest.mark.parametrize("mistake", [MISTAKE, [*MISTAKE, b"  its second line"], [b"ConfigError: epochs is 0"]])
def test_the_same_mistake_is_printed_once_for_all_ranks(mistake: list[bytes]) -> None:
    first, second = filters()
    lines = [b"a warning", *mistake, b"more"]
    assert first.feed(lines) == lines
    assert second.feed(lines) == [b"a warning", b"more"]
    assert first.feed(mistake) == mistake  # rank 0 again, after a restart


def test_another_mistake_is_printed() -> None:
    first, second = filters()
    first.feed(MISTAKE)
    other = [*MISTAKE[:-1], b"cyxtrain.errors.ConfigError: epochs is -1"]
    assert second.feed(other) == other


def test_lines_may_come_one_by_one() -> None:
    first, second = filters()
    first.feed(MISTAKE)
    assert [second.feed([line]) for line in [*MISTAKE, b"  its second line", b"more"]] == [[]] * 5 + [[b"more"]]


def test_the_rank_that_pytorch_prints_makes_no_difference() -> None:
    first, second = filters()
    assert first.feed([b"[rank0]: " + line for line in MISTAKE])
    assert second.feed([b"[rank1]: " + line for line in MISTAKE]) == []


def test_a_traceback_of_ctrl_c_is_left_out_once_the_launcher_has_sent_it() -> None:
    lines = [*FULL, b"KeyboardInterrupt"]
    rank, _ = filters()
    assert rank.feed(lines) == lines
    rank.hides_interrupts = True
    assert rank.feed([b"before", *lines, b"after"]) == [b"before", b"after"]
    error = [*FULL, b"ValueError: a banana"]
    assert rank.feed(error) == error


def test_a_rank_that_is_killed_in_a_traceback_loses_none_of_it() -> None:
    rank, _ = filters()
    rank.hides_interrupts = True
    assert rank.feed([b"before", *FULL]) == [b"before"]
    assert rank.finish() == FULL
    assert rank.finish() == []


def test_a_mistake_is_known_by_its_first_line() -> None:
    assert is_mistake(b"\n".join(MISTAKE))
    assert is_mistake(b"a warning\nConfigError: there is no file none.yaml.\n")
    assert not is_mistake(b"\n".join([*FULL, MESSAGE]))
    assert not is_mistake(b"\n".join([*MISTAKE, *FULL, b"ValueError: a banana"]))
    assert not is_mistake(b"PeerLostError: rank 1 has ended\n")
    assert not is_mistake(None)
