"""Resume: an interrupted training run ends exactly like an uninterrupted one, bit for bit.

Run it alone, or on two ranks:

    python examples/resume.py
    cyxtrain launch -n 2 -- python examples/resume.py

Ctrl-C interrupts the run in the middle of epoch 3 of 5. The second run creates a new model and knows only the folder of
checkpoints. Expect it to continue in the middle of that epoch, with the same dropout and the same order of samples, and
`bit for bit: True` at the end.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile

import torch
from torch import nn

import cyxtrain as cx
from cyxtrain.datasets import load_digits


class CtrlC(cx.callbacks.Callback):
    """Send SIGINT, as Ctrl-C does; with several ranks, the launcher forwards it to all of them."""

    def on_train_batch_end(self, batch: int, logs: cx.callbacks.Logs | None = None) -> None:
        if self.trainer.epoch == 2 and batch == 10:  # both count from 0
            signal.raise_signal(signal.SIGINT)


def make_trainer() -> cx.DistributedTrainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    return cx.DistributedTrainer(model, nn.CrossEntropyLoss(), optimizer, scheduler="cosine")


def main(folder: str) -> None:
    (x_train, y_train), _ = load_digits()
    config = cx.DistributedTrainingConfig(epochs=5, effective_batch_size=48, verbose=False)
    uninterrupted = make_trainer()
    expected = uninterrupted.fit(x_train, y_train, config)

    # A run that is killed loses at most checkpoint_every_n_steps steps. At Ctrl-C, it saves first and loses nothing.
    config.checkpoint_dir, config.checkpoint_every_n_steps, config.keep_last = folder, 20, 2
    config.verbose = True
    with contextlib.suppress(KeyboardInterrupt):  # your program would end here
        make_trainer().fit(x_train, y_train, config, callbacks=[CtrlC()])

    trainer = make_trainer()
    history = trainer.fit(x_train, y_train, config, resume="auto")  # from the newest checkpoint, or from scratch

    weights = zip(uninterrupted.model.parameters(), trainer.model.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in weights) and history.train_losses == expected.train_losses
    if cx.is_master():
        print("losses without an interruption:", *(f"{loss:.6f}" for loss in expected.train_losses))
        print("losses with an interruption:   ", *(f"{loss:.6f}" for loss in history.train_losses))
        print(f"bit for bit: {same}")


if __name__ == "__main__":
    with cx.init(), tempfile.TemporaryDirectory() as own_folder:  # only rank 0 writes and reads
        main(own_folder)
