"""Accelerate with its own DDP, as one rank of a world: `unchanged_accelerate.py BACKEND FOLDER`.

On CPUs Accelerate refuses every backend but its own choice; a group that is there already it adopts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import cyxtrain  # noqa: F401 - it registers the backend "ring"


def main(backend: str, folder: Path) -> None:
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(13, 31), torch.nn.Tanh(), torch.nn.Linear(31, 1))
    loader = DataLoader(TensorDataset(torch.randn(64, 13), torch.randn(64, 1)), batch_size=8, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    rank, size = accelerator.process_index, accelerator.num_processes
    assert (dist.get_backend(), size) == (backend, 2)
    assert accelerator.gather(torch.full((3,), rank)).tolist() == [0] * 3 + [1] * 3
    assert accelerator.gather_for_metrics([rank, "text"], use_gather_object=True) == [0, "text", 1, "text"]
    assert accelerator.reduce(torch.ones(2)).tolist() == [size] * 2
    assert accelerator.pad_across_processes(torch.ones(1 + rank)).tolist() == [1.0, 1.0 if rank else 0.0]
    torch.save(accelerator.unwrap_model(model).state_dict(), folder / f"{backend}{rank}")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
