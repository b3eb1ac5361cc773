"""Try the transports between two processes of this machine, with a short-lived second one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import NamedTuple

from cyxtrain.ring import listen_near, peer_read

_SECONDS = 20.0
_MESSAGE = b"here"
_PROGRAM = """
import json, os, runpy, socket, sys
file, pid, probe, name, port, message = json.loads(sys.argv[1])
def failure(family, address):
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(5.0)
            sock.connect(address)
            sock.sendall(message.encode())
        return ""
    except OSError as error:
        return str(error)
found = {"tcp": failure(socket.AF_INET, ("127.0.0.1", port))}
if name:
    found["unix"] = failure(socket.AF_UNIX, chr(0) + name)
if probe:
    reads = runpy.run_path(file)["PeerMemory"](pid).can_be_read(probe)
    found["cma"] = "" if reads else "the kernel does not let one process read another's memory"
print(json.dumps(found))
"""
"""It imports no PyTorch, which would take seconds, and tries to read its parent's memory: if the kernel allows that, it
allows ranks to read each other's."""


class Transport(NamedTuple):
    """A transport, as CYXTRAIN_TRANSPORT names it, and why it does not work; empty: it works."""

    name: str
    failure: str


def try_transports() -> list[Transport]:
    """Return all transports, the fastest first. Cost: one process, a tenth of a second."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        near, name = listen_near("auto"), ""
        if near is not None:
            stack.enter_context(near)
            name = os.fsencode(near.getsockname()).decode("ascii").removeprefix("\0")
        found = _ask_child(name, listener.getsockname()[1])
        for transport, server in (("tcp", listener), ("unix", near)):
            if server is not None and found.get(transport) == "" and not _has_received(server):
                found[transport] = "the data that was sent did not arrive"
    missing = found.get("error", "Linux only" if sys.platform != "linux" else "not available on this system")
    return [Transport(name, found.get(name, missing)) for name in ("cma", "unix", "tcp")]


def _ask_child(name: str, port: int) -> dict[str, str]:
    """Return the second process's failures by transport, or only "error" if it could not run."""
    facts = [peer_read.__file__, os.getpid(), peer_read.open_to_reading(), name, port, _MESSAGE.decode()]
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(facts)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        answer: dict[str, str] = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        return {"error": f"a second process failed: {(error.stderr.strip().splitlines() or ['no error printed'])[-1]}"}
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"error": f"cannot run a second process: {type(error).__name__}"}
    return answer


def _has_received(server: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        sock, _ = server.accept()
        with sock:
            sock.settimeout(1.0)
            return sock.recv(len(_MESSAGE)) == _MESSAGE
    return False
