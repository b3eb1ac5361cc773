"""What one rank tells the others about its error is short, and begins with a whole frame."""

from __future__ import annotations

from cyxtrain.errors import Failure


def nested(depth: int) -> None:
    if depth == 0:
        raise ValueError("too deep")
    alternating(depth - 1)


def alternating(depth: int) -> None:
    nested(depth)  # Python shows equal frames in a row only once


def failure_of(depth: int, message: str = "") -> Failure:
    try:
        nested(depth)
    except ValueError as error:
        return Failure.of(ValueError(message) if message else error, 1)
    raise AssertionError("nothing was raised")


def test_a_long_traceback_is_cut_between_frames():
    lines = failure_of(40).traceback.splitlines()
    assert lines[0] == "  ..."
    assert lines[1].startswith('  File "')
    assert lines[-1] == "ValueError: too deep"
    assert len("\n".join(lines)) < 1600


def test_a_short_traceback_is_whole():
    assert failure_of(0).traceback.startswith("Traceback (most recent call last):")


def test_of_a_message_longer_than_that_the_end_is_shown():
    found = failure_of(0, "x" * 5000).traceback
    assert found.startswith("  ...\nxxx")
    assert len(found) < 1600
