"""A process group of one's own, DistributedDataParallel, and a loop with accumulation and mixed precision.

The first of five guides: PyTorch's way, call by call, as in its tutorial "Getting Started with Distributed Data
Parallel", with this package's names. Run it alone, by the launcher, or by torchrun:

    python examples/guides/process_group.py
    cyxtrain launch -n 2 -- python examples/guides/process_group.py
    torchrun --nproc-per-node 2 examples/guides/process_group.py

Expect what NCCL's absence says (on a machine without it), the results of the collectives (1 alone; 3, 2 and 1 for SUM,
MAX and MIN on two ranks), a falling loss, and about 96 % of the test right, after a few seconds. Any number of ranks
takes the same steps; in 16 bits they round in other places, so that the last digits differ.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

import cyxtrain as cx
from cyxtrain.datasets import load_digits

EPOCHS = 8
EFFECTIVE_BATCH_SIZE = 64  # rows of an optimizer step, over all ranks
ACCUMULATION_STEPS = 2  # micro-batches of a step

# --- A backend that is not here -------------------------------------------------------------------------------------
# NCCL carries tensors between GPUs. Asked for where it is not, it is an error at once, which is a RuntimeError; nothing
# takes its place silently. Where it is, this joins and leaves again: the rest of this guide is for CPUs.

try:
    cx.init_process_group("nccl")
    nccl = "NCCL library available"
    cx.destroy_process_group()
except RuntimeError as error:
    nccl = f"{type(error).__name__}: {error}"

# --- Join -----------------------------------------------------------------------------------------------------------
# Who this rank is comes from the environment, which launchers set; alone, it is a world of one. By hand it would be
# cx.init_process_group("cpu", init_method="tcp://node0:29500", world_size=2, rank=0). "cpu" is cyxtrain's own ring,
# "gloo" PyTorch's backend.

cx.init_process_group("cpu")
rank, world_size = cx.get_rank(), cx.get_world_size()
if rank == 0:
    print(nccl)
    print(f"{world_size} ranks")

# --- Collectives ----------------------------------------------------------------------------------------------------
# They change tensors in place, on every rank, as PyTorch's of the same names do.


def all_reduced(number: float, op: cx.ReduceOp) -> float:
    tensor = torch.tensor([number])
    cx.all_reduce(tensor, op=op)
    return tensor.item()


total, largest, least = (all_reduced(rank + 1, op) for op in (cx.ReduceOp.SUM, cx.ReduceOp.MAX, cx.ReduceOp.MIN))

message = torch.tensor([3.0, 1.0, 4.0]) if rank == 0 else torch.zeros(3)
cx.broadcast(message, src=0)

everyone = [torch.zeros(1) for _ in range(world_size)]
cx.all_gather(everyone, torch.tensor([float(rank)]))

if rank == 0:
    print(f"all_reduce: SUM {total:g}, MAX {largest:g}, MIN {least:g}")
    print(f"all_gather: {torch.cat(everyone).tolist()}")
if rank == world_size - 1:
    print(f"broadcast, on the last rank: {message.tolist()}")

# --- The same model on every rank -----------------------------------------------------------------------------------
# All begin with rank 0's parameters, and backward averages the gradients.

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
ddp = cx.DistributedDataParallel(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
loss_fn = nn.CrossEntropyLoss()

# --- A loop, with accumulation and mixed precision ------------------------------------------------------------------
# Within no_sync() backward only adds to the gradients of this rank; the last micro-batch of a step averages them all.
# bfloat16 needs no loss scale. With float16 a torch.amp.GradScaler goes around backward and step as anywhere: it looks
# at gradients that are averaged, so that every rank leaves out the same steps.

(x_train, y_train), (x_test, y_test) = load_digits()
X, y = torch.from_numpy(x_train[:1408]), torch.from_numpy(y_train[:1408])  # 22 whole steps
sampler = cx.DistributedSampler(len(X))
batches = cx.DistributedBatchIterator(sampler, EFFECTIVE_BATCH_SIZE // ACCUMULATION_STEPS // world_size)

for epoch in range(EPOCHS):
    batches.reset(epoch)
    mean_loss = torch.zeros(1)
    for number, rows in enumerate(batches, start=1):
        last = number % ACCUMULATION_STEPS == 0
        with contextlib.nullcontext() if last else ddp.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_fn(ddp(X[rows]), y[rows])
            (loss / ACCUMULATION_STEPS).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        mean_loss += loss.detach() / len(batches)
    cx.all_reduce(mean_loss, op=cx.ReduceOp.AVG)
    if rank == 0:
        print(f"epoch {epoch + 1}/{EPOCHS}: loss {mean_loss.item():.4f}")

# --- Evaluate -------------------------------------------------------------------------------------------------------
# Each rank takes its share of the rows, and what is added up are counts: exact, however many rows a rank has.

share = slice(rank, None, world_size)
with torch.no_grad():
    right = (model(torch.from_numpy(x_test[share])).argmax(dim=1) == torch.from_numpy(y_test[share])).sum()
cx.all_reduce(right)
if rank == 0:
    print(f"test accuracy: {right.item() / len(x_test):.4f}")

# --- Leave, and single-process mode ---------------------------------------------------------------------------------
# One process is a world, too: it opens no port, and the same calls work. Here each rank is one by itself.

cx.destroy_process_group()
cx.init_process_group("cpu", world_size=1, rank=0)
alone = all_reduced(7, cx.ReduceOp.SUM)
if rank == 0:
    print(f"alone: rank {cx.get_rank()} of {cx.get_world_size()}, SUM {alone:g}")
cx.destroy_process_group()
