"""From PyTorch's DataParallel to one process per device: sampler, DataLoader, scatter, barrier, no_sync.

The second of five guides. It shows the contents of PyTorch's tutorials on several devices and on torchrun, with
Cyxtrain's names. Run it alone, by the launcher, or by torchrun:

    python examples/guides/data_parallel.py
    cyxtrain launch -n 2 -- python examples/guides/data_parallel.py
    torchrun --nproc-per-node 2 examples/guides/data_parallel.py

Expect that a step of DataParallel and one of DistributedDataParallel end with the same parameters, up to rounding; the
samples and tensors of each rank; a falling loss, and a test accuracy of about 95 %, after a few seconds. Up to
rounding, losses and accuracy are the same on any number of ranks that divides 32.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cyxtrain as cx
from cyxtrain.datasets import load_digits

EPOCHS = 6
EFFECTIVE_BATCH_SIZE = 32  # samples of a step, over all ranks

# --- Join -----------------------------------------------------------------------------------------------------------
# torchrun, `cyxtrain launch` and clusters set this process's rank in the environment; alone, it is a world of one.

cx.init()
rank, world_size = cx.get_rank(), cx.get_world_size()

(x_train, y_train), (x_test, y_test) = load_digits()
train_set = TensorDataset(torch.from_numpy(x_train[:1408]), torch.from_numpy(y_train[:1408]))  # 44 whole steps
loss_fn = nn.CrossEntropyLoss()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


# --- DataParallel: one process, a thread per GPU --------------------------------------------------------------------
# It scatters each batch to the GPUs of this process, with a copy of the model each time. Without GPUs it only calls the
# module. It cannot use other cores or a second machine.

device = "cuda" if torch.cuda.is_available() else "cpu"
threads = nn.DataParallel(make_model().to(device))
x, y = train_set[:EFFECTIVE_BATCH_SIZE]
loss_fn(threads(x.to(device)), y.to(device)).backward()
torch.optim.SGD(threads.parameters(), lr=0.1).step()

# --- DistributedDataParallel: a process per device ------------------------------------------------------------------
# Each rank takes its share of the same batch, and backward averages the gradients, so the step is the same.

model = make_model()
ddp = cx.DistributedDataParallel(model)
loss_fn(ddp(x[rank::world_size]), y[rank::world_size]).backward()
torch.optim.SGD(ddp.parameters(), lr=0.1).step()
for ours, theirs in zip(model.parameters(), threads.module.parameters(), strict=True):
    torch.testing.assert_close(ours, theirs.to("cpu"))
if rank == 0:
    print(f"{world_size} ranks: DataParallel and DistributedDataParallel give the same parameters")

# --- DistributedSampler in a DataLoader -----------------------------------------------------------------------------
# The sampler chooses each rank's samples. After init, you may leave out num_replicas and rank. Pass them by name: the
# second argument here is `shuffle`. If ranks do not divide the samples, the sampler repeats some, like PyTorch's.
# `fit` does not.

sampler = cx.DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True)
loader = DataLoader(train_set, batch_size=EFFECTIVE_BATCH_SIZE // world_size, sampler=sampler)
print(f"rank {rank}: {len(sampler)} samples in {len(loader)} batches", flush=True)

# --- scatter and barrier --------------------------------------------------------------------------------------------
# Rank 0 sends each rank a tensor. At a barrier, every rank waits for all others.

given = torch.zeros(2)
cx.scatter(given, [torch.full((2,), 10.0 * other) for other in range(world_size)] if rank == 0 else None, src=0)
print(f"rank {rank} received {given.tolist()}", flush=True)
cx.barrier()

# --- Train ----------------------------------------------------------------------------------------------------------
# The loop is the same as on one process, except for set_epoch: without it, every epoch has the same order.

optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    mean_loss = torch.zeros(1)
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(ddp(x), y)
        loss.backward()
        optimizer.step()
        mean_loss += loss.detach() / len(loader)
    cx.all_reduce(mean_loss, op=cx.ReduceOp.AVG)
    if rank == 0:
        print(f"epoch {epoch + 1}/{EPOCHS}: loss {mean_loss.item():.4f}")

# --- no_sync: a backward without averaging --------------------------------------------------------------------------
# Two batches, one exchange: the first backward only adds to this rank's gradients, the second averages the sum.

whole = copy.deepcopy(model)
x, y = train_set[: 2 * EFFECTIVE_BATCH_SIZE]
loss_fn(whole(x), y).backward()

first = slice(rank, EFFECTIVE_BATCH_SIZE, world_size)
second = slice(EFFECTIVE_BATCH_SIZE + rank, None, world_size)
optimizer.zero_grad()
with ddp.no_sync():
    (loss_fn(ddp(x[first]), y[first]) / 2).backward()
(loss_fn(ddp(x[second]), y[second]) / 2).backward()
for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, theirs.grad)
if rank == 0:
    print("no_sync: the gradients of two batches are those of one process")

# --- Evaluate, and leave --------------------------------------------------------------------------------------------

share = slice(rank, None, world_size)
with torch.no_grad():
    right = (model(torch.from_numpy(x_test[share])).argmax(dim=1) == torch.from_numpy(y_test[share])).sum()
cx.all_reduce(right)
if rank == 0:
    print(f"test accuracy: {right.item() / len(x_test):.4f}")
cx.finalize()
