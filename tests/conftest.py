"""Every test starts in an empty folder, and fails if it leaves anything behind."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import lazy
import leaks
import markers
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what test_torch_versions.py may be given."""
    text = "a version of PyTorch, and a Python that has it: 2.15=/path/to/python"
    parser.addoption("--python", action="append", default=[], help=text)


def pytest_configure() -> None:
    """Let the tests' processes receive Ctrl-C in a shell's background, too: they inherit that it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Mark the cases of each test that `nightly_where` asks for."""
    found = yield
    if isinstance(found, list) and found:
        markers.mark_nightly_cases(found)
    return found


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: all that is imported stays, and each time all of it is searched."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()  # later collections leave out what is imported, with all of PyTorch
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the tests of a file to one worker (`--dist loadgroup` does nothing on pytest 9.2 with xdist 3.8)."""
    from xdist.scheduler import LoadScopeScheduling

    def group_of(nodeid: str) -> str:
        # What a module prepares, it prepares once; so do those that parse the package. Faults have deadlines, so no two
        # of them run at a time.
        file = Path(nodeid.partition("::")[0])
        return file.parent.name if file.parent.name in ("fault", "structure") else file.name

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = group_of
    return scheduler


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Use one worker more than there are cores: many tests wait for a process to start, or for a deadline."""
    return (yield) + 1


@pytest.fixture(scope="session")
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tests begin: one folder for all, as pytest takes the longer to make one the more there are."""
    return tmp_path_factory.mktemp("cwd")


@pytest.fixture(autouse=True)
def nothing_left_behind(empty_folder: Path) -> Iterator[None]:
    """Compares threads, processes, descriptors, environment and files before and after a test."""
    with leaks.nothing_left_behind(empty_folder):
        yield


@pytest.fixture(autouse=True, scope="module")
def lazy_modules_are_imported(request: pytest.FixtureRequest) -> None:
    """Import what a file names lazily before its first test: some libraries set environment variables."""
    lazy.import_lazy_modules(vars(request.module))


@pytest.fixture(autouse=True, scope="module")
def kept_worlds_end() -> Iterator[None]:
    """Ends the worlds of ranks that stayed from one test of a module to the next."""
    yield
    if kept := sys.modules.get("kept_worlds"):
        kept.close_worlds()


@pytest.fixture(scope="session")
def pipe_of_pytorchs_stores() -> None:
    """PyTorch's first TCP store opens a pipe that the process keeps: here, before a test with a store begins."""
    import torch.distributed as dist

    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As many cores as the test's parameter says, for all that the ranks of this process know."""
    count: int = request.param
    monkeypatch.setattr("cyxtrain.ring.rendezvous.rendezvous.count_usable_cores", lambda: count)
    return count


@pytest.fixture(scope="session")
def rank_server() -> None:
    """Start the server of rank_processes; imported here, as the process that only hands out tests needs no torch."""
    import rank_processes

    rank_processes.start_server()


@pytest.fixture
def alone() -> Iterator[None]:
    """Make this process a world of one."""
    import fitting

    with fitting.one_process():
        yield


@pytest.fixture(scope="session")
def needs_hosts() -> None:
    """Skip tests where this machine cannot have several hosts: finding out starts two."""
    import hosts

    if reason := hosts.why_not():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def fakegpu_folder(rank_server: None) -> Path:
    """Where the stand-in for a GPU has been built: `run_on_stand_in(fakegpu_folder, ...)`; see stand_in."""
    from stand_in import fakegpu

    if reason := fakegpu.why_not():
        pytest.skip(f"the stand-in for a GPU cannot be built: {reason}")
    return fakegpu.built()
