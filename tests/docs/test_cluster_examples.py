"""What stands around a cluster: Ray for real, and the manifests of Slurm and Kubernetes as far as they can be read.

Ray is installed in its own virtual environment, beside the PyTorch that runs the tests.
"""

from __future__ import annotations

import ast
import contextlib
import mmap
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import yaml
from installed import installed
from worlds import child_environment

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "cluster"
RAY_SECONDS = 400


# --- Ray ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python_with_ray(tmp_path_factory):
    """A Python with Ray beside the PyTorch that runs the tests."""
    return installed(tmp_path_factory.mktemp("ray"), "ray[default,train]>=2.60", inherit=True)


@contextlib.contextmanager
def ray_driver(python, folder):
    """Runs the example, and nothing of it afterwards; gives its process."""
    # Ray puts sockets into its folder, whose paths may have 107 characters.
    ray_folder = tempfile.mkdtemp(prefix="ray")
    driver = subprocess.Popen(
        [python, CLUSTER / "ray_train.py", folder / "run"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=child_environment(
            HOME=str(folder),  # Ray writes a token there
            RAY_TMPDIR=ray_folder,
            RAY_DEDUP_LOGS="0",
            RAY_USAGE_STATS_ENABLED="0",
        ),
    )
    timer = threading.Timer(RAY_SECONDS, driver.kill)  # the kernel ends Ray's processes with it
    timer.start()
    try:
        yield driver
    finally:
        timer.cancel()
        timer.join()
        driver.kill()
        driver.communicate()
        shutil.rmtree(ray_folder, ignore_errors=True)


def run_ray_example(python, folder, killed_rank=None):
    """Runs the example, and may kill a rank's first process after the fourth epoch; returns all lines."""
    lines, processes = [], {}
    with ray_driver(python, folder) as driver:
        for line in driver.stdout:
            lines.append(line.rstrip())
            if match := re.search(r"rank (\d) of 2 is process (\d+)", line):
                processes.setdefault(int(match[1]), int(match[2]))
            if "epoch 4/10 " in line and killed_rank is not None:
                os.kill(processes[killed_rank], signal.SIGKILL)
                killed_rank = None
        assert driver.wait(timeout=30) == 0, "\n".join(lines)
    return lines


def how_it_went(lines):
    """The accuracy, the ranks that took part, the epoch with which each start began, and what carried gradients."""
    accuracy = re.fullmatch(r"test accuracy: ([01]\.\d{4})", lines[-1])
    assert accuracy, "\n".join(lines)
    text = "\n".join(lines)
    ranks = sorted(re.findall(r"rank (\d) of 2 is process \d+", text))
    begins = [int(epoch) for epoch in re.findall(r"steps per epoch, epochs (\d+) to 10", text)]
    carriers = set(re.findall(r"backend +(cpu \(cyxtrain's ring), ", text))
    return float(accuracy[1]), ranks, begins, carriers


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.skipif(sys.platform != "linux", reason="Ray's processes end with their driver on Linux")
def test_ray_trains_over_the_ring_and_ends_alike_where_a_worker_is_killed(python_with_ray, tmp_path):
    folders = [tmp_path / name for name in ("undisturbed", "killed")]
    for folder in folders:
        folder.mkdir()
    accuracy, ranks, begins, carriers = how_it_went(run_ray_example(python_with_ray, folders[0]))
    assert accuracy >= 0.96
    assert (ranks, begins) == (["0", "1"], [1])
    assert carriers == {"cpu (cyxtrain's ring"}
    assert len(list((folders[0] / "run" / "checkpoints").glob("epoch-*.ckpt"))) == 10
    # Rank 0 is the one that has the store and writes the checkpoints.
    again, ranks, begins, carriers = how_it_went(run_ray_example(python_with_ray, folders[1], killed_rank=0))
    assert again == accuracy
    assert ranks == ["0", "0", "1", "1"]
    assert begins[0] == 1
    assert begins[1] in (4, 5)  # the checkpoint of the fourth epoch may just have been written
    assert carriers == {"cpu (cyxtrain's ring"}


def test_ray_example_is_as_the_others():
    source = (CLUSTER / "ray_train.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source))
    assert "examples/cluster/ray_train.py" in docstring
    assert "Expect" in docstring
    assert "test accuracy: " in docstring


# --- Slurm ----------------------------------------------------------------------------------------------------------

SBATCH_OPTIONS = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "time": r"\d\d:\d\d:\d\d",
    "signal": r"TERM@\d+",
    "requeue": r"",
    "output": r"[\w%.-]+",
    "open-mode": r"append|truncate",
}
"""Those of sbatch's that the script uses, and how their values look."""


def batch_script():
    return (CLUSTER / "slurm.sbatch").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("bash") is None, reason="the script is for bash")
def test_batch_script_is_one_that_bash_understands():
    subprocess.run(["bash", "-n", CLUSTER / "slurm.sbatch"], check=True)


def test_batch_script_asks_slurm_for_what_it_knows():
    script = batch_script()
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, flags=re.MULTILINE)
    assert len(options) == script.count("\n#SBATCH ")
    assert [name for name, _ in options] == list(SBATCH_OPTIONS)
    assert all(re.fullmatch(SBATCH_OPTIONS[name], value) for name, value in options)
    # sbatch reads no further than the first command.
    assert script.index("#SBATCH --open-mode") < script.index("\nset ")


@pytest.fixture
def fake_slurm(tmp_path):
    """A folder with an srun and a scontrol that write down how they were called; srun's fit ends with a code."""
    folder = tmp_path / "bin"
    folder.mkdir()
    calls = f'printf "%s\\n" "$(basename "$0") $*" >>"{tmp_path / "calls"}"'
    for name, last in (("srun", '[[ "$*" != *" fit "* ]] || exit "$FIT_ENDS_WITH"'), ("scontrol", "")):
        program = folder / name
        secret = f'printf "%s\\n" "$CYXTRAIN_SECRET" >>"{tmp_path / "secrets"}"' if name == "srun" else ""
        program.write_text(f"#!/usr/bin/env bash\n{calls}\n{secret}\n{last}\n")
        program.chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    return folder


@pytest.mark.skipif(sys.platform == "win32" or shutil.which("bash") is None, reason="the script is for bash")
@pytest.mark.parametrize(("code", "goes_on"), [(0, False), (143, True), (1, False)])
def test_batch_script_goes_on_where_the_time_was_over(fake_slurm, tmp_path, code, goes_on):
    environment = child_environment(
        PATH=f"{fake_slurm}{os.pathsep}{os.environ['PATH']}",
        SLURM_CPUS_PER_TASK="4",
        SLURM_JOB_ID="17",
        FIT_ENDS_WITH=str(code),
    )
    command = ["bash", CLUSTER / "slurm.sbatch", "digits.yaml", "training.epochs=3"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
    doctor, fit, *requeued = (tmp_path / "calls").read_text().splitlines()
    assert doctor.endswith(" cyxtrain doctor")
    assert " cyxtrain fit digits.yaml training.epochs=3 training.checkpoint_dir=checkpoints/17 " in fit
    assert fit.endswith(" --resume auto")
    assert requeued == (["scontrol requeue 17"] if goes_on else [])
    secrets = (tmp_path / "secrets").read_text().splitlines()
    assert len(secrets) == 2
    assert len(set(secrets)) == 1
    assert re.fullmatch("[0-9a-f]{64}", secrets[0])
    assert secrets[0] not in doctor + fit  # every user of a machine sees the command lines of all


# --- Kubernetes -----------------------------------------------------------------------------------------------------

TRAIN_JOB_FIELDS = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata": {"name": str},
    "spec": {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": str,
            "command": [str],
            "args": [str],
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": {"requests": {"cpu": str, "memory": str}, "limits": {"cpu": str, "memory": str}},
            "env": list,
        },
        "runtimePatches": [{"manager": str, "trainingRuntimeSpec": dict}],
    },
}
"""The fields of Kubeflow's resource that the manifest uses, and their types (trainer 2.2 and 2.3)."""
POD_FIELDS = {
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
    "containers": [{"name": "node", "volumeMounts": [{"name": str, "mountPath": str}]}],
}


def check_fields(value, expected, path=""):
    """Checks that a value has exactly these fields, of these types or with these values."""
    if isinstance(expected, dict):
        assert list(value) == list(expected), path
        for name, inner in expected.items():
            check_fields(value[name], inner, f"{path}.{name}")
    elif isinstance(expected, list):
        assert isinstance(value, list), path
        assert value, path
        for item in value:
            check_fields(item, expected[0], f"{path}[]")
    elif isinstance(expected, type):
        assert type(value) is expected, path
    else:
        assert value == expected, path


def test_train_job_has_the_fields_of_kubeflow():
    job = yaml.safe_load((CLUSTER / "trainjob.yaml").read_text(encoding="utf-8"))
    check_fields(job, TRAIN_JOB_FIELDS)
    spec = job["spec"]
    [patched] = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert patched["name"] == "node"
    pod = patched["template"]["spec"]["template"]["spec"]
    check_fields(pod, POD_FIELDS)
    mount = pod["containers"][0]["volumeMounts"][0]
    assert mount["name"] == pod["volumes"][0]["name"]
    assert f"training.checkpoint_dir={mount['mountPath']}" in spec["trainer"]["args"]


def test_train_job_starts_ranks_by_the_launcher_with_a_secret():
    trainer = yaml.safe_load((CLUSTER / "trainjob.yaml").read_text(encoding="utf-8"))["spec"]["trainer"]
    assert trainer["command"][:5] == ["cyxtrain", "launch", "--", "cyxtrain", "fit"]
    variables = {variable["name"]: variable for variable in trainer["env"]}
    # What Kubeflow refuses, because it sets it.
    assert not [name for name in variables if name.startswith("PET_")]
    assert variables["CYXTRAIN_SECRET"]["valueFrom"] == {"secretKeyRef": {"name": "cyxtrain", "key": "secret"}}
    assert variables["DISTRIBUTED_TIMEOUT_MS"]["value"] == "600000"  # a text: Kubernetes takes no numbers here
    assert trainer["numProcPerNode"] == int(trainer["resourcesPerNode"]["limits"]["cpu"])


# --- docs/clusters.md -----------------------------------------------------------------------------------------------

CLUSTERS = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")


def test_torchrun_understands_its_commands():
    from torch.distributed.run import get_args_parser

    commands = re.findall(r"^torchrun (.*)$", CLUSTERS, flags=re.MULTILINE)
    parsed = [get_args_parser().parse_args(shlex.split(command)) for command in commands]
    assert [(each.nnodes, each.node_rank, each.nproc_per_node) for each in parsed] == [("2", 0, "4"), ("2", 1, "4")]
    assert all((each.module, each.training_script) == (True, "cyxtrain") for each in parsed)


def test_both_nodes_get_the_same_command_but_for_their_number():
    nodes = re.findall(r"^cyxtrain launch (.*?) *# on node\d$", CLUSTERS, flags=re.MULTILINE)
    assert len(nodes) == 2
    assert nodes[0].replace("--node-rank 0", "--node-rank 1") == nodes[1]


def test_variables_of_schedulers_are_those_that_are_read():
    table = CLUSTERS[CLUSTERS.index("## How ranks are numbered") : CLUSTERS.index("## Networks")]
    names = {
        name for row in re.findall(r"^\|.*\|$", table, flags=re.MULTILINE) for name in re.findall("`([A-Z_]+)`", row)
    }
    assert len(names) == 22
    read = (ROOT / "cyxtrain" / "environment" / "schedulers.py").read_text(encoding="utf-8")
    assert [name for name in sorted(names) if f'"{name}"' not in read] == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' PyTorch has no NCCL")
def test_pytorch_knows_the_variables_that_are_its_own():
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    names = set(re.findall(r"`(TORCH_\w+|GLOO_\w+)", CLUSTERS))
    assert len(names) == 5
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert [name for name in names if content.find(name.encode()) < 0] == []
        # Its warning of NCCL_TIMEOUT would say that some PyTorch reads it.
        assert content.find(b"\0NCCL_TIMEOUT\0") < 0
