"""Files in stores: a file has its name only when it is complete, and errors are one line with the URL."""

from __future__ import annotations

import fsspec
import pytest
import torch
from fitting import fingerprint, make_model
from fsspec.registry import known_implementations
from shelf import Shelf, dying, kept, nothing

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import CheckpointState, read_checkpoint, write_checkpoint
from cyxtrain.checkpoint.folder import look_into, newest_in
from cyxtrain.checkpoint.remote_files import (
    copy_remote,
    list_files,
    read_remote,
    remove_remote,
    require_reachable,
    staging_folder,
    upload,
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
