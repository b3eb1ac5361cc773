"""Callbacks: a custom one, small functions, and the built-in one that stops training when it no longer improves.

Run it alone, or on two ranks:

    python examples/callbacks.py
    cyxtrain launch -n 2 -- python examples/callbacks.py

Every rank calls its own callbacks at the same points, and the metrics in `logs` are aggregated over all ranks, so all
ranks decide alike. Expect a first fit that stops as soon as the validation accuracy is 84 %, and a second one, with a
learning rate that is too high, that stops when it has not improved for three epochs. The last line: after 3 and 6 of 30
epochs.
"""

from __future__ import annotations

import torch
from torch import nn

import cyxtrain as cx
from cyxtrain.datasets import load_digits

EPOCHS = 30


class GoodEnough(cx.callbacks.Callback):
    """Stop training when a metric reaches a value; hooks and arguments are Keras's."""

    def __init__(self, monitor: str, least: float) -> None:
        self.monitor, self.least = monitor, least

    def on_epoch_end(self, epoch: int, logs: cx.callbacks.Logs | None = None) -> None:
        if logs and logs[self.monitor] >= self.least:
            self.trainer.stop_training = True  # on any rank: all ranks stop after this epoch


def print_epoch(epoch: int, logs: cx.callbacks.Logs) -> None:
    if cx.is_master():
        print(f"epoch {epoch + 1}  val_loss {logs['val_loss']:.4f}  val_accuracy {logs['val_accuracy']:.4f}")


def fit(learning_rate: float, callback: cx.callbacks.Callback) -> tuple[cx.TrainingHistory, float]:
    (x_train, y_train), (x_test, y_test) = load_digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), learning_rate))
    config = cx.DistributedTrainingConfig(epochs=EPOCHS, effective_batch_size=48, validation_split=0.2, verbose=False)
    printing = cx.callbacks.LambdaCallback(on_epoch_end=print_epoch)
    history = trainer.fit(x_train, y_train, config, callbacks=[printing, callback])
    return history, trainer.evaluate(x_test, y_test).accuracy


def main() -> None:
    good, accuracy = fit(0.003, GoodEnough("val_accuracy", 0.84))
    if cx.is_master():
        print(f"test accuracy {accuracy:.4f}: good enough after {len(good.epochs)} epochs\n")

    # The best epoch is before the last one: restore its weights.
    early = cx.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True)
    worse, accuracy = fit(0.03, early)
    if cx.is_master():
        print(f"test accuracy {accuracy:.4f} with the weights of epoch {early.best_epoch + 1}\n")
        print(f"ended after {len(good.epochs)} and {len(worse.epochs)} of {EPOCHS} epochs")


if __name__ == "__main__":
    with cx.init():
        main()
