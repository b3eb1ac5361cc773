"""`--nnodes MIN:MAX`: torchrun's agent starts the ranks, as many machines as there are at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click

from cyxtrain.launch.options import Options
from cyxtrain.workers.machine import cores_of_each


def torchrun(options: Options, num_ranks: int, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Becomes torchrun, which starts all ranks again where a machine comes or goes. It does not return.

    Args:
        options: `nnodes` is MIN:MAX.
        num_ranks: On this machine.
        command: Of each rank.
        environment: What the ranks' environment begins with.
    """
    low, _, high = str(options.nnodes).partition(":")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
        raise click.UsageError(f"--nnodes must be a number, or MIN:MAX such as 1:4, got {options.nnodes!r}")
    if not options.master_addr:
        raise click.UsageError(f"with --nnodes {options.nnodes} every machine needs --master-addr, where they meet")
    words = [
        f"--nnodes={options.nnodes}",
        f"--nproc-per-node={num_ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={options.master_addr}:{options.master_port or 29400}",
        f"--rdzv-id={environment.get('CYXTRAIN_RUN') or 'cyxtrain'}",
        f"--max-restarts={options.restarts}",
        *([f"--log-dir={options.logs}", "--tee=3"] if options.logs is not None else []),
        "--no-python",
    ]
    variables = {
        # A store of its own for each round: the agents' would still have what ranks of the round before have said.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(cores_of_each(num_ranks, environment)),
        **environment,
    }
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "torch.distributed.run", *words, *command], variables)
