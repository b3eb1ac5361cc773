"""The identity of this process according to its scheduler: Slurm, Open MPI, MPICH, LSF or Kubernetes.

    started by                   rank                  of                    on its machine            rank 0 is at
    LSF's jsrun                  JSM_NAMESPACE_RANK    JSM_NAMESPACE_SIZE    JSM_NAMESPACE_LOCAL_RANK  LSB_MCPU_HOSTS
    Open MPI's mpirun            OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  ..._LOCAL_RANK            MASTER_ADDR
    MPICH's and Intel's mpiexec  PMI_RANK              PMI_SIZE              MPI_LOCALRANKID           MASTER_ADDR
    Slurm's srun                 SLURM_PROCID          SLURM_STEP_NUM_TASKS  SLURM_LOCALID             ..._STEP_NODELIST
    Kubernetes, in a TrainJob    PET_NODE_RANK         PET_NNODES                                      PET_MASTER_ADDR

Pure functions of the variables, which `process_env.py` reads. RANK and WORLD_SIZE take precedence over all of them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cyxtrain.errors import ConfigError

Variables = Mapping[str, str]

_FIRST_PORT = 20_000
# Ports of jobs: below the ephemeral ports of kernels.
_NUM_PORTS = 10_000
# Slurm numbers steps that srun did not create, such as batch scripts, from here on.
_SPECIAL_STEPS = 0xFFFF_FFF0
# Of a list such as "gpu[07-09,12],login1": "gpu[07-09,12]".
_FIRST_HOSTS = re.compile(r"(?:[^,\[]|\[[^\]]*\])*")
_NUMBERS = re.compile(r"\[(\w+)[^\]]*\]")


@dataclass(frozen=True)
class Identity:
    """A process as its scheduler describes it; None: the scheduler does not say."""

    by: str
    """The name of the scheduler."""
    rank: int
    world_size: int
    local_rank: int | None
    master_addr: str | None
    master_port: int | None
    local_world_size: int | None = None


@dataclass(frozen=True)
class _Scheduler:
    """The names of a scheduler's variables."""

    by: str
    rank: str
    """If it is set, this scheduler has started the process."""
    world_size: str
    local_rank: str
    local_size: str
    """Processes on this machine: a number, or Slurm's list for all machines such as "2(x3),1"."""
    job: tuple[str, ...]
    """Variables that tell this job from others."""
    host: Callable[[Variables], str | None] = lambda variables: None
    """Returns where rank 0 is, on several machines."""
    applies: Callable[[Variables], bool] = lambda variables: True
    """Whether this scheduler has set the variables, and not another one."""

    def identify(self, variables: Variables) -> Identity | None:
        """Return the identity of this process; None: this scheduler has not started it."""
        if self.rank not in variables or not self.applies(variables):
            return None
        rank = self._number(variables, self.rank)
        world_size = self._number(variables, self.world_size)
        local_rank = None
        if self.local_rank in variables:
            local_rank = self._number(variables, self.local_rank)
        local_size = _local_size(variables, self.local_size)
        if rank >= world_size:
            raise self._disagreement(variables, self.rank, self.world_size)
        if local_rank is not None and local_size is not None and local_rank >= local_size:
            raise self._disagreement(variables, self.local_rank, self.local_size)
        host = self.host(variables)
        if world_size in (1, local_size):  # all ranks are on this machine
            host = "127.0.0.1"
        return Identity(self.by, rank, world_size, local_rank, host, self._port(variables), local_size)

    def _port(self, variables: Variables) -> int | None:
        """Return a port that all ranks of a job derive from its name; None: the scheduler gives no name."""
        job = [variables[name] for name in self.job if name in variables]
        if not job:
            return None
        return _FIRST_PORT + zlib.crc32(".".join(job).encode()) % _NUM_PORTS

    def _disagreement(self, variables: Variables, number: str, count: str) -> ConfigError:
        why = ""
        if self.rank == "SLURM_PROCID":
            why = (
                " In a heterogeneous step SLURM_PROCID counts the tasks of all components, and SLURM_STEP_NUM_TASKS "
                "the tasks of one."
            )
        return ConfigError(
            f"{self.by} has started this process, and its variables disagree: {number}={variables[number]} is outside "
            f"{count}={variables[count]}.{why} RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR override what it says: set "
            f"them on every rank, WORLD_SIZE to the number of all processes."
        )

    def _number(self, variables: Variables, name: str) -> int:
        value = variables.get(name, "")
        if is_whole_number(value):
            return int(value)
        problem = f"not a whole number: {value!r}" if value else "not set"
        raise ConfigError(
            f"{self.by} has started this process ({self.rank} is set), and {name} is {problem}. RANK and WORLD_SIZE "
            f"override what it says: set both; or unset {self.rank} for a process that is alone."
        )


def is_whole_number(value: str) -> bool:
    """Return whether a string is ASCII digits."""
    return value.isascii() and value.isdecimal()


def _local_size(variables: Variables, name: str) -> int | None:
    """Return how many processes this machine has; None: unknown."""
    sizes: list[tuple[int, int]] = []
    for part in variables.get(name, "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return None
        num_nodes = int(found[2] or 1)
        sizes.append((int(found[1]), num_nodes))
    node = variables.get("SLURM_NODEID", "0")
    if node.isdecimal():
        nodes_before = 0
        for size, num_nodes in sizes:
            nodes_before += num_nodes
            if int(node) < nodes_before:
                return size
    return sizes[0][0]


def _is_in_srun(variables: Variables) -> bool:
    """Return whether srun has started this process: a batch script also has the variables of task 0."""
    step = variables.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _SPECIAL_STEPS


def _is_mpich(variables: Variables) -> bool:
    """Return whether mpiexec has started this process: srun sets PMI_RANK as well.

    Within a Slurm job mpiexec has srun start one process per machine, whose variables its own processes inherit.
    """
    if not _is_in_srun(variables):
        return True
    has_rank_of_srun = variables.get("SLURM_PROCID") == variables.get("PMI_RANK")
    has_size_of_srun = variables.get("SLURM_STEP_NUM_TASKS") == variables.get("PMI_SIZE")
    return not (has_rank_of_srun and has_size_of_srun)


def _slurm_host(variables: Variables) -> str | None:
    """Return the first host of a list, such as "gpu07" of "gpu[07-09,12],login1"."""
    hosts = _FIRST_HOSTS.match(variables.get("SLURM_STEP_NODELIST", ""))
    assert hosts is not None  # it matches everything
    return _NUMBERS.sub(r"\1", hosts[0]) or None


def _lsf_host(variables: Variables) -> str | None:
    """Return the first host with processes, which follows the one from which jsrun was called."""
    hosts = variables.get("LSB_MCPU_HOSTS", "").split()[::2]  # each is followed by its number of cores
    return hosts[1] if len(hosts) > 1 else None


_SCHEDULERS = (
    # In this order: processes of an mpirun within a Slurm job inherit the variables of srun, and LSF's jsrun sets those
    # of Open MPI too.
    _Scheduler(
        by="LSF (jsrun)",
        rank="JSM_NAMESPACE_RANK",
        world_size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
        job=("LSB_JOBID",),
        host=_lsf_host,
    ),
    _Scheduler(
        by="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",),
    ),
    _Scheduler(
        by="MPICH",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        job=(),
        applies=_is_mpich,
    ),
    _Scheduler(
        by="Slurm",
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        host=_slurm_host,
        applies=_is_in_srun,
    ),
)


def detect(variables: Variables) -> Identity | None:
    """Return the identity of this process; None: no scheduler has started it."""
    for scheduler in _SCHEDULERS:
        identity = scheduler.identify(variables)
        if identity is not None:
            return identity
    return _in_kubernetes(variables)


def disagreement(variables: Variables, rank: int, world_size: int) -> str:
    """Return how a scheduler contradicts RANK and WORLD_SIZE, and what to do; "": it does not."""
    if "RANK" not in variables or "TORCHELASTIC_RUN_ID" in variables or "CYXTRAIN_RUN" in variables:
        return ""  # a launcher has started several processes, and the scheduler knows one
    for scheduler in _SCHEDULERS:
        if scheduler.rank not in variables or not scheduler.applies(variables):
            continue
        reported = [f"{name}={variables.get(name)}" for name in (scheduler.rank, scheduler.world_size)]
        if reported == [f"{scheduler.rank}={rank}", f"{scheduler.world_size}={world_size}"]:
            return ""
        return (
            f"RANK={rank} and WORLD_SIZE={world_size} are set, and {scheduler.by} says {' and '.join(reported)}: unset "
            f"RANK and WORLD_SIZE if {scheduler.by} starts the ranks."
        )
    return ""


def cores_left(variables: Variables) -> int | None:
    """Return how many cores of this machine a scheduler has given to this process; None: unknown."""
    reported = _reported_cores(variables)
    if not is_whole_number(reported):
        return None
    return int(reported) or None


def _reported_cores(variables: Variables) -> str:
    """Return the number of cores as a scheduler's variable has it; "": unknown."""
    if "SLURM_JOB_ID" in variables:
        per_task = variables.get("SLURM_CPUS_PER_TASK")
        if per_task and _is_in_srun(variables):
            return per_task
        return variables.get("SLURM_CPUS_ON_NODE", "")
    if "PBS_JOBID" in variables:
        return variables.get("NCPUS", "")
    if "LSB_JOBID" in variables:
        hosts = variables.get("LSB_MCPU_HOSTS", "").split()
        is_one_host = len(hosts) == 2
        return hosts[1] if is_one_host else ""
    if variables.get("NHOSTS") == "1":  # Grid Engine
        return variables.get("NSLOTS", "")
    return ""


def _in_kubernetes(variables: Variables) -> Identity | None:
    """Return which pod of a TrainJob this is; Kubeflow sets the defaults of torchrun's options."""
    if not {"PET_NODE_RANK", "PET_NNODES"} <= variables.keys():
        return None
    check_pod(variables)
    pod = variables["PET_NODE_RANK"]
    pods = variables["PET_NNODES"]
    port = variables.get("PET_MASTER_PORT") or "29500"
    if not all(map(is_whole_number, (pod, pods, port))):
        raise ConfigError(
            f"Kubernetes says that this is pod {pod} of {pods}, with port {port} (PET_NODE_RANK, PET_NNODES, "
            "PET_MASTER_PORT), which are not three whole numbers. Begin the command with 'cyxtrain launch --', or set "
            "RANK and WORLD_SIZE, which take precedence."
        )
    host = variables.get("PET_MASTER_ADDR") or None
    return Identity("Kubernetes", int(pod), int(pods), 0, host, int(port))


def check_pod(variables: Variables) -> None:
    """Refuse a pod that is configured for several processes if its command starts one."""
    processes = variables.get("PET_NPROC_PER_NODE", "1")
    if processes not in ("", "1") and "LOCAL_RANK" not in variables:
        raise ConfigError(
            f"Kubernetes wants {processes} processes in each pod (PET_NPROC_PER_NODE), and this command is one: begin "
            "it with 'cyxtrain launch --' or torchrun."
        )


def started_by(variables: Variables, rank: int, world_size: int) -> str:
    """Return who started this process as one of several, and how to override it; "" if that is obvious."""
    if "RANK" in variables:
        return "started by torchrun" if "TORCHELASTIC_RUN_ID" in variables else ""
    identity = detect(variables)
    if identity is None or (identity.rank, identity.world_size) != (rank, world_size):
        return ""
    return f"started by {identity.by}; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT override what it says"
