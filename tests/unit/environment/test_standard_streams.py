"""A process that is started without stdin, stdout or stderr has the null device there, before anything else opens."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment
from worlds import free_port

import cyxtrain as cx
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


STARTERS = {
    "cyxtrain launch": [sys.executable, "-m", "cyxtrain", "launch"],
    "cyxtrain.launch": [sys.executable, "-m", "cyxtrain.launch"],
    "script": [sys.executable, "-c", "import sys; from cyxtrain.__main__ import main; sys.exit(main())", "launch"],
    "launch_distributed.sh": [str(ROOT / "launch_distributed.sh")],
}


@pytest.mark.parametrize(
    ("starter", "num_ranks", "absent"),
    [
        ("cyxtrain launch", "2", ">&-"),
        *(
            pytest.param(starter, num_ranks, absent, marks=pytest.mark.nightly)
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
