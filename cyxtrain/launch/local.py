"""Run the ranks of this machine: environment of each, restarts, and the report of a failure."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from cyxtrain.environment import process_env
from cyxtrain.workers.machine import free_port, launch_environment
from cyxtrain.workers.output import LAST_SECONDS, Terminal, is_mistake
from cyxtrain.workers.process import RankExit, RankSpec
from cyxtrain.workers.supervisor import Outcome, Supervisor, stop_all_at_first_failure, would_recur


@dataclass(frozen=True)
class Start:
    """What to start on this machine."""

    command: tuple[str, ...]
    num_ranks: int
    nnodes: int = 1
    """Machines, all with as many ranks."""
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    """Of machine 0."""
    master_port: str | None = None
    """Of the rendezvous; None for a free one."""
    restarts: int = 0
    """How often all ranks are restarted after a failure."""
    logs: Path | None = None
    """Folder for a copy of each rank's output."""

    @property
    def ranks(self) -> range:
        """The ranks of this machine."""
        first = self.node_rank * self.num_ranks
        return range(first, first + self.num_ranks)

    @property
    def shares_terminal(self) -> bool:
        """Whether the only rank uses the launcher's terminal itself."""
        return self.num_ranks == 1 and self.logs is None

    def log_of(self, rank: int) -> Path | None:
        """Return the file for a rank's output, if there are logs."""
        return None if self.logs is None else self.logs / f"rank{rank}.log"

    def create_logs(self) -> None:
        """Create an empty log for each rank; restarts append to it."""
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            for path in filter(None, map(self.log_of, self.ranks)):
                path.unlink(missing_ok=True)
                path.touch()


def run_ranks(start: Start, environment: Mapping[str, str]) -> int:
    """Run the ranks of this machine, which inherit `environment`; return the launcher's exit code."""
    # After a restart, `fit` recognizes the checkpoints of this launch by it.
    environment = {**environment, "CYXTRAIN_RUN": secrets.token_hex(8)}
    terminal = Terminal.standard()
    for attempt in range(start.restarts + 1):
        outcome = _run_once(start, {**environment, "CYXTRAIN_ATTEMPT": str(attempt)}, terminal)
        has_failed = outcome.first_failure is not None and outcome.stopped_by is None and not outcome.unstoppable
        can_restart = has_failed and attempt < start.restarts
        restarts = can_restart and not would_recur(outcome)
        text = describe(outcome)
        if restarts:
            text += f"restart {attempt + 1} of {start.restarts}\n".encode()
        elif can_restart:
            text += b"no restart: the same error would occur again\n"
        last = threading.Thread(target=terminal.write_err, args=(text,), daemon=True)
        last.start()
        last.join(LAST_SECONDS)  # a terminal that cannot be opened again may block
        if not restarts:
            break
    return _exit_code(outcome)


def _exit_code(outcome: Outcome) -> int:
    if outcome.stopped_by is not None:
        return 128 + outcome.stopped_by
    if outcome.first_failure is not None:
        return outcome.first_failure.code
    return 1 if outcome.unstoppable else 0


def _run_once(start: Start, environment: Mapping[str, str], terminal: Terminal) -> Outcome:
    if start.nnodes == 1:
        # Keeps other users of this machine and ranks of other runs out. Launchers of several machines cannot share one.
        secret = environment.get("CYXTRAIN_SECRET") or secrets.token_hex(32)
        environment = {**environment, "CYXTRAIN_SECRET": secret}
    bar_columns = 0
    if not start.shares_terminal and environment.get("TERM", "dumb") != "dumb":
        bar_columns = terminal.columns()
    with _prepared(start, environment) as shared:
        specs = _specs(start, shared, bar_columns)
        policy = partial(_note_exit, start, shared["CYXTRAIN_EXITED"])
        supervisor = Supervisor(specs, terminal, policy, process_env.grace_seconds(environment))
        with _stopping_on_signals(supervisor):
            supervisor.run()
        # Only now: a signal after the last rank has ended stops the launcher, too.
        return supervisor.outcome()


def _specs(start: Start, shared: Mapping[str, str], bar_columns: int) -> list[RankSpec]:
    """Return the ranks of this machine; rank 0 draws a progress bar of so many columns."""
    specs = []
    for local_rank, rank in enumerate(start.ranks):
        columns = bar_columns if rank == 0 else 0
        environment = launch_environment(
            {**shared, "CYXTRAIN_BAR_COLUMNS": str(columns)},
            local_rank,
            start.num_ranks,
            shared["MASTER_PORT"],
            nnodes=start.nnodes,
            node_rank=start.node_rank,
            address=start.master_addr,
        )
        spec = RankSpec(
            label=f"rank {rank}",
            command=start.command,
            environment=environment,
            shares_terminal=start.shares_terminal,
            shows_bar=columns > 0,
            log=start.log_of(rank),
        )
        specs.append(spec)
    return specs


def _note_exit(start: Start, exits_path: str, ended: RankExit) -> bool:
    """Note a success in the file of exits; return whether to stop all ranks."""
    if ended.code == 0:  # ranks that wait for it to join read this
        with contextlib.suppress(OSError), open(exits_path, "a") as file:
            file.write(f"{start.ranks[ended.index]}\n")
    return stop_all_at_first_failure(ended)


@contextlib.contextmanager
def _prepared(start: Start, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Hold the ports of a run and name its file of exits; yield the environment that the ranks share."""
    shared = {**environment, "MASTER_PORT": start.master_port or "", "CYXTRAIN_EXITED": ""}
    with contextlib.ExitStack() as ports:
        if start.master_port is None:
            # A plain program of PyTorch can listen at the first port, only this user's rank 0 at the second.
            port = ports.enter_context(free_port(for_any_program=True))
            port_of_rank_0 = ports.enter_context(free_port())
            shared["MASTER_PORT"] = str(port)
            shared["CYXTRAIN_PORT"] = f"{port} {port_of_rank_0}"
        with contextlib.suppress(OSError):  # there may be no temporary folder
            shared["CYXTRAIN_EXITED"] = os.path.join(tempfile.gettempdir(), f"cyxtrain-{secrets.token_hex(8)}")
        try:
            yield shared
        finally:
            with contextlib.suppress(OSError):
                os.unlink(shared["CYXTRAIN_EXITED"])


@contextlib.contextmanager
def _stopping_on_signals(supervisor: Supervisor) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 stop the ranks; restore the handlers afterwards."""

    def request_stop(number: int, _: FrameType | None) -> None:
        supervisor.request_stop(signal.Signals(number))

    numbers = [signal.SIGINT, signal.SIGTERM]
    if sys.platform == "win32":
        numbers.append(signal.SIGBREAK)
    else:  # nohup ignores SIGHUP
        more = (signal.SIGHUP, signal.SIGUSR1)
        numbers += [number for number in more if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, request_stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not installed from Python


def describe(outcome: Outcome) -> bytes:
    """Return the launcher's last message: which rank failed first, and its stderr.

    It is empty after a success, and after a user's mistake, whose short form is on the screen already.
    """
    lines = [f"{label} cannot be ended, not even by SIGKILL" for label in outcome.unstoppable]
    if outcome.stopped_by is not None:
        lines.append(f"all ranks were stopped by {outcome.stopped_by.name}")
    first = outcome.first_failure
    stderr = None if is_mistake(outcome.last_lines) else outcome.last_lines
    if first is not None and stderr is not None:
        end = "; its last lines on stderr:" if stderr else " and printed no error"
        lines.append(f"{first.label} failed first ({first.describe()}){end}")
    elif first is not None and first.killed_by is not None:  # otherwise its own error is on the screen already
        lines.append(f"{first.label} failed ({first.describe()})")
    return "".join(f"{line}\n" for line in lines).encode() + (stderr or b"")
