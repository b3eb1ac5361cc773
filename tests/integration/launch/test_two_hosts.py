"""One experiment on two hosts with their own addresses, each with a launcher: as alone, or a line that says why not.

The hosts are network namespaces on one bridge: root on Linux only.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from hosts import Host, Network
from worlds import child_environment

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("needs_hosts"),
]
CONFIG = str(Path(__file__).resolve().parents[3] / "configs" / "digits_mlp.yaml")
FIT = ("cyxtrain", "fit", CONFIG, "training.epochs=3")
SECONDS = 60.0


@contextlib.contextmanager
def two_hosts() -> Iterator[Network]:
    with hosts.hosts(2, own_processes=True) as network:
        yield network


def start(network: Network, host: int, *words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        network.hosts[host].command(sys.executable, "-m", *words),
        env=child_environment(CYXTRAIN_SECRET="known on both", **variables),
        cwd=network.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launched(network: Network, host: int, *options: str, **variables: str) -> subprocess.Popen[str]:
    nodes = ("--nnodes", "2", "--node-rank", str(host), "--master-addr", network.hosts[0].address)
    return start(network, host, "cyxtrain", "launch", *nodes, *options, **variables)


def rank_on(host: Host) -> int:
    """The process of the rank that runs on a host."""
    space = Path("/run/netns", host.name).stat().st_ino
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[1:4] == [b"-m", b"cyxtrain", b"fit"] and (folder / "ns" / "net").stat().st_ino == space:
                return int(folder.name)
    raise AssertionError(f"no rank on {host.name}")


def measures(text: str) -> list[str]:
    lines = [line.removeprefix("[rank 0] ").split("  ") for line in text.splitlines()]
    return [" ".join(line[:3]) for line in lines if line[0].startswith(("epoch", "test"))]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_launchers_train_what_one_rank_does(num_ranks):
    with two_hosts() as network:
        alone = start(network, 0, *FIT)
        found = alone.communicate(timeout=SECONDS)
        assert alone.returncode == 0, found[1]
        processes = [launched(network, host, "-n", str(num_ranks), "--", *FIT) for host in (0, 1)]
        said = [process.communicate(timeout=SECONDS) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    assert f"world      {2 * num_ranks} ranks\n" in said[0][0]
    assert "ring, " in said[0][0]
    assert measures(said[0][0]) == measures(found[0])
    assert re.search(r"test accuracy: 0\.9\d", said[0][0])


def test_torchrun_on_both_trains_what_one_rank_does():
    with two_hosts() as network:
        nodes = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", network.hosts[0].address)
        ours = (*nodes, "--master-port", "29500", "-m", *FIT)
        processes = [start(network, host, "torch.distributed.run", "--node-rank", str(host), *ours) for host in (0, 1)]
        said = [process.communicate(timeout=SECONDS) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    assert "world      2 ranks, started by torchrun\n" in said[0][0]
    assert re.search(r"test accuracy: 0\.9\d", said[0][0])


def test_a_host_that_is_cut_off_cannot_reach_rank_0_and_both_say_so():
    with two_hosts() as network:
        network.cut(1)
        processes = [launched(network, host, "-n", "1", "--", *FIT, DISTRIBUTED_TIMEOUT_MS="4000") for host in (0, 1)]
        said = [process.communicate(timeout=SECONDS) for process in processes]
        assert [process.returncode for process in processes] == [1, 1], said
    address = network.hosts[0].address
    # PyTorch warns that these hosts have no names.
    lines = [[line for line in errors.splitlines() if "[c10d]" not in line] for _, errors in said]
    assert [len(each) for each in lines] == [1, 1], lines
    assert lines[0][0].startswith("RendezvousError: rank 1 of a world of 2 did not join before the deadline")
    assert lines[1][0].startswith(f"RendezvousError: rank 1 could not reach rank 0 at {address}:29500")


def test_a_host_that_fails_is_started_again_with_the_other():
    with two_hosts() as network:
        keeps = (*FIT, "training.epochs=40", "training.checkpoint_every_n_epochs=1")
        processes = [launched(network, host, "-n", "1", "--restarts", "1", "--", *keeps) for host in (0, 1)]
        assert processes[0].stdout is not None
        shown = []
        for line in processes[0].stdout:
            shown.append(line)
            if line.startswith("epoch 5/40") and sum(each.startswith("epoch 5/40") for each in shown) == 1:
                os.kill(rank_on(network.hosts[1]), signal.SIGKILL)
        said = [process.communicate(timeout=SECONDS) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], (shown, said)
    text = "".join(shown)
    assert "restart 1 of 1" in said[0][1]
    assert "restart 1 of 1" in said[1][1]
    assert re.search(r"resume +from .*epoch-\d+.ckpt", text)
    assert re.search(r"test accuracy: 0\.9\d", text)
