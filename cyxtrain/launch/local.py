"""The ranks on this machine: the environment of each, restarts, and the last thing on the screen."""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cyxtrain.workers.machine import free_port, launch_environment
from cyxtrain.workers.output import Terminal
from cyxtrain.workers.process import RankSpec
from cyxtrain.workers.supervisor import Outcome, Supervisor, comes_again


@dataclass(frozen=True)
class Start:
    """What to start."""

    command: tuple[str, ...]
    """The program of each rank and its arguments."""
    num_ranks: int
    """On this machine."""
    nnodes: int = 1
    """How many machines there are, all with as many ranks."""
    node_rank: int = 0
    """Which of them this is."""
    master_addr: str = "127.0.0.1"
    """Machine 0."""
    master_port: str | None = None
    """At which the ranks meet there; None: a free one."""
    restarts: int = 0
    """How often all ranks are started again after a failure."""
    logs: Path | None = None
    """The folder for each rank's output, or None."""

    @property
    def ranks(self) -> range:
        """Those of this machine."""
        return range(self.node_rank * self.num_ranks, (self.node_rank + 1) * self.num_ranks)

    def log_of(self, rank: int) -> Path:
        """Returns where the output of a rank goes, if there are logs."""
        return (self.logs or Path()) / f"rank{rank}.log"

    def begin_logs(self) -> None:
        """Makes the folder for logs, if there are some, and an empty one for each rank: restarts add to it.

        Raises:
            OSError: They cannot be written there.
        """
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            for rank in self.ranks:
                self.log_of(rank).unlink(missing_ok=True)
                self.log_of(rank).touch()


def run_ranks(start: Start, environment: Mapping[str, str]) -> int:
    """Runs the ranks of this machine and returns the exit code for the launcher.

    Args:
        start: What to start.
        environment: What the ranks' environment begins with.

    Raises:
        OSError: The command cannot be started.
    """
    environment = {**environment, "CYXTRAIN_RUN": secrets.token_hex(8)}
    terminal = Terminal.standard()
    for attempt in range(start.restarts + 1):
        outcome = _run_once(start, {**environment, "CYXTRAIN_ATTEMPT": str(attempt)}, terminal)
        ends = outcome.stopped_by is not None or outcome.first_failure is None or bool(outcome.unstoppable)
        in_vain = not ends and comes_again(outcome)
        again = f"restart {attempt + 1} of {start.restarts}"
        says = "no restart: this error would come again" if in_vain else again
        with contextlib.suppress(OSError):  # nobody reads our stderr any more
            terminal.write_err(describe(outcome) + (b"" if ends or attempt == start.restarts else f"{says}\n".encode()))
        if ends or in_vain:
            break
    return _exit_code(outcome)


def _exit_code(outcome: Outcome) -> int:
    if outcome.stopped_by is not None:
        return 128 + outcome.stopped_by
    if outcome.first_failure is not None:
        return outcome.first_failure.code
    return 1 if outcome.unstoppable else 0


def _run_once(start: Start, environment: Mapping[str, str], terminal: Terminal) -> Outcome:
    with free_port() if start.master_port is None else contextlib.nullcontext(start.master_port) as port:
        supervisor = Supervisor(_specs(start, environment, str(port)), terminal)
        with _stops_on_signals(supervisor):
            return supervisor.run()


def _specs(start: Start, environment: Mapping[str, str], port: str) -> list[RankSpec]:
    if start.nnodes == 1:
        # Ranks let in only who knows it: no other user of this machine, and no rank of another run. The launchers of
        # several machines have no way of telling each other.
        environment = {**environment, "CYXTRAIN_SECRET": environment.get("CYXTRAIN_SECRET") or secrets.token_hex(32)}
    return [
        RankSpec(
            label=f"rank {rank}",
            command=start.command,
            environment=launch_environment(
                environment,
                local_rank,
                start.num_ranks,
                port,
                nnodes=start.nnodes,
                node_rank=start.node_rank,
                address=start.master_addr,
            ),
            shares_terminal=start.num_ranks == 1 and start.logs is None,
            log=None if start.logs is None else start.log_of(rank),
        )
        for local_rank, rank in enumerate(start.ranks)
    ]


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
