"""Ranks find each other, in any order and as often as they like; where they do not, each says why, and in time."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_programs import ForkedProgram
from joined_ranks import join, own_rank
from kept_worlds import on_ranks
from markers import by_night
from rank_processes import environment, run_processes, run_ranks, values
from worlds import child_environment, free_port, wait_until

import cyxtrain as cx
from cyxtrain.ring.rendezvous.key_values import Connection
from cyxtrain.ring.rendezvous.store_client import StoreLostError
from cyxtrain.world import join as joining

pytestmark = pytest.mark.usefixtures("rank_server")
LATE = 0.5  # seconds after the deadline that an error may come


def join_three_times(backend):
    for _ in range(3):
        assert join(10.0, backend=backend)[0] == "joined"


def join_late(delays):
    time.sleep(delays[own_rank()])
    return join(10.0)


def join_at_once_or_never(backend):
    return None if own_rank() == 2 else join(1.0 if own_rank() == 1 else 20.0, backend=backend)


def join_with_patience(folder):
    """Rank 1 gives up twice before rank 0 comes."""
    gave_up = Path(folder) / "gave up"
    if own_rank() == 0:
        wait_until(gave_up.exists)
        return [join(10.0)]
    tries = [join(0.3), join(0.3)]
    gave_up.touch()
    return [*tries, join(10.0)]


def join_unless_exited(exited):
    return None if own_rank() == exited else join(1_000.0)


def join_again_before_rank_0_has_left(folder):
    """The store of rank 0 is still open for the first life when the others want to begin their second one."""
    waiting = [Path(folder) / f"waiting {rank}" for rank in range(1, int(os.environ["WORLD_SIZE"]))]
    cx.init()
    if own_rank() == 0:
        wait_until(lambda: all(file.exists() for file in waiting))
    else:
        await_end = Connection.await_end

        def tell_and_await(connection, seconds):
            waiting[own_rank() - 1].touch()
            return await_end(connection, seconds)

        Connection.await_end = tell_and_await
    dist.destroy_process_group()  # finalize would wait for rank 0
    return join(10.0)[0]


def join_again_without_rank_0(folder):
    """Rank 0 stays in the first life until the other one has given up its second."""
    gave_up = Path(folder) / "gave up"
    cx.init()
    if own_rank() == 0:
        wait_until(gave_up.exists)
        return None
    dist.destroy_process_group()
    outcome = join(0.3)
    gave_up.touch()
    return outcome


def join_and_leave(times, folder):
    """Returns the last sum, and what came to stdout and stderr meanwhile, also from PyTorch's C++."""
    printed = Path(folder) / f"printed {own_rank()}"
    os.environ["CYXTRAIN_SECRET"] = "known to all ranks"
    with printed.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    for _ in range(times):
        with cx.init():
            total = torch.ones(1)
            cx.all_reduce(total)
    return total.item(), printed.read_text()


def join_and_keep_the_group():
    cx.init()
    group = dist.group.WORLD
    cx.finalize()
    assert join()[0] == "joined"
    return group.rank()


def join_as_rank_0_of_two():
    return join(1.0, rank=0, world_size=2)


def join_as(places):
    rank, world_size = places[own_rank()]
    os.environ["CYXTRAIN_SECRET"] = "known to all"
    return join(60.0, rank=rank, world_size=world_size)


def join_by_code(port):
    rank = int(os.environ["WHO"])
    cx.init(cx.DistributedConfig(rank=rank, world_size=2, master_port=port))
    return cx.get_rank(), cx.get_world_size(), cx.get_local_rank(), cx.is_master()


def join_under_pytorchs_names(port):
    with cx.init_process_group("cpu", f"tcp://localhost:{port}", world_size=2, rank=int(os.environ["WHO"])):
        return cx.get_rank(), cx.get_world_size()


def adopt(backend):
    dist.init_process_group(backend)
    with cx.init():
        assert (cx.get_rank(), cx.get_world_size(), cx.get_local_rank()) == (own_rank(), 2, own_rank())
        cx.barrier()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.destroy_process_group()


def adopt_what_must_have_a_secret(backend):
    os.environ["CYXTRAIN_SECRET"] = "the secret of this run"
    dist.init_process_group(backend)
    try:
        return cx.init(cx.DistributedConfig(require_secret=True)) is not None
    finally:
        dist.destroy_process_group()


def end(how):
    """Rank 1 ends in some way in the middle; the others wait for it."""
    world = cx.init()
    if own_rank() != 1:
        cx.barrier()
    elif how == "an exception in the context":
        with world:
            raise KeyError("what is wrong")
    elif how == "a good end in the context":
        with world:
            sys.exit(0)


@pytest.mark.parametrize("backend", ["cpu", by_night("gloo")])
def test_three_ranks_join_and_leave_three_times_at_the_same_port(backend):
    values(run_ranks(3, join_three_times, backend))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_three_ranks_join_and_leave_again_and_again():
    for _ in range(200):
        values(run_ranks(3, join_three_times, "cpu"))


@pytest.mark.parametrize("delays", [(0.0, 0.3, 0.6), by_night((0.6, 0.0, 0.3)), by_night((0.6, 0.3, 0.0))], ids=str)
def test_ranks_come_in_any_order(delays):
    assert [value[0] for value in values(run_ranks(3, join_late, delays))] == ["joined"] * 3


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ranks_meet_at_an_ipv6_address_in_brackets():
    port = free_port()
    environments = [environment(rank, 2, port, MASTER_ADDR="[::1]") for rank in (0, 1)]
    assert [outcome[0] for outcome in values(run_processes(join, environments, 10.0))] == ["joined"] * 2


def test_rank_that_gave_up_can_come_again(tmp_path):
    tries = values(run_ranks(2, join_with_patience, str(tmp_path)))[1]
    assert [found for found, *_ in tries] == ["RendezvousError", "RendezvousError", "joined"]


def test_store_of_the_life_before_is_left_for_that_of_the_next_one(tmp_path):
    assert values(run_ranks(3, join_again_before_rank_0_has_left, str(tmp_path))) == ["joined"] * 3


def test_rank_0_that_stays_in_the_life_before_is_said_at_the_deadline(tmp_path):
    kind, message, rank, seconds = values(run_ranks(2, join_again_without_rank_0, str(tmp_path)))[1]
    assert (kind, rank) == ("RendezvousError", 0)
    assert "rank 0 has not left the world that this process has left" in message
    assert seconds >= 0.3


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "times"), [(4, 20), (2, 200)])
def test_joining_and_leaving_again_and_again_prints_nothing(ranks, times, tmp_path):
    assert values(run_ranks(ranks, join_and_leave, times, str(tmp_path))) == [(float(ranks), "")] * ranks


def test_group_that_somebody_still_holds_does_not_hold_the_port():
    assert values(run_ranks(2, join_and_keep_the_group)) == [0, 1]


@pytest.mark.parametrize("backend", ["cpu", by_night("gloo")])
def test_rank_that_never_comes_is_named_on_every_rank_that_waits(backend):
    ended = run_ranks(4, join_at_once_or_never, backend)
    for rank, value in enumerate(values(ended)):
        if rank != 2:
            name, message, missing, seconds = value
            assert (name, missing) == ("RendezvousError", 2)
            assert "rank 2 of a world of 4 did not join" in message
            assert seconds < (1.0 + LATE if rank == 1 else 5.0)  # the first deadline of all ends it for all


@pytest.mark.parametrize("places", [by_night([(0, 2), (1, 3)]), [(0, 4), (1, 4), (1, 2)], [(0, 2), (3, 4)]], ids=str)
def test_ranks_of_different_worlds_are_refused_with_both_sizes_before_the_deadline(places):
    sizes = f"for a world of {places[-1][1]}, rank 0 for a world of {places[0][1]}"
    for _, message, *_ in values(run_ranks(len(places), join_as, places)):
        assert sizes in message or message.startswith("rank 1 lost the store")  # it may have ended with rank 0


def test_busy_port_is_said_by_rank_0_with_its_number():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = run_processes(join_as_rank_0_of_two, [{"MASTER_PORT": str(port)}])
    name, message, rank, seconds = values(ended)[0]
    assert (name, rank) == ("RendezvousError", 0)
    assert f"port {port} is in use" in message
    assert "MASTER_PORT" in message
    assert seconds < LATE


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        ("127.0.0.1", "connection refused"),
        by_night("no-such-host.invalid", "the name cannot be resolved"),
    ],
)
def test_unreachable_master_is_said_with_the_true_cause_within_the_deadline(address, cause):
    port = free_port()
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    name, message, rank, seconds = values(run_processes(join, [variables], 1.0))[0]
    assert (name, rank) == ("RendezvousError", 0)
    assert f"rank 1 could not reach rank 0 at {address}:{port}" in message
    assert cause in message
    assert 0.9 < seconds < 1.0 + LATE


def test_rank_0_whose_address_is_not_its_own_says_so():
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": str(free_port())}
    name, message, rank, seconds = values(run_processes(join, [variables], 1.0))[0]
    assert (name, rank) == ("RendezvousError", 0)
    assert "the name cannot be resolved" in message
    assert "MASTER_ADDR" in message
    assert seconds < 1.0 + LATE


@contextlib.contextmanager
def black_hole():
    """A port that answers nothing: Linux drops who knocks where as many wait as may wait."""
    with socket.socket() as server, contextlib.ExitStack() as waiting:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(8):
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
        yield server.getsockname()[1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems refuse instead of dropping")
def test_black_hole_is_said_to_be_one_within_the_deadline():
    with black_hole() as port:
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        name, message, rank, seconds = values(run_processes(join, [variables], 1.0))[0]
    assert (name, rank) == ("RendezvousError", 0)
    assert f"rank 1 could not reach rank 0 at 127.0.0.1:{port}" in message
    assert "no answer (timed out)" in message
    assert "firewall" in message
    assert 0.9 < seconds < 1.0 + LATE


@contextlib.contextmanager
def stranger(answer):
    """Another program's port: it accepts, and says nothing or something of its own, or closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            accepted = []
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(server.accept()[0])
                    if answer is None:
                        accepted.pop().close()
                    else:
                        accepted[-1].sendall(answer)
            for connection in accepted:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "answer",
    [b"", by_night(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10), by_night(None)],
    ids=["silent", "web", "closing"],
)
def test_another_service_on_the_port_is_told_from_the_meeting_point(answer):
    with stranger(answer) as port:
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        name, message, rank, seconds = values(run_processes(join, [variables], 1.0))[0]
    assert (name, rank) == ("RendezvousError", 0)
    assert f"found something at 127.0.0.1:{port} that is not the store" in message
    assert 0.5 < seconds < 1.0 + LATE


@pytest.mark.parametrize("program", [join_by_code, join_under_pytorchs_names])
def test_config_in_code_needs_no_environment(program):
    environments = [{"WHO": "0"}, {"WHO": "1"}]
    found = values(run_processes(program, environments, free_port()))
    assert [value[:2] for value in found] == [(0, 2), (1, 2)]


@on_ranks(2)
def test_settings_in_code_leave_the_rest_to_the_environment():
    cx.finalize()
    with cx.init(cx.DistributedConfig(collective_timeout_ms=5000)):
        assert (cx.get_rank(), cx.get_world_size()) == (own_rank(), 2)
        cx.barrier()


@pytest.mark.parametrize("backend", ["gloo", "ring"])
def test_group_that_pytorch_made_is_adopted_on_every_rank(backend):
    values(run_ranks(2, adopt, backend))


@pytest.mark.parametrize("backend", ["ring", "gloo", by_night("cpu:gloo,cuda:ring")])
def test_a_group_that_asks_for_no_secret_is_not_adopted_where_one_is_required(backend):
    for ended in run_ranks(2, adopt_what_must_have_a_secret, backend):
        if backend == "ring":
            assert ended.value is True
        else:
            assert ended.kind == "ConfigError"
            assert (
                "the default group goes over gloo, which lets in every process that reaches its port" in ended.message
            )


def test_exception_in_the_program_of_one_rank_reaches_the_others_with_its_name():
    ended = run_ranks(3, end, "an exception in the context")
    assert [outcome.kind for outcome in ended] == ["PeerLostError", "KeyError", "PeerLostError"]
    for outcome in (ended[0], ended[2]):
        assert outcome.error["rank"] == 1
        assert "rank 1 has ended: KeyError: 'what is wrong'" in outcome.message


def test_good_end_is_no_loss():
    ended = run_ranks(2, end, "a good end in the context")
    assert [outcome.kind for outcome in ended] == ["CollectiveMismatchError", "SystemExit"]
    assert "rank 1 has left" in ended[0].message


# --- whole programs ------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
import torch
import cyxtrain as cx
cx.init()
total = torch.ones(1)
cx.all_reduce(total)
who = f"rank {cx.get_rank()} of {cx.get_world_size()}, local {cx.get_local_rank()}"
os.write(1, f"{who}: {total.item():g}\\n".encode())  # in one piece
if "fail" in sys.argv and cx.get_rank() == 1:
    raise KeyError("what is wrong")
cx.barrier()
cx.finalize()
cx.init()  # again, at the same port
cx.barrier()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return str(path)


@pytest.mark.nightly
def test_program_under_torchrun_joins_as_it_is(program):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", program]
    ran = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["rank 0 of 2, local 0: 2", "rank 1 of 2, local 1: 2"]


def test_exception_in_a_program_is_told_and_all_exit_codes_are_1(program, tmp_path):
    port = free_port()
    variables = [environment(rank, 2, port) for rank in (0, 1)]
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(ForkedProgram([program, "fail"], tmp_path, each)) for each in variables]
        first, last = [rank.wait() for rank in ranks]
    assert (first.returncode, last.returncode) == (1, 1)
    assert "PeerLostError: rank 1 has ended: KeyError: 'what is wrong'" in first.stderr
    assert "KeyError: 'what is wrong'" in last.stderr
    assert "PeerLostError" not in last.stderr


def test_what_another_backend_cannot_do_is_said_with_what_to_do(monkeypatch):
    def refuse(*arguments, **named):
        raise RuntimeError("no such network card")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(cx.RendezvousError, match=r"no such network card.*other ranks"):
        cx.init(cx.DistributedConfig(rank=0, world_size=1, backend="gloo"))
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(cx.BackendUnavailableError, match="Use backend='cpu'"):
        cx.init(cx.DistributedConfig(rank=0, world_size=1, backend="gloo"))
    assert not cx.is_initialized()


def test_rank_0_that_loses_its_own_store_does_not_open_it_again(monkeypatch):
    tries = []

    def lose(*arguments):
        tries.append(arguments)
        raise StoreLostError("rank 0 lost the store.")

    monkeypatch.setattr(joining, "_make_groups", lose)
    with pytest.raises(StoreLostError):
        cx.init(cx.DistributedConfig(rank=0, world_size=1))
    assert len(tries) == 1


@pytest.mark.parametrize("exited", [0, by_night(2)])
def test_a_rank_that_the_launcher_has_seen_exit_is_not_waited_for(exited, tmp_path):
    (tmp_path / "exited").write_text(f"{exited}\n")
    outcomes = values(run_ranks(3, join_unless_exited, exited, CYXTRAIN_EXITED=str(tmp_path / "exited")))
    for rank, (how, message, *_) in enumerate(filter(None, outcomes)):
        assert how == "RendezvousError", rank
        assert message.startswith(f"rank {exited} has exited with code 0 without joining, while others of the 3 ranks")
