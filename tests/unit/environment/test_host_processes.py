"""The operating system's view of processes: alive, stopped, gone, or unknown if it cannot be asked."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from worlds import wait_until

from cyxtrain.environment import processes
from cyxtrain.environment.processes import Process, State, state_of, this_process

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither cat nor SIGSTOP")
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
HERE = "127.0.0.1"


@pytest.fixture
def own() -> Process:
    return this_process(HERE)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits until its input ends."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def seen(process: subprocess.Popen[bytes], own: Process) -> Process:
    """A child as it would describe itself."""
    return Process(own.machine, process.pid, hash(psutil.Process(process.pid)))


def test_this_process_is_alive(own):
    assert own.pid == os.getpid()
    assert state_of(own, own) is State.ALIVE


def test_what_a_process_says_of_itself_is_what_another_sees(own):
    # The file alone: it needs nothing of the package.
    command = "import runpy, sys; p = runpy.run_path(sys.argv[1])['this_process'](sys.argv[2]); print(p.machine); "
    command += "print(p.pid, p.started); input()"
    with subprocess.Popen(
        [sys.executable, "-c", command, processes.__file__, HERE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        machine = process.stdout.readline().strip()
        pid, started = map(int, process.stdout.readline().split())
        assert (machine, pid) == (own.machine, process.pid)
        assert state_of(Process(machine, pid, started), own) is State.ALIVE
        process.communicate("\n")


def test_a_stopped_process_is_stopped_until_it_goes_on(own, child):
    process = seen(child, own)
    assert state_of(process, own) is State.ALIVE
    for _ in range(3):
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(process, own) is State.STOPPED)
        child.send_signal(signal.SIGCONT)
        wait_until(lambda: state_of(process, own) is State.ALIVE)


def test_a_process_that_has_ended_is_gone_before_its_parent_asks_how(own, child):
    process = seen(child, own)
    child.send_signal(signal.SIGKILL)
    wait_until(lambda: state_of(process, own) is State.GONE)
    child.wait()
    assert state_of(process, own) is State.GONE


def test_a_later_process_of_the_same_number_is_another_one(own):
    assert state_of(dataclasses.replace(own, started=own.started - 1), own) is State.GONE


@linux
@pytest.mark.parametrize("name", [b"a) T 1 2 (b", b"two words", b"\xff\xfe\x80", b"\xe4\n", b")"], ids=repr)
def test_a_name_of_any_bytes_hides_nothing(own, name):
    """The name stands in the middle of what the kernel says, as it is."""
    script = "import os, sys; open('/proc/self/comm', 'wb').write(bytes.fromhex(sys.argv[1])); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, name.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert name in Path(f"/proc/{process.pid}/stat").read_bytes()
        named = seen(process, own)
        assert state_of(named, own) is State.ALIVE
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(named, own) is State.STOPPED)
        process.kill()
        wait_until(lambda: state_of(named, own) is State.GONE)


# --- where the kernel cannot be asked -------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["", "another"])
def test_of_a_process_elsewhere_the_kernel_says_nothing(own, machine):
    assert state_of(dataclasses.replace(own, machine=machine), own) is None
    assert state_of(own, dataclasses.replace(own, machine=machine)) is None


@linux
def test_without_a_kernel_that_can_be_asked_two_processes_are_never_taken_for_neighbours(monkeypatch):
    monkeypatch.setattr(processes.os, "readlink", lambda path: (_ for _ in ()).throw(PermissionError()))
    alone = this_process(HERE)
    assert alone.machine == ""
    assert state_of(alone, alone) is None


def test_copies_of_one_virtual_machine_are_told_apart_by_their_address():
    assert this_process("10.0.0.1").machine != this_process("10.0.0.2").machine


@linux
def test_a_process_whose_files_are_hidden_is_not_taken_for_gone(own, monkeypatch):
    monkeypatch.setattr(psutil, "Process", lambda pid: (_ for _ in ()).throw(psutil.NoSuchProcess(pid)))
    assert state_of(own, own) is None
    monkeypatch.setattr(processes.os, "kill", lambda pid, number: (_ for _ in ()).throw(PermissionError()))
    assert state_of(own, own) is None
    monkeypatch.setattr(processes.os, "kill", lambda pid, number: (_ for _ in ()).throw(ProcessLookupError()))
    assert state_of(own, own) is State.GONE


@linux
def test_without_a_free_file_descriptor_a_state_is_unknown_and_nothing_is_raised(own):
    import resource

    assert state_of(own, own) is State.ALIVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        found = state_of(own, own)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found is None


@linux
def test_a_kernel_without_time_namespaces_tells_processes_apart_too(monkeypatch):
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    own = this_process("10.0.0.1")
    assert own.machine.count(" ") == 2  # the boot, the namespace of pids, the address
    assert state_of(own, own) is State.ALIVE


@linux
def test_in_a_container_that_sees_the_files_of_another_nobody_is_asked(monkeypatch):
    readlink = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "1" if path == "/proc/self" else readlink(path))
    assert this_process("10.0.0.1") == Process("", os.getpid(), 0)
