"""A custom training loop, on any number of ranks: what `fit` does, in its simplest form.

Run it alone, or on two ranks:

    python examples/custom_loop.py
    cyxtrain launch -n 2 -- python examples/custom_loop.py

Four things differ from a loop on one process; each has a comment that begins with a star. Expect losses that fall from
1.07 to 0.08, and about 97 % in the last line: the same results on any number of ranks, up to rounding.
"""

from __future__ import annotations

import torch
from torch import nn

import cyxtrain as cx
from cyxtrain.datasets import load_digits

EPOCHS = 5
BATCH_SIZE = 48  # over all ranks


def main() -> None:
    # Every rank loads the same data, and uses its share of each batch.
    (x_train, y_train), (x_test, y_test) = (map(torch.from_numpy, part) for part in load_digits())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss(reduction="sum")

    ddp = cx.DistributedDataParallel(model)  # * copies rank 0's parameters to all, and averages gradients in backward
    sampler = cx.DistributedSampler(len(x_train), seed=42, pad=False)  # * uses each sample once
    batches = cx.DistributedBatchIterator(sampler, BATCH_SIZE, effective_batch_size=BATCH_SIZE)

    for epoch in range(EPOCHS):
        batches.reset(epoch)  # a new order, the same on every rank
        total = torch.zeros(())
        for number, rows in enumerate(batches):
            optimizer.zero_grad()
            loss = loss_fn(ddp(x_train[rows]), y_train[rows])
            total += loss.detach()
            # * In the last batch, one rank may have one sample more than another. Divide the sum over this rank's
            # samples by the samples of all ranks, and multiply by the number of ranks, because backward averages over
            # them.
            (loss * cx.get_world_size() / batches.global_batch_size(number)).backward()
            optimizer.step()
        cx.all_reduce(total)  # * the sum over all ranks
        if cx.is_master():
            print(f"epoch {epoch + 1}  loss {total / len(x_train):.4f}")

    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean()  # every rank evaluates all samples: they are few
    ddp.check_replicas()  # raises an error unless all ranks have the same parameters, bit for bit
    if cx.is_master():
        print(f"test accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    with cx.init():
        main()
