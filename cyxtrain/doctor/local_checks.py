"""Checks of one process's machine: versions, cores, memory, backends, GPUs, transports, port."""

from __future__ import annotations

import platform
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from cyxtrain.checkpoint.checkpoint_file import library_versions
from cyxtrain.config import BackendType, DistributedConfig, RingOptions
from cyxtrain.doctor.terminal import size, table
from cyxtrain.environment import accelerator, process_env, torch_compat
from cyxtrain.environment.regular_files import memory_bytes
from cyxtrain.errors import ConfigError, counted, reason_of
from cyxtrain.ring import try_transports
from cyxtrain.workers.machine import usable_cores
from cyxtrain.world import devices

if TYPE_CHECKING:
    from rich.console import RenderableType

_OK = "ok"
_NO = "no"
_UNTESTED = "untested"
_BROKEN = "BROKEN"
_ENVIRONMENT = "environment"


class Check(NamedTuple):
    """A line of the report."""

    section: str
    name: str
    state: str
    """"ok", "no", "untested", "BROKEN", or empty for information."""
    text: str
    """What was found; if it is broken, what to do."""


def run_checks(config: DistributedConfig) -> list[Check]:
    """Return all checks of this process."""
    requested = "auto"
    failure = ""
    # An invalid setting is a line of the report: the other checks still run.
    try:
        requested = RingOptions.from_environment().transport
    except ConfigError as error:
        failure = str(error)
    found = [*_versions(), *_machine(), *_backends(config), *_gpus(), *_transports(try_transports(), requested)]
    found.append(_port(config))
    found += [Check(_ENVIRONMENT, name, "", value) for name, value in process_env.settings_found().items()]
    if failure:
        found.append(Check(_ENVIRONMENT, "", _BROKEN, failure))
    return found


def is_healthy(checks: Sequence[Check]) -> bool:
    """Return whether nothing is broken."""
    return all(check.state != _BROKEN for check in checks)


def report_of(checks: Sequence[Check]) -> list[RenderableType]:
    """Return tables of the checks and a verdict."""
    # The names of variables are long: in one table they would push the other columns to the right.
    variables = [check for check in checks if check.section == _ENVIRONMENT]
    others = [check for check in checks if check.section != _ENVIRONMENT]
    found: list[RenderableType] = [table((), _rows(part)) for part in (others, variables) if part]
    broken = [check.name or check.section for check in checks if check.state == _BROKEN]
    text = "nothing is broken here; cyxtrain launch -n 2 -- cyxtrain doctor also tests the connection between processes"
    if broken:
        text = f"broken: {', '.join(broken)}"
    return [*found, text]


def _rows(checks: Sequence[Check]) -> list[tuple[str, ...]]:
    """Return the cells of a table, with the name of a section only in its first row."""
    rows: list[tuple[str, ...]] = []
    previous = ""
    for section, *cells in checks:
        rows.append(("" if section == previous else section, *cells))
        previous = section
    return rows


def _state_of(failure: str, *, is_needed: bool) -> str:
    if not failure:
        return _OK
    return _BROKEN if is_needed else _NO


def _versions() -> list[Check]:
    state = _OK if torch_compat.is_tested() else _UNTESTED
    return [
        Check("versions", "cyxtrain", "", f"{library_versions()['cyxtrain']}, in {Path(__file__).parents[1]}"),
        Check("versions", "PyTorch", state, f"{torch.__version__} (tested: {torch_compat.tested_range()})"),
        Check("versions", "NumPy", "", np.__version__),
        Check("versions", "Python", "", platform.python_version()),
    ]


def _machine() -> list[Check]:
    machine = this_machine()
    threads = counted(torch.get_num_threads(), "thread")
    return [
        Check("machine", "host", "", machine.host),
        Check("machine", "system", "", f"{platform.system()} {platform.release()} on {platform.machine()}"),
        Check("machine", "cores", "", f"{machine.cores} usable; PyTorch uses {threads}"),
        Check("machine", "memory", "", machine.memory),
    ]


def _backends(config: DistributedConfig) -> list[Check]:
    """Return the backends; the one that is configured must be available."""
    requested = BackendType.parse(config.backend or BackendType.CPU)
    gloo = "" if dist.is_gloo_available() else "this PyTorch was built without it"
    found = []
    for backend, failure, text in (
        (BackendType.CPU, "", "cyxtrain's own ring"),
        (BackendType.GLOO, gloo, "PyTorch's, for CPU tensors"),
        (BackendType.NCCL, devices.why_no_nccl(), "NVIDIA's, for CUDA tensors"),
    ):
        state = _state_of(failure, is_needed=backend is requested)
        result = failure or text
        if state == _BROKEN:
            result += ". DISTRIBUTED_BACKEND requests it: cpu works everywhere"
        found.append(Check("backends", backend.value, state, result))
    return found


def _gpus() -> list[Check]:
    found = []
    for device, name, memory in accelerator.all_with_memory():
        text = f"{name}, {size(memory)}" if memory else name
        found.append(Check("GPUs", device, "", text))
    return found or [Check("GPUs", "none", "", "PyTorch sees none: training runs on CPUs")]


def _transports(failures: Mapping[str, str], requested: str) -> list[Check]:
    """Return the transports; TCP and the one that CYXTRAIN_TRANSPORT requests must work."""
    texts = {"unix": "Unix sockets, and memory that processes share", "tcp": "the loopback interface"}
    working = [name for name, failure in failures.items() if not failure]
    used = requested if requested in failures else next(iter(working), "")
    found = []
    for name, failure in failures.items():
        text = failure or texts[name]
        if failure and name == requested:
            text += f". CYXTRAIN_TRANSPORT={requested} requests it: unset it"
        elif not failure and name == used:
            text += "; the ring uses it"
        state = _state_of(failure, is_needed=name in ("tcp", requested))
        found.append(Check("transports", name, state, text))
    return found


def _port(config: DistributedConfig) -> Check:
    """Check whether rank 0 could listen at MASTER_PORT on this machine."""
    port = config.master_port
    state = _OK
    text = f"{port} is free here"
    if process_env.agent_store_prefix(config.master_addr, port) is not None:
        text = f"{port}: torchrun's agent listens there"
    else:
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            state = _NO
            reason = reason_of(error).lower()
            text = f"{port}: {reason}. The launcher picks a free port; if you start ranks yourself, set another one"
    return Check("rendezvous", "MASTER_PORT", state, text)


@dataclass(frozen=True)
class Machine:
    """Where a rank runs; what is unknown is empty."""

    host: str
    interface: str
    """Of the address at which the rank listens."""
    cores: int
    memory: str
    gpus: str
    """Such as "2 x NVIDIA H200", or "none"."""
    cyxtrain: str
    torch: str
    python: str


def this_machine(address: str = "") -> Machine:
    """Return this process's machine; `address` is where it listens."""
    counts = Counter(name for _, name, _ in accelerator.all_with_memory())
    return Machine(
        host=socket.gethostname(),
        interface=interface_of(address),
        cores=usable_cores(process_env.to_pass_on()),
        memory=size(memory_bytes()),
        gpus=", ".join(f"{count} x {name}" for name, count in counts.items()) or "none",
        cyxtrain=library_versions()["cyxtrain"],
        torch=torch.__version__,
        python=platform.python_version(),
    )


def interface_of(address: str) -> str:
    """Return the network interface that has an address; empty if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if address in [each.address for each in addresses]:
            return str(name)
    return ""
