"""The only reader of `os.environ`: what a launcher, a scheduler or a shell tells this process, as plain values.

    RANK, WORLD_SIZE              who this process is, and of how many
    LOCAL_RANK                    its number among the processes of its machine; default: RANK
    MASTER_ADDR, MASTER_PORT      where rank 0 waits; default 127.0.0.1 and 29500
    DISTRIBUTED_BACKEND           cpu, nccl or gloo; unset, the ranks decide: see DistributedConfig.backend
    DISTRIBUTED_TIMEOUT_MS        milliseconds until joining gives up
    CYXTRAIN_SECRET               what every rank must know to join; the launcher makes one for each run
    CYXTRAIN_HEARTBEAT_TIMEOUT_MS milliseconds of silence after which a rank on another machine counts as lost; 30000
    CYXTRAIN_CHECKSUMS            1: every frame of the ring carries a checksum; default 0
    CYXTRAIN_TRANSPORT            between ranks of one machine: unix (sockets without a network, and memory that they
                                  share), tcp, or auto, the default: the first of them that works
    CYXTRAIN_COMMUNICATION        of collectives with async_op=True: thread, inline, or auto, the default: a thread
                                  if there are several machines or free cores
    CYXTRAIN_RUN                  name of the launcher's run: after a restart, training resumes from its checkpoints
    CYXTRAIN_ATTEMPT              how often the launcher has restarted all ranks; default 0
    CYXTRAIN_TRACEBACK            full: errors that are printed in short (`uncaught.py`) are printed with all frames
    CYXTRAIN_GRACE_SECONDS        seconds between a request to stop and the end of all processes; default 25
    CYXTRAIN_EXITED               where the launcher notes the ranks of this machine that have exited with code 0
    CYXTRAIN_PORT                 MASTER_PORT, which any program can take, and the port that the launcher holds for
                                  rank 0 in its place: only a process of the same user can listen there
    CYXTRAIN_STAGING_DIR          where files wait that are uploaded to a store; default ~/.cache/cyxtrain/staging
    CYXTRAIN_BAR_COLUMNS          how long a progress bar the launcher shows for rank 0 in its terminal; 0: none
    CYXTRAIN_REPLAY               the steps that `cyxtrain replay` computes again, a checkpoint and a folder, as JSON
    CYXTRAIN_TRIAL                the settings of steps that `cyxtrain doctor` times, and a file for it, as JSON

torchrun sets these very names, and they take precedence over a scheduler's (`schedulers.py`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cyxtrain.environment import schedulers
from cyxtrain.errors import ConfigError

Variables = Mapping[str, str]
ENVIRON: Variables = os.environ
"""This process's variables: the default of every function here that takes variables."""
WORKER_CHANNEL = "CYXTRAIN_WORKER"
"""How a worker of a notebook reaches the notebook."""
SECRET = "CYXTRAIN_SECRET"
GRACE = "CYXTRAIN_GRACE_SECONDS"
REPLAY = "CYXTRAIN_REPLAY"
TRIAL = "CYXTRAIN_TRIAL"
GRACE_SECONDS = 25.0
"""The default: Kubernetes and Slurm kill after 30 seconds."""
_IDENTITY = ("RANK", "WORLD_SIZE")
# Not set for a process that runs alone.
_LAUNCHED = ("LOCAL_RANK", "MASTER_ADDR")
_COMMUNICATION_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("DISTRIBUTED_BACKEND", "DISTRIBUTED_TIMEOUT_MS", SECRET, "CYXTRAIN_HEARTBEAT_TIMEOUT_MS"),
    *("CYXTRAIN_CHECKSUMS", "CYXTRAIN_TRANSPORT", "CYXTRAIN_COMMUNICATION", "CYXTRAIN_RUN", "CYXTRAIN_ATTEMPT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_TIMEOUT"),
)
"""What decides how ranks meet and communicate, here and in the libraries below."""
_ARITHMETIC_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
)
"""What decides how the libraries below compute, besides the number of threads."""


def number(name: str, variables: Variables = ENVIRON) -> int | None:
    """Return a variable as a whole number; None if it is not set, or empty."""
    value = variables.get(name)
    if not value:
        return None
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name}={value!r} in the environment is not a whole number.") from None


def grace_seconds(variables: Variables = ENVIRON) -> float:
    """Return the seconds between a request to stop and the end of all processes."""
    value = variables.get(GRACE)
    try:
        seconds = float(value or GRACE_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= threading.TIMEOUT_MAX:
        raise ConfigError(
            f"{GRACE}={value!r} in the environment must be a number of seconds above 0, at most "
            f"{threading.TIMEOUT_MAX:,.0f}."
        )
    return seconds


def one_of(name: str, choices: tuple[str, ...], variables: Variables = ENVIRON) -> str:
    """Return a variable that must be one of a few values; the first one is the default."""
    value = (variables.get(name) or choices[0]).lower()
    if value not in choices:
        raise ConfigError(f"{name} in the environment must be {' or '.join(choices)}, got {value!r}.")
    return value


def own_identity(variables: Variables = ENVIRON) -> dict[str, int]:
    """Return RANK and WORLD_SIZE, or the one of them that is set."""
    found = {name: number(name, variables) for name in _IDENTITY}
    return {name: value for name, value in found.items() if value is not None}


def identity_of(variables: Variables) -> tuple[int | None, int | None]:
    """Return (RANK, WORLD_SIZE); (0, 1) if nothing says that this process is one of several."""
    missing = [name for name in _IDENTITY if name not in variables]
    present = [name for name in (*_IDENTITY, *_LAUNCHED) if name in variables]
    if missing and present:
        raise ConfigError(
            f"the environment is half set: {', '.join(present)} is there and {' and '.join(missing)} is missing. "
            "Start with ./launch_distributed.sh or torchrun, set RANK and WORLD_SIZE by hand, or unset them all."
        )
    if missing:
        return 0, 1
    return number("RANK", variables), number("WORLD_SIZE", variables)


def with_scheduler(variables: Variables, *, needs_address: bool) -> Variables:
    """Complete the variables from a scheduler if they do not have this process's rank."""
    if any(name in variables for name in _IDENTITY):
        schedulers.check_pod(variables)
        return variables
    identity = schedulers.detect(variables)
    if identity is None:
        return variables
    has_address = variables.get("MASTER_ADDR") or identity.master_addr
    if needs_address and identity.world_size > 1 and not has_address:
        raise ConfigError(
            f"{identity.by} has started {identity.world_size} ranks and does not say where rank 0 is: set MASTER_ADDR "
            "to the name or address of its machine on every rank, such as 'mpirun -x MASTER_ADDR=node1' or 'mpiexec "
            "-genv MASTER_ADDR node1'; 127.0.0.1 if all are on one."
        )
    implied = _variables_of(identity)
    # An empty variable counts as not set.
    given = {name: value for name, value in variables.items() if value or name not in implied}
    return {**implied, **given}


def _variables_of(identity: schedulers.Identity) -> dict[str, str]:
    """Return what a scheduler knows about this process, under torchrun's names."""
    known = {
        "RANK": identity.rank,
        "WORLD_SIZE": identity.world_size,
        "LOCAL_RANK": identity.local_rank,
        "MASTER_ADDR": identity.master_addr,
        "MASTER_PORT": identity.master_port,
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def agent_store_prefix(address: str, port: int, variables: Variables = ENVIRON) -> str | None:
    """Return the prefix of our keys if torchrun's agent keeps the store at this address; otherwise None."""
    agent = (variables.get("MASTER_ADDR", "").strip("[]"), variables.get("MASTER_PORT"))
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or agent != (address, str(port)):
        return None
    # The prefix that PyTorch uses: after each restart of all ranks another one.
    return f"/worker/attempt_{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def is_launched(variables: Variables = ENVIRON) -> bool:
    """Return whether a launcher, a scheduler or a shell has started this process as one of several."""
    if any(name in variables for name in (*_IDENTITY, *_LAUNCHED)):
        return True
    identity = schedulers.detect(variables)
    return identity is not None and identity.world_size > 1


def ranks_that_share_cores(variables: Variables = ENVIRON) -> int:
    """Return how many ranks a scheduler started on this machine without OMP_NUM_THREADS; 1: this alone."""
    if variables.get("OMP_NUM_THREADS") or any(name in variables for name in _IDENTITY):
        return 1
    identity = schedulers.detect(variables)
    if identity is None:
        return 1
    return identity.local_world_size or 1


def settings_found(variables: Variables = ENVIRON) -> dict[str, str]:
    """Return the variables that decide how ranks communicate, for display; a secret is shown as "set"."""
    found = {name: variables[name] for name in _COMMUNICATION_VARIABLES if variables.get(name)}
    if SECRET in found:
        found[SECRET] = "set"
    return found


def arithmetic_variables(variables: Variables = ENVIRON) -> dict[str, str]:
    """Return the variables that decide how libraries compute, except numbers of threads."""
    return {name: variables[name] for name in _ARITHMETIC_VARIABLES if variables.get(name)}


def to_pass_on() -> dict[str, str]:
    """Return a copy of the environment, for processes that this one starts."""
    return dict(os.environ)


def take_worker_channel() -> str:
    """Return how a notebook's worker reaches its notebook, and remove it from the environment."""
    found = os.environ.pop(WORKER_CHANNEL, None)  # a process that this one starts is no worker
    if found is None:
        raise ConfigError("Only a trainer starts workers, if you set num_processes.")
    return found


def wants_full_traceback(variables: Variables = ENVIRON) -> bool:
    """Return whether the user wants to see all frames of every error."""
    return variables.get("CYXTRAIN_TRACEBACK", "").lower() == "full"


def launched_run(variables: Variables = ENVIRON) -> tuple[str, int]:
    """Return (name of the launcher's run, number of restarts of all ranks); ("", 0) without a launcher."""
    run = variables.get("CYXTRAIN_RUN", "")
    if not run:
        return "", 0
    return run, number("CYXTRAIN_ATTEMPT", variables) or 0


class Replay(NamedTuple):
    """What `cyxtrain replay` asks a program for."""

    step: int  # after which the program ends
    checkpoint: str  # where it begins; "": from scratch
    folder: str  # for hashes
    every: int  # steps between hashes


def replay(variables: Variables = ENVIRON) -> Replay | None:
    """Return the steps to compute again; None: `cyxtrain replay` has not started this program."""
    value = variables.get(REPLAY)
    return Replay(*json.loads(value)) if value else None


class Trial(NamedTuple):
    """What `cyxtrain doctor` asks a program for: to time some steps, and to end."""

    file: str  # for the result
    effective_batch_size: int | None = None  # None: with the program's own settings
    virtual_ranks: int | None = None
    accumulation_steps: int = 1


def trial(variables: Variables = ENVIRON) -> Trial | None:
    """Return how to time steps; None: `cyxtrain doctor` has not started this program."""
    value = variables.get(TRIAL)
    if not value:
        return None
    return Trial(*json.loads(value))


def passes_signals_on(variables: Variables = ENVIRON) -> bool:
    """Return whether this process's launcher forwards the signals that it receives."""
    return bool(variables.get("CYXTRAIN_RUN") or variables.get("TORCHELASTIC_RUN_ID"))


def exited_ranks(world_size: int, variables: Variables = ENVIRON) -> list[int]:
    """Return the ranks that the launcher has seen exit with code 0; [] if its world has a different size."""
    path = variables.get("CYXTRAIN_EXITED")
    if not path or variables.get("WORLD_SIZE") != str(world_size):
        return []
    try:
        return [int(rank) for rank in Path(path).read_text("ascii").split()]
    except OSError:  # the launcher was killed, or this system does not share the file
        return []


def held_port(port: int, variables: Variables = ENVIRON) -> int | None:
    """Return the port that the launcher holds for rank 0 in place of MASTER_PORT `port`, or None."""
    master, _, held = variables.get("CYXTRAIN_PORT", "").partition(" ")
    if master != str(port) or sys.platform != "linux":
        return None
    return int(held)


def staging_dir(variables: Variables = ENVIRON) -> Path:
    """Return the folder for files that wait to be uploaded to a store: on a disk, which survives a restart."""
    return Path(variables.get("CYXTRAIN_STAGING_DIR") or "~/.cache/cyxtrain/staging").expanduser().absolute()


def bar_columns(variables: Variables = ENVIRON) -> int:
    """Return the columns of the progress bar that the launcher shows for this rank; 0: it shows no bar."""
    return number("CYXTRAIN_BAR_COLUMNS", variables) or 0
