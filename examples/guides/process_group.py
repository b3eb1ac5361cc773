"""Your own process group, DistributedDataParallel, and a loop with accumulation and mixed precision.

The first of five guides. It follows PyTorch's tutorial "Getting Started with Distributed Data Parallel" call by call,
with Cyxtrain's names. Run it alone, by the launcher, or by torchrun:

    python examples/guides/process_group.py
    cyxtrain launch -n 2 -- python examples/guides/process_group.py
    torchrun --nproc-per-node 2 examples/guides/process_group.py

Expect the error for a missing NCCL (on a machine without it), the results of the collectives (1 alone; 3, 2 and 1 for
SUM, MAX and MIN on two ranks), a falling loss, and a test accuracy of about 96 %, after a few seconds. Any number of
ranks takes the same steps; 16 bits are rounded differently, so the last digits differ.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

import cyxtrain as cx
from cyxtrain.datasets import load_digits

EPOCHS = 8
EFFECTIVE_BATCH_SIZE = 64  # samples of an optimizer step, over all ranks
ACCUMULATION_STEPS = 2  # micro-batches of a step

# --- A backend that is not available --------------------------------------------------------------------------------
# NCCL sends tensors between GPUs. If it is not available, you get an error at once, which is a RuntimeError; there is
# no silent fallback. If it is available, this joins and leaves again, because the rest of this guide is for CPUs.

try:
    cx.init_process_group("nccl")
    nccl = "NCCL library available"
    cx.destroy_process_group()
except RuntimeError as error:
    nccl = f"{type(error).__name__}: {error}"

# --- Join -----------------------------------------------------------------------------------------------------------
# Launchers set the rank in the environment; alone, this process is a world of one. By hand, you would call
# cx.init_process_group("cpu", init_method="tcp://node0:29500", world_size=2, rank=0). "cpu" is Cyxtrain's own ring,
# "gloo" is PyTorch's backend.

cx.init_process_group("cpu")
rank, world_size = cx.get_rank(), cx.get_world_size()
if rank == 0:
    print(nccl)
    print(f"{world_size} ranks")

# --- Collectives ----------------------------------------------------------------------------------------------------
# They change tensors in place, on every rank, like PyTorch's functions of the same names.


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
# All ranks start with rank 0's parameters, and backward averages the gradients.

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
ddp = cx.DistributedDataParallel(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
loss_fn = nn.CrossEntropyLoss()

# --- A loop, with accumulation and mixed precision ------------------------------------------------------------------
# Within no_sync(), backward only adds to the gradients of this rank; the last micro-batch of a step averages them.
# bfloat16 needs no loss scale. With float16, use a torch.amp.GradScaler as usual: it checks averaged gradients, so
# every rank skips the same steps.

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
# Each rank evaluates its share of the samples, and the ranks add up counts, which is exact for any number of samples.

share = slice(rank, None, world_size)
with torch.no_grad():
    right = (model(torch.from_numpy(x_test[share])).argmax(dim=1) == torch.from_numpy(y_test[share])).sum()
cx.all_reduce(right)
if rank == 0:
    print(f"test accuracy: {right.item() / len(x_test):.4f}")

# --- Leave, and single-process mode ---------------------------------------------------------------------------------
# One process is a world, too: it opens no port, and the same calls work. Here each rank is a separate world.

cx.destroy_process_group()
cx.init_process_group("cpu", world_size=1, rank=0)
alone = all_reduced(7, cx.ReduceOp.SUM)
if rank == 0:
    print(f"alone: rank {cx.get_rank()} of {cx.get_world_size()}, SUM {alone:g}")
cx.destroy_process_group()
