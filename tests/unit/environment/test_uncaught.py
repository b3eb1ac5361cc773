"""What Python prints of an error that ends the program: a user's mistake in short, everything else as before."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

import cyxtrain as cx
from cyxtrain.environment import uncaught
from cyxtrain.errors import on_all_ranks
from cyxtrain.notebook.failures import Failed
from cyxtrain.notebook.failures import raised as from_worker

LIBRARY = """
def call(function):
    function()

def refuse(function):
    try:
        function()
    except AttributeError as error:
        raise ConfigError(f"the model cannot take X: {error}") from error
"""


def by_python(kind: type[BaseException], error: BaseException, _: Any) -> None:
    print("python:", repr(error), file=sys.stderr)


by_python.__module__ = "sys"


@pytest.fixture(autouse=True)
def python_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error has replaced the hook in this process."""
    monkeypatch.setattr(sys, "excepthook", by_python)
    monkeypatch.setattr(uncaught, "_hook", None)
    monkeypatch.delenv("CYXTRAIN_TRACEBACK", raising=False)


def library(module: str) -> dict[str, Any]:
    """Return functions whose frames are those of a library."""
    names = {"__name__": module, "ConfigError": cx.ConfigError}
    exec(LIBRARY, names)
    return names


def printed(function: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that Python prints where this function ends the program with an error."""
    with pytest.raises(BaseException) as found:  # noqa: PT011 - any error
        function()
    sys.excepthook(found.type, found.value, found.tb.tb_next)  # without our own frame
    return capsys.readouterr().err.splitlines()


def raised(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def frames(lines: list[str]) -> list[str]:
    """Return the functions of the frames that are shown, all of this file."""
    assert all(line.startswith(f'  File "{__file__}", line ') for line in lines if line.startswith("  File"))
    return [line.rpartition(", in ")[2] for line in lines if line.startswith("  File")]


def forward() -> None:
    raise AttributeError("no layer")


def train() -> None:
    library("cyxtrain.training.trainer")["refuse"](functools.partial(library("torch.nn")["call"], forward))


def test_a_mistake_is_printed_with_the_frames_of_the_users_code_and_those_of_its_cause(capsys):
    lines = printed(train, capsys)
    assert lines[0] == uncaught.HEADER
    assert frames(lines) == ["train", "forward"]
    assert lines[-2:] == [
        '    raise AttributeError("no layer")',
        "cyxtrain.errors.ConfigError: the model cannot take X: no layer",
    ]
    assert len(lines) == 6


def step() -> None:
    raise AttributeError("no layer")


def in_a_worker() -> None:
    try:
        step()
    except AttributeError as error:
        raise cx.ConfigError(f"the model cannot take X: {error}") from error


def fails_in_a_worker() -> None:
    with pytest.raises(cx.ConfigError) as found:
        in_a_worker()
    sent = Failed.of(found.value)
    sys.excepthook = by_python  # a worker's error is the first of this process
    error = from_worker(sent, 1, 2)
    raise error from error.__cause__


def test_a_mistake_in_a_worker_process_is_printed_with_the_frames_of_the_users_code_there(capsys):
    lines = printed(fails_in_a_worker, capsys)
    assert lines[0] == uncaught.HEADER
    assert frames(lines) == ["fails_in_a_worker", "in_a_worker", "step"]
    assert '    raise AttributeError("no layer")' in lines
    assert "cyxtrain.errors.ConfigError: the model cannot take X: no layer" in lines
    if sys.version_info >= (3, 11):
        assert lines[-1] == "  (on rank 1 of 2, in a worker process)"


def nested(depth: int) -> None:
    if depth == 0:
        raise cx.ConfigError("\n".join(f"line {number}" for number in range(40)))
    alternating(depth - 1)


def alternating(depth: int) -> None:
    nested(depth)


def test_of_many_frames_and_lines_fifteen_are_printed(capsys):
    lines = printed(functools.partial(nested, 20), capsys)
    assert len(lines) == 15
    assert frames(lines) == ["nested", "nested", "alternating", "nested"]
    assert lines[-6:] == [
        "cyxtrain.errors.ConfigError: line 0",
        *("  line 1", "  line 2", "  line 3"),
        *("  ...", "  line 39"),
    ]


def test_another_error_is_left_to_the_previous_hook(capsys):
    cx.ConfigError("caught")
    assert sys.excepthook is not by_python
    assert printed(raised(ValueError("wrong")), capsys) == ["python: ValueError('wrong')"]
    assert printed(raised(cx.CheckpointError("none")), capsys) == ["python: CheckpointError('none')"]
    assert printed(raised(on_all_ranks(ValueError("of one rank"))), capsys) == ["python: ValueError('of one rank')"]
    assert printed(raised(KeyboardInterrupt()), capsys) == ["python: KeyboardInterrupt()"]


def test_a_hook_of_the_program_stays(capsys, monkeypatch):
    def own(*_: Any) -> None:
        pass

    monkeypatch.setattr(sys, "excepthook", own)
    cx.ConfigError("caught")
    assert sys.excepthook is own


def test_a_hook_that_pytorch_puts_in_place_is_replaced_again_with_the_same_style(capsys, monkeypatch):
    uncaught.install(uncaught.ONE_LINE)
    monkeypatch.setattr(sys, "excepthook", by_python)  # as after init, which puts back the hook before it
    assert printed(raised(cx.ConfigError("epochs is 0")), capsys) == ["ConfigError: epochs is 0"]


def test_what_all_ranks_raise_is_printed_by_one_of_them(capsys):
    error = on_all_ranks(cx.NonFiniteError("the loss is nan"))
    assert printed(raised(error), capsys)[-1] == "cyxtrain.errors.NonFiniteError: the loss is nan"
    uncaught.install(is_printing=False)
    assert printed(raised(error), capsys) == []
    of_this_rank = cx.ConfigError("epochs is 0")
    uncaught.install(is_printing=False)
    assert printed(raised(of_this_rank), capsys)[-1] == "cyxtrain.errors.ConfigError: epochs is 0"


def failed_in_fit() -> None:
    other = cx.DistributedTrainingError.because_of(KeyError("a banana"), 3)
    raise cx.DistributedTrainingError(f"{other} (reported by rank 3)", during="barrier #7", failures=other.failures)


def test_an_error_of_another_rank_is_the_message_and_the_users_line(capsys):
    message, place = printed(functools.partial(library("cyxtrain")["call"], failed_in_fit), capsys)
    assert message == (
        "cyxtrain.errors.DistributedTrainingError: rank 3 has failed: KeyError: 'a banana' (its output has the "
        "traceback); this rank was in barrier #7"
    )
    assert place.startswith(f'  File "{__file__}", line ')
    lost = printed(raised(cx.PeerLostError("rank 1 has ended: KeyError: 'a'", rank=1)), capsys)
    assert lost[0] == "cyxtrain.errors.PeerLostError: rank 1 has ended: KeyError: 'a'"
    assert len(lost) == 2
    uncaught.install(uncaught.ONE_LINE)
    assert printed(raised(cx.PeerLostError("lost")), capsys) == ["PeerLostError: lost"]


def test_nothing_is_printed_after_ctrl_c_in_a_fit(capsys):
    assert printed(raised(on_all_ranks(KeyboardInterrupt())), capsys) == []


def test_all_of_a_traceback_is_printed_where_the_environment_asks_for_it(capsys, monkeypatch):
    monkeypatch.setenv("CYXTRAIN_TRACEBACK", "full")
    for error in (cx.ConfigError("wrong"), on_all_ranks(KeyboardInterrupt())):
        assert printed(raised(error), capsys) == [f"python: {error!r}"]
