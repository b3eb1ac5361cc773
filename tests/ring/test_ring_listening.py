"""Where a rank listens: at an address that the others reach; which one that is, the routing table says."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from worlds import free_port

from cyxtrain.config import DistributedConfig, complete_config
from cyxtrain.environment import process_env
from cyxtrain.errors import RendezvousError
from cyxtrain.ring.rendezvous import listen, store
from cyxtrain.workers import machine
from cyxtrain.world import join


class Network:
    """What this machine's names and routes are; in the place of `socket` in `listening`."""

    AF_INET, AF_UNIX, SOCK_DGRAM, SOCK_STREAM = socket.AF_INET, socket.AF_UNIX, socket.SOCK_DGRAM, socket.SOCK_STREAM

    def __init__(self, names: dict[str, str], routes: dict[str, str]) -> None:
        self.names, self.routes, self.asked = names, routes, ""

    def getaddrinfo(self, host: str, port: int, type: int) -> list[tuple[object, ...]]:
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, type, 0, "", (self.names[host], port))]

    def socket(self, family: int, kind: int, protocol: int = 0) -> Network:
        if family == self.AF_UNIX:
            raise OSError(errno.EACCES, "no such sockets here")
        return self

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def connect(self, address: tuple[str, int]) -> None:
        if address[0] not in self.routes:
            raise OSError(errno.ENETUNREACH, "no route")
        self.asked = address[0]

    def getsockname(self) -> tuple[str, int]:
        return self.routes[self.asked], 1


@pytest.mark.parametrize(
    ("host", "names", "routes", "own"),
    [
        ("localhost", {}, {}, "127.0.0.1"),
        ("127.0.1.1", {}, {}, "127.0.0.1"),
        ("node0", {"node0": "10.0.0.1"}, {"10.0.0.1": "10.0.0.7"}, "10.0.0.7"),
        # Its own name leads to a loopback address: the default route's is taken.
        ("me", {"me": "127.0.1.1"}, {"127.0.1.1": "127.0.0.1", "192.0.2.1": "10.0.0.7"}, "10.0.0.7"),
        ("gone", {}, {"192.0.2.1": "10.0.0.7"}, "10.0.0.7"),
        ("me", {"me": "127.0.1.1"}, {"127.0.1.1": "127.0.0.1"}, "127.0.0.1"),  # it has no network
    ],
)
def test_a_rank_listens_where_it_is_reached_from_the_store(monkeypatch, host, names, routes, own):
    monkeypatch.setattr(listen, "socket", Network({"192.0.2.1": "192.0.2.1", **names}, routes))
    assert listen.own_address(host) == own


def test_of_a_store_in_a_file_the_default_route_is_taken(tmp_path):
    assert listen._store_host(dist.FileStore(str(tmp_path / "store"), 2)) == "192.0.2.1"


def test_where_it_cannot_listen_its_rank_and_address_are_said(monkeypatch):
    monkeypatch.setattr(listen, "own_address", lambda host: "192.0.2.1")  # nobody's
    with pytest.raises(RendezvousError, match=r"rank 3 cannot listen at 192\.0\.2\.1 \(.+\)") as caught:
        listen.listen(3, dist.HashStore(), "tcp")
    assert caught.value.rank == 3


# --- the store ------------------------------------------------------------------------------------------------------


def test_rank_0_says_why_it_cannot_wait_at_its_address():
    with pytest.raises(RendezvousError, match=r"cannot wait at 127\.0\.0\.300:29500: (?!unknown)"):
        store.serve_store("127.0.0.300", 29500, 2, None, 1.0)


def test_without_ipv6_the_store_is_reached_by_ipv4(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with store._listen("node0", 0) as listener:
        assert listener.family == socket.AF_INET
        assert listener.getsockname()[0] == "0.0.0.0"


@pytest.mark.usefixtures("pipe_of_pytorchs_stores")
@pytest.mark.skipif(sys.platform != "linux", reason="a packet filter of Linux")
def test_a_store_of_pytorchs_that_is_closed_to_newcomers_keeps_its_members():
    served, listener = store.host_store("127.0.0.1", 10.0)
    member = store.reach_tcp_store(1, "127.0.0.1", served.port, 2, 10.0)
    store.close_to_newcomers(listener)
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", served.port), timeout=0.2)
    member.set("key", "value")
    assert served.get("key") == b"value"


def test_an_interrupted_rank_0_gives_its_port_back(monkeypatch):
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    port = free_port()
    with monkeypatch.context() as patch:
        patch.setattr(store, "await_listener", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.serve_store("127.0.0.1", port, 2, None, 1.0)
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux a port can be kept for who listens there later")
def test_rank_0_listens_at_the_port_that_is_held_for_it_and_only_once():
    with machine.free_port() as port:
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        served = store.serve_store("127.0.0.1", port, 2, None, 5.0, is_held=True)
        member = store.reach_store(1, "127.0.0.1", port, 2, None, 5.0)
        member.set("key", "value")
        assert served.get("key") == b"value"
        with pytest.raises(RendezvousError, match=f"port {port} is in use"):
            store.serve_store("127.0.0.1", port, 2, None, 1.0, is_held=True)
        member.close()
        served.close()


def test_the_port_that_is_held_belongs_to_one_master_port():
    variables = {"CYXTRAIN_PORT": "29500 40001"}
    is_linux = sys.platform == "linux"
    assert process_env.held_port(29500, variables) == (40001 if is_linux else None)
    assert process_env.held_port(29501, variables) is None
    assert process_env.held_port(29500, {}) is None


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
def test_a_rank_that_has_no_files_left_says_so_at_once(code, monkeypatch):
    """Not that a firewall or another program is in the way."""

    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket, "create_connection", refuse)
    config = complete_config(DistributedConfig(rank=1, world_size=2, master_port=free_port(), timeout_ms=60_000))
    with pytest.raises(
        RendezvousError, match=rf"^rank 1 cannot join: {os.strerror(code)}; (raise|free) [^.]*\.$"
    ) as caught:
        join.join(config)
    assert caught.value.rank == 1
    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(RendezvousError, match=r"^rank 0 cannot join: "):
        join.join(dataclasses.replace(config, rank=0))


def test_a_rank_that_has_met_itself_goes_on_looking(monkeypatch):
    """By chance the kernel connects a socket to itself, where the port that is tried is the one that it gives."""
    itself = SimpleNamespace(getsockname=lambda: "itself", getpeername=lambda: "itself", close=lambda: None)
    monkeypatch.setattr(socket, "create_connection", lambda *arguments, **named: itself)
    assert store.await_listener("127.0.0.1", 1, 0.0) == "connection refused (1 tries)"


def test_a_connection_that_has_ended_before_it_is_used_is_closed(monkeypatch):
    def no_peer():
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    closed = []
    ended = SimpleNamespace(getsockname=lambda: "here", getpeername=no_peer, close=lambda: closed.append(True))
    monkeypatch.setattr(socket, "create_connection", lambda *arguments, **named: ended)
    assert store.await_listener("127.0.0.1", 1, 0.0) == "transport endpoint is not connected (1 tries)"
    assert closed == [True]
