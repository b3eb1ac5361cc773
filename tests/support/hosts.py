"""Hosts on one machine: network namespaces on one bridge, whose links can be cut. Needs root and Linux.

Each host has an address in 10.x that nothing outside the bridge can reach, and on demand numbers its processes by
itself, so that the kernel cannot be asked about those of another host. Names carry the number of this process: what
a process that was killed has left behind is removed by the next one that needs hosts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import worlds
from worlds import RankResult, child_environment

PORT = 29500
"""MASTER_PORT: nobody else is on these hosts."""
_HOST = re.compile(r"cyxtrain-(\d+)-\d+")
_DEVICE = re.compile(r"cx(\d+)(b|v\d+)")
_SECONDS = 10.0
_OURS = ("CYXTRAIN_SECRET", "CYXTRAIN_HEARTBEAT_TIMEOUT_MS", "CYXTRAIN_CHECKSUMS")


@functools.cache
def why_not() -> str:
    """Returns why there can be no hosts here; "" where there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} missing (iproute2, util-linux)"
    try:
        with hosts(2) as network:
            network.hosts[0].run("ip", "neighbour")
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout


@dataclass
class Host:
    """One host.

    Attributes:
        number: From 0.
        name: Of its network namespace.
        address: In the network.
        port: Its end at the bridge.
        own_processes: Whether it numbers its processes by itself.
    """

    number: int
    name: str
    address: str
    port: str
    own_processes: bool

    def run(self, *command: str) -> str:
        """Runs a command there, and returns what it wrote."""
        return _run("ip", "netns", "exec", self.name, *command)

    def command(self, *command: str) -> list[str]:
        """Returns the command that runs a command there."""
        inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] if self.own_processes else []
        return ["ip", "netns", "exec", self.name, *inside, *command]


@dataclass
class Network:
    """Hosts, and the ranks that run on them; see `hosts`.

    Attributes:
        hosts: All of them.
        bridge: What joins them.
        folder: Shared by the ranks (TEST_FOLDER), removed at the end.
    """

    hosts: list[Host]
    bridge: str
    folder: Path
    _ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, places: list[int], function: Callable[..., Any], *args: Any, **env: str) -> None:
        """Starts a world.

        Args:
            places: By rank, the number of its host; the meeting point is that of rank 0.
            function: At the top of a module; it returns JSON types.
            *args: JSON types.
            **env: More variables.
        """
        module = Path(sys.modules[function.__module__].__file__ or "")
        kept = {name: value for name, value in child_environment().items() if name not in _OURS}
        for rank, place in enumerate(places):
            value = self.folder / f"value{rank}"
            value.unlink(missing_ok=True)
            script = [sys.executable, worlds.__file__, str(module), function.__qualname__, json.dumps(args), str(value)]
            ours = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "MASTER_ADDR": self.hosts[places[0]].address,
                "MASTER_PORT": str(PORT),
                "CYXTRAIN_SECRET": "known on every host",
                "TEST_FOLDER": str(self.folder),
            }
            with open(self.folder / f"out{rank}", "wb") as out:
                self._ranks.append(
                    subprocess.Popen(
                        self.hosts[place].command(*script),
                        env=kept | ours | env,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        cwd=self.folder,
                    )
                )

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Sends a signal to the process of a rank; returns when, in seconds of `time.monotonic`."""
        pid = self._ranks[rank].pid
        inside = _children(pid)
        now = time.monotonic()
        os.kill(inside[0] if inside else pid, number)  # under `unshare --fork` the rank is its child
        return now

    def cut(self, host: int) -> float:
        """Takes a host's link off the bridge: nothing comes and nothing goes, and no side is told. Returns when."""
        _run("ip", "link", "set", self.hosts[host].port, "nomaster")
        return time.monotonic()

    def heal(self, host: int) -> float:
        """Puts the link back. Returns when."""
        _run("ip", "link", "set", self.hosts[host].port, "master", self.bridge)
        return time.monotonic()

    def results(self, seconds: float) -> list[RankResult]:
        """Waits until all ranks have ended, at most so long, and returns how each ended; None: killed here."""
        deadline = time.monotonic() + seconds
        for process in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))
        codes = [process.poll() for process in self._ranks]
        self.end()
        return [self._result(rank, code) for rank, code in enumerate(codes)]

    def _result(self, rank: int, code: int | None) -> RankResult:
        out, file = (self.folder / f"out{rank}").read_text("utf-8", "replace"), self.folder / f"value{rank}"
        return RankResult(rank, code, out, "", json.loads(file.read_text()) if file.exists() else None)

    def end(self) -> None:
        """Ends every rank; then another world may start."""
        for process in self._ranks:
            for pid in (*_children(process.pid), process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        self._ranks.clear()


def _children(pid: int) -> list[int]:
    """Returns the children of a process that `unshare` has made; none for a rank, whose children are its own."""
    try:
        if b"unshare" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
            return []
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []  # it has ended


@contextlib.contextmanager
def hosts(count: int, *, own_processes: bool = False) -> Iterator[Network]:
    """Hosts that reach each other, and nobody else; everything is removed at the end of the block.

    Args:
        count: How many.
        own_processes: Give each a process namespace too.
    """
    _remove(lambda pid: not Path(f"/proc/{pid}").exists())
    pid = os.getpid()
    bridge = f"cx{pid}b"
    found = [
        Host(n, f"cyxtrain-{pid}-{n}", f"10.{pid % 200}.{pid // 200 % 250}.{n + 1}", f"cx{pid}v{n}", own_processes)
        for n in range(count)
    ]
    with tempfile.TemporaryDirectory(prefix="hosts") as folder:
        network = Network(found, bridge, Path(folder))
        try:
            _run("ip", "link", "add", bridge, "type", "bridge", "forward_delay", "0")
            _run("ip", "link", "set", bridge, "up")
            for host in found:
                _build(host, bridge)
            yield network
        finally:
            network.end()
            _remove(lambda owner: owner == pid)


def _build(host: Host, bridge: str) -> None:
    _run("ip", "netns", "add", host.name)
    _run("ip", "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _run("ip", "link", "set", host.port, "master", bridge, "up")
    _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _run("ip", "-n", host.name, "link", "set", device, "up")


def _remove(whose: Callable[[int], bool]) -> None:
    """Removes the hosts of the processes that are asked for, with all that runs there."""
    for device in sorted(os.listdir("/sys/class/net")):
        match = _DEVICE.fullmatch(device)
        if match and whose(int(match[1])):
            _run("ip", "link", "delete", device)  # the kernel would do so too, later
    for line in _run("ip", "netns").splitlines():
        name = line.split()[0]
        match = _HOST.fullmatch(name)
        if match and whose(int(match[1])):
            for pid in _run("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "delete", name)
