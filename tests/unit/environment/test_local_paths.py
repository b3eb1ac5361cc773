"""Claims about paths that users give: "~" is the home folder, and a URL is that of a store or is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cyxtrain as cx
from cyxtrain.callbacks import CSVLogger, ModelCheckpoint, TensorBoard
from cyxtrain.checkpoint.remote_files import write_remote
from cyxtrain.environment.regular_files import local_path, path_or_url, url_of
from cyxtrain.launch.command_line import main

URL = "s3://bucket/run"
MLP = {"name": "mlp", "inputs": 4, "outputs": 2}
X, Y = torch.randn(8, 4), torch.arange(8) % 2


def trainer() -> cx.DistributedTrainer:
    return cx.DistributedTrainer(torch.nn.Linear(4, 2), "cross_entropy", "sgd")


def fit(**settings):
    trainer().fit(X, Y, epochs=1, verbose=False, **settings)


def test_a_path_is_one_of_this_machine(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = ["runs/a", "~/runs", "file:///a%20b/c", Path("file:///a"), "C:/runs", Path("~")]
    assert [local_path("it", each) for each in given] == [
        "runs/a",
        "/home/me/runs",
        "/a b/c",
        "/a",
        "C:/runs",
        "/home/me",
    ]
    for wrong in ("s3://a/b", Path("gs://a"), "file://host/a", "HTTPS://a", "abfs+x://a"):
        with pytest.raises(cx.ConfigError, match=r"^it is .*, a URL: only files and folders of this machine"):
            local_path("it", wrong)
    for wrong in ("", " ", None, 3, b"a", "a\0b"):
        with pytest.raises(cx.ConfigError, match=r"^it must be a path, got "):
            local_path("it", wrong)


def test_a_url_is_the_one_that_fsspec_takes():
    given = ["s3://a/b/", Path("S3://a/b"), "local:///a", "abfs+x://a", "file:///a", "file://host/a", "C:/a", "a//b"]
    assert [url_of(each) for each in given] == ["s3://a/b", "s3://a/b", "local:///a", "abfs+x://a", "", "", "", ""]
    assert [path_or_url("it", each) for each in ("gs://a", "~", "file:///a")] == ["gs://a", str(Path.home()), "/a"]


class UPath:
    """As universal_pathlib's, which is not a `pathlib.Path` in a store."""

    __module__ = "upath.core"

    def __init__(self, url, **options):
        self.url = url
        self.storage_options = options

    def __str__(self):
        return self.url


def test_a_upath_is_a_path_or_a_url():
    assert path_or_url("it", UPath("s3://a/b")) == "s3://a/b"
    assert local_path("it", UPath("/a")) == "/a"
    config = cx.DistributedTrainingConfig(checkpoint_dir=UPath("s3://a/b"))
    config.validate()
    assert config.checkpoint_dir == "s3://a/b"
    write_remote("memory://configs/a.yaml", b"training: {epochs: 3}")
    assert cx.Config.from_file(UPath("memory://configs/a.yaml")).to_dict() == {"training": {"epochs": 3}}
    with pytest.raises(cx.ConfigError, match=r"it is a UPath with storage_options.*FSSPEC_S3_ENDPOINT_URL"):
        path_or_url("it", UPath("s3://a/b", key="k"))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: fit(profile=URL), "profile"),
        (lambda: TensorBoard(URL), "TensorBoard.log_dir"),
        (lambda: ModelCheckpoint(URL), "ModelCheckpoint.filepath"),
        (lambda: cx.metrics.ConfusionMatrix(URL), "ConfusionMatrix.path"),
        (
            lambda: cx.Experiment(
                {"model": {"name": "mlp", "inputs": 4, "outputs": 2}, "data": {"name": "npz", "path": URL}}
            ),
            "data.path",
        ),
    ],
)
def test_a_url_is_refused_by_the_name_of_its_argument(tmp_path, monkeypatch, call, argument):
    monkeypatch.chdir(tmp_path)
    with cx.init(cx.DistributedConfig(rank=0, world_size=1)), pytest.raises(cx.CyxtrainError) as caught:
        call()
    assert f"{argument} is s3:/" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "argument"),
    [(["launch", "--logs", URL, "-n", "1", "true"], "--logs")],
)
def test_a_url_in_a_command_is_refused(capsys, words, argument):
    said = ""
    try:
        main(words, {})
    except cx.ConfigError as error:
        said = str(error)
    assert f"{argument} is s3:/" in said + capsys.readouterr().err


def test_a_relative_path_is_that_of_the_folder_where_the_fit_began(tmp_path, monkeypatch):
    class Leave(cx.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            (tmp_path / f"other{epoch}").mkdir()
            monkeypatch.chdir(tmp_path / f"other{epoch}")

    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home")
    saving = {"checkpoint_every_n_epochs": 1, "checkpoint_dir": "kept", "keep_best": "loss", "load_best": True}
    callbacks = [Leave(), CSVLogger("a.csv"), ModelCheckpoint("own/{epoch}.ckpt"), TensorBoard("~/logs")]
    with cx.init(cx.DistributedConfig(rank=0, world_size=1)):
        trainer().fit(X, Y, epochs=3, batch_size=1, verbose=False, profile="traces", callbacks=callbacks, **saving)
    assert not any(path.is_file() for each in range(3) for path in (tmp_path / f"other{each}").rglob("*"))
    found = {str(path.relative_to(tmp_path / "home")) for path in (tmp_path / "home").rglob("*") if path.is_file()}
    epochs = {f"epoch-000{epoch}.ckpt" for epoch in (1, 2, 3)}
    assert found >= {"a.csv", "own/3.ckpt", "traces/steps.txt", *(f"kept/{name}" for name in (*epochs, "best.ckpt"))}
    assert any(name.startswith("logs/train/") for name in found)
