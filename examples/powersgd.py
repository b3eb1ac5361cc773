"""Low-rank gradients for slow networks: PowerSGD (Vogels et al., 2019), compared with uncompressed gradients.

Run it on two ranks; alone nothing is sent, and the two fits are the same:

    cyxtrain launch -n 2 -- python examples/powersgd.py
    python examples/powersgd.py

A gradient of m x n numbers is sent as (m + n) x matrix_approximation_rank numbers. Each rank keeps the difference and
adds it in the next step. This pays off on a slow network between machines. Within one machine, where nothing is sent,
it only adds overhead. Expect 17 times fewer bytes per step, and about 96 % with and without compression.
"""

from __future__ import annotations

import torch
from torch import nn

import cyxtrain as cx
from cyxtrain.datasets import load_digits

COLUMNS = 4  # of the low-rank matrices: with more columns they are more accurate, and larger


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def sent_bytes(model: nn.Module, columns: int) -> int:
    """Return the bytes of gradients that a step sends; a matrix is sent as it is unless compression halves it."""
    numbers = 0
    for parameter in model.parameters():
        thin = columns * sum(parameter.shape)
        is_thin = parameter.dim() == 2 and 0 < 2 * thin < parameter.numel()
        numbers += thin if is_thin else parameter.numel()
    return 4 * numbers


def main() -> None:
    (x_train, y_train), (x_test, y_test) = load_digits()
    results = {}
    for name, ddp_config in {
        "uncompressed": cx.DDPConfig(),
        "powersgd": cx.DDPConfig(compression="powersgd", matrix_approximation_rank=COLUMNS),
    }.items():
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), optimizer, ddp_config=ddp_config)
        trainer.fit(x_train, y_train, epochs=10, effective_batch_size=96, verbose=False)
        results[name] = trainer.evaluate(x_test, y_test)

    if cx.is_master():
        whole, thin = sent_bytes(make_model(), 0), sent_bytes(make_model(), COLUMNS)
        print(f"bytes of gradients in a step: {whole:,} uncompressed, {thin:,} as low-rank matrices")
        for name, (loss, accuracy) in results.items():
            print(f"{name:<12}  test loss {loss:.4f}  test accuracy {accuracy:.4f}")
        print(f"{whole / thin:.1f} times fewer bytes, accuracy {results['powersgd'].accuracy:.4f}")


if __name__ == "__main__":
    with cx.init():
        main()
