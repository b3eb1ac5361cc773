"""The Cyxtrain code and the commands in docs/migrating.md run, on one process and on two ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from markers import by_night, nightly_where
from rank_processes import run_ranks, values
from worlds import child_environment, free_port

import cyxtrain as cx
from cyxtrain.launch.starting import launch

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## From (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
TABLES = {name: re.findall(r"^\| (.+?) \| (.+) \|$", text, flags=re.MULTILINE)[1:] for name, text in SECTIONS.items()}
PROGRAM = re.search(r"^```python\n(# train\.py\n.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)[1]
ON_HOSTS = re.findall(r"^<!-- hosts -->\n```sh\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)

# The variables that the tables use.
GIVEN = """
import torch
import cyxtrain as cx
torch.manual_seed(0)
X, target = torch.randn(64, 8), torch.arange(64) % 2
y, X_val, y_val, tensor = target, X[:20], target[:20], torch.ones(3)
dataset = torch.utils.data.TensorDataset(X, y)
loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
val_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X_val, y_val), batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(8, 3))
loss_fn = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
d, g = (torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters())
d_optimizer, g_optimizer = d, g
share = slice(int(RANK), None, int(WORLD_SIZE))
x, target = X[share], y[share]
def compute_metrics(output, target): return (output.argmax(1) == target).float().mean()
"""


def code(cell: str) -> list[str]:
    """Return the texts between backticks in a cell."""
    return re.findall(r"`(.+?)`", cell)


def is_command(text: str) -> bool:
    return text.split()[0] in ("cyxtrain", "python", "torchrun")


def ours(name: str) -> list[str]:
    """Return the code in a table's second column, from top to bottom, without single names and lines of a method."""
    lines = [line for _, cell in TABLES[name] for line in code(cell)]
    names = [line for line in lines if line.isidentifier() or "self" in line]
    return [line for line in lines if line not in names and not line.startswith("{") and not is_command(line)]


def run_table(name: str, folder: str) -> list[str]:
    """Run a table's code as a rank; return the lines."""
    os.chdir(folder)
    namespace = {"RANK": os.environ["RANK"], "WORLD_SIZE": os.environ["WORLD_SIZE"]}
    exec(GIVEN, namespace)
    with contextlib.redirect_stdout(io.StringIO()):
        for line in ours(name):
            try:
                exec(compile(line, line, "exec"), namespace)
            except Exception as error:
                raise AssertionError(f"{line!r} in the table of {name}: {error!r}") from error
        cx.finalize()
    return ours(name)


def test_each_table_but_that_of_a_plain_loop_has_commands_for_two_machines():
    assert list(TABLES) == ["a loop on one process", "PyTorch, by hand", "Lightning", "Accelerate", "Keras", "Horovod"]
    assert all(len(table) >= 10 for table in TABLES.values())
    assert len(ON_HOSTS) == len(TABLES) - 1


@pytest.mark.parametrize("name", TABLES)
def test_their_lines_are_python(name):
    for cell, _ in TABLES[name]:
        assert code(cell), cell
        for line in code(cell):
            compile(line.replace("@hvd.elastic.run", "hvd.elastic.run"), cell, "exec")


@nightly_where(lambda name: name != "a loop on one process")
@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("world_size", [by_night(1), 2])
@pytest.mark.parametrize("name", TABLES)
def test_our_lines_run_from_top_to_bottom(name, world_size, tmp_path):
    ran = values(run_ranks(world_size, run_table, name, str(tmp_path)))
    assert all(len(lines) >= 10 for lines in ran)


@pytest.mark.parametrize("line", [line for text in ON_HOSTS for line in text.splitlines() if line.startswith("cyx")])
def test_the_launcher_understands_its_words(line):
    program, command, *words = shlex.split(line)
    assert (program, command) == ("cyxtrain", "launch")
    options = launch.make_context("launch", words, obj={}).params
    assert options["words"] == ("python", "train.py")
    assert (options["nnodes"], options["num_ranks"], options["master_addr"]) == ("2", "2", "node0")


def test_the_launcher_refuses_other_words():
    with pytest.raises(click.UsageError, match="Did you mean --nnodes"):
        launch.make_context("launch", ["--num-machines", "2", "--", "true"], obj={})


@pytest.fixture
def binaries(tmp_path):
    """Return a folder with `python`, `cyxtrain` and `torchrun` of the Python that runs the tests."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, words in {"python": "", "cyxtrain": "-m cyxtrain", "torchrun": "-m torch.distributed.run"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="the commands are for bash")
@pytest.mark.parametrize("commands", ON_HOSTS, ids=list(SECTIONS)[1:])
def test_commands_for_two_machines_start_one_world(commands, binaries, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    port = str(free_port())
    path = os.pathsep.join([str(binaries), os.environ["PATH"]])
    environment = child_environment(PATH=path, MASTER_PORT=port, CYXTRAIN_SECRET="of both")
    started = [
        subprocess.Popen(
            ["bash", "-c", line.replace("node0", "127.0.0.1").replace("29500", port)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in commands.splitlines()
    ]
    try:
        said = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0, 0], said
    ranks = 2 if "WORLD_SIZE" in commands else 4
    assert re.search(rf"^(\[rank 0\] )?{ranks} ranks, test accuracy 9\d%$", said[0][0], flags=re.MULTILINE), said
    assert "test accuracy" not in said[1][0]
