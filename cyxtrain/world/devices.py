"""The accelerators that each rank sees, and the backend and devices that all ranks choose because of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cyxtrain.config import BackendType, DistributedConfig
from cyxtrain.environment import accelerator, torch_compat
from cyxtrain.errors import BackendUnavailableError, ConfigError


@dataclass(frozen=True)
class DeviceReport:
    """The accelerators of one rank, as it reports them during rendezvous."""

    backend: str = ""
    """The backend that the user requested; "": none."""
    kind: str = ""
    """Such as "cuda"; "": no accelerator is visible."""
    count: int = 0
    local_rank: int = 0
    uuid: str = ""
    """The UUID of the GPU that this rank uses; "": unknown."""
    slot: str = ""
    """That GPU's PCI address, which parts of one GPU (MIG) share."""
    no_nccl: str = ""
    """Why this rank cannot use NCCL; "": it can."""

    def to_text(self) -> str:
        """Return the report as a string; "" for a rank without accelerators or a requested backend."""
        return "" if self == DeviceReport(local_rank=self.local_rank) else json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> DeviceReport:
        """Read the result of `to_text`."""
        try:
            facts = json.loads(text or "{}")
            # The sender is not trusted: each value is converted to the type of its field.
            report = cls(**{name: type(value)(facts.get(name, value)) for name, value in _NOTHING.items()})
            if report.kind and report.count < 1:
                raise ValueError
            return report
        except (ValueError, TypeError, AttributeError, RecursionError):  # from another version
            raise ConfigError(
                "another rank describes its devices in a way that this one cannot read. Install the same version of "
                "cyxtrain everywhere."
            ) from None


_NOTHING = dataclasses.asdict(DeviceReport())


def report_devices(config: DistributedConfig) -> DeviceReport:
    """Return the accelerators of this rank. Cost: starts CUDA if several ranks may use NCCL."""
    backend = ""
    if config.backend is not None:
        backend = BackendType.parse(config.backend).value
    report = DeviceReport(backend, local_rank=config.local_rank or 0)
    visible = accelerator.visible()
    if visible is None:
        return report
    report = dataclasses.replace(report, kind=visible.type, count=accelerator.count())
    if config.world_size == 1 or backend not in ("", "nccl"):
        return report
    # The rest starts CUDA, for which only NCCL has a use.
    reason = "require_secret=True" if config.require_secret else why_no_nccl()
    if reason:
        return dataclasses.replace(report, no_nccl=reason)
    try:
        uuid, slot = torch_compat.identity_of_gpu(report.local_rank % report.count)
    except RuntimeError as error:  # the others must not wait for a rank whose driver is broken
        return dataclasses.replace(report, no_nccl=str(error).splitlines()[0])
    return dataclasses.replace(report, uuid=uuid, slot=slot)


def why_no_nccl() -> str:
    """Return why NCCL cannot be used here; "": it can."""
    reasons = []
    if not dist.is_nccl_available():
        reasons.append("this PyTorch was built without it")
    if not torch.cuda.is_available():
        reasons.append("no CUDA device is visible")
    return " and ".join(reasons)


def common_backend(reports: Sequence[DeviceReport]) -> BackendType | None:
    """Return the backend that any rank was told to use; None: the ranks decide."""
    requested = {report.backend: rank for rank, report in enumerate(reports) if report.backend}
    if not requested:
        return None
    if len(requested) > 1:
        (one, first), (other, second), *_ = requested.items()
        raise ConfigError(
            f"rank {first} was started with the backend {one} and rank {second} with {other}. Set DISTRIBUTED_BACKEND, "
            "or DistributedConfig.backend, to the same value on every rank."
        )
    return BackendType(next(iter(requested)))


def check_nccl(reports: Sequence[DeviceReport]) -> None:
    """Refuse NCCL if a rank cannot use it."""
    for rank, report in enumerate(reports):
        missing = report.no_nccl if report.kind == "cuda" else "it sees no CUDA device"
        if missing:
            raise BackendUnavailableError(
                f"backend 'nccl' was requested, and rank {rank} cannot use it: {missing}. Leave the backend unset: "
                "then the ranks decide."
            )


def why_ring(reports: Sequence[DeviceReport], machines: Sequence[str]) -> str:
    """Return why ranks without a requested backend use the ring; "": they use NCCL, each on its own GPU."""
    if len(reports) == 1:
        return "one rank needs no backend"
    holders: dict[tuple[str, ...], int] = {}
    for rank, report in enumerate(reports):
        if report.kind != "cuda":
            return f"rank {rank} sees no CUDA device"
        if report.no_nccl:
            return f"rank {rank} cannot use NCCL: {report.no_nccl}"
        for gpu in _names_of_gpu(report, machines[rank]):
            if gpu in holders:
                return f"rank {holders[gpu]} and rank {rank} share a GPU"
            holders[gpu] = rank
    return ""


def _names_of_gpu(report: DeviceReport, machine: str) -> list[tuple[str, ...]]:
    """Return the names of the GPU that a rank uses; ranks share a GPU if they share a name."""
    names: list[tuple[str, ...]] = []
    if report.uuid:
        names.append(("UUID", report.uuid))
    # By slot too: NCCL refuses two parts of one GPU (MIG), which have different UUIDs.
    if report.slot:
        names.append((machine, report.slot))
    elif not report.uuid:
        names.append((machine, str(report.local_rank % report.count)))
    return names


def why_cpus(reports: Sequence[DeviceReport]) -> str:
    """Return why ranks without a requested device train on CPUs; "": all see the same kind of device.

    All compute on the same kind of device: parameters on two kinds would differ in their last bits.
    """
    kinds = [report.kind or "no accelerator" for report in reports]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            return f"rank 0 sees {kinds[0]} and rank {rank} sees {kind}"
    return ""
