"""Mixed precision in a custom training loop, with `DistributedAMPTrainer`.

The fourth of five guides. It shows `training_step`, which updates the parameters with every second batch; how the loss
scale falls and grows; a learning rate with scaling and warm-up; checkpoints with and without the optimizer; and the
same with `fit`, which also measures the parts of a step. Run it alone, by the launcher, or by torchrun:

    python examples/guides/amp_trainer.py
    cyxtrain launch -n 2 -- python examples/guides/amp_trainer.py
    torchrun --nproc-per-node 2 examples/guides/amp_trainer.py

Expect a loss scale that falls from 2**30 until gradients fit into 16 bits, and a test accuracy of about 95 %: of the
loop, of the loaded weights, and of `fit`. Two ranks get the same as one, except for a sample or two.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import cyxtrain as cx
from cyxtrain.datasets import load_digits

EPOCHS, WARMUP_STEPS = 6, 15
STEP = 96  # samples of a step, over all ranks and micro-batches
BASE_BATCH, BASE_RATE = 24, 0.0025  # rows of a step on one rank, and a good learning rate for it
(X, Y), (X_TEST, Y_TEST) = ((torch.tensor(x), torch.tensor(y)) for x, y in load_digits())


class Classifier(nn.Module):
    """A model that returns its own loss: a trainer without a loss_fn calls it with the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(pixels)
        return {"loss": functional.cross_entropy(scores, labels), "scores": scores}


def make_model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def accuracy(model: Classifier) -> float:
    with torch.no_grad():
        return (model.layers(X_TEST).argmax(1) == Y_TEST).float().mean().item()


def scaled_rate(rule: str) -> float:
    """Return the rate for a step of STEP samples: "linear" (Goyal et al., 2017), or "sqrt", better for Adam."""
    ratio = STEP / BASE_BATCH
    return BASE_RATE * (ratio if rule == "linear" else ratio**0.5)


def train_by_steps(folder: Path) -> None:
    # The trainer uses AdamW and the model's own loss by default. Create it on every rank.
    config = cx.create_default_amp_config(dynamic_history_size=20, initial_scale=2.0**30)
    rate = scaled_rate("sqrt")
    trainer = cx.DistributedAMPTrainer(make_model(), config, accumulation_steps=2, learning_rate=rate)
    if trainer.is_main_process:
        print(f"rate for a step of {STEP} samples: {scaled_rate('linear'):g} (linear), {rate:g} (sqrt, used)")

    # One of PyTorch's schedules warms the rate up; it steps after the optimizer has.
    warmup = torch.optim.lr_scheduler.LinearLR(trainer.optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)

    # The loop uses this rank's part of each batch, which may be empty at the end of an epoch.
    sampler = cx.DistributedSampler(len(X), pad=False)
    batches = cx.DistributedBatchIterator(sampler, STEP // 2, effective_batch_size=STEP // 2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for rows in batches:
            step, scale = trainer.step, trainer.scaler.get_scale()
            trainer.training_step((X[rows], Y[rows]))
            if trainer.step > step and trainer.scaler.get_scale() >= scale:  # otherwise gradients have overflowed
                warmup.step()
        if trainer.is_main_process:
            print(f"epoch {epoch + 1}: loss scale {trainer.scaler.get_scale():,.0f}")

    # Rank 0 writes. A file with only the weights is smaller.
    if trainer.is_main_process:
        trainer.save_checkpoint(folder / "whole.ckpt", metadata={"epochs": EPOCHS})
        trainer.save_checkpoint(folder / "weights.ckpt", include_optimizer=False)
        loaded = Classifier()
        cx.load_weights(loaded, folder / "weights.ckpt")
        whole, weights = ((folder / name).stat().st_size for name in ("whole.ckpt", "weights.ckpt"))
        print(f"loop: accuracy {accuracy(trainer.model):.4f}")
        print(f"weights alone, {weights / whole:.0%} of the checkpoint: accuracy {accuracy(loaded):.4f}")


def train_by_fit(folder: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE)
    trainer = cx.DistributedTrainer(model, None, optimizer)
    config = cx.DistributedTrainingConfig(
        epochs=EPOCHS,
        batch_size=BASE_BATCH,
        effective_batch_size=STEP,
        precision="fp16",
        learning_rate_scaling="sqrt",
        warmup_steps=WARMUP_STEPS,
        profile=str(folder),  # a trace for Perfetto, and the time of each part of a step
        verbose=False,
    )
    trainer.fit(X, Y, config)
    if trainer.is_master():
        seconds = trainer.step_seconds[0]
        print(f"most of a step's time on rank 0: {max(seconds, key=seconds.__getitem__)}")
        print(f"fit: accuracy {accuracy(model):.4f}")


def main() -> None:
    with cx.init(), tempfile.TemporaryDirectory() as folder:
        train_by_steps(Path(folder))
        train_by_fit(Path(folder))


if __name__ == "__main__":
    main()
