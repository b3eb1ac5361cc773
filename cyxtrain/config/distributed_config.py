"""How processes form a world, and how the ring communicates: settings, completed from the environment."""

from __future__ import annotations

import dataclasses
import enum
import re
from dataclasses import dataclass
from typing import TypeVar

from cyxtrain.config.settings import check_fields, require, settings, unknown_name
from cyxtrain.environment import process_env, schedulers
from cyxtrain.environment.process_env import ENVIRON, Variables
from cyxtrain.errors import ConfigError, CyxtrainError, warn

_Error = TypeVar("_Error", bound=CyxtrainError)


class BackendType(str, enum.Enum):
    """The backend of the collectives."""

    CPU = "cpu"
    """Cyxtrain's ring: shared memory or Unix sockets within a machine, TCP between machines."""
    NCCL = "nccl"
    """NVIDIA's library, for CUDA tensors."""
    GLOO = "gloo"
    """PyTorch's CPU backend."""

    @classmethod
    def parse(cls, value: BackendType | str) -> BackendType:
        """Return the backend called `value`, in upper or lower case; "ring" is another name of CPU.

        Raises:
            ConfigError: Unknown backend; the message has the nearest name.
        """
        if isinstance(value, BackendType):
            return value
        name = str(value).lower()
        if name == "ring":
            return cls.CPU
        known = [backend.value for backend in cls]
        if name not in known:
            raise unknown_name("cyxtrain", name, known, "backend")
        return cls(name)


@settings
class DistributedConfig:
    """This process's rank, and how it joins the others. None: from the environment."""

    rank: int | None = None
    """This process among all, from 0."""
    world_size: int | None = None
    """How many processes there are."""
    local_rank: int | None = None
    """This process among the processes of its machine, from 0; the index of its GPU. Default: the rank."""
    master_addr: str = "127.0.0.1"
    """Host name or address of rank 0; IPv6 with or without brackets."""
    master_port: int = 29500
    """TCP port on which rank 0 waits for the others; it must be free there."""
    backend: BackendType | str | None = None
    """The backend of the collectives; None: DISTRIBUTED_BACKEND, otherwise NCCL if each rank has its own CUDA GPU,
    and the ring if not."""
    timeout_ms: int = 30_000
    """Milliseconds until joining gives up."""
    collective_timeout_ms: int = 1_800_000
    """Milliseconds until a collective gives up; a slow rank is never ended before."""
    require_secret: bool = False
    """Refuse to join without a secret that all ranks share: CYXTRAIN_SECRET in the environment of each."""

    @classmethod
    def from_environment(cls) -> DistributedConfig:
        """Return the environment's config (see `cyxtrain.environment.process_env`); alone, a world of one.

        Raises:
            ConfigError: The environment is half set, or has an invalid number or a rank outside the world.
        """
        return complete_config(cls())

    def validate(self) -> None:
        """Refuse invalid settings, before any socket is opened.

        Raises:
            ConfigError: Names the field, its value and what it must be.
        """
        owner = "DistributedConfig"
        for given, missing in (("rank", "world_size"), ("world_size", "rank")):
            require(
                getattr(self, given) is None or getattr(self, missing) is not None,
                f"{owner}.{given} is set and {missing} is not. Set both, or neither: a field that is None is read from "
                f"{missing.upper()} in the environment, which is not set.",
            )
        address = ("the host name or address of rank 0", lambda value: isinstance(value, str) and bool(value.strip()))
        positive = ("world_size", "master_port", "timeout_ms", "collective_timeout_ms")
        check_fields(self, {"master_addr": address}, positive=positive)
        if self.rank is not None and self.world_size is not None:
            require(
                self.rank < self.world_size,
                f"rank {self.rank} is outside a world of {self.world_size}: ranks count from 0, "
                f"so the highest is {self.world_size - 1}.",
            )
        problem = problem_of_address(self.master_addr)
        require(not problem, f"{owner}.master_addr (MASTER_ADDR) is {self.master_addr!r}: {problem}.")
        require(self.master_port < 65536, f"{owner}.master_port must be below 65536, got {self.master_port}.")
        if self.backend is not None:
            BackendType.parse(self.backend)


def without_brackets(address: str) -> str:
    """Return an IPv6 address without the brackets that URLs put around it; anything else unchanged."""
    return address[1:-1] if re.fullmatch(r"\[[^\[\]]*:[^\[\]]*\]", address) else address


def problem_of_address(address: str) -> str:
    """Return why a string is not one machine's host name or address, and the remedy; "": it is."""
    address = without_brackets(address)
    with_port = re.fullmatch(r"(?:\w+://)?(?:\[(.+)\]|([^:\s]+)):(\d+)/?", address.strip())
    if with_port is not None:
        host = with_port[1] or with_port[2]
        return f"it has a port in it; set MASTER_ADDR={host} and MASTER_PORT={with_port[3]}"
    if "://" in address:
        return "it is a URL; give the host name alone, and the port as MASTER_PORT"
    if address != address.strip():
        return f"it has a space before or after the name; set it to {address.strip()!r}"
    # Before commas, which such a list has within its brackets too.
    if "[" in address[1:]:
        return "it is a list of Slurm's; give its first name, which `scontrol show hostnames` prints first"
    if re.search(r"[\s,;]", address):
        first = re.split(r"[\s,;]+", address)[0]
        return f"it has a space or a comma in it; give rank 0's machine alone, such as the first: {first!r}"
    if "[" in address or "]" in address:
        return "brackets belong around a whole IPv6 address, such as [fe80::1]; leave them out"
    return ""


@dataclass(frozen=True)
class RingOptions:
    """Settings of the ring, from the environment; an argument of a group."""

    secret: str | None = dataclasses.field(default=None, repr=False)
    """What every rank must know to join (CYXTRAIN_SECRET); None: rank 0 makes one, and the store carries it."""
    heartbeat_timeout_seconds: float = 30.0
    """Silence after which a rank on another machine counts as lost (CYXTRAIN_HEARTBEAT_TIMEOUT_MS)."""
    checksums: bool = False
    """Whether every frame carries a checksum of its bytes (CYXTRAIN_CHECKSUMS=1), the same on all ranks."""
    transport: str = "auto"
    """Between ranks of one machine (CYXTRAIN_TRANSPORT): unix, tcp, or auto: the first of them that works. The older
    "cma" is auto, with a warning."""
    is_restarted: bool = False
    """Whether a launcher has restarted this rank (CYXTRAIN_ATTEMPT): previous ranks may still be ending."""
    communication: str = "auto"
    """Where collectives with async_op=True run (CYXTRAIN_COMMUNICATION): thread; inline, in the calling thread; or
    auto: in a thread if there are several machines or free cores."""
    group_name: str = ""
    """The name of the group, part of what values in the store prove; set by the code that makes the group."""
    devices: str = ""
    """The accelerators of this rank, for the others to see (`cyxtrain.world.devices`)."""
    keeps_listening: bool = False
    """Whether a next generation may follow the group, for whose ranks it listens meanwhile; set by the code that makes
    the group."""

    @property
    def secret_bytes(self) -> bytes | None:
        """The secret as bytes, whether or not they are UTF-8; None: no secret is set."""
        return None if self.secret is None else self.secret.encode("utf-8", "surrogateescape")

    @classmethod
    def from_environment(cls, variables: Variables = ENVIRON) -> RingOptions:
        """Return the settings in the environment."""
        milliseconds = process_env.number("CYXTRAIN_HEARTBEAT_TIMEOUT_MS", variables)
        if milliseconds is None:
            milliseconds = 30_000
        if milliseconds < 100:
            raise ConfigError(
                f"CYXTRAIN_HEARTBEAT_TIMEOUT_MS in the environment must be at least 100, got {milliseconds}."
            )
        return cls(
            secret=variables.get(process_env.SECRET) or None,
            heartbeat_timeout_seconds=milliseconds / 1000,
            checksums=process_env.one_of("CYXTRAIN_CHECKSUMS", ("0", "1"), variables) == "1",
            transport=process_env.one_of("CYXTRAIN_TRANSPORT", ("auto", "tcp", "unix", "cma"), variables),
            is_restarted=process_env.launched_run(variables)[1] > 0,
            communication=process_env.one_of("CYXTRAIN_COMMUNICATION", ("auto", "inline", "thread"), variables),
        )


def complete_config(config: DistributedConfig, variables: Variables = ENVIRON) -> DistributedConfig:
    """Return a copy in which the environment fills in the fields that are None or have their default.

    So a program that sets only a timeout still joins the others at its launcher's address.
    """
    if "NCCL_TIMEOUT" in variables:
        warn("NCCL_TIMEOUT is set, and PyTorch ignores it: set collective_timeout_ms in DistributedConfig.")
    config = dataclasses.replace(config)
    if config.rank is None and config.world_size is None:
        needs_address = config.master_addr == DistributedConfig.master_addr
        variables = process_env.with_scheduler(variables, needs_address=needs_address)
        config.rank, config.world_size = process_env.identity_of(variables)
    _complete_identity(config, variables)
    _complete_address(config, variables)
    if config.backend is None:
        config.backend = requested_backend(variables)
    else:
        config.backend = BackendType.parse(config.backend)
    try:
        config.validate()
    except ConfigError as error:
        raise with_disagreement(error, config, variables) from None
    config.master_addr = without_brackets(config.master_addr)
    if config.require_secret:
        _check_secret(config, variables)
    return config


def _complete_identity(config: DistributedConfig, variables: Variables) -> None:
    """Fill in rank, world size and local rank where the program has not set them."""
    if config.rank is None:
        config.rank = process_env.number("RANK", variables)
    if config.world_size is None:
        config.world_size = process_env.number("WORLD_SIZE", variables)
    if config.local_rank is None and config.rank is not None:
        config.local_rank = process_env.number("LOCAL_RANK", variables)
        if config.local_rank is None:
            config.local_rank = config.rank


def _complete_address(config: DistributedConfig, variables: Variables) -> None:
    """Fill in where and how long to join, where the program has left the defaults."""
    if config.master_addr == DistributedConfig.master_addr:
        config.master_addr = variables.get("MASTER_ADDR") or config.master_addr
    for name, variable in (("master_port", "MASTER_PORT"), ("timeout_ms", "DISTRIBUTED_TIMEOUT_MS")):
        if getattr(config, name) == getattr(DistributedConfig, name):
            found = process_env.number(variable, variables)
            if found is not None:
                setattr(config, name, found)


def requested_backend(variables: Variables = ENVIRON) -> BackendType | None:
    """Return the value of DISTRIBUTED_BACKEND; None: it is not set."""
    value = variables.get("DISTRIBUTED_BACKEND")
    if not value:
        return None
    try:
        return BackendType.parse(value)
    except ConfigError as error:
        raise ConfigError(f"DISTRIBUTED_BACKEND in the environment: {error}") from None


def _check_secret(config: DistributedConfig, variables: Variables) -> None:
    """Refuse to join if strangers could join too."""
    if config.backend is not None and config.backend != BackendType.CPU:
        raise ConfigError(
            f"require_secret=True: the {BackendType.parse(config.backend).value} backend lets in every process that "
            "reaches its port. Use backend='cpu', cyxtrain's own ring."
        )
    if not variables.get(process_env.SECRET) and config.world_size != 1:
        raise ConfigError(
            "require_secret=True, and CYXTRAIN_SECRET is not set: put the same long random string into the environment "
            "of every rank (python -c 'import secrets; print(secrets.token_hex(32))'). On one machine the launcher "
            "does so."
        )


def with_disagreement(error: _Error, config: DistributedConfig, variables: Variables = ENVIRON) -> _Error:
    """Add to an error about this rank how the scheduler contradicts RANK and WORLD_SIZE, if it does."""
    if config.rank is None or config.world_size is None:
        return error
    contradiction = schedulers.disagreement(variables, config.rank, config.world_size)
    if not contradiction:
        return error
    return type(error)(f"{error} {contradiction}", rank=error.rank, during=error.during)
