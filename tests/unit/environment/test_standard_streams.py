"""A process that is started without stdin, stdout or stderr has the null device there, before anything else opens."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from launching import QUICK_LAUNCH, environment
from markers import by_night
from worlds import free_port

import cyxtrain as cx
from cyxtrain.environment import standard_streams
from cyxtrain.notebook.pool import Pool

ROOT = Path(__file__).parents[3]
CONFIG = str(ROOT / "configs" / "digits_mlp.yaml")
ABSENT = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the shell here is POSIX's")

# What is found goes to a file: there may be nowhere else. Without PyTorch the import ends where it would begin.
LOOK = """
import os, socket, subprocess, sys
sys.modules["torch"] = None
try:
    import cyxtrain
except ImportError:
    pass
with socket.socket() as first:
    found = [f"next: {first.fileno() > 2}"]
null = os.stat(os.devnull)
found += [f"{number}: {os.path.samestat(os.fstat(number), null)}" for number in range(3)]
found.append(f"streams: {[stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)]}")
print("\\N{SNOWMAN}", flush=True)
print("said", file=sys.stderr, flush=True)
child = "import os; [os.fstat(number) for number in range(3)]"
found.append(f"child: {subprocess.run([sys.executable, '-c', child]).returncode}")
if os.path.samestat(os.fstat(0), null):
    found.append(f"stdin: {sys.stdin.read()!r}")
with open(sys.argv[1], "w") as file:
    file.write("\\n".join(found))
"""


def run_without(absent: str, *words: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a command as a shell does that closes some of its standard streams."""
    return subprocess.run(
        ["sh", "-c", f"exec {shlex.join(words)} {absent}"],
        env=environment(**variables),
        input=b"",
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("absent", ["", *ABSENT])
def test_importing_opens_the_null_device_where_a_stream_is_absent_before_pytorch_is_imported(absent, tmp_path):
    done = run_without(absent, sys.executable, "-c", LOOK, str(tmp_path / "found"))
    assert done.returncode == 0, done.stderr
    closed = [sign in absent.split() for sign in ("<&-", ">&-", "2>&-")]
    lines = ["next: True", *(f"{number}: {was}" for number, was in enumerate(closed)), "streams: [0, 1, 2]", "child: 0"]
    assert (tmp_path / "found").read_text().splitlines() == lines + ["stdin: ''"] * closed[0]
    assert [bool(done.stdout), bool(done.stderr)] == [not closed[1], not closed[2]]


# As `cyxtrain launch`, but the import of cyxtrain ends where PyTorch's would begin.
QUICK_START = f"""
import sys
sys.modules["torch"] = None
try:
    import cyxtrain
except ImportError:
    pass
{QUICK_LAUNCH}"""
STARTERS = {
    "cyxtrain launch": [sys.executable, "-m", "cyxtrain", "launch"],
    "cyxtrain.launch": [sys.executable, "-m", "cyxtrain.launch"],
    "script": [sys.executable, "-c", "import sys; from cyxtrain.__main__ import main; sys.exit(main())", "launch"],
    "without PyTorch": [sys.executable, "-c", QUICK_START],
    "launch_distributed.sh": [str(ROOT / "launch_distributed.sh")],
}


@pytest.mark.parametrize(
    ("starter", "num_ranks", "absent"),
    [
        ("without PyTorch", "2", ">&-"),
        by_night("cyxtrain launch", "2", ">&-"),
        *(
            by_night(starter, num_ranks, absent)
            for starter in STARTERS
            for num_ranks in ("1", "2")
            for absent in ABSENT[-1:]
        ),
    ],
)
def test_the_launcher_starts_ranks(starter, num_ranks, absent, tmp_path):
    count = f"for number in 0 1 2; do test -e /dev/fd/$number || exit 3; done; echo here > {tmp_path}/$RANK"
    words = [*STARTERS[starter], "-n", num_ranks, "--", "sh", "-c", count]
    done = run_without(absent, *words, PYTHON=sys.executable)
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(file.name for file in tmp_path.iterdir()) == [str(rank) for rank in range(int(num_ranks))]


@pytest.mark.parametrize("opens", [cx.init, lambda: Pool(1, {}).abandon()], ids=["init", "workers"])
def test_a_stream_that_the_program_closes_later_is_not_replaced_by_a_socket(opens):
    kept = os.dup(0)
    try:
        os.close(0)
        opens()
        assert os.path.samestat(os.fstat(0), os.stat(os.devnull))
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        cx.finalize()


@pytest.mark.nightly
@pytest.mark.parametrize("absent", [">&-", ABSENT[-1]])
@pytest.mark.parametrize(
    "words",
    [
        ["fit", CONFIG, "training.epochs=1"],
        ["fit", CONFIG, "training.epochs=1", "training.num_processes=2"],
        ["launch", "-n", "2", "--", "cyxtrain", "fit", CONFIG, "training.epochs=1"],
        ["launch", "--nnodes", "1:1", "--master-addr", "127.0.0.1", "-n", "2", "--", "cyxtrain", "doctor"],
        ["doctor"],
    ],
    ids=["fit", "fit with workers", "launched fit", "elastic doctor", "doctor"],
)
def test_commands_do_their_work(words, absent, tmp_path):
    if "--nnodes" in words:
        words = [*words[:1], "--master-port", str(free_port()), *words[1:]]
    done = run_without(absent, sys.executable, "-m", "cyxtrain", *words)
    assert done.returncode == 0, done.stderr
    shown = b"test accuracy" if "fit" in words else b"the pair is well" if "launch" in words else b"nothing is broken"
    assert (shown in done.stdout) == (">&-" not in absent.split())


class Stream(io.StringIO):
    """A stdout that fails a few times."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self._errors = list(errors)

    def write(self, text: str) -> int:
        if self._errors:
            raise self._errors.pop(0)
        return super().write(text)


def test_output_that_fails_is_one_warning_and_comes_back(monkeypatch):
    stream = Stream(OSError(errno.EIO, "Input/output error"), OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.warns(UserWarning, match="takes no output: Input/output error"):
        standard_streams.show("one")
    with warnings.catch_warnings(action="error"):
        standard_streams.show("two")
        standard_streams.show("three")
    assert stream.getvalue() == "three\n"


def test_output_to_a_stream_that_the_program_has_closed_is_left_out(monkeypatch):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.warns(UserWarning, match="closed file"):
        standard_streams.show("text")
    monkeypatch.setattr(sys, "stdout", None)
    standard_streams.show("text")


def test_a_pipe_that_does_not_block_takes_output_again_after_a_text_that_it_could_not_hold(monkeypatch):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb", buffering=0) as end, open(writer, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        output = standard_streams._Output("stdout", writer)
        with pytest.warns(UserWarning, match="nobody reads it"):
            output.write("long" * (1 << 18))
        end.read(1 << 20)
        output.write("later\n")
        assert end.read(1 << 20).endswith(b"later\n")


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "b?hy ??"), ("cp1252", "b?hy ??"), ("utf-8", "běhy 训练")])
def test_a_letter_that_the_console_lacks_becomes_a_question_mark(encoding, shown, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    standard_streams.show("běhy 训练", "")
    assert stream.buffer.getvalue().decode(encoding) == shown


PRINT = """
import os, sys, types
package = types.ModuleType("cyxtrain")
package.__path__ = [sys.argv[1]]
sys.modules["cyxtrain"] = package
from cyxtrain.environment import standard_streams
standard_streams.UNREAD_SECONDS = 0.1
for line in range(3):
    standard_streams.show("a line")
    if sys.argv[2] != "unread":
        print("the program's own", flush=True)
print("done", file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
@pytest.mark.parametrize(
    ("kind", "cause"),
    [("full", "/dev/full) takes no output: No space left"), ("gone", "Broken pipe"), ("unread", "nobody reads it")],
)
def test_a_program_continues_without_its_stdout(kind, cause):
    reader, writer = os.pipe()
    if kind == "gone":
        os.close(reader)
    if kind == "unread":
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
    stdout = os.open("/dev/full", os.O_WRONLY) if kind == "full" else os.dup(writer)
    words = [sys.executable, "-c", PRINT, str(ROOT / "cyxtrain"), kind]
    done = subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False)
    for number in (stdout, writer, *([] if kind == "gone" else [reader])):
        os.close(number)
    assert (done.returncode, done.stderr.count(b"takes no output")) == (0, 1), done.stderr
    assert cause.encode() in done.stderr
    assert done.stderr.endswith(b"done\n")
