"""What schedulers say of a process: each one's variables, which of them rule, and what is said of half of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from worlds import free_port

import cyxtrain as cx
from cyxtrain.config import complete_config
from cyxtrain.environment import process_env, schedulers
from cyxtrain.world import join


def read_config(variables):
    return complete_config(cx.DistributedConfig(), variables)


# What the third of four tasks finds, two on each of two nodes, as each scheduler's documents list it.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node1-4711@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
LSF = {
    "LSB_JOBID": "4711",
    "LSB_MCPU_HOSTS": "batch5 1 h36n11 42 h36n12 42",
    "JSM_NAMESPACE_RANK": "2",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    **OPEN_MPI,  # Spectrum MPI is an Open MPI
}
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
NODE1 = {"MASTER_ADDR": "node1"}
ON_ONE = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.mark.parametrize(
    ("variables", "by", "local_rank", "address"),
    [
        (SLURM, "Slurm", 0, "gpu07"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4"}, "Slurm", 0, "127.0.0.1"),
        (OPEN_MPI | NODE1, "Open MPI", 0, "node1"),
        (OPEN_MPI | ON_ONE, "Open MPI", 0, "127.0.0.1"),
        (MPICH | NODE1, "MPICH", 0, "node1"),
        (LSF, "LSF (jsrun)", 0, "h36n11"),
        (KUBERNETES, "Kubernetes", 0, "job-node-0-0.job"),
    ],
)
def test_each_scheduler_says_who_this_process_is(variables, by, local_rank, address):
    config = read_config(variables)
    assert (config.rank, config.world_size, config.local_rank) == (2, 4, local_rank)
    assert config.master_addr == address
    assert process_env.is_launched(variables)
    said = schedulers.started_by(variables, 2, 4)
    assert said == f"started by {by}; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT override what it says"


@pytest.mark.parametrize("variables", [SLURM, OPEN_MPI | ON_ONE, MPICH | NODE1, LSF, KUBERNETES])
def test_torchruns_variables_rule(variables):
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "other", "MASTER_PORT": "1234"}
    config = read_config(variables | torchrun)
    assert (config.rank, config.world_size, config.local_rank) == (1, 2, 1)
    assert (config.master_addr, config.master_port) == ("other", 1234)
    assert schedulers.started_by(variables | torchrun, 1, 2) == ""
    assert schedulers.started_by(variables | torchrun | {"TORCHELASTIC_RUN_ID": "7"}, 1, 2) == "started by torchrun"


@pytest.mark.parametrize("variables", [SLURM, OPEN_MPI | ON_ONE, MPICH | NODE1, LSF, KUBERNETES])
def test_single_variables_rule_over_a_scheduler(variables):
    config = read_config(variables | {"LOCAL_RANK": "3", "MASTER_ADDR": "here", "MASTER_PORT": "29501"})
    assert (config.rank, config.world_size, config.local_rank) == (2, 4, 3)
    assert (config.master_addr, config.master_port) == ("here", 29501)


def test_what_a_program_sets_itself_is_not_asked_of_a_scheduler():
    config = complete_config(cx.DistributedConfig(rank=0, world_size=2), SLURM)
    assert (config.rank, config.world_size, config.master_addr) == (0, 2, "127.0.0.1")
    assert schedulers.started_by(SLURM, 0, 2) == ""


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("login1,gpu[07-09]", "login1"),
        ("gpu[3,5]", "gpu3"),
        ("r[1-2]n[01-16]", "r1n01"),
        ("a[001-100]-ib,b", "a001-ib"),
        ("node-1.cluster.example,node-2.cluster.example", "node-1.cluster.example"),
    ],
)
def test_the_first_of_slurms_hosts_is_that_of_rank_0(hosts, first):
    assert read_config(SLURM | {"SLURM_STEP_NODELIST": hosts}).master_addr == first


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290", "batch"])
def test_a_batch_script_and_an_interactive_shell_of_slurms_are_alone(step):
    variables = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP_")}
    if step is not None:
        variables["SLURM_STEP_ID"] = step
    assert read_config(variables).world_size == 1
    assert not process_env.is_launched(variables)
    assert schedulers.started_by(variables, 0, 1) == ""


def test_one_task_of_slurms_may_start_workers_itself():
    assert not process_env.is_launched(SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})


def test_all_processes_of_a_job_have_one_port_and_those_of_another_a_different_one():
    def port(**others):
        return read_config(SLURM | others).master_port

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="1", SLURM_NODEID="0")
    assert 20_000 <= port() < 30_000
    assert len({port(), port(SLURM_STEP_ID="1"), port(SLURM_JOB_ID="4712")}) == 3


def test_mpirun_within_a_slurm_job_is_mpiruns():
    # The processes are children of a daemon that srun has started, once per node.
    daemon = SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    for mpi, by in ((OPEN_MPI, "Open MPI"), (MPICH, "MPICH")):
        assert read_config(daemon | mpi | NODE1).world_size == 4
        assert by in schedulers.started_by(daemon | mpi | NODE1, 2, 4)


@pytest.mark.parametrize("tasks", ["1", "2"])
def test_the_first_rank_of_mpiexec_within_a_slurm_job_is_mpiexecs_too(tasks):
    daemon = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": tasks}
    assert read_config(daemon | MPICH | {"PMI_RANK": "0"} | NODE1).world_size == 4


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        (SLURM, 2),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_NODEID": "2"}, 1),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,5(x2)", "SLURM_NODEID": "2"}, 5),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,5(x99999999999)", "SLURM_NODEID": "2"}, 5),
        (OPEN_MPI | ON_ONE, 4),
        (SLURM | {"OMP_NUM_THREADS": "3"}, 1),
        (SLURM | {"RANK": "0", "WORLD_SIZE": "2"}, 1),
        ({}, 1),
    ],
)
def test_ranks_of_a_scheduler_that_share_cores_are_counted(variables, ranks):
    assert process_env.ranks_that_share_cores(variables) == ranks


def test_srun_that_speaks_pmi_is_slurm():
    assert "Slurm" in schedulers.started_by(SLURM | {"PMI_RANK": "2", "PMI_SIZE": "4"}, 2, 4)


@pytest.mark.parametrize(("variables", "by"), [(OPEN_MPI, "Open MPI"), (MPICH, "MPICH")])
def test_over_several_machines_mpi_does_not_say_where_rank_0_is(variables, by):
    with pytest.raises(cx.ConfigError, match=f"{by} has started 4 ranks and does not say where rank 0 is: set MASTER"):
        read_config(variables)
    config = complete_config(cx.DistributedConfig(master_addr="node7"), variables)
    assert (config.rank, config.master_addr) == (2, "node7")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, "SLURM_STEP_NUM_TASKS is not set"),
        ({"OMPI_COMM_WORLD_RANK": "one", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not a whole number"),
        ({"PMI_RANK": "1"}, "PMI_SIZE is not set"),
        (
            SLURM | {"SLURM_PROCID": "5"},  # the second component of a heterogeneous step
            "disagree: SLURM_PROCID=5 is outside SLURM_STEP_NUM_TASKS=4. In a heterogeneous step SLURM_PROCID counts",
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 is outside OMPI_COMM_WORLD_SIZE=4"),
        (OPEN_MPI | ON_ONE | {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "LOCAL_RANK=4 is outside OMPI_COMM_WORLD_LOCAL_SIZE"),
        (
            SLURM | {"RANK": "2", "WORLD_SIZE": "2"},  # RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_NNODES
            "outside a world of 2.*RANK=2 and WORLD_SIZE=2 are set, and Slurm says SLURM_PROCID=2 and SLURM",
        ),
        (KUBERNETES | {"PET_NNODES": "1:4"}, "pod 2 of 1:4, with port 29400"),
        (KUBERNETES | {"PET_NPROC_PER_NODE": "auto"}, "wants auto processes in each pod"),
        ({"RANK": "0", "WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "4"}, "begin it with 'cyxtrain launch --'"),
    ],
)
def test_half_of_what_a_scheduler_says_is_an_error_with_the_remedy(variables, words):
    with pytest.raises(cx.ConfigError, match=words):
        read_config(variables)


def test_error_of_joining_says_how_a_scheduler_contradicts_rank(monkeypatch):
    for name, value in (SLURM | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    contradicts = "RANK=1 and WORLD_SIZE=2 are set, and Slurm says SLURM_PROCID=2 and SLURM_STEP_NUM_TASKS=4"
    with pytest.raises(cx.RendezvousError, match=f"could not reach rank 0.*{contradicts}: unset RANK and WORLD_SIZE"):
        cx.init(cx.DistributedConfig(timeout_ms=100, master_addr="127.0.0.1"))
    for known in ({"TORCHELASTIC_RUN_ID": "x"}, {"CYXTRAIN_RUN": "x"}, {"RANK": "2", "WORLD_SIZE": "4"}):
        found = dict(SLURM, RANK="1", WORLD_SIZE="2") | known
        assert schedulers.disagreement(found, int(found["RANK"]), int(found["WORLD_SIZE"])) == ""


def test_a_rank_that_torchrun_has_started_in_a_pod_is_itself():
    variables = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "0"}
    assert read_config(variables).rank == 1


def test_each_rank_takes_its_share_of_the_cores_where_nobody_has_seen_to_it(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    try:
        shares = []
        for threads, ranks in ((4, 2), (4, 3), (1, 4), (2, 2), (4, 1), (4, 9)):
            torch.set_num_threads(threads)
            join._share_cores(ranks)
            shares.append(torch.get_num_threads())
        assert shares == [2, 1, 1, 2, 4, 1]
    finally:
        torch.set_num_threads(before)


def test_nobody_has_started_a_process_that_is_alone():
    assert schedulers.detect({}) is None
    assert schedulers.started_by({}, 0, 1) == ""


def test_a_scheduler_need_not_say_how_many_processes_a_machine_has():
    variables = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_TASKS_PER_NODE"}
    assert schedulers.detect(variables) == dataclasses.replace(schedulers.detect(SLURM), local_world_size=None)
    assert process_env.ranks_that_share_cores(variables) == 1
