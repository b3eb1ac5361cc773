"""The text classifier with Lightning.

Run it alone, or on two ranks (`pip install lightning`):

    python examples/side_by_side/text_lightning.py
    torchrun --nproc-per-node 2 examples/side_by_side/text_lightning.py

Expect a test accuracy of at least 0.95 in the last line.
"""

from __future__ import annotations

import os

import lightning
import torch
from text_task import BATCH_SIZE, EPOCHS, RATE, TextClassifier, collate, make_reviews
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

Batch = dict[str, Tensor]


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = TextClassifier()

    def step(self, batch: Batch, name: str) -> Tensor:
        scores = self.model(batch["tokens"])
        loss = functional.cross_entropy(scores, batch["labels"])
        accuracy = (scores.argmax(1) == batch["labels"]).float().mean()
        numbers = {f"{name}_loss": loss, f"{name}_accuracy": accuracy}
        self.log_dict(numbers, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(scores), sync_dist=True)
        return loss

    def training_step(self, batch: Batch) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: Batch) -> None:
        self.step(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE)


def main() -> None:
    lightning.seed_everything(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    size = BATCH_SIZE // ranks
    train = DataLoader(make_reviews(3000, seed=0), batch_size=size, shuffle=True, collate_fn=collate)
    test = DataLoader(make_reviews(500, seed=1), batch_size=size, collate_fn=collate)
    module = Classifier()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, train, test)
    [measured] = trainer.validate(module, test, verbose=False)
    if trainer.is_global_zero:
        print(f"loss {measured['val_loss']:.4f}  accuracy {measured['val_accuracy']:.4f}")


if __name__ == "__main__":
    main()
