"""The only reader of `os.environ`: what a launcher, a scheduler or a shell says about this process.

    RANK, WORLD_SIZE              who this process is, and of how many
    LOCAL_RANK                    among those of its machine; default: RANK
    MASTER_ADDR, MASTER_PORT      where rank 0 waits; default 127.0.0.1 and 29500
    DISTRIBUTED_BACKEND           cpu, nccl or gloo; unset, the ranks decide: see DistributedConfig.backend
    DISTRIBUTED_TIMEOUT_MS        milliseconds until joining gives up
    CYXTRAIN_SECRET               what every rank must know to be let in; the launcher makes one for each run
    CYXTRAIN_HEARTBEAT_TIMEOUT_MS milliseconds of silence after which a rank on another machine counts as gone; 30000
    CYXTRAIN_CHECKSUMS            1: every frame of the ring carries a checksum; default 0
    CYXTRAIN_TRANSPORT            between ranks of one machine: cma (they read each other's memory), unix (sockets
                                  without a network), tcp, or auto, the default: the first of them that works
    CYXTRAIN_COMMUNICATION        of collectives with async_op=True: thread, inline, or auto, the default: a thread
                                  where there are several machines, or cores that are free
    CYXTRAIN_RUN                  name of the launcher's run: its checkpoints are those to go on from after a restart
    CYXTRAIN_ATTEMPT              how often the launcher has started all ranks again; default 0

torchrun sets these very names, and they rule. Where they are not set, a scheduler's are taken (`schedulers.py`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TypeVar

from cyxtrain.config import BackendType, DistributedConfig, RingOptions
from cyxtrain.config.world import without_brackets
from cyxtrain.environment import schedulers
from cyxtrain.errors import ConfigError, CyxtrainError, warn

_Error = TypeVar("_Error", bound=CyxtrainError)

WORKER_CHANNEL = "CYXTRAIN_WORKER"
"""Where a worker finds how to reach its notebook."""
_IDENTITY = ("RANK", "WORLD_SIZE")
_SIGNS = ("LOCAL_RANK", "MASTER_ADDR")
"""What nobody sets for a process that is alone."""
_SECRET = "CYXTRAIN_SECRET"
_READ = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("DISTRIBUTED_BACKEND", "DISTRIBUTED_TIMEOUT_MS", _SECRET, "CYXTRAIN_HEARTBEAT_TIMEOUT_MS"),
    *("CYXTRAIN_CHECKSUMS", "CYXTRAIN_TRANSPORT", "CYXTRAIN_COMMUNICATION", "CYXTRAIN_RUN", "CYXTRAIN_ATTEMPT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_TIMEOUT"),
)
"""What decides how ranks meet and talk, here and in the libraries below."""


def read_config(variables: Mapping[str, str] | None = None) -> DistributedConfig:
    """Returns what the environment says, complete: alone it is a world of one.

    Args:
        variables: The environment; None: this process's.

    Raises:
        ConfigError: Half an environment, a number that is none, a rank outside the world.
    """
    return complete(DistributedConfig(), variables)


def complete(config: DistributedConfig, variables: Mapping[str, str] | None = None) -> DistributedConfig:
    """Returns a copy in which the environment has said what the config leaves open.

    Open is what is None, and what has its default: a program that sets only a deadline still meets the others
    where its launcher says.

    Args:
        config: What the user set, which rules.
        variables: The environment; None: this process's.

    Raises:
        ConfigError: As `read_config`; or a setting is wrong.
    """
    variables = os.environ if variables is None else variables
    if "NCCL_TIMEOUT" in variables:
        warn("NCCL_TIMEOUT is set, and PyTorch ignores it: set collective_timeout_ms in DistributedConfig.")
    config = dataclasses.replace(config)
    if config.rank is None and config.world_size is None:
        variables = _with_scheduler(variables, asks_where=config.master_addr == DistributedConfig.master_addr)
    _complete_identity(config, variables)
    if config.master_addr == DistributedConfig.master_addr:
        config.master_addr = variables.get("MASTER_ADDR") or config.master_addr
    for name, variable in (("master_port", "MASTER_PORT"), ("timeout_ms", "DISTRIBUTED_TIMEOUT_MS")):
        if getattr(config, name) == getattr(DistributedConfig, name) and variables.get(variable):
            setattr(config, name, _number(variables, variable))
    config.backend = backend(variables) if config.backend is None else BackendType.parse(config.backend)
    try:
        config.validate()
    except ConfigError as error:
        raise with_disagreement(error, config, variables) from None
    config.master_addr = without_brackets(config.master_addr)
    if config.require_secret:
        _check_secret(config, variables)
    return config


def ring_options(variables: Mapping[str, str] | None = None) -> RingOptions:
    """Returns what the environment says about the ring.

    Args:
        variables: The environment; None: this process's.

    Raises:
        ConfigError: A value that is none of those allowed.
    """
    variables = os.environ if variables is None else variables
    milliseconds = 30_000
    if variables.get("CYXTRAIN_HEARTBEAT_TIMEOUT_MS"):
        milliseconds = _number(variables, "CYXTRAIN_HEARTBEAT_TIMEOUT_MS")
    if milliseconds < 100:
        raise ConfigError(f"CYXTRAIN_HEARTBEAT_TIMEOUT_MS in the environment must be at least 100, got {milliseconds}.")
    return RingOptions(
        secret=variables.get(_SECRET) or None,
        heartbeat_timeout_seconds=milliseconds / 1000,
        checksums=_one_of(variables, "CYXTRAIN_CHECKSUMS", ("0", "1")) == "1",
        transport=_one_of(variables, "CYXTRAIN_TRANSPORT", ("auto", "tcp", "unix", "cma")),
        comes_again=launched_run(variables)[1] > 0,
        communication=_one_of(variables, "CYXTRAIN_COMMUNICATION", ("auto", "inline", "thread")),
    )


def _one_of(variables: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    """Returns a variable that has a few values, the first of which is the default."""
    value = (variables.get(name) or known[0]).lower()
    if value not in known:
        raise ConfigError(f"{name} in the environment must be {' or '.join(known)}, got {value!r}.")
    return value


def _check_secret(config: DistributedConfig, variables: Mapping[str, str]) -> None:
    """Refuses to join where strangers would be let in."""
    if config.backend not in (None, BackendType.CPU):
        raise ConfigError(
            f"require_secret=True: the {BackendType.parse(config.backend or '').value} backend lets in whoever "
            "reaches its port. Use backend='cpu', cyxtrain's own ring."
        )
    if not variables.get(_SECRET) and config.world_size != 1:
        raise ConfigError(
            "require_secret=True, and CYXTRAIN_SECRET is not set: put the same long random text into the environment "
            "of every rank (python -c 'import secrets; print(secrets.token_hex(32))'). On one machine the launcher "
            "does so."
        )


def backend(variables: Mapping[str, str] | None = None) -> BackendType | None:
    """Returns what DISTRIBUTED_BACKEND says; None: it is not set.

    Args:
        variables: The environment; None: this process's.

    Raises:
        ConfigError: There is no such backend.
    """
    variables = os.environ if variables is None else variables
    asked = variables.get("DISTRIBUTED_BACKEND")
    try:
        return BackendType.parse(asked) if asked else None
    except ConfigError as error:
        raise ConfigError(f"DISTRIBUTED_BACKEND in the environment: {error}") from None


def own_identity(variables: Mapping[str, str] | None = None) -> dict[str, int]:
    """Returns RANK and WORLD_SIZE, as far as they are set.

    Args:
        variables: The environment; None: this process's.

    Raises:
        ConfigError: One of them is no number.
    """
    variables = os.environ if variables is None else variables
    return {name: _number(variables, name) for name in _IDENTITY if variables.get(name)}


def local_rank(default: int, variables: Mapping[str, str] | None = None) -> int:
    """Returns LOCAL_RANK, or the default where nobody set it."""
    variables = os.environ if variables is None else variables
    return _number(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else default


def agent_store_prefix(config: DistributedConfig, variables: Mapping[str, str] | None = None) -> str | None:
    """Returns the prefix of our keys where torchrun's agent keeps the store; None where rank 0 does.

    Args:
        config: Complete. Where it names another meeting point than the agent's, rank 0 opens that one.
        variables: The environment; None: this process's.
    """
    variables = os.environ if variables is None else variables
    agent = (without_brackets(variables.get("MASTER_ADDR", "")), variables.get("MASTER_PORT"))
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or agent != (
        config.master_addr,
        str(config.master_port),
    ):
        return None
    return f"/worker/attempt_{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def with_disagreement(error: _Error, config: DistributedConfig, variables: Mapping[str, str] | None = None) -> _Error:
    """Returns an error about who this process is, with how a scheduler contradicts RANK and WORLD_SIZE, where one does.

    Args:
        error: What went wrong.
        config: Who this process takes itself to be.
        variables: The environment; None: this process's.
    """
    variables = os.environ if variables is None else variables
    if config.rank is None or config.world_size is None:
        return error
    said = schedulers.disagreement(variables, config.rank, config.world_size)
    return type(error)(f"{error} {said}", rank=error.rank, during=error.during) if said else error


def is_launched(variables: Mapping[str, str] | None = None) -> bool:
    """Returns whether somebody has started this process as one of several: a launcher, a scheduler or a shell."""
    variables = os.environ if variables is None else variables
    if any(name in variables for name in (*_IDENTITY, *_SIGNS)):
        return True
    identity = schedulers.detect(variables)
    return identity is not None and identity.world_size > 1


def started_by(rank: int, world_size: int, variables: Mapping[str, str] | None = None) -> str:
    """Returns who has started this process as one of several, and how to override it; "" where that needs no words.

    Args:
        rank: Of this process.
        world_size: How many there are.
        variables: The environment; None: this process's.
    """
    variables = os.environ if variables is None else variables
    return schedulers.started_by(variables, rank, world_size)


def ranks_that_share_cores(variables: Mapping[str, str] | None = None) -> int:
    """Returns how many ranks a scheduler has started on this machine without a word on threads; 1: it has not.

    Args:
        variables: The environment; None: this process's.
    """
    variables = os.environ if variables is None else variables
    if variables.get("OMP_NUM_THREADS") or any(name in variables for name in _IDENTITY):
        return 1
    identity = schedulers.detect(variables)
    return 1 if identity is None else identity.local_world_size or 1


def cores_left(variables: Mapping[str, str] | None = None) -> int | None:
    """Returns how many cores of this machine a scheduler has given to this process; None: it does not say.

    Args:
        variables: The environment; None: this process's.
    """
    return schedulers.cores_left(os.environ if variables is None else variables)


def sets_threads(variables: Mapping[str, str] | None = None) -> bool:
    """Returns whether somebody has set how many threads PyTorch uses.

    Args:
        variables: The environment; None: this process's.
    """
    variables = os.environ if variables is None else variables
    return bool(variables.get("OMP_NUM_THREADS"))


def settings_found(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the variables that are set of those that decide how ranks meet and talk, for people to see.

    The value of CYXTRAIN_SECRET is nobody's business: it is "set".

    Args:
        variables: The environment; None: this process's.
    """
    variables = os.environ if variables is None else variables
    return {name: "set" if name == _SECRET else variables[name] for name in _READ if variables.get(name)}


def to_pass_on() -> dict[str, str]:
    """Returns a copy of the environment, for processes that this one starts."""
    return dict(os.environ)


def take_worker_channel() -> str:
    """Returns how a notebook's worker reaches its notebook, and takes it out of the environment.

    Raises:
        ConfigError: This is no worker.
    """
    found = os.environ.pop(WORKER_CHANNEL, None)
    if found is None:
        raise ConfigError("A worker is started by a trainer, where num_processes asks for it.")
    return found


def launched_run(variables: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Returns (name of the launcher's run, how often it has started all ranks again); ("", 0) without a launcher.

    Raises:
        ConfigError: A number that is none.
    """
    variables = os.environ if variables is None else variables
    run = variables.get("CYXTRAIN_RUN", "")
    return run, _number(variables, "CYXTRAIN_ATTEMPT") if run and variables.get("CYXTRAIN_ATTEMPT") else 0


def _with_scheduler(variables: Mapping[str, str], *, asks_where: bool) -> Mapping[str, str]:
    """Returns the variables, where they do not say who this process is with those that a scheduler says.

    Args:
        variables: The environment.
        asks_where: Whether nobody has said where rank 0 is.
    """
    if any(name in variables for name in _IDENTITY):
        schedulers.check_pod(variables)
        return variables
    identity = schedulers.detect(variables)
    if identity is None:
        return variables
    if asks_where and identity.world_size > 1 and not (variables.get("MASTER_ADDR") or identity.master_addr):
        raise ConfigError(
            f"{identity.by} has started {identity.world_size} ranks and does not say where rank 0 is: set MASTER_ADDR "
            "to the name or address of its machine on every rank, such as 'mpirun -x MASTER_ADDR=node1' or 'mpiexec "
            "-genv MASTER_ADDR node1'; 127.0.0.1 where all are on one."
        )
    said = identity.to_variables()
    return {**said, **{name: value for name, value in variables.items() if value or name not in said}}


def _complete_identity(config: DistributedConfig, variables: Mapping[str, str]) -> None:
    """Sets rank, world size and local rank where they are None; `validate` refuses what is still missing."""
    if config.rank is None and config.world_size is None:
        missing = [name for name in _IDENTITY if name not in variables]
        present = [name for name in (*_IDENTITY, *_SIGNS) if name in variables]
        if missing and present:
            raise ConfigError(
                f"the environment is half set: {', '.join(present)} is there and {' and '.join(missing)} is missing. "
                "Start with ./launch_distributed.sh or torchrun, set RANK and WORLD_SIZE by hand, or unset them all."
            )
        if missing:
            config.rank, config.world_size = 0, 1
    if config.rank is None and "RANK" in variables:
        config.rank = _number(variables, "RANK")
    if config.world_size is None and "WORLD_SIZE" in variables:
        config.world_size = _number(variables, "WORLD_SIZE")
    if config.local_rank is None and config.rank is not None:
        config.local_rank = local_rank(config.rank, variables)


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ConfigError(f"{name}={variables[name]!r} in the environment is not a whole number.") from None
