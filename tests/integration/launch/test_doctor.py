"""The doctor: every pair is tried once, what is broken is named and nothing else, and nothing hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import socket
import sys
import threading
import time
from types import SimpleNamespace

import hosts
import pytest
import torch
import torch.distributed as dist
from doctor_ranks import (
    examine_among_strangers,
    examine_and_die,
    examine_and_stop,
    examine_here,
    examine_with_one_way_closed,
)
from markers import by_night
from rank_processes import (
    Ended,
    environment,
    run_processes,
    run_ranks,
    values,
)
from worlds import free_port, wait_until

import cyxtrain as cx
from cyxtrain.config import DistributedConfig
from cyxtrain.doctor import examine, local_checks, measure, report, store_exchange, terminal
from cyxtrain.doctor.local_checks import Machine
from cyxtrain.doctor.measure import RoundTrip
from cyxtrain.doctor.pairs import rounds
from cyxtrain.doctor.store_exchange import Pair, PeerResult, RankInfo, Roster
from cyxtrain.environment.processes import Process
from cyxtrain.ring import Deadline, RankRecord, StoreClient, try_transports
from cyxtrain.ring.rendezvous import probe

pytestmark = pytest.mark.usefixtures("rank_server")
MACHINE = Machine("node", "eth0", 8, "64 GiB", "none", "0.1.0", "2.13.0", "3.11.7")
COLUMNS = 80 - len("[rank 0] ")


# --- who meets whom -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 10))
def test_every_pair_meets_exactly_once_and_nobody_is_in_two_pairs_at_a_time(count):
    ranks = [3 * number for number in range(count)]  # some never came
    found = rounds(ranks)
    pairs = [pair for each in found for pair in each]
    assert sorted(pairs) == [(a, b) for a in ranks for b in ranks if a < b]
    for each in found:
        busy = [rank for pair in each for rank in pair]
        assert len(busy) == len(set(busy))
    assert len(found) == count - 1 + count % 2


# --- arithmetic -----------------------------------------------------------------------------------------------------


def exchange(there, back, skew, thinks=0.25):
    """Asked at 100 s, by a clock that the other one is `skew` ahead of."""
    return RoundTrip(100.0, 100.0 + there + skew, 100.0 + there + thinks + skew, 100.0 + there + thinks + back)


@pytest.mark.parametrize("skew", [0.0, 3.5, -0.125])
def test_skew_is_exact_where_both_ways_take_equally_long(skew):
    found = exchange(0.5, 0.5, skew)
    assert found.skew_seconds == skew
    assert found.seconds == 1.0


def test_skew_is_that_of_the_shortest_exchange():
    assert measure.skew_of([exchange(4.0, 0.5, 2.0), exchange(0.25, 0.25, 2.0), exchange(0.5, 3.0, 2.0)]) == 2.0


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (terminal.duration(83.2e-6), "83.2 us"),
        (terminal.duration(0.00013), "130 us"),
        (terminal.duration(0.0249), "24.9 ms"),
        (terminal.duration(1.25), "1.25 s"),
        (terminal.size(4), "4 B"),
        (terminal.size(16 << 20), "16 MiB"),
        (terminal.size(3 << 19), "1.5 MiB"),
        (terminal.rate(1.204e9), "1.20 GB/s"),
        (terminal.rate(84.6e6), "84.6 MB/s"),
        (terminal.rate(831.2e6), "831 MB/s"),
        (terminal.rate(46_000), "46.0 kB/s"),
    ],
)
def test_figures_are_written_as_people_write_them(found, text):
    assert found == text


def test_tables_have_colours_in_a_terminal_alone(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    report_of = report.report_of(world(2, [(0, 1)]))
    terminal.print_report(report_of)
    plain = capsys.readouterr().out
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: True, raising=False)
    terminal.print_report(report_of)
    coloured = capsys.readouterr().out
    assert "\033" not in plain
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plain != coloured


def between_two(lead_seconds, follow):
    """Measures over a connection, and returns what came of it; `follow` is at the other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        other = threading.Thread(target=follow, args=(theirs,))
        other.start()
        try:
            return measure.lead(ours, lead_seconds)
        finally:
            ours.close()
            other.join()


def test_a_connection_is_measured_both_ways():
    figures = between_two(20.0, lambda sock: measure.follow(sock, 20.0))
    assert 0 < figures.round_trip_seconds < 1
    assert figures.bytes_per_second > 1e6
    assert abs(figures.skew_seconds) < 1  # one clock, read on both sides


def test_a_connection_that_ends_in_the_middle_is_an_error():
    with pytest.raises(ConnectionError):
        between_two(20.0, lambda sock: sock.close())


def test_a_connection_that_carries_short_messages_only_is_told_from_one_that_is_dead():
    def follow_what_is_short(sock: socket.socket) -> None:
        while question := sock.recv(16):
            if any(question):  # bytes come, or are wanted
                return
            sock.sendall(bytes(16))

    with pytest.raises(measure.LargeLostError):
        between_two(0.5, follow_what_is_short)


# --- how it looks ---------------------------------------------------------------------------------------------------


def info(rank, *, host="node", **fields):
    record = RankRecord(8, Process(f"{host} boot", 100 + rank, 1), f"10.0.0.{rank + 1}", 41234, **fields)
    return RankInfo(record, dataclasses.replace(MACHINE, host=f"{host}-{rank}"))


def world(count, broken=(), world_size=None, **changes):
    """What rank 0 knows of so many ranks; `broken` are pairs of which neither reaches the other."""
    infos = {rank: info(rank) for rank in range(count)}
    pairs = []
    for low, high in ((a, b) for b in range(count) for a in range(b)):
        well = PeerResult(low, high), PeerResult(high, low, "", "", "", 80e-6, 1.2e9, 0.0)
        bad = (
            PeerResult(low, high, "silent", "no answer within 5 s"),
            PeerResult(high, low, "refused", "connection refused"),
        )
        pairs.append(Pair(low, high, bad if (low, high) in broken else well))
    config = DistributedConfig(rank=0, world_size=world_size or count, master_addr="10.0.0.1", timeout_ms=5000)
    return dataclasses.replace(report.World(config, infos, pairs), **changes)


def text(found):
    """The whole report."""
    return squeezed("\n".join(lines(found)))


def lines(found):
    """What rank 0 prints of it; no line is too long."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        terminal.print_report(report.report_of(found))
    printed = out.getvalue().splitlines()
    assert max(map(len, printed)) <= COLUMNS
    return printed


def squeezed(out):
    """One line with single spaces, so that it does not matter where lines are broken."""
    return " ".join(out.split())


def rows(out):
    """The table of pairs: their ranks, and how they are."""
    return dict(re.findall(r"^(?:\[rank 0\] )?(\d+ - \d+) +(ok|BROKEN)\b", out, re.M))


def test_pairs_are_lines_and_the_last_one_says_that_all_are_well():
    printed = lines(world(3))
    assert "0 - 1  ok     tcp           80.0 us  1.20 GB/s      0.0 ms" in printed
    assert printed[-1] == "all 3 pairs are OK"
    assert report.is_healthy(world(3))


def test_a_broken_pair_is_named_with_its_cause_and_what_to_do():
    found = text(world(3, [(1, 2)]))
    assert (
        "rank 1 (10.0.0.2) cannot reach rank 2 (10.0.0.3:41234): no answer within 5 s. "
        "Is there a firewall between them? All ranks need TCP to each other." in found
    )
    assert "rank 2 (10.0.0.3) cannot reach rank 1 (10.0.0.2:41234): connection refused." in found
    assert found.endswith("broken: 1 - 2; the other 2 are OK")
    assert not report.is_healthy(world(3, [(1, 2)]))


def test_a_pair_of_which_one_rank_left_no_word_is_broken():
    pair = Pair(0, 1, (PeerResult(0, 1),))
    found = text(world(2, pairs=[pair]))
    assert "rank 1 reported nothing about rank 0: its process has exited or is suspended." in found
    assert found.endswith("broken: 0 - 1; no pair is OK")


def test_an_address_that_only_its_own_machine_reaches_is_said():
    local = info(1, host="other")
    local = dataclasses.replace(local, record=dataclasses.replace(local.record, host="127.0.0.1"))
    found = text(world(2, [(0, 1)], infos={0: info(0), 1: local}))
    assert "127.0.0.1 is reachable only from its own machine: set MASTER_ADDR" in found


def test_who_is_missing_is_named_with_what_to_look_at():
    found = text(world(2, world_size=4))
    for rank in (2, 3):
        assert f"rank {rank} did not register within 5 s. Was it started, with RANK={rank} WORLD_SIZE=4" in found
    assert found.endswith("the pair is OK; missing: rank 2, rank 3")


def test_versions_that_differ_are_said_and_are_no_fault():
    other = info(2)
    other = dataclasses.replace(other, machine=dataclasses.replace(other.machine, torch="2.12.0"))
    found = world(3, infos={0: info(0), 1: info(1), 2: other})
    assert "note: PyTorch differs: 2.13.0 on ranks 0, 1; 2.12.0 on rank 2" in text(found)
    assert "on all ranks: cyxtrain 0.1.0, Python 3.11.7, cores 8, memory 64 GiB, GPUs none" in text(found)
    assert report.is_healthy(found)


def test_clocks_that_are_far_apart_are_said_and_are_no_fault():
    pair = Pair(0, 1, (PeerResult(0, 1), PeerResult(1, 0, "", "", "", 1e-4, 1e9, -2.5)))
    found = world(2, pairs=[pair])
    assert "note: the clocks of rank 0 and rank 1 are 2.50 s apart." in text(found)
    assert "2500.0 ms" in text(found)
    assert report.is_healthy(found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checksums": True}, "rank 1 was started with checksums and rank 0 without"),
        ({"protocol": 0}, "Install the same version of cyxtrain everywhere"),
        ({"transport": "tcp"}, "rank 1 was started with CYXTRAIN_TRANSPORT=tcp and rank 0 with auto"),
    ],
)
def test_ranks_that_do_not_fit_together_are_a_fault_also_where_all_pairs_are_well(changes, words):
    found = world(2, infos={0: info(0), 1: info(1, **changes)})
    assert words in text(found)
    assert text(found).endswith("the pair is OK, but the ranks cannot join: see above")
    assert not report.is_healthy(found)


def test_a_transport_that_was_asked_for_and_is_not_there_is_a_fault():
    near = Pair(0, 1, (PeerResult(0, 1, transport="unix"), PeerResult(1, 0, "", "", "tcp", 1e-4, 1e9, 0.0)))
    asks = {rank: info(rank, transport="unix") for rank in range(2)}
    found = world(2, infos=asks, pairs=[near])
    assert "CYXTRAIN_TRANSPORT=unix, but between rank 0 and rank 1 only tcp works." in text(found)
    assert not report.is_healthy(found)


def test_a_transport_that_was_asked_for_is_no_fault_where_it_works_or_between_machines():
    asks = {rank: info(rank, transport="unix") for rank in range(2)}
    for way in ("unix", ""):
        pair = Pair(0, 1, (PeerResult(0, 1, transport=way), PeerResult(1, 0, "", "", way, 1e-4, 1e9, 0.0)))
        found = world(2, infos=asks, pairs=[pair])
        assert pair.transport == (way or "tcp")
        assert "CYXTRAIN_TRANSPORT" not in text(found)
        assert report.is_healthy(found)


def test_of_many_pairs_only_what_stands_out_is_shown():
    slow = PeerResult(15, 3, "", "", "", 2e-3, 1.1e9, 0.0)
    found = world(16, [(4, 9)])
    pairs = [
        Pair(3, 15, (PeerResult(3, 15), slow)) if (pair.low, pair.high) == (3, 15) else pair for pair in found.pairs
    ]
    found = dataclasses.replace(found, pairs=pairs)
    assert "120 pairs, of which 119 are OK round trip: 80.0 us to 2.00 ms (ranks 3 - 15) bandwidth:" in text(found)
    assert rows("\n".join(lines(found))) == {"4 - 9": "BROKEN", "3 - 15": "ok"}
    assert not rows("\n".join(lines(world(16))))


def test_long_names_do_not_make_long_lines():
    long = dataclasses.replace(
        MACHINE, host="gpu-node-0017.cluster.example.org", gpus="8 x NVIDIA H100 80GB HBM3", torch="2.13.0+cu130"
    )
    found = world(2, infos={rank: dataclasses.replace(info(rank), machine=long) for rank in range(2)})
    assert lines(found)


# --- alone ----------------------------------------------------------------------------------------------------------


def config_of(**fields):
    return DistributedConfig(rank=0, world_size=1, local_rank=0, master_port=free_port(), backend="cpu", **fields)


def test_alone_it_says_what_is_here(capsys, monkeypatch):
    monkeypatch.setenv("CYXTRAIN_SECRET", "nobody's business")
    assert examine(config_of()) == 0
    out = capsys.readouterr().out
    for words in ("PyTorch ok", "MASTER_PORT ok", "memory", "gloo ok", "tcp ok", "CYXTRAIN_SECRET set"):
        assert words in squeezed(out)
    assert "nobody's business" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert squeezed(out).endswith(
        "nothing is broken here; cyxtrain launch -n 2 -- cyxtrain doctor also tests the connection between processes"
    )


def test_accelerators_other_than_cuda_are_listed(capsys, monkeypatch):
    monkeypatch.setattr("cyxtrain.environment.accelerator.visible", lambda: torch.device("xpu"))
    monkeypatch.setattr("cyxtrain.environment.accelerator.count", lambda: 2)
    monkeypatch.setattr("cyxtrain.environment.accelerator.name_of", lambda device: "Arc")
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(total_memory=2**34))
    monkeypatch.setattr("torch.get_device_module", lambda device: module)
    assert examine(config_of()) == 0
    size = terminal.size(2**34)
    assert f"GPUs xpu:0 Arc, {size} xpu:1 Arc, {size}" in squeezed(capsys.readouterr().out)
    monkeypatch.setattr("torch.get_device_module", lambda device: SimpleNamespace())
    assert examine(config_of()) == 0
    assert "GPUs xpu:0 Arc xpu:1 Arc" in squeezed(capsys.readouterr().out)


def test_a_pytorch_that_nobody_has_tested_is_called_untested(capsys, monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.99.0")
    assert examine(config_of()) == 0
    assert "PyTorch untested 2.99.0 (tested: 2.11 to 2.15)" in squeezed(capsys.readouterr().out)


def test_a_backend_that_was_asked_for_and_is_not_here_is_broken(capsys, monkeypatch):
    monkeypatch.setattr("cyxtrain.world.devices.why_no_nccl", lambda: "no CUDA device is visible")
    assert examine(dataclasses.replace(config_of(), backend="nccl")) == 1
    out = capsys.readouterr().out
    assert "nccl BROKEN no CUDA device is visible. DISTRIBUTED_BACKEND requests it" in squeezed(out)
    assert out.splitlines()[-1] == "broken: nccl"


def test_a_variable_that_cannot_be_is_broken(capsys, monkeypatch):
    monkeypatch.setenv("CYXTRAIN_TRANSPORT", "pigeon")
    assert examine(config_of()) == 1
    assert "CYXTRAIN_TRANSPORT in the environment must be auto or tcp or" in squeezed(capsys.readouterr().out)


def test_a_port_that_is_in_use_is_said():
    with socket.create_server(("", 0)) as listener:
        fact = local_checks._port(dataclasses.replace(config_of(), master_port=listener.getsockname()[1]))
    assert fact.state == "no"
    assert "address already in use" in fact.text


def test_a_transport_that_does_not_work_is_broken_only_where_it_is_asked_for():
    ways = {"unix": "no", "tcp": ""}
    for requested in ("auto", "cma"):  # which means auto
        unix, tcp = local_checks._transports(ways, requested)
        assert (unix.state, unix.text) == ("no", "no")
        assert (tcp.state, tcp.text) == ("ok", "the loopback interface; the ring uses it")
    unix, tcp = local_checks._transports(ways, "unix")
    assert (unix.state, unix.text) == ("BROKEN", "no. CYXTRAIN_TRANSPORT=unix requests it: unset it")
    assert (tcp.state, tcp.text) == ("ok", "the loopback interface")
    ways["tcp"] = "no"
    assert local_checks._transports(ways, "auto")[1].state == "BROKEN"


@pytest.mark.parametrize(("requested", "used"), [("auto", "unix"), ("cma", "unix"), ("unix", "unix"), ("tcp", "tcp")])
def test_of_transports_that_work_the_ring_uses_the_fastest_or_the_one_that_is_asked_for(requested, used):
    found = local_checks._transports({"unix": "", "tcp": ""}, requested)
    assert [fact.state for fact in found] == ["ok", "ok"]
    assert [fact.name for fact in found if fact.text.endswith("; the ring uses it")] == [used]


def test_transports_are_tried():
    failures = try_transports()
    assert list(failures) == ["unix", "tcp"]
    assert failures["tcp"] == ""
    assert failures["unix"] == ("" if sys.platform == "linux" else "Linux only")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no abstract Unix sockets")
def test_a_transport_that_does_not_work_is_reported_with_the_reason(monkeypatch):
    def listen_and_refuse(_transport):
        sock = socket.socket(socket.AF_UNIX)
        sock.bind("\0nobody-listens-here-" + os.urandom(8).hex())
        return sock

    monkeypatch.setattr(probe, "listen_unix", listen_and_refuse)
    assert try_transports() == {"unix": "[Errno 111] Connection refused", "tcp": ""}
    monkeypatch.setattr(probe, "listen_unix", lambda _transport: None)
    assert try_transports() == {"unix": "not available on this system", "tcp": ""}


def test_the_interface_of_an_address_is_found():
    assert local_checks.interface_of("127.0.0.1") in ("lo", "")  # "": not Linux
    assert local_checks.interface_of("192.0.2.1") == local_checks.interface_of("") == ""


# --- who comes ------------------------------------------------------------------------------------------------------


def test_who_comes_when_rank_0_has_ceased_to_wait_hears_so():
    store = dist.HashStore()
    board = StoreClient(store, "rank 2", Deadline(5.0))
    board.write("roster", Roster([0, 1], "ab"))
    with pytest.raises(cx.RendezvousError, match="rank 2 registered after rank 0 had stopped waiting"):
        store_exchange.read_roster(board, 2, Deadline(5.0))


def test_a_rank_that_rank_0_never_speaks_to_gives_up():
    with pytest.raises(cx.RendezvousError, match="rank 1 waited for rank 0, which did not register"):
        store_exchange.read_roster(StoreClient(dist.HashStore(), "rank 1", Deadline(5.0)), 1, Deadline(0.05))


def test_two_processes_of_one_rank_are_told_apart():
    board = StoreClient(dist.HashStore(), "rank 1", Deadline(5.0))
    store_exchange.register(board, 1, info(1).record, MACHINE)
    other = dataclasses.replace(info(1).record, token="of another process")
    with pytest.raises(cx.RendezvousError, match="rank 1 is taken"):
        store_exchange.register(board, 1, other, MACHINE)
    assert store_exchange.read_infos(board, [1])[1].record == info(1).record


@pytest.mark.parametrize(
    "text",
    ["[1, 2", '{"ranks": [0, "1"], "token": ""}', '{"ranks": [0], "token": "no"}'],
)
def test_what_no_rank_has_written_is_said(text):
    store = dist.HashStore()
    store.set("roster", text)
    with pytest.raises(cx.RendezvousError, match="holds what no rank has written"):
        store_exchange.read_roster(StoreClient(store, "rank 1", Deadline(5.0)), 1, Deadline(5.0))


# --- real processes -------------------------------------------------------------------------------------------------


def reported(outcomes: list[Ended], code: int) -> str:
    """What rank 0 printed; the others print nothing, and return 0."""
    found = values(outcomes)
    assert [each["code"] for each in found] == [code] + [0] * (len(found) - 1), found[0]["out"]
    assert not any(each["out"] for each in found[1:])
    return str(found[0]["out"])


def test_three_ranks_of_one_machine_are_well():
    out = reported(run_ranks(3, examine_here), 0)
    assert rows(out) == {"0 - 1": "ok", "0 - 2": "ok", "1 - 2": "ok"}
    assert out.splitlines()[-1] == "all 3 pairs are OK"
    assert len(re.findall(r"127\.0\.0\.1:\d+  lo", out)) == 3


def test_a_rank_that_never_comes_is_named_and_the_others_are_tried():
    port = free_port()
    environments = [environment(rank, 3, port, DISTRIBUTED_TIMEOUT_MS="900") for rank in (0, 2)]
    out = reported(run_processes(examine_here, environments), 1)
    assert "rank 1 did not register within 0.9 s. Was it started, with RANK=1 WORLD_SIZE=3" in squeezed(out)
    assert rows(out) == {"0 - 2": "ok"}
    assert out.splitlines()[-1] == "the pair is OK; missing: rank 1"


@pytest.mark.parametrize(("rank", "peer"), [(1, 2), by_night(2, 1)])
def test_a_pair_of_which_one_way_is_closed_is_named_and_no_other(rank, peer):
    out = reported(run_ranks(3, examine_with_one_way_closed, rank, peer), 1)
    assert rows(out) == {"0 - 1": "ok", "0 - 2": "ok", "1 - 2": "BROKEN"}
    said = squeezed(out)
    assert re.search(rf"rank {rank} \(127.0.0.1\) cannot reach rank {peer} \(127.0.0.1:\d+\): connection refused", said)
    assert len(re.findall("cannot reach", said)) == 1
    assert out.splitlines()[-1] == "broken: 1 - 2; the other 2 are OK"


def test_a_rank_that_dies_in_the_middle_is_broken_pairs_and_no_wait():
    began = time.monotonic()
    outcomes = run_ranks(3, examine_and_die, 2)
    assert outcomes[2].kind == "Killed"
    out = reported(outcomes[:2], 1)
    assert rows(out) == {"0 - 1": "ok", "0 - 2": "BROKEN", "1 - 2": "BROKEN"}
    assert "its process has exited" in squeezed(out)
    assert time.monotonic() - began < 10.0


def test_strangers_at_every_port_change_nothing():
    out = reported(run_ranks(2, examine_among_strangers), 0)
    assert rows(out) == {"0 - 1": "ok"}


def test_ranks_with_different_secrets_are_named():
    port = free_port()
    secrets = ("one", "one", "other")
    environments = [environment(rank, 3, port, CYXTRAIN_SECRET=secret) for rank, secret in enumerate(secrets)]
    out = reported(run_processes(examine_here, environments), 1)
    assert "rank 2 and rank 0 have different secrets." in out
    assert rows(out) == {"0 - 1": "ok", "0 - 2": "ok", "1 - 2": "ok"}


def test_ranks_of_different_worlds_are_named():
    port = free_port()
    for ended in run_processes(examine_here, [environment(0, 2, port), environment(1, 3, port)]):
        assert ended.kind == "RendezvousError"
        assert "started for a world of 3, rank 0 for a world of 2. Start all ranks with the same" in ended.message


def test_a_port_that_is_in_use_and_a_rank_0_that_is_not_there_are_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first = run_processes(examine_here, [environment(0, 2, port)])[0]
    other = run_processes(examine_here, [environment(1, 2, free_port(), DISTRIBUTED_TIMEOUT_MS="300")])[0]
    assert (first.kind, other.kind) == ("RendezvousError", "RendezvousError")
    assert f"port {port} is in use on this machine" in first.message
    assert "rank 1 could not reach rank 0 at" in other.message


# --- several hosts --------------------------------------------------------------------------------------------------


def on_hosts(network, places, *arguments):
    network.start(places, examine_here, *arguments)
    found = network.results(60.0)
    bad = [result for result in found if result.returncode != 0]
    assert not bad, "\n".join(result.stdout for result in bad)
    assert not any(result.value["out"] for result in found[1:])
    return found[0].value


@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.nightly
def test_a_link_between_two_hosts_that_is_cut_is_named_and_no_other():
    with hosts.hosts(3) as network:
        network.hosts[1].run("ip", "route", "add", "blackhole", f"{network.hosts[2].address}/32")
        found = on_hosts(network, [0, 1, 2], 1.0)
        addresses = [host.address for host in network.hosts]
    said = squeezed(found["out"])
    assert found["code"] == 1
    assert rows(found["out"]) == {"0 - 1": "ok", "0 - 2": "ok", "1 - 2": "BROKEN"}
    assert f"rank 1 ({addresses[1]}) cannot reach rank 2 ({addresses[2]}:" in said
    assert f"rank 2 ({addresses[2]}) cannot reach rank 1 ({addresses[1]}:" in said
    assert said.endswith("broken: 1 - 2; the other 2 are OK")


@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.nightly
def test_four_ranks_on_two_hosts_are_well():
    with hosts.hosts(2) as network:
        found = on_hosts(network, [0, 0, 1, 1])
    assert found["code"] == 0, found["out"]
    assert set(rows(found["out"]).values()) == {"ok"}
    assert found["out"].splitlines()[-1] == "all 6 pairs are OK"
    ways = dict(re.findall(r"^(\d - \d) +ok +(\w+)", found["out"], re.M))
    assert [ways[pair] for pair in ("0 - 2", "0 - 3", "1 - 2", "1 - 3")] == ["tcp"] * 4
    assert ways["0 - 1"] == ways["2 - 3"] == "unix"


@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.nightly
def test_hosts_between_which_large_packets_are_lost_are_told_to_look_at_their_mtu():
    with hosts.hosts(3) as network:
        for host in network.hosts[1:]:  # what they send each other is larger than the bridge takes
            for setting, value in (("mtu", "9000"), ("gso_max_segs", "1")):
                host.run("ip", "link", "set", "eth0", setting, value)
        found = on_hosts(network, [0, 1, 2])
    assert rows(found["out"]) == {"0 - 1": "ok", "0 - 2": "ok", "1 - 2": "BROKEN"}
    said = squeezed(found["out"])
    assert re.search(
        r"rank 2 \([\d.]+\) can send only short messages to rank 1 \([\d.:]+\): short messages arrive, and 256", said
    )
    assert "Is the MTU the same on both machines" in said


@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.nightly
def test_a_rank_that_is_stopped_on_another_host_is_named_and_all_others_are_tried():
    with hosts.hosts(3) as network:
        network.start([0, 1, 2], examine_and_stop, 2)
        wait_until(lambda: all((network.folder / f"value{rank}").exists() for rank in (0, 1)), 60.0)
        first, second, _ = network.results(0.1)
    assert (first.value["code"], second.value) == (1, {"code": 0, "out": ""})
    assert rows(first.value["out"]) == {"0 - 1": "ok", "0 - 2": "BROKEN", "1 - 2": "BROKEN"}
    said = squeezed(first.value["out"])
    assert (
        len(re.findall(r"got no answer from rank 2 \([\d.:]+\): it did not take part in the test. Is it stopped", said))
        == 2
    )
