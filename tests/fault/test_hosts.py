"""Ranks on several hosts: what dies, is cut off or stops there is named in time, and what heals is never noticed.

The hosts are network namespaces on one bridge: root on Linux only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import hosts
import pytest
import torch
from hosts import Network
from hosts_ranks import fit, idle_until_error, join, reduce_until_error, sums
from worlds import RankResult, child_environment, wait_until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("needs_hosts"),
]
START_SECONDS = 60.0
LARGE = 8 << 20
"""Elements: 32 MiB of float32."""
HEARTBEAT_TIMEOUT_SECONDS = 5.0


def await_work(network: Network, world_size: int) -> None:
    def at_work() -> bool:
        return all((network.folder / f"at work {rank}").exists() for rank in range(world_size))

    wait_until(at_work, START_SECONDS)


def values(results: list[RankResult], *, without: int | None = None) -> list[Any]:
    """What each rank returned, but for one that was killed; shows the others' output where they failed."""
    bad = [result for result in results if result.returncode != 0 and result.rank != without]
    assert not bad, "\n".join(f"rank {result.rank} ended with {result.returncode}\n{result.stdout}" for result in bad)
    return [result.value for result in results if result.rank != without]


def seconds_after(found: list[Any], moment: float) -> list[float]:
    return [round(value["at"] - moment, 2) for value in found]


# --- the hosts themselves -------------------------------------------------------------------------------------------

_PROBE = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=0.5)
except ConnectionRefusedError:
    print("reached")
except TimeoutError:
    print("silence")
"""


def reaches(network: Network, one: int, other: int) -> bool:
    said = network.hosts[one].run(sys.executable, "-S", "-c", _PROBE, network.hosts[other].address).strip()
    assert said in ("reached", "silence")
    return said == "reached"


def test_hosts_reach_each_other_until_one_is_cut_off_and_again_once_it_heals():
    with hosts.hosts(3) as network:
        assert reaches(network, 0, 1)
        network.cut(1)
        assert not reaches(network, 0, 1)
        assert not reaches(network, 1, 2)
        assert reaches(network, 0, 2)
        network.heal(1)
        assert reaches(network, 0, 1)


def test_nothing_is_left_of_hosts_also_not_of_those_of_a_process_that_was_killed():
    program = (
        "import hosts, os, subprocess\nwith hosts.hosts(2) as network:\n"
        "  subprocess.Popen(network.hosts[0].command('sleep', '1000'))\n  os.kill(os.getpid(), 9)"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], env=child_environment())
    assert killed.wait(60) == -SIGKILL
    assert f"cyxtrain-{killed.pid}-0" in hosts._run("ip", "netns")
    with hosts.hosts(1):
        assert f"cyxtrain-{killed.pid}-" not in hosts._run("ip", "netns")
    left = [name for name in os.listdir("/sys/class/net") if name.startswith((f"cx{killed.pid}", f"cx{os.getpid()}"))]
    assert left == []
    assert f"cyxtrain-{os.getpid()}-" not in hosts._run("ip", "netns")


def test_a_host_with_processes_of_its_own_sees_no_other():
    with hosts.hosts(1, own_processes=True) as network:
        program = "import os; print(os.getpid(), sorted(name for name in os.listdir('/proc') if name.isdigit()))"
        command = network.hosts[0].command(sys.executable, "-S", "-c", program)
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        assert said == "1 ['1']\n"


# --- promise 1: a rank dies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [reduce_until_error, idle_until_error])
def test_a_rank_that_is_killed_on_another_host_is_named_by_all_within_a_second(program):
    with hosts.hosts(3, own_processes=True) as network:
        network.start([0, 1, 2], program, 1000 if program is reduce_until_error else 30.0)
        await_work(network, 3)
        killed = network.signal(1, SIGKILL)
        found = values(network.results(30.0), without=1)
    print(f"\n{program.__name__}: rank 1 killed, named after {seconds_after(found, killed)} s by ranks 0 and 2")
    assert [(value["type"], value["rank"]) for value in found] == [("PeerLostError", 1)] * 2
    assert max(seconds_after(found, killed)) <= 1.0


# --- promise 3: the network drops -----------------------------------------------------------------------------------


def cut_off(network: Network, program: Any, argument: Any, after_seconds: float) -> list[float]:
    """Cuts rank 2 of 3 off, so long after all are at work; returns after which time each rank noticed."""
    clear(network)
    network.start([0, 1, 2], program, argument)
    await_work(network, 3)
    time.sleep(after_seconds)
    cut = network.cut(2)
    found = values(network.results(60.0))
    network.heal(2)
    assert [value["type"] for value in found] == ["PeerLostError"] * 3
    assert [value["rank"] for value in found[:2]] == [2, 2]
    assert found[2]["rank"] in (0, 1)
    return seconds_after(found, cut)


def clear(network: Network) -> None:
    for file in network.folder.iterdir():
        file.unlink()


def test_a_host_that_is_cut_off_while_all_are_idle_is_noticed_on_both_sides_within_six_seconds():
    with hosts.hosts(3) as network:
        # What a kernel does about silence depends on what was sent last: signs of life come every three seconds.
        noticed = {after: cut_off(network, idle_until_error, 30.0, after) for after in (0.2, 0.8, 1.4, 2.0, 2.6)}
    print(f"\nidle; cut off so long after a start: noticed by each rank after so many seconds: {noticed}")
    assert max(map(max, noticed.values())) <= 6.0


def test_a_host_that_is_cut_off_in_large_collectives_is_noticed_on_both_sides_within_six_seconds():
    with hosts.hosts(3) as network:
        noticed = [cut_off(network, reduce_until_error, LARGE, after) for after in (0.0, 0.7)]
    print(f"\nall_reduce of {LARGE} elements: the cut was noticed by each rank after so many seconds: {noticed}")
    assert max(map(max, noticed)) <= 6.0


def run_sums(network: Network, places: list[int], elements: int, disturb: Any, **env: str) -> list[Any]:
    """Runs `sums` on every rank, does something to it meanwhile, and returns what the ranks returned."""
    clear(network)
    network.start(places, sums, 20, elements, **env)
    await_work(network, len(places))
    disturb()
    (network.folder / "go on").touch()
    return values(network.results(90.0))


@pytest.mark.parametrize("elements", [100, LARGE])
def test_a_cut_of_two_and_a_half_seconds_heals_unnoticed_and_changes_no_bit(elements):
    def cut_and_heal() -> None:
        moment = network.cut(1)
        (network.folder / "go on").touch()  # they run into it
        time.sleep(max(moment + 2.5 - time.monotonic(), 0.0))
        network.heal(1)

    with hosts.hosts(2) as network:
        undisturbed = run_sums(network, [0, 1], elements, lambda: None)
        cut = run_sums(network, [0, 1], elements, cut_and_heal)
    longest = [[round(value["longest"], 2) for value in found] for found in (undisturbed, cut)]
    print(f"\n{elements} elements: the longest collective took {longest[0]} s, with the cut {longest[1]} s")
    assert {value["digest"] for value in undisturbed + cut} == {undisturbed[0]["digest"]}
    assert max(longest[1]) > 1.5, "the cut did not fall into a collective"


def test_cuts_of_nearly_three_seconds_heal_unnoticed_while_all_are_idle():
    def cut_again_and_again() -> None:
        for _ in range(5):  # 6.7 s from one to the next: each at another moment between two signs of life
            moment = network.cut(1)
            time.sleep(max(moment + 2.8 - time.monotonic(), 0.0))
            network.heal(1)
            time.sleep(max(moment + 6.7 - time.monotonic(), 0.0))

    with hosts.hosts(2) as network:
        undisturbed = run_sums(network, [0, 1], 100, lambda: None)
        cut = run_sums(network, [0, 1], 100, cut_again_and_again)
    assert {value["digest"] for value in undisturbed + cut} == {undisturbed[0]["digest"]}


# --- promise 2: a rank is stopped -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("program", "argument"), [(idle_until_error, 60.0), (reduce_until_error, 1000)])
def test_a_rank_that_is_stopped_on_another_host_is_named_within_the_heartbeat_timeout(program, argument):
    milliseconds = str(round(HEARTBEAT_TIMEOUT_SECONDS * 1000))
    with hosts.hosts(3, own_processes=True) as network:
        network.start([0, 1, 2], program, argument, CYXTRAIN_HEARTBEAT_TIMEOUT_MS=milliseconds)
        await_work(network, 3)
        stopped = network.signal(2, SIGSTOP)
        wait_until(lambda: all((network.folder / f"value{rank}").exists() for rank in (0, 1)), 30.0)
        network.signal(2, SIGCONT)
        found = values(network.results(30.0))
    print(f"\n{program.__name__}: rank 2 stopped, named after {seconds_after(found[:2], stopped)} s by ranks 0 and 1")
    assert [(value["type"], value["rank"]) for value in found[:2]] == [("PeerSilentError", 2)] * 2
    assert min(seconds_after(found[:2], stopped)) >= HEARTBEAT_TIMEOUT_SECONDS - 1.0
    assert max(seconds_after(found[:2], stopped)) <= HEARTBEAT_TIMEOUT_SECONDS + 1.0
    assert (found[2]["type"], found[2]["rank"]) == ("PeerSilentError", 2)  # it learns why it is out, when it goes on


def test_a_rank_that_is_stopped_for_eight_seconds_on_another_host_changes_nothing_by_default():
    def stop() -> None:
        moment = network.signal(1, SIGSTOP)
        (network.folder / "go on").touch()
        time.sleep(max(moment + 8.0 - time.monotonic(), 0.0))
        network.signal(1, SIGCONT)

    with hosts.hosts(2, own_processes=True) as network:
        undisturbed = run_sums(network, [0, 1], 1000, lambda: None)
        stopped = run_sums(network, [0, 1], 1000, stop)
    print(f"\nthe longest collective took {[round(value['longest'], 2) for value in stopped]} s")
    assert {value["digest"] for value in undisturbed + stopped} == {undisturbed[0]["digest"]}
    assert max(value["longest"] for value in stopped) > 6.0, "the stop did not fall into a collective"


# --- while ranks join -----------------------------------------------------------------------------------------------


def joined(network: Network, places: list[int], milliseconds: int, **variables: str) -> list[str]:
    """Returns why each rank could not join."""
    clear(network)
    network.start(places, join, milliseconds, **variables)
    return [str(value) for value in values(network.results(120.0))]


def test_two_machines_with_rank_0_are_both_told_at_once():
    with hosts.hosts(2) as network:
        texts = joined(network, [0, 1], 100_000, RANK="0")
    assert all("two processes were started as rank 0" in text for text in texts), texts


@pytest.mark.parametrize("mtu", [1000, 600])
def test_a_network_that_loses_large_packets_is_named_with_address_and_port(mtu):
    with hosts.hosts(2) as network:
        for host in network.hosts:
            host.run("ip", "link", "set", "eth0", "gso_max_segs", "1")
        hosts._run("ip", "link", "set", network.hosts[1].port, "mtu", str(mtu))
        texts = joined(network, [0, 1], 15_000)
        addresses = "|".join(re.escape(host.address) for host in network.hosts)
    named = [text for text in texts if re.search(rf"rank \d at ({addresses}):\d+", text) and "(path MTU)" in text]
    assert named, texts


@pytest.mark.parametrize("kind", ["blackhole", "prohibit"])
def test_a_firewalled_port_of_a_rank_is_named_with_its_address(kind):
    with hosts.hosts(2) as network:
        first = network.hosts[0]
        first.run("ip", "rule", "add", "pref", "100", "lookup", "local")
        first.run("ip", "rule", "del", "pref", "0")
        ports = ("iif", "eth0", "ipproto", "tcp", "dport", "30000-65000")
        first.run("ip", "rule", "add", "pref", "10", *ports, kind)
        texts = joined(network, [0, 1], 6_000)
    for text in texts:
        assert re.search(rf"rank 0 at {re.escape(first.address)}:\d+", text), text
        assert "firewalls must allow TCP" in text


@pytest.mark.parametrize("kind", ["blackhole", "unreachable", "prohibit"])
def test_an_address_that_a_rank_cannot_reach_is_named_with_its_port(kind):
    with hosts.hosts(3) as network:
        unreachable = network.hosts[1].address
        network.hosts[2].run("ip", "route", "add", kind, f"{unreachable}/32")
        texts = joined(network, [0, 1, 2], 60_000)
    for text in texts:
        assert re.match(rf"rank 2 cannot reach rank 1 at {re.escape(unreachable)}:\d+ \(", text), text


# --- training -------------------------------------------------------------------------------------------------------


def test_training_on_two_hosts_is_training_on_one():
    runs = {}
    with hosts.hosts(2) as network:
        for places in ([0], [0, 0], [0, 1]):
            network.start(places, fit, 3)
            runs[str(places)] = values(network.results(60.0))
    same_host, two_hosts = runs["[0, 0]"], runs["[0, 1]"]
    assert two_hosts == same_host  # every bit
    assert two_hosts[0] == two_hosts[1]
    alone = torch.tensor(runs["[0]"][0]["parameters"])
    torch.testing.assert_close(torch.tensor(two_hosts[0]["parameters"]), alone, rtol=1e-5, atol=1e-6)


def test_the_hosts_leave_no_folder(tmp_path: Path):
    with hosts.hosts(1) as network:
        folder = network.folder
    assert not folder.exists()
