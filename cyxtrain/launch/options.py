"""What `cyxtrain launch` was told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """What `cyxtrain launch` was given, as words; None: nothing, and Kubernetes may say it (PET_...)."""

    num_ranks: str | None = None
    gpus: str | None = None
    nnodes: str | None = None
    node_rank: str | None = None
    master_addr: str | None = None
    master_port: str | None = None
    restarts: int = 0
    logs: Path | None = None
    config: str | None = None

    def or_from(self, environment: Mapping[str, str]) -> Options:
        """Returns the options, completed by what a TrainJob of Kubernetes says; of its machines, where they do not."""

        def said(own: str | None, variable: str) -> str | None:
            return own if own is not None else environment.get(f"PET_{variable}") or None

        own = self
        if own.gpus is None:
            own = replace(own, num_ranks=said(own.num_ranks, "NPROC_PER_NODE"))
        if own.nnodes is None:
            own = replace(own, nnodes=said(None, "NNODES"), node_rank=said(own.node_rank, "NODE_RANK"))
        return replace(
            own,
            master_addr=said(own.master_addr, "MASTER_ADDR"),
            master_port=said(own.master_port, "MASTER_PORT"),
        )
