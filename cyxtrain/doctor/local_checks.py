"""One process by itself: what is here, what works, and what does not."""

from __future__ import annotations

import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from cyxtrain.checkpoint.checkpoint_file import library_versions
from cyxtrain.config import BackendType, DistributedConfig, RingOptions
from cyxtrain.doctor import machine_facts
from cyxtrain.doctor.transports import Way, try_ways
from cyxtrain.environment import accelerator, process_env, torch_compat
from cyxtrain.errors import ConfigError, counted
from cyxtrain.progress import tables
from cyxtrain.world import devices

_OK, _NO, _UNTESTED, _BROKEN = "ok", "no", "untested", "BROKEN"
_ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Fact:
    """A line of the report.

    Attributes:
        part: Under which heading.
        name: What it is about.
        state: "ok", "no", "untested", "BROKEN", or "" where there is nothing to judge.
        text: What was found; where it is broken, what to do.
    """

    part: str
    name: str
    state: str
    text: str


def facts_alone(config: DistributedConfig) -> list[Fact]:
    """Returns what is found of this process, its machine and its environment.

    Args:
        config: Complete.
    """
    asked, failure = "auto", ""
    try:
        asked = RingOptions.from_environment().transport
    except ConfigError as error:
        failure = str(error)
    found = [*_versions(), *_machine(), *_backends(config), *_gpus(), *_ways(try_ways(), asked), _port(config)]
    found += [Fact(_ENVIRONMENT, name, "", value) for name, value in process_env.settings_found().items()]
    if failure:
        found.append(Fact(_ENVIRONMENT, "", _BROKEN, failure))
    return found


def is_healthy(facts: Sequence[Fact]) -> bool:
    """Returns whether nothing is broken."""
    return all(fact.state != _BROKEN for fact in facts)


def lines_of(facts: Sequence[Fact]) -> list[str]:
    """Returns the report."""
    apart = [fact for fact in facts if fact.part == _ENVIRONMENT]  # names of variables are long
    found = [line for group in ([fact for fact in facts if fact not in apart], apart) for line in _table(group)]
    broken = [fact for fact in facts if fact.state == _BROKEN]
    names = ", ".join(fact.name or fact.part for fact in broken)
    last = f"broken: {names}" if broken else "nothing is broken here"
    more = "; cyxtrain launch -n 2 -- cyxtrain doctor also tries the way between processes"
    return [*found, "", *tables.wrapped(last if broken else last + more, "  ")]


def _table(facts: Sequence[Fact]) -> list[str]:
    """Returns facts with their columns aligned; a heading stands at its first fact."""
    if not facts:
        return []
    before = ["", *(fact.part for fact in facts)]
    parts = [fact.part if fact.part != last else "" for last, fact in zip(before[:-1], facts, strict=True)]
    starts = tables.aligned([(part, fact.name, fact.state) for part, fact in zip(parts, facts, strict=True)])
    width = max(map(len, starts)) + 2
    found = []
    for start, fact in zip(starts, facts, strict=True):
        found += tables.wrapped(f"{start.ljust(width)}{fact.text}", " " * width)
    return found


def _versions() -> list[Fact]:
    state = _OK if torch_compat.is_tested() else _UNTESTED
    return [
        Fact("versions", "cyxtrain", "", f"{library_versions()['cyxtrain']}, in {Path(__file__).parents[1]}"),
        Fact("versions", "PyTorch", state, f"{torch.__version__} (tested: {torch_compat.tested_range()})"),
        Fact("versions", "NumPy", "", np.__version__),
        Fact("versions", "Python", "", platform.python_version()),
    ]


def _machine() -> list[Fact]:
    here = machine_facts.this_machine()
    threads = counted(torch.get_num_threads(), "thread")
    return [
        Fact("machine", "host", "", here.host),
        Fact("machine", "system", "", f"{platform.system()} {platform.release()} on {platform.machine()}"),
        Fact("machine", "cores", "", f"{here.cores} usable; PyTorch computes with {threads}"),
        Fact("machine", "memory", "", here.memory or "unknown"),
    ]


def _backends(config: DistributedConfig) -> list[Fact]:
    """Returns which backends there are; the one that is asked for must be."""
    asked = BackendType.parse(config.backend or BackendType.CPU)
    gloo = "" if dist.is_gloo_available() else "this PyTorch was built without it"
    found = []
    for backend, failure, text in (
        (BackendType.CPU, "", "cyxtrain's own ring"),
        (BackendType.GLOO, gloo, "PyTorch's, for CPU tensors"),
        (BackendType.NCCL, devices.why_no_nccl(), "NVIDIA's, for CUDA tensors"),
    ):
        state = _OK if not failure else _BROKEN if backend is asked else _NO
        hint = ". DISTRIBUTED_BACKEND asks for it: cpu works everywhere" if state == _BROKEN else ""
        found.append(Fact("backends", backend.value, state, (failure or text) + hint))
    return found


def _gpus() -> list[Fact]:
    found = [
        Fact("GPUs", f"cuda:{number}", "", f"{name}, {tables.size(memory)}")
        for number, (name, memory) in enumerate(machine_facts.gpus())
    ]
    other = accelerator.visible()
    if not found and other is not None:
        name = accelerator.name_of(other)
        found = [Fact("GPUs", f"{other.type}:{number}", "", name) for number in range(accelerator.count())]
    return found or [Fact("GPUs", "none", "", "PyTorch sees none: training runs on CPUs")]


def _ways(ways: Sequence[Way], asked: str) -> list[Fact]:
    """Returns the transports; TCP must work, and what CYXTRAIN_TRANSPORT asks for."""
    texts = {
        "cma": "processes read each other's memory",
        "unix": "sockets without a network",
        "tcp": "the loopback interface",
    }
    taken = next((way.name for way in ways if not way.failure), "") if asked == "auto" else asked
    found = []
    for way in ways:
        state = _OK if not way.failure else _BROKEN if way.name in ("tcp", asked) else _NO
        text = way.failure or texts[way.name]
        text += "; the ring takes it" if way.name == taken and not way.failure else ""
        hint = f". CYXTRAIN_TRANSPORT={asked} asks for it: leave it away" if way.failure and way.name == asked else ""
        found.append(Fact("transports", way.name, state, text + hint))
    return found


def _port(config: DistributedConfig) -> Fact:
    """Returns whether rank 0 could listen at MASTER_PORT here."""
    port = config.master_port
    if process_env.agent_store_prefix(config.master_addr, config.master_port) is not None:
        return Fact("meeting", "MASTER_PORT", _OK, f"{port}: torchrun's agent listens there")
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return Fact(
            "meeting",
            "MASTER_PORT",
            _NO,
            f"{port}: {reason}. The launcher finds a free port by itself; set MASTER_PORT to another one where you "
            "start ranks yourself",
        )
    return Fact("meeting", "MASTER_PORT", _OK, f"{port} is free here")
