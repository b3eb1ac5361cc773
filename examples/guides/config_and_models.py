"""Settings and a model by name, a trainer that starts processes, PowerSGD, and metrics averaged over ranks.

The last of five guides, for systems in which a config creates the model and a program starts its own processes. Run it
alone, by the launcher, or by torchrun:

    python examples/guides/config_and_models.py
    cyxtrain launch -n 2 -- python examples/guides/config_and_models.py
    torchrun --nproc-per-node 2 examples/guides/config_and_models.py

Expect the epochs of two fits, which end with the same bits, a test loss of about 27 from `fit` and from the loop by
hand, and the loss of eleven samples computed in two ways, which differ on two ranks. It takes about ten seconds. Alone,
each part starts two processes, with the same results as two ranks under a launcher.
"""

from __future__ import annotations

import os
import secrets
import socket

import torch
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

import cyxtrain as cx
from cyxtrain.datasets import load_digits

# --- Settings -------------------------------------------------------------------------------------------------------
# The same as a YAML file: cx.Config.from_file("configs/digits_vae.yaml"). Read a setting as config.training.epochs, and
# pass a section as **config.training.

CONFIG = cx.Config(
    {
        "model": {"name": "vae", "inputs": 64, "latent": 8},
        "training": {"epochs": 5, "effective_batch_size": 96, "num_processes": 2},
        "powersgd": {"matrix_approximation_rank": 4},
    }
)
(X_TRAIN, _), (X_TEST, _) = load_digits()


# --- A model by name ------------------------------------------------------------------------------------------------
# It returns {"loss": ...}, so the trainer needs no loss and no targets. To add yours: @cx.register_model("name").


def make_model(config: cx.Config) -> torch.nn.Module:
    torch.manual_seed(0)
    return cx.get_model(config.model.name)(config)


# --- A trainer with processes ---------------------------------------------------------------------------------------
# With num_processes=2, two processes run the calls of this trainer, and their results come back into the model. Under a
# launcher, its ranks run them. Gradients are sent as low-rank matrices (PowerSGD). With gradient checkpointing, layers
# recompute activations in backward instead of keeping them.


def train_by_fit(config: cx.Config, *, checkpointing: bool) -> cx.DistributedTrainer:
    model = make_model(config)
    trainer = cx.DistributedTrainer(
        model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        ddp_config=cx.DDPConfig(compression="powersgd", **config.powersgd),
    )
    if checkpointing:
        trainer.enable_gradient_checkpointing()
    trainer.fit(X_TRAIN, cx.DistributedTrainingConfig(**config.training))
    return trainer


# --- The same by hand, with PyTorch's PowerSGD hook -----------------------------------------------------------------
# register_comm_hook accepts PyTorch's hooks.


def train_by_hand(config: cx.Config) -> torch.nn.Module:
    model = make_model(config)
    ddp = cx.DistributedDataParallel(model)
    state = powersgd.PowerSGDState(process_group=None, start_powerSGD_iter=2, **config.powersgd)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pixels = torch.from_numpy(X_TRAIN)
    batches = cx.DistributedBatchIterator(cx.DistributedSampler(pixels), 96 // cx.get_world_size())
    for epoch in range(config.training.epochs):
        batches.reset(epoch)
        for rows in batches:
            optimizer.zero_grad()
            ddp(pixels[rows])["loss"].backward()
            optimizer.step()
    return model.eval()


# --- Metrics, averaged over ranks -----------------------------------------------------------------------------------
# In the mean of the ranks' means, a sample of the smaller share has a larger weight. trainer.evaluate adds up sums and
# counts, and is exact for any number of samples.


def show_metrics(model: torch.nn.Module) -> None:
    rows = torch.from_numpy(X_TEST[:11])  # six for one of two ranks, five for the other
    with torch.no_grad():
        mean = model(rows[cx.get_rank() :: cx.get_world_size()])["loss"]
    cx.all_reduce(mean, op=cx.ReduceOp.AVG)
    trainer = cx.DistributedTrainer(model)
    loss, of_rows = trainer.evaluate(X_TEST)["loss"], trainer.evaluate(rows)["loss"]
    if cx.is_master():
        print(f"test loss by hand: {loss:.4f}")
        print(f"loss of eleven samples: {of_rows:.4f}, as the mean over {cx.get_world_size()} ranks: {mean.item():.4f}")


# --- Processes of your own -----------------------------------------------------------------------------------------
# torch.multiprocessing.spawn calls this with the number of the process, from 0. Each process uses one core, and gets
# the secret of this run from the environment.


def spawned(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    with cx.init(cx.DistributedConfig(rank=rank, world_size=world_size, master_port=port)):
        show_metrics(train_by_hand(CONFIG))


def spawn(num_processes: int) -> None:
    os.environ["CYXTRAIN_SECRET"] = secrets.token_hex(32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(spawned, args=(num_processes, port), nprocs=num_processes)


if __name__ == "__main__":
    trainer = train_by_fit(CONFIG, checkpointing=True)
    kept = train_by_fit(CONFIG, checkpointing=False)
    loss = trainer.evaluate(X_TEST)["loss"]
    if trainer.is_master():
        pairs = zip(trainer.model.parameters(), kept.model.parameters(), strict=True)
        print(f"gradient checkpointing changes no bit: {all(torch.equal(one, other) for one, other in pairs)}")
        print(f"test loss by fit: {loss:.4f}", flush=True)
    if "RANK" in os.environ:  # a launcher has started the ranks
        show_metrics(train_by_hand(CONFIG))
    else:
        spawn(CONFIG.training.num_processes)
    cx.finalize()
