"""Files in stores: a file has its name only when it is complete, and errors are one line with the URL."""

from __future__ import annotations

import threading
import time
import traceback
from typing import Any

import fsspec
import pytest
import torch
from fitting import fingerprint, make_model
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations
from shelf import Shelf, dying, kept, nothing

import cyxtrain as cx
from cyxtrain.checkpoint import remote_files
from cyxtrain.checkpoint.background_file import BackgroundFile
from cyxtrain.checkpoint.checkpoint_file import CheckpointState, read_checkpoint, write_checkpoint
from cyxtrain.checkpoint.folder import look_into, newest_in
from cyxtrain.checkpoint.remote_files import (
    copy_remote,
    create_remote,
    list_files,
    read_remote,
    read_text_of,
    remove_remote,
    require_reachable,
    staging_folder,
    upload,
    write_remote,
)

RUN = {"id": "0123456789abcdef", "started": 1.0}


@pytest.fixture(autouse=True)
def staging(tmp_path, monkeypatch):
    monkeypatch.setenv("CYXTRAIN_STAGING_DIR", f"{tmp_path}/staging")


@pytest.fixture
def in_order():
    yield
    Shelf.before = staticmethod(nothing)


def test_files_go_there_and_come_back(tmp_path):
    url = f"local://{tmp_path}/store"
    assert list_files(url) == {}
    require_reachable(url, writes=True)
    assert list_files(url) == {}
    (tmp_path / "a").write_bytes(b"1" * 3000)
    seen = []
    upload(tmp_path / "a", f"{url}/deep/b", progress=lambda *_: seen.append(1))
    copy_remote(f"{url}/deep/b", f"{url}/deep/c")
    assert {name: size for name, (size, _) in list_files(f"{url}/deep").items()} == {"b": 3000, "c": 3000}
    assert read_remote(f"{url}/deep/c", "file") == b"1" * 3000
    remove_remote(f"{url}/deep/b")
    remove_remote(f"{url}/deep/b")
    assert kept(tmp_path / "store" / "deep") == {"c"}


def test_in_memory_too(tmp_path):
    url = "memory://store/run"
    (tmp_path / "a").write_bytes(b"1" * 3000)
    seen = []
    require_reachable(url, writes=True)
    upload(tmp_path / "a", f"{url}/b", progress=lambda *_: seen.append(1))
    copy_remote(f"{url}/b", f"{url}/c")
    assert {name: size for name, (size, _) in list_files(url).items()} == {"b": 3000, "c": 3000}
    assert read_remote(f"{url}/c", "file") == b"1" * 3000
    assert seen
    fsspec.filesystem("memory").rm("/store", recursive=True)


def test_a_failed_upload_leaves_the_old_file_and_nothing_else(tmp_path, in_order):
    url = f"shelf://{tmp_path}/store"
    (tmp_path / "old").write_bytes(b"0" * 3000)
    (tmp_path / "new").write_bytes(b"1" * 3000)
    upload(tmp_path / "old", f"{url}/a")
    Shelf.before = staticmethod(dying(2))
    with pytest.raises(cx.CheckpointError, match=r"^Cannot write shelf://.*/a: ConnectionError: the store is gone\. "):
        upload(tmp_path / "new", f"{url}/a")
    assert read_remote(f"{url}/a", "file") == b"0" * 3000
    assert kept(tmp_path / "store") == {"a"}


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(known_implementations, "nolib", {"class": "no_such_lib.X", "err": "Install no_such_lib"})
    for url, words in (("nolib://a/b", "Install no_such_lib. fsspec needs"), ("nothing://a", "not known: nothing")):
        with pytest.raises(cx.ConfigError, match=words):
            require_reachable(url, writes=True)


def test_files_wait_in_one_folder_per_url(tmp_path):
    first = staging_folder("s3://bucket/run")
    assert first == staging_folder("s3://bucket/run")
    assert first.parent == tmp_path / "staging"
    assert first.name.startswith("s3-bucket-run-")
    assert staging_folder("s3://bucket-run") != first


@pytest.mark.parametrize("size", [10, 300_000])
def test_a_checkpoint_is_looked_into_by_its_end(tmp_path, size):
    state = CheckpointState({"weight": torch.zeros(size)}, position={"epoch": 3, "step": 7}, run=RUN)
    write_checkpoint(tmp_path / "epoch-0003.ckpt", state)
    there = look_into(f"local://{tmp_path}/epoch-0003.ckpt")
    here = look_into(tmp_path / "epoch-0003.ckpt")
    assert (there.position, there.run) == (here.position, here.run) == ({"epoch": 3, "step": 7}, RUN)
    assert there.url == there.where == f"local://{tmp_path}/epoch-0003.ckpt"
    newest = newest_in(f"local://{tmp_path}")
    assert newest is not None
    assert newest.where == there.url


def test_a_cut_checkpoint_is_corrupt(tmp_path):
    write_checkpoint(tmp_path / "epoch-0003.ckpt", CheckpointState({"weight": torch.zeros(10)}, run=RUN))
    content = (tmp_path / "epoch-0003.ckpt").read_bytes()
    (tmp_path / "epoch-0003.ckpt").write_bytes(content[:-100])
    found = look_into(f"local://{tmp_path}/epoch-0003.ckpt")
    assert not found.position
    assert f"Checkpoint local://{tmp_path}/epoch-0003.ckpt is corrupt" in found.problem


def test_weights_are_written_through_a_url(tmp_path):
    model = make_model()
    cx.save_weights(model, "memory://store/model.safetensors")
    with torch.no_grad():
        model[0].weight.zero_()
    cx.load_weights(model, "memory://store/model.safetensors")
    assert fingerprint(model) == fingerprint(make_model())
    with pytest.raises(cx.CheckpointError, match=r"model\.safetensors is corrupt or is not a checkpoint"):
        read_checkpoint("memory://store/model.safetensors")
    with pytest.raises(cx.CheckpointError, match="There is no weights file memory://store/x"):
        cx.load_weights(model, "memory://store/x")
    fsspec.filesystem("memory").rm("/store", recursive=True)


@pytest.mark.parametrize("url", ["memory://store/run", "shelf://{}/store/run"])
def test_small_files_are_written_whole_or_only_if_there_is_none(url, tmp_path):
    url = url.format(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        read_text_of(f"{url}/a")
    write_remote(f"{url}/a", "café".encode())
    assert read_text_of(f"{url}/a") == "café"
    assert not create_remote(f"{url}/a", b"2")
    assert create_remote(f"{url}/b", b"3")
    write_remote(f"{url}/a", b"4")
    assert {name: read_text_of(f"{url}/{name}") for name in list_files(url)} == {"a": "4", "b": "3"}
    with pytest.raises(cx.CheckpointError, match=r"it has 1 bytes, and it may have 0\. Use another file"):
        read_text_of(f"{url}/a", 0)
    for name in ("a", "b"):
        remove_remote(f"{url}/{name}")


def test_a_store_that_ignores_conditions_keeps_a_file_that_is_there(tmp_path, monkeypatch):
    def ignoring(self: Shelf, path: str, value: bytes, mode: str = "overwrite") -> None:
        LocalFileSystem.pipe_file(self, path, value)

    monkeypatch.setattr(remote_files, "_S3", ("shelf",))
    monkeypatch.setattr(Shelf, "pipe_file", ignoring)
    assert create_remote(f"shelf://{tmp_path}/store/a", b"1")
    assert not create_remote(f"shelf://{tmp_path}/store/a", b"2")
    assert read_text_of(f"shelf://{tmp_path}/store/a") == "1"


def test_an_object_that_stands_for_the_folder_is_not_a_file_of_it(tmp_path, monkeypatch):
    def marked(self: Shelf, path: str, **_: Any) -> list[dict[str, Any]]:
        return [{"name": f"{path}/", "type": "file", "size": 0}, {"name": f"{path}/a", "type": "file", "size": 3}]

    monkeypatch.setattr(Shelf, "ls", marked)
    assert [*list_files(f"shelf://{tmp_path}/store")] == ["a"]


def test_a_library_that_is_missing_is_named_by_what_reads_files():
    with pytest.raises(cx.ConfigError, match=r"^Cannot use nothing://a"):
        cx.open_predictions("nothing://a/b")
    with pytest.raises(cx.ConfigError, match=r"^Cannot use nothing://a"):
        cx.TrainingHistory.from_json("nothing://a/b")


def test_an_error_of_a_store_has_no_frames_of_its_library(tmp_path, in_order):
    Shelf.before = staticmethod(dying(-1))
    with pytest.raises(cx.CheckpointError) as caught:
        write_remote(f"shelf://{tmp_path}/store/a", b"1")
    text = "".join(traceback.format_exception(caught.value))
    assert "Cannot write shelf://" in text
    assert "shelf.py" not in text
    assert "Traceback" not in text.replace("Traceback", "", 1)  # a single one


def test_a_file_that_is_written_again_and_again_never_waits_and_ends_with_the_newest(tmp_path, in_order):
    url = f"shelf://{tmp_path}/store/log"
    gate = threading.Event()
    uploads = []

    def before(call: str) -> None:
        if call == "pipe":
            uploads.append(call)
            gate.wait(5.0)

    Shelf.before = staticmethod(before)
    file = BackgroundFile(url)
    for number in range(9):
        file.write(b"%d" % number)
    gate.set()
    file.finish()
    assert read_text_of(url) == "8"
    assert len(uploads) <= 2
    assert kept(tmp_path / "store") == {"log"}


def test_one_thread_at_a_time_uploads_a_file(tmp_path, in_order):
    """New content that comes when a thread has made its last upload, and before it ends, is uploaded once."""
    newer = [b"2"]

    class Gap(threading.Condition):
        def __exit__(self, *arguments: Any) -> None:
            super().__exit__(*arguments)
            if threading.current_thread().name == "cyxtrain-file" and newer:
                file.write(newer.pop())

    uploads: list[str] = []
    Shelf.before = staticmethod(uploads.append)
    file = BackgroundFile(f"shelf://{tmp_path}/store/log")
    file._condition = Gap()
    file.write(b"1")
    deadline = time.monotonic() + 5.0
    while any(thread.name == "cyxtrain-file" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert uploads.count("pipe") == 2
    assert read_text_of(f"shelf://{tmp_path}/store/log") == "2"


def test_a_file_that_could_not_be_written_is_told_and_tried_again_at_the_end(tmp_path, in_order):
    url = f"shelf://{tmp_path}/store/log"
    file = BackgroundFile(url)
    Shelf.before = staticmethod(dying(-1))
    file.write(b"1")
    with pytest.raises(cx.CheckpointError, match=r"Cannot write shelf://.*the store is gone"):
        file.finish()
    with pytest.raises(cx.CheckpointError, match=r"Cannot write shelf://.*the store is gone"):
        file.write(b"2")
    Shelf.before = staticmethod(nothing)
    file.finish()
    assert read_text_of(url) == "2"
