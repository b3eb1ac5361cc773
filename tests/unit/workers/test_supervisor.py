"""How ranks end: who failed first, what a stop reaches, and what is left, which is nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from launching import (
    SECONDS,
    children_of,
    environment,
    noted_pids,
    run,
    run_script,
    runs,
    started,
    wait_for_ranks,
    write_script,
)
from markers import by_night
from worlds import wait_until

from cyxtrain.environment.uncaught import HEADER
from cyxtrain.launch import local
from cyxtrain.workers import output, process, supervisor
from cyxtrain.workers.guard import end_groups, group_is_alive
from cyxtrain.workers.process import RankExit, RankSpec
from cyxtrain.workers.supervisor import Outcome, Supervisor, find_first_failure, find_stop, would_recur

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="these ranks speak POSIX")


# --- the end ------------------------------------------------------------------------------------------------------


def test_a_success_says_nothing(tmp_path: Path) -> None:
    done = run_script(tmp_path, 3, "")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_first_failure_stops_all_and_has_the_last_word(tmp_path: Path) -> None:
    source = """
        if rank == 1:
            for other in (0, 2):
                wait_for(f"ready{other}")
            print("some warning", file=sys.stderr)
            raise ValueError("the loss is a banana")
        ready(start_child())
        rest()
    """
    done = run_script(tmp_path, 3, source)
    assert done.returncode == 1
    head, _, words = done.stderr.decode().partition("rank 1 failed first (exit code 1); its last lines on stderr:\n")
    assert "[rank 1] ValueError: the loss is a banana\n" in head
    assert words.startswith("some warning\nTraceback (most recent call last):\n")
    assert words.endswith("\nValueError: the loss is a banana\n")
    assert len(noted_pids(tmp_path)) == 4
    assert not any(runs(pid) for pid in noted_pids(tmp_path))


def test_the_exit_code_is_that_of_the_rank_which_failed_first(tmp_path: Path) -> None:
    done = run_script(tmp_path, 2, "sys.exit(42 * rank)")
    assert done.returncode == 42
    assert done.stderr == b"rank 1 failed first (exit code 42) and printed no error\n"


def test_a_rank_that_succeeds_stops_nobody(tmp_path: Path) -> None:
    source = """
        if rank == 0:
            ready()
        else:
            wait_for("ready0")
            wait_for_end_of(json.loads((here / "ready0").read_text())[0])
            print("still here")
    """
    done = run_script(tmp_path, 2, source)
    assert (done.returncode, done.stdout) == (0, b"[rank 1] still here\n")


def test_only_a_failure_stops_the_others() -> None:
    stops = [supervisor.stop_all_at_first_failure(RankExit(0, "rank 0", code, None, 0.0)) for code in (0, 1, 137)]
    assert stops == [False, True, True]


def test_a_rank_that_is_killed_is_named_with_the_signal(tmp_path: Path) -> None:
    with started(tmp_path, 3, "ready(); rest()") as launcher:
        wait_for_ranks(tmp_path, 3)
        os.kill(json.loads((tmp_path / "ready2").read_text())[0], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=SECONDS)
        assert launcher.returncode == 137
        assert errors.startswith(
            b"rank 2 failed first (exit code 137: SIGKILL, often out of memory) and printed no error"
        )
        assert errors.count(b"\n") == 1


def test_a_failure_caused_by_another_rank_is_not_the_first(tmp_path: Path) -> None:
    # Rank 1 says what is wrong, the others hear of it, and are gone before rank 1 has left the interpreter.
    source = """
        class PeerLostError(RuntimeError):
            pass
        if rank == 1:
            for other in (0, 2):
                wait_for(f"ready{other}")
            print("ValueError: the cause", file=sys.stderr)
            note("raised", "")
            for other in (0, 2):
                wait_for_end_of(json.loads((here / f"ready{other}").read_text())[0])
            sys.exit(3)
        ready()
        wait_for("raised")
        raise PeerLostError("rank 1 has ended")
    """
    done = run_script(tmp_path, 3, source)
    assert done.returncode == 3
    assert done.stderr.endswith(
        b"rank 1 failed first (exit code 3); its last lines on stderr:\nValueError: the cause\n"
    )
    assert b"[rank 0] PeerLostError: rank 1 has ended\n" in done.stderr
    assert b"[rank 2] PeerLostError: rank 1 has ended\n" in done.stderr


@pytest.mark.nightly
def test_a_rank_that_still_ends_after_its_error_is_the_first(tmp_path: Path) -> None:
    source = """
        if rank == 1:
            import atexit
            atexit.register(time.sleep, 60)
            atexit.register(ready)  # first
            raise ValueError("the true cause")
        wait_for("ready1")
        from cyxtrain.errors import PeerLostError
        raise PeerLostError("rank 1 has failed", rank=1, during="all_reduce")
    """
    done = run_script(tmp_path, 2, source)
    assert done.returncode == 1
    assert b"rank 1 failed first (exit code 1); its last lines on stderr:\nTraceback" in done.stderr
    assert done.stderr.endswith(b"\nValueError: the true cause\n")


def test_the_first_failure_is_the_earliest_of_those_that_blame_nobody() -> None:
    def ended(index: int, code: int) -> RankExit:
        return RankExit(index, f"rank {index}", code, None, at_seconds=float(index))

    lost, banana = b"Traceback\ncyxtrain.errors.PeerLostError: rank 2 has ended\n", b"ValueError: a banana\n"
    exits = [ended(0, 0), ended(1, 1), ended(2, 1), ended(3, 1)]
    assert find_first_failure(exits, {0: b"", 1: lost, 2: banana, 3: banana}) is exits[2]
    assert find_first_failure(exits, {0: b"", 1: banana, 2: banana, 3: lost}) is exits[1]
    assert find_first_failure(exits, {0: b"", 1: lost, 2: lost, 3: lost}) is exits[1]
    assert find_first_failure(exits, {0: b"", 1: b"it was no PeerLostError\n", 2: banana, 3: b""}) is exits[1]
    assert find_first_failure(exits, {0: b"", 1: lost, 2: None, 3: None}) is exits[2]
    assert find_first_failure(exits[:1], {0: b""}) is None
    # As PyTorch prints a traceback once there is a process group.
    ranked = b"[rank1]: Traceback\n[rank1]: cyxtrain.errors.PeerLostError: rank 2 has ended\n"
    assert find_first_failure(exits, {0: b"", 1: ranked, 2: b"[rank2]: " + banana, 3: lost}) is exits[2]


@pytest.mark.parametrize(("code", "number"), [(130, signal.SIGINT), (143, signal.SIGTERM)])
def test_a_rank_that_somebody_has_stopped_has_not_failed(code: int, number: signal.Signals) -> None:
    def ended(index: int, code: int) -> RankExit:
        return RankExit(index, f"rank {index}", code, None, at_seconds=float(index))

    lost, banana = b"cyxtrain.errors.PeerLostError: rank 2 has ended\n", b"ValueError: a banana\n"
    stopped = [ended(0, 1), ended(1, 1), ended(2, code)]
    assert find_first_failure(stopped, {0: lost, 1: lost, 2: b""}) is None
    assert find_stop(stopped) is number
    assert find_first_failure(stopped, {0: lost, 1: banana, 2: b""}) is stopped[1]
    assert find_stop(stopped[:2]) is None


@pytest.mark.parametrize(
    ("last_line", "killed_by", "comes"),
    [
        (b"cyxtrain.errors.ConfigError: epochs must be at least 1", None, True),
        (b"[rank1]: cyxtrain.errors.NonFiniteError: epoch 1, step 3", None, True),
        (b"[rank0]: [rank1]: cyxtrain.errors.ConfigError: epochs must be at least 1", None, True),
        (b"cyxtrain.errors.ConfigError: of long ago", signal.SIGKILL, False),
        (b"MyConfigError: mine", None, False),
        (b"cyxtrain.errors.ConfigError: caught\n\nTraceback (most recent call last):\nOSError: x", None, False),
        (b"cyxtrain.errors.PeerLostError: rank 1 has ended", None, False),
        (None, None, False),
    ],
)
def test_an_error_that_would_come_again_is_known_by_its_name(
    last_line: bytes | None, killed_by: int | None, comes: bool
) -> None:
    failure = RankExit(1, "rank 1", 1, killed_by, 0.0)
    words = None if last_line is None else b"Traceback (most recent call last):\n" + last_line + b"\n"
    assert would_recur(Outcome((failure,), failure, words, None, ())) is comes


def ended_with(code: int, index: int) -> RankExit:
    return RankExit(index, f"rank {index}", code, None, at_seconds=float(index))


def test_a_mistake_of_all_ranks_is_the_failure_of_the_one_that_prints_it() -> None:
    mistake = f"{HEADER}\ncyxtrain.errors.CollectiveMismatchError: rank 0 calls fit\n".encode()
    lost = b"Traceback (most recent call last):\ncyxtrain.errors.PeerLostError: rank 2 has ended\n"
    banana = b"Traceback (most recent call last):\nValueError: a banana\n"
    exits = [ended_with(1, index) for index in range(3)]
    assert find_first_failure(exits, {0: b"", 1: mistake, 2: b"a warning\n"}) is exits[1]
    assert find_first_failure(exits, {0: lost, 1: lost, 2: mistake}) is exits[2]
    assert find_first_failure(exits, {0: mistake, 1: lost, 2: banana}) is exits[2]
    killed = RankExit(2, "rank 2", 137, 9, 2.0)
    assert find_first_failure([*exits[:2], killed], {0: mistake, 1: b"", 2: b""}) is killed


_MISTAKE = f"{HEADER}\n  File 'train.py', line 1\ncyxtrain.errors.ConfigError: epochs is 0"
_PRINTS_MISTAKE = """
if rank in {}:
    print({!r}, file=sys.stderr)
    note(f"printed{{rank}}", "")
wait_for("printed0")
sys.exit(1)
"""


@pytest.mark.parametrize("writers", ["(0,)", "(0, 1)"], ids=["rank 0", "all ranks"])
def test_a_mistake_is_shown_once_and_no_rank_is_named_as_the_first(tmp_path: Path, writers: str) -> None:
    done = run_script(tmp_path, 2, _PRINTS_MISTAKE.format(writers, _MISTAKE))
    assert (done.returncode, done.stdout) == (1, b"")
    shown = done.stderr.decode().replace("[rank 1] ", "[rank 0] ")  # the one that was faster
    assert shown == "".join(f"[rank 0] {line}\n" for line in _MISTAKE.splitlines())


def test_a_mistake_of_all_ranks_is_no_reason_to_start_again(tmp_path: Path) -> None:
    done = run("--restarts", 3, 2, write_script(tmp_path, _PRINTS_MISTAKE.format("(0,)", _MISTAKE)))
    assert done.returncode == 1
    assert done.stderr.splitlines()[3:] == [b"no restart: the same error would occur again"]


def test_after_a_failure_the_others_may_say_what_they_think(tmp_path: Path) -> None:
    source = """
        if rank == 0:
            ready()
            sys.exit("rank 0 gives up")
        wait_for("ready0")
        wait_for_end_of(json.loads((here / "ready0").read_text())[0])
        sys.exit("and I saw it")
    """
    done = run_script(tmp_path, 2, source)
    assert b"[rank 1] and I saw it\n" in done.stderr
    assert done.stderr.endswith(b"rank 0 failed first (exit code 1); its last lines on stderr:\nrank 0 gives up\n")


def test_only_the_end_of_a_long_speech_is_repeated(tmp_path: Path) -> None:
    source = "[print('line', i, file=sys.stderr) for i in range(1000)]; sys.exit(1)"
    done = run_script(tmp_path, 2, f"if rank == 0: {source}")
    words = done.stderr.partition(b"its last lines on stderr:\n")[2].splitlines()
    assert words == [b"line %d" % i for i in range(1000 - output.KEPT_LINES, 1000)]


# --- stopping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "received", "code"),
    [by_night("SIGINT", "SIGINT", 130), ("SIGTERM", "SIGTERM", 143), by_night("SIGHUP", "SIGTERM", 129)],
)
def test_a_signal_to_the_launcher_stops_all_ranks_and_what_they_started(
    tmp_path: Path, sent: str, received: str, code: int
) -> None:
    source = """
        def say(number, frame):
            print(signal.Signals(number).name)
            sys.exit(0)
        child = start_child()
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            signal.signal(getattr(signal, name), say)
        ready(child)
        rest()
    """
    with started(tmp_path, 2, source) as launcher:
        pids = wait_for_ranks(tmp_path, 2)
        launcher.send_signal(getattr(signal, sent))
        shown, errors = launcher.communicate(timeout=SECONDS)
        assert launcher.returncode == code
        assert sorted(shown.decode().splitlines()) == [f"[rank 0] {received}", f"[rank 1] {received}"]
        assert errors.decode().endswith(f"all ranks were stopped by {sent}\n")
        assert len(pids) == 4
        assert not any(runs(pid) for pid in pids)


def test_ctrl_c_stops_one_rank_alone(tmp_path: Path) -> None:
    with started(tmp_path, 1, "ready(start_child()); rest()") as launcher:
        pids = wait_for_ranks(tmp_path, 1)
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=SECONDS)
        assert launcher.returncode == 130
        # Lines of the tracebacks of the rank and its child may mix; what is left of them comes before.
        assert errors.endswith(b"all ranks were stopped by SIGINT\n")
        assert not any(runs(pid) for pid in pids)


def test_ctrl_c_while_ranks_import_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "slow_library.py").write_text("from __main__ import ready, rest\nready()\nrest()\n")
    with started(tmp_path, 2, "import slow_library") as launcher:
        pids = wait_for_ranks(tmp_path, 2)
        launcher.send_signal(signal.SIGINT)
        shown, errors = launcher.communicate(timeout=SECONDS)
        assert (launcher.returncode, shown, errors) == (130, b"", b"all ranks were stopped by SIGINT\n")
        assert not any(runs(pid) for pid in pids)


def test_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    source = """
        signal.signal(signal.SIGINT, lambda *_: note(f"refused{rank}", ""))
        ready()
        rest()
    """
    with started(tmp_path, 2, source) as launcher:
        pids = wait_for_ranks(tmp_path, 2)
        launcher.send_signal(signal.SIGINT)
        wait_until(lambda: len(list(tmp_path.glob("refused?"))) == 2)
        launcher.send_signal(signal.SIGINT)
        begun = time.monotonic()
        launcher.communicate(timeout=SECONDS)
        assert time.monotonic() - begun < supervisor.GRACE_SECONDS / 2
        assert launcher.returncode == 130
        assert not any(runs(pid) for pid in pids)


def test_a_second_sigterm_does_not_kill_and_the_rank_is_asked_alone_first(tmp_path: Path) -> None:
    source = """
        child = subprocess.Popen([sys.executable, "-c", "import signal\\ntry: signal.pause()\\nfinally: pass"])
        signal.signal(signal.SIGTERM, lambda *_: note("asked", ""))
        ready()
        wait_for("twice")
        print("alive" if child.poll() is None else "dead")
        child.wait()  # until the rest of the group is asked
        print("saved")
    """
    with started(tmp_path, 1, source) as launcher:
        wait_for_ranks(tmp_path, 1)
        launcher.send_signal(signal.SIGTERM)
        wait_until((tmp_path / "asked").exists)
        launcher.send_signal(signal.SIGTERM)
        (tmp_path / "twice").touch()
        shown, _ = launcher.communicate(timeout=SECONDS)
        assert (launcher.returncode, shown) == (143, b"alive\nsaved\n")


@pytest.mark.parametrize(("handles", "code"), [(True, 0), (False, 128 + signal.SIGUSR1)])
def test_sigusr1_is_passed_on_to_ranks_that_may_use_it(handles: bool, code: int, tmp_path: Path) -> None:
    source = f"""
        if {handles}:
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print("mine")))
        ready()
        rest()
    """
    with started(tmp_path, 2, source) as launcher:
        wait_for_ranks(tmp_path, 2)
        launcher.send_signal(signal.SIGUSR1)
        shown, errors = launcher.communicate(timeout=SECONDS)
        assert launcher.returncode == code
        assert shown.count(b"mine") == 2 * handles
        assert errors == (b"" if handles else b"all ranks were stopped by SIGUSR1\n")


def test_the_grace_is_a_setting_and_an_invalid_one_is_refused(tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready()\nrest()"
    with started(tmp_path, 1, deaf, env=environment(CYXTRAIN_GRACE_SECONDS="0.5")) as launcher:
        wait_for_ranks(tmp_path, 1)
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=supervisor.GRACE_SECONDS)
        assert launcher.returncode == 143
    for grace in ("0", "1e10", "inf"):
        assert run("--grace", grace, "1", "true").returncode == 2
    refused = run("1", "true", env=environment(CYXTRAIN_GRACE_SECONDS="soon"))
    assert (
        b"CYXTRAIN_GRACE_SECONDS='soon' in the environment must be a number of seconds above 0, at most"
        in refused.stderr
    )


def test_nohup_means_what_it_says(tmp_path: Path) -> None:
    ignoring = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    with started(tmp_path, 2, "ready(); wait_for('go')", before=ignoring) as launcher:
        wait_for_ranks(tmp_path, 2)
        launcher.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert launcher.wait(SECONDS) == 0


def test_what_a_rank_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    done = run_script(tmp_path, 2, "ready(start_child())")
    assert done.returncode == 0
    assert len(noted_pids(tmp_path)) == 4
    assert not any(runs(pid) for pid in noted_pids(tmp_path))


@pytest.mark.skipif(sys.platform == "win32", reason="no process groups")
@pytest.mark.parametrize("num_ranks", [1, by_night(3)])
def test_a_launcher_that_is_killed_leaves_nobody_behind(tmp_path: Path, num_ranks: int) -> None:
    with started(tmp_path, num_ranks, "ready(start_child()); rest()") as launcher:
        pids = wait_for_ranks(tmp_path, num_ranks)
        assert all(runs(pid) for pid in pids)
        guards = children_of(launcher.pid) - set(pids)
        assert len(guards) == (1 if sys.platform == "linux" else 0)
        launcher.kill()
        launcher.wait(SECONDS)
        wait_until(lambda: not any(runs(pid) for pid in [*pids, *guards]))


# --- the supervisor by itself -------------------------------------------------------------------------------------


class Screen:
    """Both streams of a terminal, in memory; takes little at a time and lets others run, as a slow one does."""

    def __init__(self) -> None:
        self.shown = b""

    def write(self, data: bytes, /) -> int:
        self.shown += data[:7]
        time.sleep(0)
        return min(len(data), 7)


def supervise(
    folder: Path, num_ranks: int, source: str, screen: Screen | None = None, **options: Any
) -> tuple[Outcome, bytes]:
    screen = screen or Screen()
    command = (sys.executable, write_script(folder, source))
    specs = [RankSpec(f"rank {rank}", command, {**os.environ, "RANK": str(rank)}) for rank in range(num_ranks)]
    return Supervisor(specs, output.Terminal(screen, screen), **options).run(), screen.shown


def test_a_policy_may_let_the_others_go_on(tmp_path: Path) -> None:
    source = """
        if rank == 0:
            ready()
            sys.exit(3)
        wait_for("ready0")
        wait_for_end_of(json.loads((here / "ready0").read_text())[0])
        wait_for("policy was asked")
        print("done")
    """

    def keep_going(ended: RankExit) -> bool:
        (tmp_path / "policy was asked").touch()
        return False

    outcome, shown = supervise(tmp_path, 2, source, policy=keep_going)
    assert [(ended.label, ended.code) for ended in outcome.exits] == [("rank 0", 3), ("rank 1", 0)]
    assert outcome.first_failure == outcome.exits[0]
    assert shown == b"[rank 1] done\n"


class StoppedAtTheEnd(Supervisor):
    """Its process gets SIGTERM when the last rank has ended."""

    def run(self) -> Outcome:
        outcome = super().run()
        os.kill(os.getpid(), signal.SIGTERM)
        return outcome


def test_a_signal_after_a_failure_prevents_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "Supervisor", StoppedAtTheEnd)
    command = (sys.executable, write_script(tmp_path, "note(f'ran{os.getpid()}', ''); sys.exit(3)"))
    start = local.Start(command, num_ranks=2, restarts=1)
    assert local.run_ranks(start, environment()) == 128 + signal.SIGTERM
    assert len([*tmp_path.glob("ran*")]) <= 2
    told = capfd.readouterr().err
    assert "all ranks were stopped by SIGTERM" in told
    assert "restart" not in told


def test_a_rank_that_refuses_to_end_is_killed_after_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "OWN_END_SECONDS", 0.1)
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 1.0)
    source = """
        if rank == 1:
            wait_for("ready0")
            sys.exit(1)
        signal.signal(signal.SIGTERM, lambda *_: print("no"))
        ready()
        rest()
    """
    outcome, shown = supervise(tmp_path, 2, source)
    assert [ended.killed_by for ended in outcome.exits] == [None, signal.SIGKILL]
    assert outcome.first_failure == outcome.exits[0]
    assert shown == b"[rank 0] no\n"


def test_no_thread_and_no_process_is_left(tmp_path: Path) -> None:
    before, children = set(threading.enumerate()), children_of(os.getpid())
    supervise(tmp_path, 2, "print('a')")
    assert set(threading.enumerate()) == before
    assert children_of(os.getpid()) == children


def test_a_pipe_that_a_daemon_holds_does_not_hold_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "DRAIN_SECONDS", 0.1)
    source = """
        if os.fork() == 0:
            os.setsid()
            ready()
            rest()
        wait_for("ready0")
    """
    threads = threading.active_count()
    begun = time.monotonic()
    outcome, _ = supervise(tmp_path, 1, source)
    try:
        assert outcome.exits[0].code == 0
        assert time.monotonic() - begun < process.GRACE_SECONDS
    finally:
        os.kill(noted_pids(tmp_path)[0], signal.SIGKILL)
    wait_until(lambda: threading.active_count() == threads)  # the reader ends with the daemon


def test_lines_are_not_mixed_on_a_slow_terminal(tmp_path: Path) -> None:
    source = """
        ready()
        for other in range(3):
            wait_for(f"ready{other}")
        for i in range(200):
            print(str(rank) * 100, file=(sys.stdout, sys.stderr)[i % 2])
    """
    _, shown = supervise(tmp_path, 3, source)
    lines = shown.splitlines()
    assert len(lines) == 600
    assert set(lines) == {b"[rank %d] " % rank + b"%d" % rank * 100 for rank in range(3)}


def test_a_slow_terminal_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "DRAIN_SECONDS", 0.05)

    class Paused(Screen):
        def __init__(self) -> None:
            super().__init__()
            self.goes_on = threading.Event()

        def write(self, data: bytes, /) -> int:
            assert self.goes_on.wait(SECONDS)
            return super().write(data)

    paused = Paused()
    timer = threading.Timer(0.5, paused.goes_on.set)
    timer.start()
    _, shown = supervise(tmp_path, 1, "for i in range(1000): print(i)", screen=paused)
    timer.join(SECONDS)
    assert shown == b"".join(b"[rank 0] %d\n" % i for i in range(1000))


def test_ranks_that_had_started_are_stopped_when_one_cannot_start() -> None:
    before, children = set(threading.enumerate()), children_of(os.getpid())
    sleeper = RankSpec("rank 0", (sys.executable, "-c", "import signal; signal.pause()"), dict(os.environ))
    missing = RankSpec("rank 1", ("no_such_program",), dict(os.environ))
    with pytest.raises(FileNotFoundError, match="no_such_program"):
        Supervisor([sleeper, missing], output.Terminal(Screen(), Screen())).run()
    assert set(threading.enumerate()) == before
    assert children_of(os.getpid()) == children


def test_a_group_that_refuses_to_end_is_killed() -> None:
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True)\nwhile True: signal.pause()"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert group_is_alive(child.pid)
        end_groups([child.pid], 0.1)
        assert child.wait(SECONDS) == -signal.SIGKILL
    assert not group_is_alive(child.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell")
def test_a_group_of_zombies_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        os.killpg(child.pid, 0)  # does not raise: to the kernel the group is still there
        assert not group_is_alive(child.pid)


def test_a_signal_without_a_name_has_its_number():
    assert RankExit(0, "rank 0", 128 + 63, 63, 0.0).describe() == "exit code 191: signal 63"


def test_a_terminal_that_would_have_to_wait_is_given_the_rest_later():
    taken: list[bytes] = []
    answers = [2, None, 1]

    class Full:
        def write(self, data: bytes) -> int | None:
            count = answers.pop(0) if answers else len(data)
            taken.append(data[: count or 0])
            return count

    output.Terminal(Full(), Full()).write_out(b"a line\n")
    assert taken == [b"a ", b"", b"l", b"ine\n"]
