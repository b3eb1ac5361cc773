"""As a container's first process the launcher reaps orphans, passes signals on, and ends as its ranks do."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launching import LAUNCHER
from worlds import child_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux's")
# A process that adopts orphans, as a container's first one does, runs a function that leaves one.
PROGRAM = """
    import ctypes, importlib.util, os, signal, subprocess, sys, time
    spec = importlib.util.spec_from_file_location("first_process", sys.argv[1])
    first_process = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(first_process)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    heard = []

    def run():
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        shell = ["sh", "-c", "sh -c 'read line; exit 3' & echo $!"]
        pipe = subprocess.PIPE
        with subprocess.Popen(shell, stdin=pipe, stdout=pipe, text=True) as parent:
            orphan = int(parent.stdout.readline())
            parent.wait()
            parent.stdin.close()  # it ends now, and its parent is gone
        until = time.monotonic() + 20
        while os.path.exists(f"/proc/{orphan}") and time.monotonic() < until:
            time.sleep(0.01)
        print("reaped" if not os.path.exists(f"/proc/{orphan}") else "a zombie", flush=True)
        while not heard and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "killed" else None
        return 7 if heard else 1

    sys.exit(first_process.run_as_first_process(run, is_first=sys.argv[3] == "first"))
"""
# A rank that leaves an orphan, which ends.
RANK = """
    import glob, os, sys, time

    def zombies():
        states = []
        for name in glob.glob("/proc/[0-9]*/stat"):
            try:
                states.append(open(name).read().rpartition(")")[2].split()[0])
            except OSError:
                continue
        return states.count("Z")

    parent = os.fork()
    if parent == 0:
        os.fork()
        os._exit(0)
    os.waitpid(parent, 0)
    until = time.monotonic() + 20
    while zombies() and time.monotonic() < until:
        time.sleep(0.01)
    print(zombies(), os.getppid())
    sys.exit(5)
"""
SOURCE = Path(__file__).parents[3] / "cyxtrain/launch/first_process.py"


@pytest.mark.parametrize(("end", "code"), [("returns", 7), ("killed", 128 + signal.SIGKILL)])
def test_first_process_reaps_orphans_passes_signals_on_and_has_the_exit_code_of_its_child(end, code):
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(PROGRAM), str(SOURCE), end, "first"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reaped\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == code


def test_launcher_that_is_the_first_process_leaves_no_zombie():
    """In its own container, where the system lets us make one."""
    own = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*own, "true"], capture_output=True).returncode != 0:
        pytest.skip("no namespaces here")
    rank = [*LAUNCHER, "-n", "1", "--", sys.executable, "-c", textwrap.dedent(RANK)]
    found = subprocess.run([*own, *rank], capture_output=True, text=True, env=child_environment(), timeout=60)
    assert found.returncode == 5, found.stderr
    zombies, parent = found.stdout.split()
    assert zombies == "0"
    assert parent != "1"
