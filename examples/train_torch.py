"""Train on digits by hand, on any number of ranks: plain PyTorch, DistributedDataParallel over Gloo.

train_cyxtrain.py is the same training with Cyxtrain, in the same order and with the same comments. Compare them:

    diff -y -W 200 examples/train_torch.py examples/train_cyxtrain.py

Run it alone, under torchrun, or as `./launch_distributed.sh 2 python examples/train_torch.py`. Expect about 96 %.
Although it is long, it uses some samples twice if the ranks do not divide the data (the sampler repeats them), does not
report which rank died, and may leave half a checkpoint when it is killed.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cyxtrain.datasets import load_digits

EPOCHS = 10
BATCH_SIZE = 96  # samples per step, over all ranks
LEARNING_RATE = 0.01
SEED = 42
FOLDER = Path("checkpoints")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

History = dict[str, list[float]]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train(model: nn.Module, loss_fn: nn.Module, optimizer: torch.optim.Optimizer, train_set: TensorDataset) -> History:
    sampler: DistributedSampler[int] = DistributedSampler(train_set, seed=SEED)
    loader = DataLoader(train_set, BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    history: History = {"train_losses": [], "train_accuracies": []}
    for epoch in range(EPOCHS):
        started = time.perf_counter()
        sampler.set_epoch(epoch)
        loss, accuracy = run_epoch(model, loss_fn, loader, optimizer)
        history["train_losses"].append(loss)
        history["train_accuracies"].append(accuracy)
        if dist.get_rank() == 0:
            speed = len(train_set) / (time.perf_counter() - started)
            numbers = f"loss {loss:.4f}, accuracy {accuracy:.4f}, {speed:,.0f} samples/s"
            print(f"epoch {epoch + 1}/{EPOCHS}: {numbers}", flush=True)
    return history


def run_epoch(
    model: nn.Module,
    loss_fn: nn.Module,
    loader: DataLoader[tuple[torch.Tensor, ...]],
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[float, float]:
    """Train if there is an optimizer, otherwise evaluate; return loss and accuracy over all ranks."""
    model.train(optimizer is not None)
    sums = torch.zeros(3, dtype=torch.float64)  # loss, correct predictions, samples
    with torch.set_grad_enabled(optimizer is not None):
        for x, y in loader:
            scores = model(x)
            loss = loss_fn(scores, y)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            correct = (scores.argmax(dim=1) == y).sum().item()
            sums += torch.tensor([loss.item() * len(y), correct, len(y)], dtype=torch.float64)
    dist.all_reduce(sums)
    total_loss, total_correct, num_samples = sums.tolist()
    return total_loss / num_samples, total_correct / num_samples


def main() -> None:
    # Join the world; on one process, a world of one.
    if "RANK" not in os.environ:
        os.environ.update(ALONE)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # Every rank has the same data.
    (x_train, y_train), (x_test, y_test) = load_digits()

    # The same weights on every rank, and averaged gradients.
    torch.manual_seed(SEED)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    loss_fn = nn.CrossEntropyLoss()

    # Train: a new order in every epoch, and each rank uses its share.
    train_set = TensorDataset(torch.from_numpy(x_train), torch.from_numpy(y_train))
    history = train(model, loss_fn, optimizer, train_set)

    # Evaluate: count every sample once, on any number of ranks.
    x_share, y_share = x_test[rank::world_size], y_test[rank::world_size]
    test_set = TensorDataset(torch.from_numpy(x_share), torch.from_numpy(y_share))
    loss, accuracy = run_epoch(model.module, loss_fn, DataLoader(test_set, BATCH_SIZE))

    # Save the checkpoint, the history and the result; rank 0 writes.
    if rank == 0:
        FOLDER.mkdir(parents=True, exist_ok=True)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": EPOCHS, "history": history}, FOLDER / "train_torch.pt")
        (FOLDER / "train_torch.json").write_text(json.dumps(history))
        print(f"test loss: {loss:.4f}")
        print(f"test accuracy: {accuracy:.4f}")

    # Leave.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
