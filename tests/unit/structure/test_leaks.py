"""The guard that every test runs under finds whatever is left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from leaks import nothing_left_behind

import cyxtrain  # noqa: F401 - it registers the backend "ring"


def check(folder, leave, what):
    with pytest.raises(AssertionError, match=f"left behind: .*{what}"), nothing_left_behind(folder, seconds=0.05):
        leave()


def test_what_ends_in_time_is_not_left_behind(tmp_path):
    with nothing_left_behind(tmp_path):
        threading.Timer(0.02, lambda: None).start()


def test_a_thread_is_found(tmp_path):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    check(tmp_path, thread.start, "threads.*forgotten")
    stop.set()
    thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell")
def test_a_socket_is_found(tmp_path):
    sockets = []
    check(tmp_path, lambda: sockets.append(socket.socket()), "descriptors.*socket:")
    sockets.pop().close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell")
def test_a_process_is_found(tmp_path):
    processes = []

    def leave():
        command = [sys.executable, "-c", "print(flush=True); input()"]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        processes[0].stdout.read(1)  # from then on it has its name

    check(tmp_path, leave, "processes.*input")
    processes.pop().communicate()


def test_a_file_is_found(tmp_path):
    check(tmp_path, lambda: Path("forgotten.txt").touch(), "files.*forgotten.txt")


def test_another_working_folder_is_found(tmp_path):
    home = Path.cwd()
    check(tmp_path, lambda: os.chdir(home), "folders")
    assert home.samefile(Path.cwd())


def test_a_variable_is_found(tmp_path):
    check(tmp_path, lambda: os.environ.update(FORGOTTEN="1"), "variables.*FORGOTTEN")
    del os.environ["FORGOTTEN"]


def test_a_process_group_is_found_and_ended(tmp_path):
    check(
        tmp_path,
        lambda: dist.init_process_group("ring", store=dist.HashStore(), rank=0, world_size=1),
        "process groups",
    )
    assert not dist.is_initialized()
