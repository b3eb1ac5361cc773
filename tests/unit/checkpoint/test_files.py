"""Claims about what a path may lead to: other things than files, and files that lie, are one line and no waiting."""

from __future__ import annotations

import copy
import json
import os
import socket
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import adam, make_model, make_rows, one_process

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import FORMAT, FORMAT_VERSION, STATE
from cyxtrain.checkpoint.folder import CheckpointFolder
from cyxtrain.checkpoint.format.archive import write_archive
from cyxtrain.environment.regular_files import open_regular, read_rest, read_text
from cyxtrain.errors import brief
from cyxtrain.experiment.data import npz as read_npz
from cyxtrain.notebook.sharing import _open_array, _place_in_file

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such objects"),
]
TERABYTE = 1 << 40
OBJECTS = (
    *("pipe", "socket", "folder", "device", "endless device", "dangling link", "loop of links", "unreadable file"),
    *("empty file", "sparse file"),
)
SAYS = {
    "pipe": r"it is a named pipe \(FIFO\), not a file",
    "socket": "it is a socket, not a file",
    "folder": "it is a folder, not a file",
    "device": "it is a device, not a file",
    "endless device": "it is a device, not a file",
    "dangling link": "[Tt]here is no ",
    "loop of links": "Too many levels of symbolic links",
    "unreadable file": "Permission denied",
}
"""What an error says besides the path; of the other two it depends on what is read."""


def put(kind: str, path: Path) -> None:
    """Puts an object of a kind in the place of whatever is at a path."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            before = Path.cwd()
            os.chdir(path.parent)  # the name of a socket is short
            made.bind(path.name)
            os.chdir(before)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("device", "endless device"):
        path.symlink_to("/dev/null" if kind == "device" else "/dev/zero")
    elif kind == "dangling link":
        path.symlink_to(path.with_name("nothing"))
    elif kind == "loop of links":
        path.symlink_to(path.name)
    elif kind == "unreadable file":
        if os.geteuid() == 0:
            pytest.skip("root reads everything")
        path.touch(0)
    else:
        with path.open("wb") as file:
            file.truncate(TERABYTE if kind == "sparse file" else 0)


def is_one_line(text: str, name: str) -> bool:
    """Whether a message is one line, not long, with the name of the file."""
    return text.isprintable() and name in text and len(text) < 700


def one_line(caught: pytest.ExceptionInfo[cx.CyxtrainError], name: str, kind: str = "") -> str:
    """Returns what an error says, which is one line."""
    text = str(caught.value)
    assert is_one_line(text, name), text
    if kind in SAYS:
        caught.match(SAYS[kind])
    return text


def make_trainer(**settings: Any) -> cx.DistributedTrainer:
    model = make_model()
    return cx.DistributedTrainer(model, "cross_entropy", adam(model), **settings)


def fit(folder: Path, trainer: cx.DistributedTrainer | None = None, **settings: Any) -> cx.TrainingHistory:
    given = {"epochs": 2, "batch_size": 10, "verbose": False, "checkpoint_every_n_epochs": 1, **settings}
    return (trainer or make_trainer()).fit(*make_rows(20), checkpoint_dir=str(folder), **given)


@pytest.fixture(autouse=True)
def world(saved):
    with one_process():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, bytes]:
    """The two checkpoints of a fit, by name."""
    folder = tmp_path_factory.mktemp("saved")
    stopping = cx.callbacks.EarlyStopping(monitor="loss", patience=9)
    with one_process():
        fit(folder, make_trainer(scheduler="cosine"), callbacks=[stopping])
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A folder with these checkpoints."""
    for name, content in saved.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def resume(path: Path, how: str, **settings: Any) -> list[str]:
    """Goes on with the fit of `saved`; returns what it warned of."""
    callbacks = [cx.callbacks.EarlyStopping(monitor="loss", patience=9)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(path, make_trainer(scheduler="cosine"), resume=how, callbacks=callbacks, **settings)
    return [str(each.message) for each in caught]


# Objects in the place of files.


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_in_the_place_of_a_checkpoint_is_one_line(tmp_path, kind):
    path = tmp_path / "mine.ckpt"
    put(kind, path)
    trainer = make_trainer()
    for use in (
        trainer.load_checkpoint,
        lambda path: cx.load_weights(trainer.model, path),
        cx.Experiment.from_checkpoint,
    ):
        with pytest.raises(cx.CheckpointError) as caught:
            use(str(path))
        one_line(caught, str(path), kind)
    with pytest.raises(cx.CheckpointError) as caught:
        fit(tmp_path / "folder", trainer, resume=str(path))
    one_line(caught, str(path), kind)


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path, kind):
    path = tmp_path / "mine.ckpt"
    put(kind, path)
    before, trainer = path.lstat(), make_trainer()
    for save in (trainer.save_checkpoint, lambda path: cx.save_weights(trainer.model, path)):
        with pytest.raises(cx.CheckpointError) as caught:
            save(str(path))
        assert one_line(caught, str(path), kind).endswith("Give the name of a file.")
    assert os.path.samestat(path.lstat(), before)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.ckpt"]


def test_the_current_folder_is_no_name_of_a_file():
    trainer = make_trainer()
    for save in (trainer.save_checkpoint, lambda path: cx.save_weights(trainer.model, path)):
        with pytest.raises(cx.CheckpointError, match=r"it is a folder, not a file\. Give the name of a file"):
            save(".")


def test_a_folder_whose_name_is_too_long_ends_no_fit(tmp_path):
    said = " ".join(resume(tmp_path / ("x" * 300), None))
    assert "File name too long" in said


def test_a_fit_without_checkpoints_needs_no_current_folder(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with one_process():
        assert len(make_trainer().fit(*make_rows(8), epochs=1, verbose=False).epochs) == 1
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_beside_a_good_checkpoint_are_skipped_by_name(folder, kind):
    names = {"epoch-0002.ckpt", "epoch-0009.ckpt", "best.ckpt"}
    for name in names:
        put(kind, folder / name)
    warned = resume(folder, "auto")
    skipped = [text for text in warned if text.endswith("It is skipped.")]
    assert {name for text in skipped for name in names if str(folder / name) in text} == names
    assert len(skipped) == len(names)
    assert skipped == warned or kind not in (
        "dangling link",
        "unreadable file",
        "empty file",
        "sparse file",
    )  # new ones


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_in_the_folder_ends_no_fit_that_saves_there(tmp_path, kind):
    for name in ("epoch-0001.ckpt", "epoch-0002.ckpt", "epoch-0009.ckpt", "best.ckpt"):
        put(kind, tmp_path / name)
    for name in (".best.ckpt.cyxtrain-tmp", ".epoch-0001.ckpt.0123abcd.cyxtrain-tmp"):
        put(kind, tmp_path / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a folder in the place of a checkpoint stays
        history = fit(tmp_path, epochs=3, keep_last=1, keep_best="loss")
    assert len(history.epochs) == 3
    intact = [found.path.name for found in CheckpointFolder(tmp_path).newest_first() if found.position]
    assert set(intact) == {"epoch-0003.ckpt"} | ({"best.ckpt"} if kind != "folder" else set())


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_in_the_place_of_a_config_or_its_base_is_one_line(tmp_path, kind):
    put(kind, tmp_path / "base.yaml")
    (tmp_path / "own.yaml").write_text("_base_: base.yaml\n")
    if kind == "empty file":
        assert not cx.Config.from_file(tmp_path / "own.yaml")
        return
    for name, says in (("base.yaml", ""), ("own.yaml", "own.yaml: _base_: ")):
        with pytest.raises(cx.ConfigError) as caught:
            cx.Config.from_file(tmp_path / name)
        assert says in one_line(caught, str(tmp_path / "base.yaml"), kind)


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_in_the_place_of_data_is_one_line(tmp_path, kind):
    put(kind, tmp_path / "rows.npz")
    with pytest.raises(cx.ConfigError) as caught:
        read_npz(str(tmp_path / "rows.npz"))
    one_line(caught, str(tmp_path / "rows.npz"), kind)


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_in_the_place_of_a_history_or_a_log_is_one_line(tmp_path, kind):
    path = tmp_path / "file"
    put(kind, path)
    with pytest.raises(cx.ConfigError) as caught:
        cx.TrainingHistory.from_json(path)
    one_line(caught, str(path), "" if kind == "dangling link" else kind)
    if kind in ("empty file", "dangling link"):
        fit(tmp_path, callbacks=[cx.callbacks.CSVLogger(path)], checkpoint_every_n_epochs=0)
        assert path.read_text().startswith("epoch,loss")
        return
    with pytest.raises(cx.ConfigError) as caught:
        fit(tmp_path, callbacks=[cx.callbacks.CSVLogger(path)], checkpoint_every_n_epochs=0)
    one_line(caught, str(path), kind)


def test_a_file_is_read_as_far_as_it_went_when_it_was_opened(tmp_path):
    path = tmp_path / "file"
    path.write_text("größer")
    assert read_text(path) == "größer"
    with open_regular(path) as file, path.open("a") as other:
        size_bytes = os.fstat(file.fileno()).st_size
        assert not os.get_inheritable(file.fileno())
        other.write("more")
        assert read_rest(file).decode() == "größer"
        other.flush()
        assert os.fstat(file.fileno()).st_size == size_bytes + 4
    with pytest.raises(OSError, match="it has 12 bytes, and may have 11"):
        read_text(path, 11)
    with pytest.raises(OSError, match="no file can have this name"):
        open_regular(f"{path}\0")


def test_a_memory_map_whose_file_has_become_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(8.0))
    place: Any = _place_in_file(np.load(path, mmap_mode="r"))
    assert np.array_equal(_open_array(*place), np.arange(8.0))
    put("pipe", path)
    with pytest.raises(OSError, match="it is a named pipe"):
        _open_array(*place)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "a"),
        ([1, "a"], "[1, 'a']"),
        ("a\nb\x1b[2J\u202e", "a b [2J"),
        (10**5000, "<int>"),
        ("x" * 201, "x" * 200 + "..."),
        (" " * 1000 + "x", "..."),
        (lambda model, x: None, "<lambda>(model, x)"),
        (object(), "<object object>"),
    ],
    ids=range(8),
)
def test_values_are_short_in_messages(value, text):
    assert brief(value) == text


def test_a_system_without_the_flags_reads_files_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a")
    monkeypatch.setattr("cyxtrain.environment.regular_files._FLAGS", 0)
    monkeypatch.delattr(os, "sysconf")
    assert read_text(tmp_path / "file") == "a"
    with open_regular(tmp_path / "file") as file:
        assert read_rest(file) == b"a"
    with pytest.raises(OSError, match="it is a folder"):
        open_regular(tmp_path)


# Checkpoints whose checksums are right.

DEEP, HUGE = "@deep@", "@huge@"
_TEXTS = {f'"{DEEP}"': "[" * 100_000 + "]" * 100_000, f'"{HUGE}"': "9" * 5000}
NAN = {"$float": "nan"}


def tampered(content: bytes, where: str, value: Any) -> bytes:
    """Returns a checkpoint in which a part of state.json is another, with the checksums that belong to that."""
    path = Path(f"tampered-{os.getpid()}")
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist() if name != "manifest.json"}
    state: Any = json.loads(entries[STATE])
    *parents, last = where.split("/")
    part = state
    for name in parents:
        part = part[int(name) if isinstance(part, list) else name]
    part[int(last) if isinstance(part, list) else last] = value
    text = json.dumps(state)
    for placeholder, meant in _TEXTS.items():
        text = text.replace(placeholder, meant)
    with path.open("w+b") as file:
        write_archive(file, FORMAT, FORMAT_VERSION, {**{n: [e] for n, e in entries.items()}, STATE: [text.encode()]})
    found = path.read_bytes()
    path.unlink()
    return found


KINDS_OF_LIES = (NAN, {"$float": "inf"}, [], ["a"], "many", -1, 10**18, 0.5, None, True, {}, DEEP, HUGE)
LIES = [
    *[("position/step", value) for value in KINDS_OF_LIES],
    *[("position/epoch", value) for value in (NAN, [1], "1", -1, 10**6, 10**18, HUGE)],
    *[("position/fits", value) for value in (NAN, [1], "1", -1, 10**18)],
    *[("position", value) for value in (NAN, [], "there", -1, None, DEEP)],
    *[("run", value) for value in (NAN, [], "one", None)],
    *[("run/id", value) for value in (NAN, [], {}, -1)],
    *[("run/started", value) for value in (NAN, [], "now", {"$float": "inf"}, HUGE)],
    *[("history", value) for value in (NAN, [], "long")],
    *[("history/epochs", value) for value in (NAN, "1", ["a"], [-1], [10**18] * 9)],
    *[("history/train_losses", value) for value in (NAN, "1", ["a"], [[1]], [True])],
    *[("config/seed", value) for value in (NAN, "1", -1, [])],
    *[("config/batch_size", value) for value in (NAN, "1", -1, 0.5)],
    *[("ranks", value) for value in ("a", [1], [{}] * 9, [{"sums": 3}])],
    *[("world_size", value) for value in (NAN, "a", 0, -1, 10**18, [])],
    *[("optimizer", value) for value in ([], "a", {"0.weight": 3}, DEEP)],
    *[("optimizer_groups", value) for value in ("a", [1], [{}], [{"params": 3}], [{"params": [3]}])],
    *[("optimizer_groups/0/lr", value) for value in (NAN, "fast", [])],
    *[("others", value) for value in ([], "a", {"rates": 3}, {"trained": 3}, DEEP)],
    *[("others/rates/factor", value) for value in (NAN, "a", [], {"$float": "inf"})],
    *[("others/scheduler/state/last_epoch", value) for value in ("a", [], {})],
    *[("others/callbacks", value) for value in ([], "a", {"EarlyStopping": 3})],
    *[("others/stop_reason", value) for value in ([], 3)],
    *[("others/columns", value) for value in ([], {"X": "area"}, {"X": [3]})],
    *[("model_order", value) for value in (NAN, 3, ["a"])],
    *[("layouts", value) for value in ([], 3, {"model.safetensors": 3})],
    *[("arithmetic", value) for value in ([], 3)],
    *[("versions", value) for value in ([], {"torch": []})],
    *[("metadata", value) for value in ([], 3, DEEP)],
]
"""Parts of state.json, and what stands there instead."""


def lie_id(value: Any) -> str | None:
    return None if isinstance(value, str) else json.dumps(value)[:20]


def test_a_checkpoint_that_lies_is_one_line_and_changes_no_weight(folder, saved):
    path, trainer = folder / "epoch-0002.ckpt", make_trainer(scheduler="cosine")
    before = copy.deepcopy(trainer.model.state_dict())
    taken = []
    for where, value in LIES:
        path.write_bytes(tampered(saved["epoch-0002.ckpt"], where, value))
        text = error_of(lambda: trainer.load_checkpoint(path), f"{where} = {value!r}", (cx.CheckpointError,))
        if not is_one_line(text, str(path)):
            taken.append((where, value, text))
        assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items()), where
    assert taken == []


def test_checkpoints_that_lie_are_skipped_by_name(folder, saved):
    (folder / "epoch-0002.ckpt").unlink()  # as new as most of them: once it is found, they are not read
    paths = [folder / f"epoch-{1000 + number}.ckpt" for number in range(len(LIES))]
    for path, (where, value) in zip(paths, LIES, strict=True):
        path.write_bytes(tampered(saved["epoch-0002.ckpt"], where, value))
    warned = resume(folder, "auto")
    assert all(text.endswith("It is skipped.") and text.isprintable() for text in warned), warned
    assert [path.name for path in paths if not any(str(path) in text for text in warned)] == []
    assert len(warned) == len(paths)


def test_checkpoints_that_lie_end_no_fit_that_saves_beside_them(folder, saved):
    for number, (where, value) in enumerate(LIES):
        (folder / f"epoch-{1000 + number}.ckpt").write_bytes(tampered(saved["epoch-0002.ckpt"], where, value))
    (folder / "best.ckpt").write_bytes(tampered(saved["epoch-0002.ckpt"], "position/step", NAN))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".* of another training")
        fit(folder, epochs=3, keep_last=1, keep_best="loss")
    assert {found.path.name for found in CheckpointFolder(folder).newest_first() if found.position} >= {
        "epoch-0003.ckpt",
        "best.ckpt",
    }


@pytest.mark.parametrize(("name", "value"), [("wait", "many"), ("best", "good"), ("wait", None), ("best_epoch", [])])
def test_the_state_of_a_callback_that_lies_is_one_line(folder, saved, name, value):
    path = folder / "epoch-0001.ckpt"
    path.write_bytes(tampered(saved[path.name], f"others/callbacks/EarlyStopping/{name}", value))
    with pytest.raises(cx.CheckpointError, match=r"EarlyStopping: .*TypeError: its state is \{") as caught:
        resume(folder, str(path))
    one_line(caught, str(path))


def test_what_is_not_a_tensor_has_a_limit_when_it_is_written_and_when_it_is_read(folder, monkeypatch):
    path = folder / "epoch-0002.ckpt"
    monkeypatch.setattr("cyxtrain.checkpoint.checkpoint_file.STATE_LIMIT_BYTES", 100)
    with pytest.raises(cx.CheckpointError, match=r"state\.json: it has [\d,]+ bytes, and may have 100"):
        make_trainer(scheduler="cosine").load_checkpoint(path)
    with pytest.raises(cx.CheckpointError, match=r"Without its tensors the state has .* bytes as JSON, .* at most 100"):
        make_trainer().save_checkpoint(folder / "mine.ckpt")


def leaves(value: Any, where: str = "") -> list[str]:
    """Returns the places of all parts of a JSON value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [each for name, part in parts for each in (f"{where}{name}", *leaves(part, f"{where}{name}/"))]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("value", KINDS_OF_LIES, ids=lie_id)
def test_whatever_stands_anywhere_in_a_checkpoint_is_taken_or_refused_in_one_line(folder, saved, value):
    path = folder / "epoch-0002.ckpt"
    with zipfile.ZipFile(path) as archive:
        places = leaves(json.loads(archive.read(STATE)))
    assert len(places) > 150
    for where in places:
        if where.endswith(("amsgrad", "capturable")) and value is True:
            continue  # a possible value, for which PyTorch's step misses state or a GPU
        if where == "others/trained" and value == []:
            continue  # all of it is frozen: there is nothing to train
        path.write_bytes(tampered(saved["epoch-0002.ckpt"], where, value))
        for use in (
            lambda: make_trainer(scheduler="cosine").load_checkpoint(path),
            lambda: resume(folder, str(path), epochs=3, checkpoint_every_n_epochs=0),
            lambda: resume(folder, "auto", epochs=3, checkpoint_every_n_epochs=0),
        ):
            text = error_of(use, f"{where} = {value!r}")
            assert text.isprintable(), where
            assert len(text) < 900, where


OURS = (cx.CheckpointError, cx.ConfigError, cx.NonFiniteError)


def error_of(use: Callable[[], object], what: str, kinds: tuple[type[Exception], ...] = OURS) -> str:
    """Returns the text of an error of these kinds, or nothing; any other is one of this test."""
    try:
        use()
    except kinds as error:
        return str(error)
    except Exception as error:
        raise AssertionError(what) from error
    return ""


def test_entries_that_say_more_than_the_file_has_allocate_nothing(folder):
    path = folder / "epoch-0002.ckpt"
    content = path.read_bytes()
    with path.open("wb") as file:  # the same directory and comment, a terabyte further on
        file.write(content[:4096])
        file.seek(TERABYTE)
        file.write(content)
    trainer = make_trainer(scheduler="cosine")
    with pytest.raises(cx.CheckpointError, match=r"the zip directory: its entries have [\d,]+ bytes, and the file"):
        trainer.load_checkpoint(path)
    [said] = resume(folder, "auto")
    assert said.endswith("It is skipped.")


def test_a_safetensors_file_whose_header_is_too_long_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((TERABYTE // 2).to_bytes(8, "little"))
        file.truncate(TERABYTE)
    with pytest.raises(cx.CheckpointError, match=r"safetensors file: a file of 1,099,511,627,776 bytes cannot have"):
        cx.load_weights(make_model(), path)


# Files of settings and of data.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"training: {{epochs: {'9' * 5000}}}", r"line 1: the number 9{20}\.\.\. has 5,000 digits"),
        (f"training: {{epochs: 0x{'9' * 5000}}}", r"line 1: the number 0x9{18}\.\.\. has 5,002 digits"),
        (f"data: {'[' * 300}{']' * 300}", "line 1: settings are nested more than 32 deep"),
        (f"data: {'{a: ' * 300}1{'}' * 300}", "line 1: settings are nested more than 32 deep"),
        ("data:\n" + "".join(f"{' ' * n}a:\n" for n in range(1, 300)), "line 33: settings are nested more than 32"),
        ("training: {seed: '${training.epochs}', epochs: '${training.seed}'}", r"Recursive .*in training\.seed"),
        ("data: {a: '${.b}', b: 'x${.a}'}", r"Recursive .*in data\.a"),
        ("data: &a [*a]", "recursive aliases"),
        (f"_base_: {'a' * 5000}.yaml", "_base_: cannot read .*: File name too long"),
        ('_base_: "a\\0b"', r"_base_ must be a path, got .a\\x00b"),
        (f"_base_: {{a: {'x' * 100_000}}}", r"_base_ must be a file, or a list of files, got \{'a': 'x+\.\.\."),
        (f"data: {{a: '{'${' * 300}'}}", r"line 1: a value has more than 256 references"),
        (f"data: {{a: '${{{'A' * 5000}}}'}}", "the environment has no A+"),
        ("training: {epochs: !!int abc}", "a value cannot be read: invalid literal"),
        ("training: {epochs: !!bool abc}", "a value cannot be read: 'abc'"),
        ("training: {epochs: !!timestamp abc}", "a value cannot be read"),
        ("data: {a: '\x1b[2J'}", "this is not valid YAML: unacceptable character"),
    ],
    ids=lambda text: text[:20],
)
def test_what_no_config_has_is_one_line_with_shortened_values(tmp_path, text, says):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(cx.ConfigError, match=says) as caught:
        cx.Config.from_file(tmp_path / "mine.yaml")
    one_line(caught, "mine.yaml")


DOUBLED = ("'${.a%d}${.a%d}'", "['${data.a%d}', '${data.a%d}']", "['${data.a%d[-1]}${data.a%d[-1]}']")
REPEATED = ("&a%d [*a%d, *a%d]", "&a%d {p: *a%d, q: *a%d}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *(
            ("".join(f"  a{n}: {each % (n + 1, n + 1)}\n" for n in range(40)) + "  a40: ['']\n", "references .* repeat")
            for each in DOUBLED
        ),
        *(
            ("  a0: &a0 [x]\n" + "".join(f"  a{n}: {each % (n, n - 1, n - 1)}\n" for n in range(1, 40)), "aliases")
            for each in REPEATED
        ),
        (f"  a: [{'a, ' * 100_000}a]", "line 2: there are too many settings"),
        (f"  a: '{'${' * 500_000}'", "line 2: a value has more than 256 references"),
        ("  a: '${oc.env:HOME}'", r"data\.a is \$\{oc\.env:HOME\}\. Environment variables are in capitals"),
        ("  a: '${b${c}}'", "token recognition error"),
        ("  a: '${CYXTRAIN_SECRET}'", r"data\.a is .*: settings are printed and kept in checkpoints, which must not"),
        ("  a: 'x-${HF_TOKEN:none}'", "Read HF_TOKEN in your own code"),
        ('  "\\e[2J": ${x}', "Interpolation key 'x' not found"),
        ('"\\e]0;owned\\a\\e[2J\\u202e": 1', r"has no section '\?]0;owned\?\?\[2J\?'"),
    ],
    ids=lambda text: text[:20],
)
def test_a_short_file_takes_no_memory_and_no_secret(tmp_path, monkeypatch, text, says):
    monkeypatch.setenv("CYXTRAIN_SECRET", "topsecret")
    (tmp_path / "mine.yaml").write_text(f"data:\n{text}")
    with pytest.raises(cx.ConfigError, match=says) as caught:
        cx.Config.from_file(tmp_path / "mine.yaml")
    one_line(caught, "mine.yaml")
    assert str(caught.value).isprintable()
    assert "topsecret" not in str(caught.value)


def test_names_of_a_history_are_shown_without_control_characters():
    history = cx.TrainingHistory(train_losses=[1.0], metrics={"\x1b[2J": [1.0]})
    assert "?[2J" in repr(history)
    assert "\x1b" not in repr(history)


@pytest.mark.parametrize("value", ["9" * 5000, f"{'[' * 300}{']' * 300}"], ids=["digits", "nesting"])
def test_what_no_config_has_is_one_line_in_overrides_too(tmp_path, monkeypatch, value):
    with pytest.raises(cx.ConfigError, match=r"the override training\.seed=.*\.\.\., line 1") as caught:
        cx.Config({}).with_overrides([f"training.seed={value}"])
    one_line(caught, "training.seed")
    monkeypatch.setenv("SEED", value)
    (tmp_path / "mine.yaml").write_text("training: {seed: '${SEED}'}")
    assert cx.Config.from_file(tmp_path / "mine.yaml").training.seed == value  # a text, which `fit` refuses


def test_bases_of_bases_are_read_once_each_and_not_without_an_end(tmp_path):
    for number in range(1, 60):
        (tmp_path / f"{number}.yaml").write_text(f"_base_: [{number - 1}.yaml, {number - 1}.yaml]\n")
    (tmp_path / "0.yaml").write_text("training: {seed: 3}\n")
    assert cx.Config.from_file(tmp_path / "30.yaml").training.seed == 3  # 2 ** 30 ways lead there
    with pytest.raises(cx.ConfigError, match="_base_ is more than 32 files deep") as caught:
        cx.Config.from_file(tmp_path / "59.yaml")
    one_line(caught, "27.yaml")


def npy(shape: tuple[int, ...] = (3, 2), dtype: str = "<f8", content: bytes = bytes(48), header: str = "") -> bytes:
    text = header or repr({"descr": dtype, "fortran_order": False, "shape": shape})
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin-1") + content


def npz(path: Path, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (npy((10**15,)), r"says float64 of shape \(1000000000000000,\), 8,000,000,000,000,000 bytes, but it has 48"),
        (npy((2**32, 2**32)), r"18446744073709551616|147,573,952,589,676,412,928 bytes"),
        (npy((-3, -2)), r"\(-3, -2\)"),
        (npy((4, 2)), "64 bytes, but it has 48"),
        (npy((3, 2), "<f4"), "24 bytes, but it has 48"),
        (npy((1,), "|V1000000000"), "1,000,000,000 bytes, but it has 48"),
        (npy((6,), "|O"), "holds Python objects"),
        (npy(header="{'descr': '<f8'}"), "Header does not contain the correct keys"),
        (npy(header="(" * 5000), "x_train|[Cc]annot|parenthes|large|damaged|arrays"),
        (npy(header="{'descr': '<f8', 'fortran_order': False, 'shape': (3, "), "npz file of np.savez"),
        (npy(header="x" * 60000), "large|max_header_size"),
        (b"", "npz file of np.savez"),
        (b"\x80\x04K\x03.", "magic string"),
    ],
    ids=range(13),
)
def test_arrays_that_lie_are_one_line_and_nothing_is_allocated(tmp_path, array, says):
    npz(tmp_path / "rows.npz", {"x_train.npy": array})
    with pytest.raises(cx.ConfigError, match=says) as caught:
        read_npz(str(tmp_path / "rows.npz"))
    one_line(caught, "rows.npz")


def resized(path: Path, size_bytes: int, *, compressed: bool) -> None:
    """Lets the directory of a zip with one entry give it another size."""
    content = bytearray(path.read_bytes())
    place = content.rindex(b"PK\x01\x02") + 20
    sizes = size_bytes.to_bytes(4, "little")
    content[place : place + 8] = (sizes if compressed else content[place : place + 4]) + sizes
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("compression", "compressed"),
    [(zipfile.ZIP_STORED, True), (zipfile.ZIP_STORED, False), (zipfile.ZIP_DEFLATED, False), (zipfile.ZIP_LZMA, False)],
)
def test_sizes_that_lie_are_one_line_and_nothing_is_allocated(tmp_path, compression, compressed):
    path, most = tmp_path / "rows.npz", 2**32 - 2
    npz(path, {"x_train.npy": npy((most // 8,))}, compression)
    resized(path, most, compressed=compressed)
    with pytest.raises(
        cx.ConfigError, match=r"x_train\.npy has 4,294,967,294 bytes that the file cannot hold"
    ) as caught:
        read_npz(str(path))
    one_line(caught, "rows.npz")


def test_arrays_that_do_not_fit_into_memory_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "rows.npz"
    np.savez_compressed(path, x_train=np.zeros((1000, 100)))
    assert read_npz(str(path))["train"][0].shape == (1000, 100)
    monkeypatch.setattr("cyxtrain.experiment.data.memory_bytes", lambda: 799_999)
    with pytest.raises(cx.ConfigError, match=r"its arrays have more bytes than this machine's memory, 799,999"):
        read_npz(str(path))


def test_a_name_that_is_no_array_of_ours_is_shortened_and_its_bytes_are_not_read(tmp_path):
    path = tmp_path / "rows.npz"
    npz(path, {f"{'z' * 5000}.npy": b"no array"})
    with pytest.raises(cx.ConfigError, match=r"rows\.npz has no array 'z+\.\.\.'") as caught:
        read_npz(str(path))
    one_line(caught, "rows.npz")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "is not JSON"),
        ('{"epochs": [%s]}' % ("9" * 5000), "is not JSON"),
        ('{"epochs": "%s"}' % ("9" * 5000), r"epochs must be a list of numbers, got 9+\.\.\.\.$"),
        ('{"metrics": {"f1": 3}}', "f1 must be a list of numbers, got 3"),
        ('{"metrics": [3]}', "metrics must be lists of numbers by name"),
        ("\0" * 100, "is not JSON"),
    ],
    ids=range(6),
)
def test_a_history_that_lies_is_one_line(tmp_path, text, says):
    (tmp_path / "history.json").write_text(text)
    with pytest.raises(cx.ConfigError, match=says) as caught:
        cx.TrainingHistory.from_json(tmp_path / "history.json")
    one_line(caught, "")
