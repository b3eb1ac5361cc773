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
class Seen:
    """The accelerators of one rank, as it reports them during rendezvous."""

    backend: str = ""
    """The one that its user requested; "": none."""
    kind: str = ""
    """Such as "cuda"; "": no accelerator is visible."""
    count: int = 0
    local_rank: int = 0
    uuid: str = ""
    """Of the one that this rank uses; "": unknown."""
    slot: str = ""
    """Its place in the machine, which parts of one GPU (MIG) share."""
    no_nccl: str = ""
    """Why this rank cannot use NCCL; "": it can."""

    def to_text(self) -> str:
        """Return it as text; "" where there is nothing to tell."""
        return "" if self == Seen(local_rank=self.local_rank) else json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Seen:
        """Read what `to_text` wrote."""
        try:
            facts = json.loads(text) if text else {}
            seen = cls(**{name: type(value)(facts.get(name, value)) for name, value in _NOTHING.items()})
            if seen.kind and seen.count < 1:
                raise ValueError
            return seen
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise ConfigError(
                "another rank describes its devices in a way that this one cannot read. Install the same version of "
                "cyxtrain everywhere."
            ) from None


_NOTHING = dataclasses.asdict(Seen())


def look(config: DistributedConfig) -> Seen:
    """Return what this rank sees. Cost: CUDA is started if several ranks may use NCCL."""
    backend = "" if config.backend is None else BackendType.parse(config.backend).value
    visible, local_rank = accelerator.visible(), config.local_rank or 0
    if visible is None:
        return Seen(backend, local_rank=local_rank)
    kind, count = visible.type, accelerator.count()
    reason = uuid = slot = ""
    if config.world_size != 1 and backend in ("", "nccl"):
        reason = "require_secret=True" if config.require_secret else why_no_nccl()
        if not reason:
            try:
                uuid, slot = torch_compat.identity_of_gpu(local_rank % count)
            except RuntimeError as error:  # the others must not wait for a rank whose driver is broken
                reason = str(error).splitlines()[0]
    return Seen(backend, kind, count, local_rank, uuid, slot, reason)


def why_no_nccl() -> str:
    """Return why NCCL cannot be used here; "": it can."""
    reasons = []
    if not dist.is_nccl_available():
        reasons.append("this PyTorch was built without it")
    if not torch.cuda.is_available():
        reasons.append("no CUDA device is visible")
    return " and ".join(reasons)


def common_backend(ranks: Sequence[Seen]) -> BackendType | None:
    """Return the backend that any rank was told to use; None: the ranks decide."""
    requested = {seen.backend: rank for rank, seen in enumerate(ranks) if seen.backend}
    if len(requested) > 1:
        (one, first), (other, second) = [*requested.items()][:2]
        raise ConfigError(
            f"rank {first} was started with the backend {one} and rank {second} with {other}. Set DISTRIBUTED_BACKEND, "
            "or DistributedConfig.backend, to the same value on every rank."
        )
    return BackendType(next(iter(requested))) if requested else None


def check_nccl(ranks: Sequence[Seen]) -> None:
    """Refuse NCCL if a rank cannot use it."""
    for rank, seen in enumerate(ranks):
        missing = seen.no_nccl if seen.kind == "cuda" else "it sees no CUDA device"
        if missing:
            raise BackendUnavailableError(
                f"backend 'nccl' was requested, and rank {rank} cannot use it: {missing}. Leave the backend unset: "
                "then the ranks decide."
            )


def why_ring(ranks: Sequence[Seen], machines: Sequence[str]) -> str:
    """Return why ranks without a requested backend use the ring; "": they use NCCL, each on its own GPU."""
    if len(ranks) == 1:
        return "one rank needs no backend"
    holders: dict[tuple[str, ...], int] = {}
    for rank, seen in enumerate(ranks):
        if seen.kind != "cuda":
            return f"rank {rank} sees no CUDA device"
        if seen.no_nccl:
            return f"rank {rank} cannot use NCCL: {seen.no_nccl}"
        # By slot too: NCCL refuses two parts of one GPU (MIG), which have different names.
        slot = seen.slot or ("" if seen.uuid else str(seen.local_rank % seen.count))
        for key in filter(lambda key: key[-1], (("", seen.uuid), (machines[rank], slot))):
            if key in holders:
                return f"rank {holders[key]} and rank {rank} share a GPU"
        holders |= {("", seen.uuid): rank, (machines[rank], slot): rank}
    return ""


def why_cpus(ranks: Sequence[Seen]) -> str:
    """Return why ranks without a requested device train on CPUs; "": each uses its accelerator, or none has one.

    All compute on the same kind of device: the parameters of two kinds would differ in their last bits.
    """
    kinds = [seen.kind for seen in ranks]
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is None:
        return ""
    one, another = (f"rank {rank} sees {kinds[rank] or 'no accelerator'}" for rank in (0, other))
    return f"{one} and {another}"
