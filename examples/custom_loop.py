"""A training loop of your own, on as many ranks as you start: what `fit` does, in its simplest form.

Run it alone, or on two ranks:

    python examples/custom_loop.py
    cyxtrain launch -n 2 -- python examples/custom_loop.py

Four things differ from a loop for one process; each has a comment that begins with a star. Expect losses that fall from
1.07 to 0.08, and about 97 % as the last line: the same numbers on any number of ranks, up to rounding.
"""

from __future__ import annotations

import torch
from torch import nn

import cyxtrain as cx
from cyxtrain.datasets import load_digits

EPOCHS = 5
BATCH_SIZE = 48  # over all ranks


def main() -> None:
    # Every rank has the same data, and sees its share of each batch.
    (x_train, y_train), (x_test, y_test) = (map(torch.from_numpy, part) for part in load_digits())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss(reduction="sum")

    ddp = cx.DistributedDataParallel(model)  # * rank 0's parameters for all, and gradients averaged in backward
    sampler = cx.DistributedSampler(len(x_train), seed=42, pad=False)  # * no sample twice, none left out
    batches = cx.DistributedBatchIterator(sampler, BATCH_SIZE, effective_batch_size=BATCH_SIZE)

    for epoch in range(EPOCHS):
        batches.reset(epoch)  # a new order, the same on every rank
        total = torch.zeros(())
        for number, rows in enumerate(batches):
            optimizer.zero_grad()
            loss = loss_fn(ddp(x_train[rows]), y_train[rows])
            total += loss.detach()
            # * The last batch may have a row more on one rank than on another: the mean over the rows of all ranks is
            # the sum over this rank's, times the number of ranks (backward averages over them), by the rows of all.
            (loss * cx.get_world_size() / batches.global_batch_size(number)).backward()
            optimizer.step()
        cx.all_reduce(total)  # * this rank's sum becomes that of all
        if cx.is_master():
            print(f"epoch {epoch + 1}  loss {total / len(x_train):.4f}")

    with torch.no_grad():
        right = (model(x_test).argmax(1) == y_test).float().mean()  # few enough rows for every rank to take all
    ddp.check_replicas()  # the parameters of all ranks are the same, to the bit; else an error
    if cx.is_master():
        print(f"test accuracy: {right:.4f}")


if __name__ == "__main__":
    with cx.init():
        main()
