"""Training in 16 bits: bf16, and fp16 with automatic loss scaling.

Run it alone, or on two ranks:

    python examples/mixed_precision.py
    cyxtrain launch -n 2 -- python examples/mixed_precision.py

Parameters stay in 32 bits; PyTorch's autocast computes in 16 bits where that is safe. This halves the memory of
activations. It is fast on GPUs and on CPUs with AMX or AVX512-BF16, and slower than 32 bits on others. In fp16, small
gradients become 0, so the loss is multiplied by a scale before backward, and the gradients are divided by it
afterwards. This example starts with a scale that is far too large, to show what happens: steps that overflow are
skipped, and each halves the scale. Expect about 97 % three times, and some steps that overflow in the first epoch of
fp16.
"""

from __future__ import annotations

import torch
from torch import nn

import cyxtrain as cx
from cyxtrain.datasets import load_digits


def main() -> None:
    (x_train, y_train), (x_test, y_test) = load_digits()

    tiny = torch.tensor(1e-8)
    if cx.is_master():
        scaled = (tiny * 2.0**15).half().float() / 2.0**15
        print(f"1e-8 in fp16: {tiny.half().item():g}; scaled by 2**15 before and divided afterwards: {scaled:.1e}")

    # The scale grows again after 100 steps without an overflow. 2000 is usual, but these fits have only 150 steps.
    amp = cx.create_default_amp_config(initial_scale=2.0**24, dynamic_history_size=100)
    accuracies = {}
    for precision in ("fp32", "bf16", "fp16"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), optimizer)
        config = cx.DistributedTrainingConfig(
            epochs=5,
            effective_batch_size=48,
            precision=precision,
            amp=amp if precision == "fp16" else None,  # only fp16 has a loss scale
            verbose=precision == "fp16",  # its lines show how many steps overflowed
        )
        trainer.fit(x_train, y_train, config)
        accuracies[precision] = trainer.evaluate(x_test, y_test).accuracy  # uses the precision of the fit
    if cx.is_master():
        print("test accuracy: " + "  ".join(f"{name} {value:.4f}" for name, value in accuracies.items()))


if __name__ == "__main__":
    with cx.init():
        main()
