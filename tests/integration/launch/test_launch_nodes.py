"""The launcher on several machines, with logs, on GPUs, and with no number at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from launching import LAUNCHER, SECONDS, environment, run, write_script
from worlds import child_environment, free_port

from cyxtrain.environment import process_env
from cyxtrain.launch import starting
from cyxtrain.launch.local import Start

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="these ranks speak POSIX")
NOTE = "note(f'env{rank}', json.dumps(dict(os.environ))); print('said by', rank); print('err', file=sys.stderr)"
PODS = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "pod0", "PET_MASTER_PORT": "29400"}


def noted(folder: Path) -> dict[int, dict[str, str]]:
    return {int(file.name[3:]): json.loads(file.read_text()) for file in folder.glob("env?")}


# --- several machines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [0, 1])
def test_each_machine_has_its_own_ranks_of_all(tmp_path, node):
    script = write_script(tmp_path, NOTE)
    options = ["--nnodes", "2", "--node-rank", node, "--master-addr", "node0", "-n", "2"]
    done = run(*options, "--", script)
    assert done.returncode == 0, done.stderr
    found = noted(tmp_path)
    assert sorted(found) == [2 * node, 2 * node + 1]
    for rank, variables in found.items():
        assert (variables["RANK"], variables["LOCAL_RANK"]) == (str(rank), str(rank - 2 * node))
        assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("node0", "29500")
        assert "CYXTRAIN_SECRET" not in variables  # no launcher can tell another one
    assert {line.split(b"]")[0] for line in done.stdout.splitlines()} == {b"[rank %d" % rank for rank in found}


def test_ranks_get_an_ipv6_address_without_its_brackets(tmp_path):
    script = write_script(tmp_path, NOTE)
    done = run("--nnodes", 2, "--node-rank", 0, "--master-addr", "[fd00::1]", "-n", 1, "--", script)
    assert done.returncode == 0, done.stderr
    assert noted(tmp_path)[0]["MASTER_ADDR"] == "fd00::1"


def test_the_environment_and_the_guides_names_say_the_same(tmp_path):
    script = write_script(tmp_path, NOTE)
    variables = environment(MASTER_ADDR="node7", MASTER_PORT="1234", CYXTRAIN_SECRET="ours")
    done = run("--num_nodes", 3, "--node_rank", 2, "--nproc_per_node", 1, "--", script, env=variables)
    assert done.returncode == 0, done.stderr
    found = noted(tmp_path)[2]
    assert (found["WORLD_SIZE"], found["MASTER_ADDR"], found["MASTER_PORT"]) == ("3", "node7", "1234")
    assert found["CYXTRAIN_SECRET"] == "ours"


def test_a_pod_knows_which_it_is(tmp_path):
    script = write_script(tmp_path, NOTE)
    done = run("--", script, env=environment(**PODS, PET_NODE_RANK="1"))
    assert done.returncode == 0, done.stderr
    found = noted(tmp_path)
    assert sorted(found) == [2, 3]
    assert (found[2]["MASTER_ADDR"], found[2]["MASTER_PORT"]) == ("pod0", "29400")
    done = run(1, "--nnodes", 1, "--", script, env=environment(**PODS, PET_NODE_RANK="1"))
    assert noted(tmp_path)[0]["WORLD_SIZE"] == "1", done.stderr  # options rule


MEETS = """
    import torch, cyxtrain as cx
    if os.environ["CYXTRAIN_ATTEMPT"] == "0" and rank == int(sys.argv[1]):
        if sys.argv[2] == "met":
            cx.init()
        os.kill(os.getpid(), signal.SIGKILL)
    cx.init()
    total = torch.tensor([float(rank)])
    cx.all_reduce(total)
    print("total", total.item())
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("failing", "when"),
    [
        (0, "met"),
        (1, "not yet met"),
        (1, "met"),
        (0, "not yet met"),
    ],
)
def test_after_a_failure_on_one_machine_all_ranks_meet_again(tmp_path, failing, when):
    script, port = write_script(tmp_path, MEETS), free_port()
    options = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--restarts", "2", "-n", "1"]
    launchers = [
        subprocess.Popen(
            [*LAUNCHER, *options, "--node-rank", str(node), "--", script, str(failing), when],
            env=environment(CYXTRAIN_SECRET="of both"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for node in (0, 1)
    ]
    said = [launcher.communicate(timeout=3 * SECONDS) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    assert [out.splitlines()[-1] for out, _ in said] == [b"total 1.0", b"total 1.0"]


# --- logs -----------------------------------------------------------------------------------------------------------


def test_each_ranks_output_is_kept_without_its_label_and_shown(tmp_path):
    script, logs = write_script(tmp_path, NOTE), tmp_path / "new" / "logs"
    for _ in range(2):  # a second run begins anew
        done = run("-n", 2, "--logs", logs, "--", script)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [b"[rank 0] said by 0", b"[rank 1] said by 1"]
        assert sorted(file.name for file in logs.iterdir()) == ["rank0.log", "rank1.log"]
        for rank in (0, 1):
            assert sorted((logs / f"rank{rank}.log").read_text().splitlines()) == ["err", f"said by {rank}"]


def test_a_restart_adds_to_the_log_and_one_rank_alone_has_one_too(tmp_path):
    script = write_script(tmp_path, "print('attempt', os.environ['CYXTRAIN_ATTEMPT']); sys.exit(3)")
    done = run("-n", 1, "--restarts", 1, "--logs", tmp_path, "--", script)
    assert done.returncode == 3
    assert (tmp_path / "rank0.log").read_text() == "attempt 0\nattempt 1\n"
    assert done.stdout == b"[rank 0] attempt 0\n[rank 0] attempt 1\n"


def test_a_log_that_cannot_be_written_is_not_taken_for_a_command_that_cannot_be_started(tmp_path):
    (tmp_path / "rank1.log").mkdir()
    done = run("-n", 2, "--logs", tmp_path, "--", "true")
    assert done.returncode == 2
    assert done.stderr == f"cyxtrain launch: --logs {tmp_path}: Is a directory (see --help)\n".encode()


# --- how many -------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """Runs the command without starting anything; returns what it would start, the variables, and what it says."""
    asked = []
    monkeypatch.setattr(starting, "run_ranks", lambda start, variables: asked.append((start, variables)) or 0)

    def call(*words: str, gpus: int = 0, **variables: str) -> tuple[Start | None, dict[str, str], str]:
        asked.clear()
        monkeypatch.setattr(starting, "_count_gpus", lambda _: gpus)
        done = CliRunner().invoke(starting.launch, [*words], obj=variables, standalone_mode=False)
        if done.exception is not None:
            return None, {}, done.exception.format_message()
        return (*asked[0], done.output)

    return call


def test_without_a_number_there_is_a_rank_per_gpu_or_core(started, monkeypatch):
    monkeypatch.setattr("cyxtrain.workers.machine.count_usable_cores", lambda: 6)
    start, variables, said = started("--", "true")
    assert (start.num_ranks, variables) == (6, {})
    assert said == "cyxtrain launch: 6 ranks, one per core; set it with -n\n"
    monkeypatch.setattr("cyxtrain.workers.machine.count_usable_cores", lambda: 64)
    assert started("-n", "auto", "true")[0].num_ranks == 8
    start, variables, said = started("--config", "a.yaml", gpus=4)
    assert (start.num_ranks, variables) == (4, {"DISTRIBUTED_BACKEND": "nccl"})
    assert "4 ranks, one per GPU" in said
    assert started("-n", "cpu", "true", gpus=4)[:2] == (Start(("true",), 8), {})


@pytest.mark.parametrize(
    ("words", "variables", "num_ranks", "more"),
    [
        (("--gpus", "all"), {}, 4, {}),
        (("--num_gpus", "2"), {}, 2, {}),
        (("--gpus", "0,3"), {}, 2, {"CUDA_VISIBLE_DEVICES": "0,3"}),
        (("--gpus", "1,3"), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 2, {"CUDA_VISIBLE_DEVICES": "5,7"}),
        (("--gpus", "2"), {"DISTRIBUTED_BACKEND": "cpu"}, 2, {"DISTRIBUTED_BACKEND": "cpu"}),
    ],
)
def test_gpus_are_counted_or_listed(started, words, variables, num_ranks, more):
    start, found, _ = started(*words, "--", "true", gpus=4, **variables)
    assert start.num_ranks == num_ranks
    assert found == {"DISTRIBUTED_BACKEND": "nccl", **variables, **more}


@pytest.mark.parametrize(
    ("word", "gpus", "says"),
    [
        ("all", 0, "--gpus all: PyTorch sees no CUDA GPU; use -n N to train on CPUs"),
        ("2", 0, "--gpus 2: PyTorch sees no CUDA GPU"),
        ("5", 4, "--gpus 5: this machine has 4"),
        ("0", 4, "--gpus 0: this machine has 4"),
        ("1,4", 4, "there is no GPU 4; they count from 0 to 3"),
        ("1,1", 4, "--gpus must be a number of GPUs, all, or a list such as 0,2, got '1,1'"),
        ("two", 4, "--gpus must be a number of GPUs"),
    ],
)
def test_gpus_that_are_not_there_are_refused(started, word, gpus, says):
    assert says in started("--gpus", word, "--", "true", gpus=gpus)[2]


def test_a_config_is_the_command_and_what_follows_its_overrides(started):
    start, _, _ = started("--num_gpus", "2", "--config", "a.yaml", "training.epochs=3", gpus=2)
    assert start.command == (sys.executable, "-m", "cyxtrain", "fit", "a.yaml", "training.epochs=3")
    assert started("2", "--config", "a.yaml")[0].num_ranks == 2
    start, _, _ = started("2", "--", "cyxtrain", "fit", "a.yaml", "--resume", "auto")
    assert start.command == (sys.executable, "-m", "cyxtrain", "fit", "a.yaml", "--resume", "auto")


def test_elastic_is_torchruns(monkeypatch):
    became = []
    monkeypatch.setattr(os, "execve", lambda *words: became.append(words))
    words = [
        "--nnodes",
        "1:4",
        "--master-addr",
        "node0",
        "-n",
        "2",
        "--restarts",
        "3",
        "--logs",
        "logs",
        "--",
        "a",
        "-b",
    ]
    CliRunner().invoke(
        starting.launch, words, obj={"A": "b", "OMP_NUM_THREADS": "5"}, standalone_mode=False, catch_exceptions=False
    )
    program, command, variables = became[0]
    assert program == sys.executable
    assert variables == {"A": "b", "OMP_NUM_THREADS": "5", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert {"--nnodes=1:4", "--nproc-per-node=2", "--rdzv-endpoint=node0:29400", "--max-restarts=3"} <= {*command}
    assert command[-3:] == ["--no-python", "a", "-b"]
    # Ranks do not know which checkpoints are of this launch, which --help says.
    assert process_env.launched_run({**variables, "TORCHELASTIC_RESTART_COUNT": "1"}) == ("", 0)
    shown = CliRunner().invoke(starting.launch, ["--help"]).output
    assert "fit resumes only if the program asks for it" in " ".join(shown.split())


# torchrun waits for more machines after the least number has come: half a minute, if it is not told otherwise.
SHORT_WAIT = {"PET_RDZV_CONF": "last_call_timeout=2"}


@pytest.mark.nightly
def test_elastic_starts_for_real(tmp_path):
    config = Path(__file__).resolve().parents[3] / "configs" / "digits_mlp.yaml"
    options = ["--nnodes", "1:2", "--master-addr", "localhost", "--master-port", str(free_port()), "-n", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "cyxtrain", "launch", *options, "--", "cyxtrain", "fit", config, "training.epochs=3"],
        env=child_environment() | SHORT_WAIT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "world      2 ranks, started by torchrun" in done.stdout
    assert "test accuracy: 0.9" in done.stdout


@pytest.mark.nightly
def test_a_machine_that_comes_later_takes_part_and_the_fit_goes_on(tmp_path):
    config = Path(__file__).resolve().parents[3] / "configs" / "digits_mlp.yaml"
    options = ["--nnodes", "1:2", "--master-addr", "localhost", "--master-port", str(free_port()), "-n", "1"]
    fit = ["cyxtrain", "fit", str(config), "training.epochs=1000000", "training.checkpoint_every_n_epochs=1000"]

    def agent() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "cyxtrain", "launch", *options, "--", *fit, "--resume", "auto"],
            env=child_environment() | SHORT_WAIT,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    agents, said = [agent()], []
    try:
        assert agents[0].stdout is not None
        for line in agents[0].stdout:
            said.append(line)
            if line.startswith("epoch 5/"):
                agents.append(agent())
            if len(agents) == 2 and re.match(r"epoch .*/1000000", line) and "world      2 ranks" in "".join(said):
                break
    finally:
        for each in agents:
            each.terminate()  # each agent ends its rank, with a checkpoint
        for each in agents:
            each.communicate(timeout=SECONDS)
    text = "".join(said)
    assert "world      1 rank, started by torchrun" in text
    assert "world      2 ranks, started by torchrun" in text
    assert re.search(r"resume +from checkpoints/\S+.ckpt: .* made by 1 rank, samples keep their order", text)
