"""Try the transports between two processes of this machine."""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
from typing import NamedTuple

from cyxtrain.ring import PeerMemory, allow_peer_reads, listen_unix

_SECONDS = 20.0
_PROGRAM = """
import json, runpy, sys
file, pid, probe = json.loads(sys.argv[1])
print(int(runpy.run_path(file)["PeerMemory"](pid).can_be_read(probe)))
"""
"""It imports no PyTorch, which would take seconds, and tries to read its parent's memory: if the kernel allows that, it
allows ranks to read each other's."""


class Transport(NamedTuple):
    """A transport, as CYXTRAIN_TRANSPORT names it, and why it does not work; empty: it works."""

    name: str
    failure: str


def try_transports() -> list[Transport]:
    """Return all transports, the fastest first. Cost: one process, a tenth of a second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tcp = _failure_of(listener)
    unix = "Linux only" if sys.platform != "linux" else "not available on this system"
    near = listen_unix("auto")
    if near is not None:
        with near:
            unix = _failure_of(near)
    return [Transport("cma", _failure_of_reading()), Transport("unix", unix), Transport("tcp", tcp)]


def _failure_of(listener: socket.socket) -> str:
    with socket.socket(listener.family, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(5.0)
            sock.connect(listener.getsockname())
        except OSError as error:
            return str(error)
    return ""


def _failure_of_reading() -> str:
    """Return why a second process cannot read this one's memory."""
    probe = allow_peer_reads()
    if not probe:
        return "Linux only" if sys.platform != "linux" else "not available on this system"
    arguments = json.dumps([inspect.getfile(PeerMemory), os.getpid(), probe])
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except subprocess.CalledProcessError as error:
        return f"a second process failed: {(error.stderr.strip().splitlines() or ['no error printed'])[-1]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot run a second process: {type(error).__name__}"
    return "" if done.stdout.strip() == "1" else "the kernel does not let one process read another's memory"
