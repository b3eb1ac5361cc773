"""Claims about writing a checkpoint: it is whole or the old one stays, and nothing else is left behind."""

import errno
import os
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import pack_checkpoint

from cyxtrain.checkpoint.checkpoint_file import CheckpointState, read_checkpoint, write_checkpoint
from cyxtrain.checkpoint.files import is_being_written, replacing
from cyxtrain.checkpoint.folder import CheckpointFolder, Found, look_into
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
        with pytest.raises(ConfigError, match="the path of a checkpoint must be a text or a Path"):
            write_checkpoint(path, state())


def test_a_temporary_file_has_a_writer_as_long_as_it_is_open(tmp_path):
    with replacing(tmp_path / "7.ckpt", "checkpoint"):
        (temporary,) = tmp_path.iterdir()
        if os.name == "posix":
            assert is_being_written(temporary)
        CheckpointFolder(tmp_path).remove_leftovers()
        assert temporary.exists()
    assert is_being_written(temporary)  # it is gone: nobody's business


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
        assert look_into(path) == Found(path, {}, {})
