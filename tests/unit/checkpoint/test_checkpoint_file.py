"""Claims about writing a checkpoint: it is whole or the old one stays, and nothing else is left behind."""

import contextlib
import errno
import os
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import pack_checkpoint

from cyxtrain.checkpoint import files
from cyxtrain.checkpoint.checkpoint_file import (
    FORMAT,
    FORMAT_VERSION,
    CheckpointState,
    read_checkpoint,
    records_of,
    write_checkpoint,
)
from cyxtrain.checkpoint.files import is_locked, replacing, temporary_file
from cyxtrain.checkpoint.folder import CheckpointFolder, Found, look_into
from cyxtrain.checkpoint.format.archive import write_archive
from cyxtrain.checkpoint.writer import Writer
from cyxtrain.errors import CheckpointError, ConfigError


def state(**fields):
    return CheckpointState(**{"model": {"weight": torch.arange(6.0)}, "world_size": 2, **fields})


def test_a_file_comes_back_and_its_folder_is_made(tmp_path):
    path = tmp_path / "runs" / "first" / "7.ckpt"
    write_checkpoint(path, state())
    assert pack_checkpoint(read_checkpoint(path)) == pack_checkpoint(state())
    assert path.read_bytes() == pack_checkpoint(state())
    assert os.listdir(path.parent) == ["7.ckpt"]


def test_a_file_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "any").touch()
    write_checkpoint(tmp_path / "7.ckpt", state())
    assert (tmp_path / "7.ckpt").stat().st_mode == (tmp_path / "any").stat().st_mode


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call, failure):
    path = tmp_path / "7.ckpt"
    write_checkpoint(path, state())

    def fail(*arguments):
        raise failure

    monkeypatch.setattr(os, call, fail)
    expected = CheckpointError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        write_checkpoint(path, state(world_size=9))
    monkeypatch.undo()
    if expected is CheckpointError:
        assert str(caught.value) == (
            f"Cannot write checkpoint {path}: No space left on device. Free space there, or choose another folder."
        )
    assert read_checkpoint(path).world_size == 2
    assert os.listdir(tmp_path) == ["7.ckpt"]


def test_a_kill_between_temporary_file_and_rename_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "7.ckpt"
    write_checkpoint(path, state())

    class KilledError(BaseException):
        pass

    def killed(*arguments):
        raise KilledError

    monkeypatch.setattr(os, "replace", killed)
    monkeypatch.setattr(Path, "unlink", killed)  # a process that is killed cleans nothing up
    with pytest.raises(KilledError):
        write_checkpoint(path, state(world_size=9))
    monkeypatch.undo()
    assert read_checkpoint(path).world_size == 2
    (left,) = set(os.listdir(tmp_path)) - {"7.ckpt"}
    assert left.endswith(".cyxtrain-tmp")


def test_a_state_that_cannot_be_saved_leaves_the_old_file(tmp_path):
    path = tmp_path / "7.ckpt"
    write_checkpoint(path, state())
    with pytest.raises(CheckpointError, match=r"position\.callback"):
        write_checkpoint(path, state(position={"callback": print}))
    assert pack_checkpoint(read_checkpoint(path)) == pack_checkpoint(state())
    assert os.listdir(tmp_path) == ["7.ckpt"]


def test_the_new_content_is_on_disk_before_its_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, original=original: (calls.append(name), original(*a))[1])
    write_checkpoint(tmp_path / "7.ckpt", state())
    assert calls == ["fsync", "replace", "fsync"]


def test_a_folder_that_is_a_file_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Cannot write checkpoint .*choose another folder"):
        write_checkpoint(tmp_path / "file" / "7.ckpt", state())


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*7\.ckpt"):
        read_checkpoint(tmp_path / "7.ckpt")
    with pytest.raises(CheckpointError, match="Cannot read checkpoint"):
        read_checkpoint(tmp_path)


def test_writes_that_follow_each_other_do_not_mix(tmp_path):
    writer = Writer(CheckpointFolder(tmp_path))
    tensor = torch.zeros(2_000_000)
    for step in range(4):
        writer.write(f"step-{step}", CheckpointState(model={"weight": tensor.fill_(step)}), lambda: None)
    assert writer.wait() is None
    writer.close()
    for step in range(4):
        assert read_checkpoint(tmp_path / f"step-{step}.ckpt").model["weight"].unique().tolist() == [step]


def test_a_copy_of_a_strided_tensor_is_made_once_and_kept(tmp_path):
    writer = Writer(CheckpointFolder(tmp_path))
    turned = torch.arange(12.0).reshape(3, 4).t()
    places = set()
    for step in (1, 2):
        writer.write("one", CheckpointState(model={"turned": turned.mul_(step)}), lambda: None)
        assert writer.wait() is None
        assert torch.equal(read_checkpoint(tmp_path / "one.ckpt").model["turned"], turned)
        places |= {copy.data_ptr() for copy in writer._copies.values()}
    assert len(places) == 1
    writer.close()


def test_a_path_that_is_none_is_refused(tmp_path):
    for path in ("", None, 7):
        with pytest.raises(ConfigError, match="the path of a checkpoint must be a path"):
            write_checkpoint(path, state())


def test_a_temporary_file_has_a_writer_as_long_as_it_is_open(tmp_path):
    with replacing(tmp_path / "7.ckpt", "checkpoint"):
        (temporary,) = tmp_path.iterdir()
        if os.name == "posix":
            assert is_locked(temporary)
        CheckpointFolder(tmp_path).remove_leftovers()
        assert temporary.exists()
    assert is_locked(temporary) is None  # it is gone: nobody's business


@pytest.mark.skipif(os.name != "posix", reason="needs locks")
def test_a_sweep_between_creating_and_locking_a_file_does_not_harm_its_writer(tmp_path, monkeypatch):
    lock = files._lock
    sweeps = [CheckpointFolder(tmp_path).remove_leftovers]

    def lock_after_sweep(file, *, shared=False):
        if not shared and sweeps:
            sweeps.pop()()
            assert os.listdir(tmp_path) == []
        lock(file, shared=shared)

    monkeypatch.setattr(files, "_lock", lock_after_sweep)
    with replacing(tmp_path / "7.ckpt", "checkpoint") as file:
        assert [is_locked(path) for path in tmp_path.iterdir()] == [True]
        file.write(b"content")
    assert (tmp_path / "7.ckpt").read_bytes() == b"content"
    assert os.listdir(tmp_path) == ["7.ckpt"]


@pytest.mark.skipif(os.name != "posix", reason="needs locks")
def test_a_writer_waits_for_a_process_that_looks_whether_its_file_has_one(tmp_path, monkeypatch):
    lock = files._lock
    tries = []
    with contextlib.ExitStack() as looking:

        def lock_while_looking(file, *, shared=False):
            if not shared and not tries:
                lock(looking.enter_context(open(file.name, "rb")), shared=True)
            tries.append(shared)
            try:
                lock(file, shared=shared)
            finally:
                looking.close()

        monkeypatch.setattr(files, "_lock", lock_while_looking)
        with temporary_file(tmp_path / "7.ckpt", "file") as (_, path):
            assert tries == [False, False]
            assert is_locked(path)


@pytest.mark.skipif(os.name != "posix", reason="needs locks")
def test_a_file_without_a_writer_is_locked_until_it_is_removed(tmp_path, monkeypatch):
    path = tmp_path / f".7.ckpt.0123abcd{files.TEMPORARY_SUFFIX}"
    path.touch()
    unlink = Path.unlink

    def unlink_locked(found):
        with open(found, "r+b") as file, pytest.raises(BlockingIOError):
            files._lock(file)
        unlink(found)

    monkeypatch.setattr(Path, "unlink", unlink_locked)
    CheckpointFolder(tmp_path).remove_leftovers()
    assert os.listdir(tmp_path) == []


def test_the_best_is_a_copy_where_a_file_system_has_no_links(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    write_checkpoint(folder.file("epoch-0001"), state())

    def refuse(*paths):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    folder.mark_best(folder.file("epoch-0001"))
    assert folder.file("best").read_bytes() == folder.file("epoch-0001").read_bytes()
    assert folder.file("best").stat().st_ino != folder.file("epoch-0001").stat().st_ino
    assert len(os.listdir(tmp_path)) == 2


def test_what_looks_like_a_checkpoint_and_is_none_says_nothing_of_itself(tmp_path):
    path = tmp_path / "epoch-0001.ckpt"
    write_checkpoint(path, state(position={"epoch": 1}))
    assert look_into(path).position == {"epoch": 1}
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    for kind, change in ((zipfile.ZIP_DEFLATED, b""), (zipfile.ZIP_STORED, b" ")):
        with zipfile.ZipFile(path, "w", kind) as archive:
            for name, content in entries.items():
                archive.writestr(name, content + (change if name == "state.json" else b""))
        assert look_into(path) == Found(path, {} if kind == zipfile.ZIP_DEFLATED else {"epoch": 1}, {})
        with pytest.raises(CheckpointError, match="is corrupt or is not a checkpoint"):
            read_checkpoint(path)


def test_a_look_reads_the_manifest_alone_and_never_much(tmp_path):
    path = tmp_path / "epoch-0001.ckpt"
    write_checkpoint(path, state(position={"epoch": 1}, run={"id": "a1"}))
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"world_size":2', b'"world_size":7'))
    assert look_into(path).position == {"epoch": 1}  # its state.json is corrupt, and was not read
    older = records_of(state())
    for nested, known in ((1000, {"epoch": 1}), (1_000_000, {})):  # a file of an older version, without a summary
        older["state.json"] = [b'{"position":{"epoch":1},"run":{},"metadata":[' + b"[]," * nested + b"[]]}"]
        with path.open("w+b") as file:
            write_archive(file, FORMAT, FORMAT_VERSION, older)
        assert look_into(path).position == known
    assert "at most 1,048,576 are allowed" in look_into(path).problem


@pytest.mark.parametrize("run", [{"id": "../../a"}, {"id": 3}, {"started": 1e300}, {"started": -1}])
def test_a_run_that_cannot_be_is_that_of_no_checkpoint(tmp_path, run):
    write_checkpoint(tmp_path / "epoch-0001.ckpt", state(position={"epoch": 1}, run=run))
    found = look_into(tmp_path / "epoch-0001.ckpt")
    assert (found.position, found.run) == ({}, {})
    assert "is corrupt or is not a checkpoint" in found.problem


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_keep_the_locks_of_its_parent(tmp_path):
    (read, write), (ready, begun) = os.pipe(), os.pipe()
    with temporary_file(tmp_path / "run", "file") as (file, path):
        child = os.fork()
        if child == 0:
            os.write(begun, b"x")
            os.read(read, 1)
            os._exit(0)
        try:
            os.read(ready, 1)
            assert is_locked(path)
            file.close()  # as the kernel does when the parent is killed
            assert is_locked(path) is False
        finally:
            os.write(write, b"x")
            os.waitpid(child, 0)
            for each in (read, write, ready, begun):
                os.close(each)
