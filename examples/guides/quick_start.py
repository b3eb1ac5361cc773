"""The quick start: join, train with `fit`, save the result; then the same by hand, step by step.

The third of five guides, with the names of `cyxtrain.distributed`. Run it alone, by the launcher, or by torchrun:

    python examples/guides/quick_start.py
    cyxtrain launch -n 2 -- python examples/guides/quick_start.py
    torchrun --nproc-per-node 2 examples/guides/quick_start.py

Expect six epochs with their losses, a test accuracy of about 95 % after them and after the loop by hand, and two files
of weights, which rank 0 writes to the folder `checkpoints`, after a few seconds. Up to rounding, the results are the
same on any number of ranks that divides 32.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import cyxtrain as cx
import cyxtrain.distributed as dist
from cyxtrain.datasets import load_digits

FOLDER = Path("checkpoints")
EPOCHS = 6
EFFECTIVE_BATCH_SIZE = 32  # samples of a step, over all ranks


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


# --- 1. Join --------------------------------------------------------------------------------------------------------
# The rank comes from the environment, or from dist.init(dist.DistributedConfig(rank=0, world_size=2,
# master_addr="node0")). All names of `dist` are also in `cx`.

dist.init()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)

# --- 2. A model, a loss, an optimizer, a trainer --------------------------------------------------------------------
# Create the same on every rank, and pass the full dataset; the trainer splits the samples among the ranks.

(x_train, y_train), (x_test, y_test) = load_digits()
model = make_model()
loss_fn = nn.CrossEntropyLoss()
trainer = dist.DistributedTrainer(model, loss_fn, torch.optim.Adam(model.parameters(), lr=0.01))

# --- 3. Train -------------------------------------------------------------------------------------------------------
# `batch_size` is per rank, `effective_batch_size` over all of them.

config = dist.DistributedTrainingConfig(
    epochs=EPOCHS,
    effective_batch_size=EFFECTIVE_BATCH_SIZE,
    shuffle=True,
    seed=42,
    validation_split=0.1,
)
history = trainer.fit(x_train, y_train, config)
loss, accuracy = trainer.evaluate(x_test, y_test)

# --- 4. The results -------------------------------------------------------------------------------------------------
# The history and the result of `evaluate` are the same on every rank. Rank 0 prints and writes.

if trainer.is_master():
    FOLDER.mkdir(exist_ok=True)
    cx.save_weights(model, FOLDER / "by_fit.safetensors")
    print(f"losses from {history.train_losses[0]:.4f} to {history.train_losses[-1]:.4f}")
    print(f"validation accuracy: {history.val_accuracies[-1]:.4f}")
    print(f"{history.effective_batch_size} samples a step, {history.world_size} ranks")
    print(f"test accuracy by fit: {accuracy:.4f}")

# --- 5. The same by hand: wrap --------------------------------------------------------------------------------------
# All ranks start with rank 0's parameters. (This is a new model: train a model with a trainer or by hand, not both.)

model = make_model()
ddp = dist.DistributedDataParallel(model, dist.DDPConfig(bucket_size_mb=1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

# --- 6. The same by hand: split samples -------------------------------------------------------------------------------
# The sampler splits an order of the samples among the ranks, and the iterator makes batches of it. By default, the
# sampler repeats samples until the number of ranks divides them; 1,408 samples need none.

X, y = torch.from_numpy(x_train[:1408]), torch.from_numpy(y_train[:1408])
sampler = dist.DistributedSampler(len(X), shuffle=True, seed=42)
batches = dist.DistributedBatchIterator(sampler, batch_size=EFFECTIVE_BATCH_SIZE // 2 // dist.get_world_size())
if dist.is_master():
    print(f"{sampler.local_size()} of {sampler.total_size()} samples on this rank, in {batches.num_batches()} batches")

# --- 7. The same by hand: forward, backward, update -----------------------------------------------------------------
# backward() accumulates on this rank only. update_parameters() averages over ranks, takes a step, and clears the
# gradients; calling it after every second batch accumulates two batches. To inspect or clip averaged gradients first,
# call `gradients = ddp.sync_gradients()`; calling it twice changes nothing.

for epoch in range(EPOCHS):
    batches.reset(epoch)
    while batches.has_next():
        for _ in range(2):
            rows = batches.next()
            output = ddp.forward(X[rows])
            ddp.backward(loss_fn(output, y[rows]) / 2)
        gradients = ddp.sync_gradients()
        ddp.update_parameters(optimizer)
ddp.check_replicas()  # compares the ranks' parameters, bit for bit

# --- 8. The same by hand: evaluate, write, leave --------------------------------------------------------------------
# A trainer can also evaluate a model that was trained elsewhere.

loss, accuracy = dist.DistributedTrainer(ddp.get_model(), loss_fn).evaluate(x_test, y_test)
if dist.is_master():
    cx.save_weights(model, FOLDER / "by_hand.safetensors")
    print(f"largest gradient of the last step: {max(gradient.abs().max() for gradient in gradients.values()):.4f}")
    print(f"test accuracy by hand: {accuracy:.4f}")
dist.barrier()
dist.finalize()
