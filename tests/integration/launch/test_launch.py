"""The command line, what it gives each rank, and what it shows of them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import (
    LAUNCHER,
    QUICK_LAUNCH,
    SECONDS,
    environment,
    run,
    run_script,
    started,
    write_script,
)
from markers import by_night
from worlds import wait_until

from cyxtrain.launch import local
from cyxtrain.workers import output
from cyxtrain.workers.machine import launch_environment

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="these ranks speak POSIX")


# --- what a rank is given -----------------------------------------------------------------------------------------


def test_each_rank_finds_its_place_in_its_environment(tmp_path: Path) -> None:
    done = run_script(tmp_path, 3, "note(f'env{rank}', json.dumps(dict(os.environ)))")
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"env{rank}").read_text()) for rank in range(3)]
    for rank, variables in enumerate(found):
        assert (variables["RANK"], variables["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert variables["PYTHONUNBUFFERED"] == "1"
        assert variables["PATH"] == os.environ["PATH"]
    assert len({variables["MASTER_PORT"] for variables in found}) == 1


def test_the_port_is_free_and_not_always_the_same(tmp_path: Path) -> None:
    source = """
        import socket
        port = int(os.environ["MASTER_PORT"])
        socket.create_server(("", port)).close()
        socket.create_server(("127.0.0.1", port)).close()
        if socket.has_dualstack_ipv6():
            socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
        print(port)
    """
    all_done = [run_script(tmp_path, 1, source) for _ in range(3)]
    assert [done.returncode for done in all_done] == [0, 0, 0], all_done[0].stderr
    assert len({done.stdout for done in all_done}) > 1


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux a port can be kept for who listens there later")
def test_nobody_else_gets_the_port_until_the_ranks_have_ended(tmp_path: Path) -> None:
    """Rank 0 listens there seconds later, and would find it taken."""
    source = f"""
        import socket
        note("port", os.environ["MASTER_PORT"])
        try:
            socket.socket().bind(("", int(os.environ["MASTER_PORT"])))
        except OSError as error:
            print(error.errno == {errno.EADDRINUSE})
    """
    done = run_script(tmp_path, 1, source)
    assert done.stdout == b"True\n", done.stderr
    with socket.socket() as stranger:
        stranger.bind(("", int((tmp_path / "port").read_text())))


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux a port can be kept for who listens there later")
def test_nobody_can_steal_the_port_of_rank_0_before_it_listens(tmp_path: Path) -> None:
    source = """
        import socket
        port = int(os.environ["CYXTRAIN_PORT"].split()[1])
        if rank == 1:
            users = [os.getuid(), 65534][: 2 if os.getuid() == 0 else 1]
            places = [{"address": ("", port)}, {"address": ("127.0.0.1", port)}]
            places.append({"address": ("", port), "family": socket.AF_INET6, "dualstack_ipv6": True})
            for place in places[: 3 if socket.has_dualstack_ipv6() else 2]:
                for number, user in enumerate(users):
                    pid = os.fork()
                    if not pid:
                        os.setuid(user)
                        try:
                            socket.create_server(**place, reuse_port=number > 0).close()
                        except OSError as error:
                            os._exit(error.errno)
                        os._exit(0)
                    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            note("tried", "")
        wait_for("tried")
        if rank == 0:
            listener = socket.create_server(("127.0.0.1", port), reuse_port=True)
            note("listens", "")
            print(listener.accept()[0].recv(1))
        else:
            wait_for("listens")
            socket.create_connection(("127.0.0.1", port)).sendall(b"x")
    """
    done = run_script(tmp_path, 2, source)
    *tries, last = done.stdout.splitlines()
    assert {*tries} == {b"[rank 1] %d" % errno.EADDRINUSE}, done
    assert last == b"[rank 0] b'x'"


IN_A_CHILD = (sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("before", "library"),
    [
        ((sys.executable,), "cyxtrain"),
        (("bash", "-c", 'exec "$0" "$@"', sys.executable), "cyxtrain"),
        ((*IN_A_CHILD, sys.executable), "cyxtrain"),  # which closes all files that it inherits
        ((sys.executable,), "torch.distributed"),  # whose store binds MASTER_PORT itself
    ],
    ids=["python", "bash", "child", "plain"],
)
def test_programs_join_at_the_launchers_port(tmp_path: Path, before: tuple[str, ...], library: str) -> None:
    source = f"""
        import torch
        import {library} as dist
        dist.init_process_group({{"cyxtrain": "cpu"}}.get({library!r}, "gloo"))
        ones = torch.ones(1)
        dist.all_reduce(ones)
        print(int(ones))
        dist.destroy_process_group()  # without, PyTorch's Gloo may abort at exit
    """
    words = [sys.executable, "-m", "cyxtrain.launch", "-n", "2", "--", *before, write_script(tmp_path, source)]
    done = subprocess.run(words, env=environment(), capture_output=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [b"[rank 0] 2", b"[rank 1] 2"]


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="how many files are needed differs")
@pytest.mark.parametrize("few", ["0", "1", "01"])
def test_ranks_name_a_limit_of_open_files(tmp_path: Path, few: str) -> None:
    source = f"""
        import resource
        import cyxtrain as cx
        if str(rank) in {few!r}:
            resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
        cx.init(cx.DistributedConfig(timeout_ms=20_000))
    """
    words = [sys.executable, "-m", "cyxtrain.launch", "2", write_script(tmp_path, source)]
    done = subprocess.run(words, env=environment(), capture_output=True, timeout=120, check=False)
    told = re.findall(rb"rank (\d) cannot join: Too many open files; raise the limit", done.stderr)
    assert done.returncode == 1
    assert told
    assert {rank.decode() for rank in told} <= {*few}, done.stderr
    assert b"firewall" not in done.stderr
    assert b"nother program" not in done.stderr


def test_a_master_port_that_is_set_wins(tmp_path: Path) -> None:
    done = run_script(tmp_path, 2, "print(os.environ['MASTER_PORT'])", env=environment(MASTER_PORT="29517"))
    assert sorted(done.stdout.splitlines()) == [b"[rank 0] 29517", b"[rank 1] 29517"]


def test_every_run_has_a_secret_of_its_own_which_its_ranks_share(tmp_path: Path) -> None:
    runs = [run_script(tmp_path, 2, "print(os.environ['CYXTRAIN_SECRET'])") for _ in range(2)]
    found = [{line.split()[-1] for line in done.stdout.splitlines()} for done in runs]
    assert [len(secrets) for secrets in found] == [1, 1]
    assert found[0] != found[1]
    assert all(len(secret) == 64 for secrets in found for secret in secrets)


def test_a_secret_that_is_set_wins(tmp_path: Path) -> None:
    done = run_script(tmp_path, 2, "print(os.environ['CYXTRAIN_SECRET'])", env=environment(CYXTRAIN_SECRET="ours"))
    assert sorted(done.stdout.splitlines()) == [b"[rank 0] ours", b"[rank 1] ours"]


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cyxtrain.workers.machine.count_usable_cores", lambda: 8)
    shares = [launch_environment({}, 0, num_ranks, "1")["OMP_NUM_THREADS"] for num_ranks in (1, 2, 3, 8, 9)]
    assert shares == ["8", "4", "2", "1", "1"]
    assert launch_environment({"OMP_NUM_THREADS": ""}, 0, 2, "1")["OMP_NUM_THREADS"] == "4"
    assert launch_environment({"OMP_NUM_THREADS": "7"}, 0, 2, "1")["OMP_NUM_THREADS"] == "7"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux restricts a process to cores")
def test_only_the_cores_that_we_may_use_are_shared(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        done = run_script(tmp_path, 1, "print(os.environ['OMP_NUM_THREADS'])")
    finally:
        os.sched_setaffinity(0, cores)
    assert done.stdout == b"1\n"


def test_arguments_arrive_as_they_were_given(tmp_path: Path) -> None:
    words = [
        "two words",
        "",
        "'",
        '"',
        "$HOME",
        "`id`",
        "*",
        "a\\b",
        "ü 漢字",
        "--help",
        "-n",
        "--",
        "-h",
        "line\nline",
        ";",
    ]
    done = run_script(tmp_path, 2, "note(f'arguments{rank}', json.dumps(sys.argv[1:]))", *words)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"arguments{rank}").read_text()) == words


def test_a_script_gets_the_launchers_python_before_it(tmp_path: Path) -> None:
    done = run_script(tmp_path, 1, "print(sys.executable)")
    assert done.stdout.decode().strip() == sys.executable


def test_any_program_can_be_a_rank(tmp_path: Path) -> None:
    done = run(2, "sh", "-c", 'echo "$RANK of $WORLD_SIZE: $0"', "a word")
    assert sorted(done.stdout.splitlines()) == [b"[rank 0] 0 of 2: a word", b"[rank 1] 1 of 2: a word"]


def test_several_ranks_have_an_empty_stdin(tmp_path: Path) -> None:
    done = run_script(tmp_path, 2, "print(repr(sys.stdin.read()))", stdin=b"not for them")
    assert sorted(done.stdout.splitlines()) == [b"[rank 0] ''", b"[rank 1] ''"]


# --- what is shown ------------------------------------------------------------------------------------------------


def test_every_line_carries_its_rank_on_its_own_stream(tmp_path: Path) -> None:
    done = run_script(tmp_path, 2, "print('out'); print(); print('err', file=sys.stderr)")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [b"[rank 0] ", b"[rank 0] out", b"[rank 1] ", b"[rank 1] out"]
    assert sorted(done.stderr.splitlines()) == [b"[rank 0] err", b"[rank 1] err"]


def test_lines_of_ranks_are_never_mixed(tmp_path: Path) -> None:
    source = """
        note(f"ready{rank}", "[]")
        for other in range(4):
            wait_for(f"ready{other}")
        for _ in range(100):
            for part in (str(rank) * 3000, str(rank) * 5000, "\\n"):
                os.write(1, part.encode())
    """
    done = run_script(tmp_path, 4, source)
    lines = done.stdout.splitlines()
    assert len(lines) == 400
    assert set(lines) == {b"[rank %d] " % rank + b"%d" % rank * 8000 for rank in range(4)}


def test_a_line_is_shown_when_it_is_complete(tmp_path: Path) -> None:
    with started(tmp_path, 2, "print('now'); wait_for('seen'); print('later')") as launcher:
        assert launcher.stdout is not None
        first = sorted(launcher.stdout.readline() for _ in range(2))  # the ranks still wait for us
        assert first == [b"[rank 0] now\n", b"[rank 1] now\n"]
        (tmp_path / "seen").touch()
        assert sorted(launcher.communicate(timeout=SECONDS)[0].splitlines()) == [b"[rank 0] later", b"[rank 1] later"]


def test_a_last_line_without_an_end_is_shown_and_any_byte_survives(tmp_path: Path) -> None:
    done = run_script(tmp_path, 2, r"os.write(1, b'\xff\xfe\x00\x80 \xc3'); os.write(2, b'the end')")
    assert sorted(done.stdout.splitlines()) == [b"[rank 0] \xff\xfe\x00\x80 \xc3", b"[rank 1] \xff\xfe\x00\x80 \xc3"]
    assert sorted(done.stderr.splitlines()) == [b"[rank 0] the end", b"[rank 1] the end"]


def test_a_progress_bar_leaves_its_last_state(tmp_path: Path) -> None:
    source = r"""
        for step in range(1, 101):
            os.write(2, b"\r%d%%" % step)
        os.write(2, b"\nwindows\r\n50%\r100%\r")
    """
    done = run_script(tmp_path, 2, source)
    for rank in range(2):
        mine = [line for line in done.stderr.split(b"\n") if line.startswith(b"[rank %d] " % rank)]
        assert [line[9:] for line in mine] == [b"100%", b"windows", b"100%"]


def test_a_progress_bar_that_goes_on_is_shown_now_and_then() -> None:
    now = 0.0
    assembler = output.LineAssembler(clock=lambda: now)
    assert assembler.feed(b"\r10%\r20%") == []
    now = output.REFRESH_SECONDS
    assert assembler.feed(b"\r30%") == [b"20%"]
    assert assembler.feed(b"\r40%") == []
    assert assembler.feed(b"\r50%\r") == []
    assert assembler.feed(b"\n") == [b"50%"]
    assert assembler.finish() == []


def test_lines_are_cut_in_the_same_places_however_the_bytes_arrive() -> None:
    data = b"one\ntwo\r\n\n10%\r20%\r\n\xff\rlast"
    whole = output.LineAssembler()
    expected = whole.feed(data) + whole.finish()
    assert expected == [b"one", b"two", b"", b"20%", b"last"]
    for size in range(1, len(data)):
        pieces = output.LineAssembler()
        lines = [line for start in range(0, len(data), size) for line in pieces.feed(data[start : start + size])]
        assert lines + pieces.finish() == expected, f"in pieces of {size} bytes"


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    assembler = output.LineAssembler()
    shown = [line for _ in range(70) for line in assembler.feed(b"x" * (1 << 16))]
    assert len(shown) == 1
    assert sum(map(len, shown)) + len(assembler.finish()[0]) == 70 << 16


@pytest.mark.parametrize("kind", ["reader is gone", by_night("nobody reads"), by_night("full")])
def test_ranks_continue_without_a_reader(tmp_path: Path, kind: str) -> None:
    """They print more than a pipe holds; the launcher ends too."""
    reader, writer = os.pipe()
    if kind == "reader is gone":
        os.close(reader)
        reader = os.open(os.devnull, os.O_RDONLY)
    if kind == "full":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    source = """
        print("x" * 200_000, flush=True)
        print("done", file=sys.stderr)
    """
    done = subprocess.run(
        [*LAUNCHER, "2", write_script(tmp_path, source)],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment(),
        timeout=SECONDS,
        check=False,
    )
    os.close(reader)
    os.close(writer)
    lines = done.stderr.splitlines()
    causes = {"reader is gone": "Broken pipe", "nobody reads": "nobody reads it", "full": "No space left on device"}
    told = f"{causes[kind]}; the ranks continue".encode()
    assert done.returncode == 0, done.stderr
    assert [line.endswith(told) for line in lines].count(True) == 1, lines
    assert {line for line in lines if b"done" in line} == {b"[rank 0] done", b"[rank 1] done"}


def test_output_comes_back_with_its_reader_and_is_missed_once(tmp_path: Path) -> None:
    class Stream:
        def __init__(self) -> None:
            self.taken = b""
            self.answers: list[OSError | None] = []

        def write(self, data: bytes) -> int | None:
            answer = self.answers.pop(0) if self.answers else len(data)
            if isinstance(answer, OSError):
                raise answer
            self.taken += data[: answer or 0]
            return answer

    out, err = Stream(), Stream()
    terminal = output.Terminal(out, err)
    terminal.patience_seconds = 0.0
    out.answers = [None, None, OSError(errno.ENOSPC, "No space left on device")]
    for line in (b"one\n", b"two\n", b"three\n", b"four\n"):
        terminal.write_out(line)
    assert out.taken == b"four\n"
    assert err.taken.count(b"cannot write stdout") == err.taken.count(b"\n") == 1
    for rank in range(2):
        terminal.append(tmp_path / "missing" / f"rank{rank}.log", b"a line\n")
    assert err.taken.endswith(
        f"cannot write logs to {tmp_path}/missing: No such file or directory; the ranks continue\n".encode()
    )
    assert err.taken.count(b"\n") == 2


@pytest.mark.parametrize("folder", ["/dev/null", ""])
def test_no_run_needs_a_temporary_folder(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gettempdir() -> str:
        if not folder:
            raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")
        return folder

    monkeypatch.setattr(local.tempfile, "gettempdir", gettempdir)
    assert local.run_ranks(local.Start((sys.executable, "-c", ""), 2), environment()) == 0


# --- a world of one -----------------------------------------------------------------------------------------------


def test_one_rank_alone_writes_and_reads_as_if_nothing_stood_between(tmp_path: Path) -> None:
    source = r"print(sys.stdin.read()); os.write(2, b'a bar\ranother'); sys.exit(7)"
    done = run_script(tmp_path, 1, source, stdin=b"from stdin")
    assert (done.stdout, done.stderr, done.returncode) == (b"from stdin\n", b"a bar\ranother", 7)


def test_one_rank_alone_has_the_terminal(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    shown = b""

    def shows_the_answer() -> bool:
        nonlocal shown
        with contextlib.suppress(BlockingIOError):
            shown += os.read(ours, 4096)
        return b"[True, True, True] me" in shown

    source = "print([stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)], input())"
    try:
        with started(tmp_path, 1, source, stdin=theirs, stdout=theirs, stderr=theirs) as launcher:
            os.write(ours, b"me\n")
            wait_until(shows_the_answer)
            assert launcher.wait(SECONDS) == 0
    finally:
        os.close(ours)
        os.close(theirs)


def test_one_rank_alone_that_is_killed_is_named(tmp_path: Path) -> None:
    done = run_script(tmp_path, 1, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert (done.returncode, done.stderr) == (139, b"rank 0 failed (exit code 139: SIGSEGV)\n")


# --- the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no command to start"),
        (("0", "true"), "a whole number of at least 1, got '0'"),
        (("-1", "true"), "No such option '-1'"),
        (("-n", "-1", "true"), "a whole number of at least 1, got '-1'"),
        (("2.5", "true"), "got '2.5'"),
        (("²", "true"), "got '²'"),
        (("--ranks", "2"), "No such option '--ranks'"),
        (("--nprocs", "2"), "No such option '--nprocs'. Did you mean -n? It counts the ranks on this machine"),
        (("2",), "no command to start"),
        (("2", ""), "no command"),
        (("2", "x", "--restarts", "3"), "cannot start 'x'"),
        (("-n", "2", "4", "true"), "cannot start '4'"),
        (("--restarts", "-1", "2", "true"), "--restarts': '-1' is not a whole number of at least 0"),
        (("--grace", "soon", "2", "true"), "--grace': 'soon' is not a number of seconds above 0"),
        (("--nnodes", "2", "2", "true"), "with --nnodes 2 every machine needs --node-rank"),
        (("--nnodes", "2", "--node-rank", "0", "2", "true"), "with --nnodes 2 every machine needs --master-addr"),
        (("--nnodes", "2", "--node-rank", "2", "--master-addr", "h", "2", "true"), "there are 2"),
        (("--nnodes", "0", "2", "true"), "--nnodes must be at least 1"),
        (("--nnodes", "two", "2", "true"), "--nnodes must be a whole number, got 'two'"),
        (("--nnodes", "1:4", "-n", "2", "true"), "with --nnodes 1:4 every machine needs --master-addr"),
        (("--nnodes", "4:1", "--master-addr", "h", "-n", "2", "true"), "MIN:MAX such as 1:4, got '4:1'"),
        (("--master-port", "70000", "2", "true"), "a number from 1 to 65535, got '70000'"),
        (("--gpus", "all", "-n", "2", "true"), "give -n or --gpus"),
        (("--logs", "/dev/null/logs", "2", "true"), "--logs /dev/null/logs: Not a directory"),
        (("2", "no_such_program"), "cannot start 'no_such_program': No such file"),
        (("2", "no_such_script.py"), "there is no file 'no_such_script.py'"),
        (("2", "/"), "cannot start '/': Permission denied"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_refused_in_one_line(words: tuple[str, ...], says: str) -> None:
    done = run(*words)
    errors = done.stderr.decode()
    assert (done.returncode, done.stdout) == (2, b"")
    assert says in errors
    assert errors.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="how many files are needed differs")
def test_a_limit_of_open_files_is_named_and_not_the_command(tmp_path: Path) -> None:
    limited = f"ulimit -n 15; exec {shlex.join([*LAUNCHER, '3', write_script(tmp_path, '')])}"
    done = subprocess.run(["sh", "-c", limited], env=environment(), capture_output=True, timeout=SECONDS, check=False)
    cause = b"cannot start 3 ranks: Too many open files; raise the limit of open files (ulimit -n)\n"
    assert (done.returncode, done.stderr) == (1, b"cyxtrain launch: " + cause)


def test_a_missing_python_gets_a_hint() -> None:
    done = run(2, "python", "train.py", env={"PATH": ""})
    assert done.returncode == 2
    assert b"cannot start 'python': No such file or directory; give the script alone (train.py)" in done.stderr


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_shows_examples(option: str) -> None:
    done = run(option)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"cyxtrain launch -n 4 -- python train.py" in done.stdout


def test_the_launcher_itself_needs_no_torch() -> None:
    imports = QUICK_LAUNCH.replace("runpy.run_module", "import cyxtrain.launch.command_line; 0 and runpy.run_module")
    code = f"{imports}\nassert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)


@pytest.mark.nightly
def test_the_shell_script_starts_ranks_and_passes_everything_on(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print(sys.argv[1:]); sys.exit(5 * rank)")
    done = subprocess.run(
        [ROOT / "launch_distributed.sh", "2", script, "two words", ""],
        env=environment(PYTHON=sys.executable),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert sorted(done.stdout.splitlines()) == [b"[rank 0] ['two words', '']", b"[rank 1] ['two words', '']"]
    assert done.returncode == 5


@pytest.mark.parametrize(("name", "is_named"), [("python", False), ("python3", False), ("my own", True)])
def test_the_shell_script_finds_python_and_passes_everything_on(tmp_path: Path, name: str, is_named: bool) -> None:
    fake = tmp_path / name
    fake.write_text('#!/bin/sh\nprintf "%s|" "$0" "$@"\nexit 5\n')
    fake.chmod(0o755)
    bash = subprocess.run(["sh", "-c", "command -v bash"], capture_output=True, check=True).stdout.decode().strip()
    done = subprocess.run(
        [bash, ROOT / "launch_distributed.sh", "2", "x", "two words", ""],
        env={"PYTHON": str(fake)} if is_named else {"PATH": str(tmp_path)},
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.stdout.decode() == f"{fake}|-m|cyxtrain|launch|2|x|two words||"
    assert done.returncode == 5


def test_the_batch_file_calls_the_same_python() -> None:
    batch = (ROOT / "launch_distributed.bat").read_bytes()
    assert b" -m cyxtrain launch %*\r\nexit /b %ERRORLEVEL%\r\n" in batch
    assert batch.count(b"\n") == batch.count(b"\r\n")
