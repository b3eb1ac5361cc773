"""N ranks on this machine: the command line, the environment of each rank, and the last thing on the screen."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from cyxtrain.workers.machine import find_free_port, launch_environment
from cyxtrain.workers.output import Terminal
from cyxtrain.workers.process import RankSpec
from cyxtrain.workers.supervisor import Outcome, Supervisor, comes_again

_USAGE_ERROR = 2  # the exit code of a command line that cannot be understood

_OPTIONS = ("-h", "--help", "--restarts")

_HELP = """\
examples:
  %(prog)s 4 train.py
  %(prog)s 2 python train.py --lr 0.1 --name "two words"
  %(prog)s --restarts 3 4 train.py
  MASTER_PORT=29500 OMP_NUM_THREADS=2 %(prog)s 4 python -m my_package.train --help

Everything after the number is the command; its options are its own. No shell reads it. A first word that
ends in .py gets Python before it.

Each rank finds in its environment: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
(a free port; one that is set wins), OMP_NUM_THREADS (its share of the cores; one that is set wins),
CYXTRAIN_SECRET (made for this run; one that is set wins) and PYTHONUNBUFFERED=1.

Several ranks: each line of output begins with its rank, and stdin is empty. One rank has the terminal to itself.
Ctrl-C, SIGTERM, SIGHUP and the first failure stop all ranks, with 5 seconds to end; a second Ctrl-C kills them.
SIGTERM or SIGINT to one rank is a stop too, not a failure: fit agrees on a step, and all ranks end there.
With --restarts N, all ranks are started again after a failure, up to N times, and fit goes on from the newest
checkpoint that this command has made; where it makes none, it begins anew. There is no restart after a stop, nor
after an error that would come again (ConfigError, a missing backend, NaN), as far as the launcher sees it: one rank
that has the terminal to itself is started again.

exit code: 0, or that of the first rank that failed (128 + n: killed by signal n), or 128 + n where signal n
stopped the launcher or a rank, or 2 for a command line that cannot be used."""


class _Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE_ERROR, f"{self.prog}: {message} (see --help)\n")


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: The number of ranks, then the command.
        environment: What the ranks' environment begins with.
    """
    parser = _Parser(
        prog="python -m cyxtrain.launch",
        usage="%(prog)s [-h] [--restarts N] NUM_RANKS COMMAND...",
        description="Starts NUM_RANKS processes of a command on this machine, which train together.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("num_ranks", metavar="NUM_RANKS", type=_parse_num_ranks, help="processes to start, at least 1")
    parser.add_argument("--restarts", metavar="N", type=_parse_restarts, default=0, help="start again so many times")
    # Only the words up to the number are ours. argparse never sees the command, so it cannot take an option, a "--"
    # or an empty argument out of it.
    first = arguments[0] if arguments else ""
    if first.startswith("-") and first.partition("=")[0] not in _OPTIONS and not first.lstrip("-").isdecimal():
        parser.error(f"there is no option {first!r}: NUM_RANKS comes first, then the command")
    own = 3 if first == "--restarts" else 2 if first.startswith("--restarts=") else 1
    parsed = parser.parse_args(arguments[:own])
    num_ranks, command = parsed.num_ranks, list(arguments[own:])
    if not command or not command[0]:
        parser.error(f"no command to start on {num_ranks} ranks")
    if command[0].startswith("-"):
        place = "; it comes before the number" if command[0].startswith("--restarts") else ""
        parser.error(f"after the number comes the command, got the option {command[0]!r}{place}")
    if command[0].endswith(".py"):
        if not Path(command[0]).is_file():
            parser.error(f"there is no file {command[0]!r}")
        command.insert(0, sys.executable)
    try:
        return launch(num_ranks, command, environment, parsed.restarts)
    except OSError as error:
        hint = "; a script alone (train.py) gets Python before it" if command[0].startswith("python") else ""
        parser.error(f"cannot start {command[0]!r}: {error.strerror}{hint}")


def _parse_num_ranks(word: str) -> int:
    """Returns the number of ranks, or says in argparse's way what is wrong."""
    if not (word.isdecimal() and word.isascii() and int(word) > 0):
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 comes first, got {word!r}")
    return int(word)


def _parse_restarts(word: str) -> int:
    """Returns the number of restarts, or says in argparse's way what is wrong."""
    if not (word.isdecimal() and word.isascii()):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {word!r}")
    return int(word)


def launch(num_ranks: int, command: Sequence[str], environment: Mapping[str, str], restarts: int = 0) -> int:
    """Runs a command as ranks 0 to `num_ranks` - 1 and returns the exit code for the launcher.

    Args:
        num_ranks: How many.
        command: Of each.
        environment: What the ranks' environment begins with.
        restarts: How often all ranks are started again after a failure.

    Raises:
        OSError: The command cannot be started.
    """
    environment = {**environment, "CYXTRAIN_RUN": secrets.token_hex(8)}
    terminal = Terminal.standard()
    for attempt in range(restarts + 1):
        outcome = _launch_once(num_ranks, command, {**environment, "CYXTRAIN_ATTEMPT": str(attempt)}, terminal)
        ends = outcome.stopped_by is not None or outcome.first_failure is None or bool(outcome.unstoppable)
        in_vain = not ends and comes_again(outcome)
        says = "no restart: this error would come again" if in_vain else f"restart {attempt + 1} of {restarts}"
        with contextlib.suppress(OSError):  # nobody reads our stderr any more
            terminal.write_err(describe(outcome) + (b"" if ends or attempt == restarts else f"{says}\n".encode()))
        if ends or in_vain:
            break
    return _exit_code(outcome)


def _exit_code(outcome: Outcome) -> int:
    if outcome.stopped_by is not None:
        return 128 + outcome.stopped_by
    if outcome.first_failure is not None:
        return outcome.first_failure.code
    return 1 if outcome.unstoppable else 0


def _launch_once(num_ranks: int, command: Sequence[str], environment: Mapping[str, str], terminal: Terminal) -> Outcome:
    port = environment.get("MASTER_PORT") or str(find_free_port())
    # Ranks let in only who knows it: no other user of this machine, and no rank of another run.
    environment = {**environment, "CYXTRAIN_SECRET": environment.get("CYXTRAIN_SECRET") or secrets.token_hex(32)}
    specs = [
        RankSpec(
            label=f"rank {rank}",
            command=tuple(command),
            environment=launch_environment(environment, rank, num_ranks, port),
            shares_terminal=num_ranks == 1,
        )
        for rank in range(num_ranks)
    ]
    supervisor = Supervisor(specs, terminal)
    with _stops_on_signals(supervisor):
        return supervisor.run()


@contextlib.contextmanager
def _stops_on_signals(supervisor: Supervisor) -> Iterator[None]:
    """Lets Ctrl-C, SIGTERM and SIGHUP stop the ranks; puts the handlers back as they were."""

    def request_stop(number: int, _: FrameType | None) -> None:
        supervisor.request_stop(signal.Signals(number))

    numbers = [signal.SIGINT, signal.SIGTERM]
    if sys.platform == "win32":
        numbers.append(signal.SIGBREAK)
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it, and means it
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, request_stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def describe(outcome: Outcome) -> bytes:
    """Returns what the launcher says last: nothing after a success, else who failed first and its last words."""
    lines = [f"{label} cannot be ended, not even by SIGKILL" for label in outcome.unstoppable]
    if outcome.stopped_by is not None:
        lines.append(f"all ranks were stopped by {outcome.stopped_by.name}")
    first, words = outcome.first_failure, outcome.last_words
    if first is not None and words is not None:
        end = "; its last words:" if words else ", and left no last words"
        lines.append(f"{first.label} failed first, with {first.describe()}{end}")
    elif first is not None and first.killed_by is not None:  # else its own words are on the screen already
        lines.append(f"{first.label} failed, with {first.describe()}")
    return "".join(f"{line}\n" for line in lines).encode() + (words or b"")
