"""`cyxtrain ...`: the same experiment however its ranks are started, and one line for what is wrong."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from forked_programs import run_python
from launching import call_command_line
from markers import by_night
from rank_processes import environment, run_processes, values
from worlds import child_environment, free_port

import cyxtrain as cx
from cyxtrain.launch import command_line

pytestmark = pytest.mark.usefixtures("rank_server")
ROOT = Path(__file__).resolve().parents[3]
CONFIG = str(ROOT / "configs" / "digits_mlp.yaml")
SHORT = "training.epochs=3"
SECONDS = 60.0


def command(folder: str, *words: str) -> tuple[int, str]:
    """What a rank says, and its exit code; an error as the one line that it becomes."""
    os.chdir(folder)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = call_command_line(words, dict(os.environ))
        finally:
            cx.finalize()
    return code, said.getvalue()


def on_ranks(environments: list[dict[str, str]], *words: str) -> list[tuple[int, str]]:
    return [tuple(found) for found in values(run_processes(command, environments, os.getcwd(), *words))]


def alone(*words: str) -> tuple[int, str]:
    return on_ranks([{}], *words)[0]


def here(*words: str) -> tuple[int, str]:
    """Do so in this process: for what starts no world."""
    return command(os.getcwd(), *words)


def measures(text: str) -> list[str]:
    """The losses of the epochs and the last lines, which do not depend on how ranks were started."""
    lines = [line for line in text.splitlines() if re.match(r"epoch|test", line)]
    return [re.sub(r"  [\d.]+ s, .* samples/s", "", line) for line in lines]


# --- fit ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_one_rank(tmp_path_factory, rank_server) -> list[str]:
    folder = str(tmp_path_factory.mktemp("alone"))
    code, text = values(run_processes(command, [{}], folder, "fit", CONFIG, SHORT))[0]
    assert code == 0
    assert "world      1 rank\n" in text
    found = measures(text)
    assert [line.split()[0] for line in found] == ["epoch"] * 3 + ["test"] * 2
    assert float(re.fullmatch(r"test accuracy: (0\.\d{4})", found[-1])[1]) > 0.9
    return found


def launched(rank: int, port: int) -> dict[str, str]:
    return environment(rank, 2, port)


def by_slurm(rank: int, port: int) -> dict[str, str]:
    step = {"SLURM_JOB_ID": str(port), "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
    return step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2"}


def by_open_mpi(rank: int, port: int) -> dict[str, str]:
    sizes = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": str(port)}
    return sizes | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (launched, "world      2 ranks\n"),
        by_night(
            by_slurm, "world      2 ranks, started by Slurm; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        ),
        by_night(by_open_mpi, "world      2 ranks, started by Open MPI; RANK, WORLD_SIZE"),
    ],
)
def test_two_ranks_however_they_are_started_train_what_one_does(start, says, by_one_rank):
    port = free_port()
    (code, first), (other_code, other) = on_ranks([start(rank, port) for rank in (0, 1)], "fit", CONFIG, SHORT)
    assert (code, other_code, other) == (0, 0, "")
    assert says in first
    assert measures(first) == by_one_rank


@pytest.mark.nightly
@pytest.mark.parametrize(
    "starter",
    [
        ["-m", "cyxtrain", "launch", "-n", "2", "--", "cyxtrain"],
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "cyxtrain"],
        ["-m", "torch.distributed.launch", "--nproc-per-node", "2", "-m", "cyxtrain"],
    ],
    ids=["cyxtrain launch", "torchrun", "torch.distributed.launch"],
)
def test_real_launchers_train_what_one_rank_does(starter, by_one_rank):
    variables = child_environment(MASTER_PORT=str(free_port()))
    done = subprocess.run(
        [sys.executable, *starter, "fit", CONFIG, SHORT],
        env=variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.removeprefix("[rank 0] ") for line in done.stdout.splitlines()]
    assert any(line.startswith("world      2 ranks") for line in said)
    assert measures("\n".join(said)) == by_one_rank


@pytest.mark.nightly
def test_one_command_starts_workers(by_one_rank):
    code, text = alone("fit", CONFIG, SHORT, "training.num_processes=2")
    assert code == 0
    assert "world      2 ranks" in text
    assert measures(text)[-1] == by_one_rank[-1]


@pytest.mark.parametrize("every_name", [False, by_night(True)])
def test_it_goes_on_and_evaluates_what_it_has_kept(every_name, by_one_rank, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keep = "training.checkpoint_every_n_epochs=1"
    code, _ = alone("fit", CONFIG, "training.epochs=2", keep)
    assert code == 0
    code, text = alone("fit", CONFIG, SHORT, keep, "--resume", "auto")
    assert code == 0
    assert measures(text) == by_one_rank[2:]
    url = f"local://{tmp_path}/checkpoints"
    named = ["checkpoints/epoch-0003.ckpt"], ["checkpoints", "--config", CONFIG], [url], [f"{url}/epoch-0003.ckpt"]
    for words in (["checkpoints"], *named) if every_name else (["checkpoints"], [url]):
        assert alone("evaluate", *words) == (0, "".join(f"{line}\n" for line in by_one_rank[-2:]))


HOUSES = """import numpy, pandas

def make(columns):
    rows = numpy.random.default_rng(0).normal(size=(20, 2)).astype("float32")
    table = pandas.DataFrame(rows, columns=["area", "rooms"])
    return (table, numpy.arange(20) % 2), (table[columns], numpy.arange(20) % 2)
"""


def test_it_evaluates_a_table_with_the_columns_of_training_alone(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    Path("houses.py").write_text(HOUSES)
    Path("houses.yaml").write_text(
        "model: {name: mlp, inputs: 2, outputs: 2}\nloss_fn: cross_entropy\n"
        "data: {name: 'houses:make', columns: [area, rooms]}\ntraining: {epochs: 1, checkpoint_every_n_epochs: 1}\n"
    )
    assert alone("fit", "houses.yaml")[0] == 0
    evaluate = "evaluate", "checkpoints", "--config", "houses.yaml"
    assert alone(*evaluate)[0] == 0
    code, text = alone(*evaluate, "data.columns=[rooms, area]")
    assert code != 0
    assert "X must have the columns that the model was trained with" in text


@pytest.mark.nightly
def test_it_evaluates_rank_0s_checkpoint_if_each_rank_has_written_its_own(by_one_rank, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["training.checkpoint_every_n_epochs=1", "training.save_on_master_only=false"]
    code, _ = alone("fit", CONFIG, SHORT, *settings)
    assert code == 0
    Path("checkpoints/epoch-0004-rank1.ckpt").write_bytes(b"of another rank")
    assert alone("evaluate", "checkpoints") == (0, "".join(f"{line}\n" for line in by_one_rank[-2:]))


def test_settings_are_shown_with_all_that_decides_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = here("fit", CONFIG, "training.clip_norm=1e-1", "--print-config")
    assert code == 0
    Path("shown.yaml").write_text(text)
    assert cx.Config.from_file("shown.yaml") == cx.Config.from_file(CONFIG, ["training.clip_norm=0.1"])


# --- what is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (
            ["fit", CONFIG, "training.epoch=3"],
            r"ConfigError: .*digits_mlp.yaml with training.epoch=3: .*'epoch'. Did you mean 'epochs'\?",
            1,
        ),
        (
            ["fit", CONFIG, "epochs=3"],
            "ConfigError: the config has no section 'epochs'. Did you mean 'training.epochs'",
            1,
        ),
        (["fit", CONFIG, "training.epochs"], "ConfigError: an override is name=value", 1),
        (["fit", "none.yaml"], "ConfigError: there is no file none.yaml", 1),
        by_night(["fit", CONFIG, "--resume", "none.ckpt"], "CheckpointError: .*none.ckpt", 1),
        (["evaluate", "none.ckpt"], "CheckpointError: .*none.ckpt", 1),
        (["evaluate", "."], "CheckpointError: . has no intact checkpoint", 1),
        by_night(
            ["fit", CONFIG, "training.epochs=three"], "ConfigError: .* with .*three: training.epochs must be a whole", 1
        ),
        (["fit"], "cyxtrain fit: Missing argument 'CONFIG'", 2),
        (["fit", CONFIG, "--resum", "auto"], "cyxtrain fit: No such option '--resum'. Did you mean", 2),
        (["fti", CONFIG], r"cyxtrain: No such command 'fti'", 2),
        (["replay", "run", "--step", "x"], "cyxtrain replay: .*'--step': 'x' is not a whole number of at least 1", 2),
        (["doctor", "--virtual-ranks", "0"], ".*'--virtual-ranks': '0' is not a whole number of at least 1", 2),
        by_night(["completion", "tcsh"], "cyxtrain completion: Invalid value", 2),
    ],
)
def test_an_error_is_one_line(words, says, code):
    found, text = here(*words)
    assert (found, text.count("\n")) == (code, 1), text
    assert re.match(says, text), text


@pytest.mark.parametrize("words", [[], by_night(["--traceback"])])
def test_a_process_says_one_line_and_the_traceback_where_it_is_asked_for(words, tmp_path):
    done = run_python(["-m", "cyxtrain", *words, "fit", "none.yaml"], tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].endswith("ConfigError: there is no file none.yaml.")
    assert ("Traceback" in done.stderr) == (done.stderr.count("\n") > 1) == bool(words)


def test_a_port_that_is_taken_and_a_rank_0_that_is_not_there_are_one_line_each():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = on_ranks([environment(0, 2, port)], "fit", CONFIG)[0]
        assert (code, text.count("\n")) == (1, 1)
        assert re.match(rf"RendezvousError: .*{port}.* is in use on this machine", text)
    quick = {"DISTRIBUTED_TIMEOUT_MS": "500"}
    code, text = on_ranks([environment(1, 2, port, **quick)], "fit", CONFIG)[0]
    assert (code, text.count("\n")) == (1, 1)
    assert re.match(rf"RendezvousError: rank 1 could not reach rank 0 at 127.0.0.1:{port}", text)


# --- what helps ----------------------------------------------------------------------------------------------------


def test_doctor_and_bench_are_commands_with_their_exit_codes():
    code, text = alone("doctor")
    assert code == 0
    assert "nothing is broken here" in text
    code, text = here("bench")
    assert (code, text.count("\n")) == (2, 1)
    assert "cyxtrain launch -n 2 -- cyxtrain bench" in text
    port = free_port()
    (code, first), (other, rest) = on_ranks([launched(rank, port) for rank in (0, 1)], "doctor")
    assert (code, other, rest) == (0, 0, "")
    assert first.splitlines()[-1] == "the pair is OK"
    quick = {"DISTRIBUTED_TIMEOUT_MS": "500"}
    code, text = on_ranks([environment(0, 2, free_port(), **quick)], "doctor")[0]
    assert code == 1
    assert text.splitlines()[-1].endswith("missing: rank 1")


@pytest.mark.nightly
def test_an_error_of_ones_own_is_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def data():\n    raise EOFError('ran out of rows')\n")
    done = subprocess.run(
        [sys.executable, "-m", "cyxtrain", "fit", CONFIG, "data=mine:data"],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "EOFError: ran out of rows"
    assert 'mine.py", line 2, in data' in done.stderr


# --- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [[], ["fit"], ["evaluate"], ["launch"], ["doctor"], ["bench"], ["bisect"], ["replay"], ["completion"]]
)
def test_help_has_examples(words):
    code, text = here(*words, "--help")
    assert code == 0
    assert text.startswith("Usage: cyxtrain")
    assert "examples:" in text or words == ["completion"]


@pytest.mark.parametrize("shell", ["bash", by_night("zsh"), by_night("fish")])
def test_a_shell_is_told_how_to_complete(shell):
    code, text = here("completion", shell)
    assert code == 0
    assert f"_CYXTRAIN_COMPLETE={shell}_complete" in text


@pytest.mark.parametrize(
    ("typed", "gives"),
    [by_night("cyxtrain l", "plain,launch"), ("cyxtrain fit a.yaml training.ep", "plain,training.epochs=")],
)
def test_a_shell_gets_what_it_asks_for(typed, gives, tmp_path):
    asked = {"_CYXTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    done = run_python(["-m", "cyxtrain"], tmp_path, asked)
    assert gives in done.stdout.splitlines()


def test_torchs_local_rank_is_accepted() -> Any:
    for option in ("--local-rank=1", "--local_rank=1"):
        assert here(option, "fit", CONFIG, "--print-config")[0] == 0


@pytest.mark.parametrize("name", ["", *command_line.cyxtrain.commands])
def test_help_fits_80_columns(name):
    command = command_line.cyxtrain.commands[name] if name else command_line.cyxtrain
    text = command.get_help(click.Context(command, info_name=f"cyxtrain {name}", terminal_width=80))
    assert [line for line in text.splitlines() if len(line) > 80] == []
