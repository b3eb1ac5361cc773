"""GPT-2 from a config with Lightning.

Run it alone, or on two ranks (`pip install lightning transformers`):

    python examples/side_by_side/gpt2_lightning.py
    torchrun --nproc-per-node 2 examples/side_by_side/gpt2_lightning.py

On several ranks, the loss of a step is the mean of the ranks' means over tokens, not the mean over all tokens. Expect
an accuracy of at least 0.95 on the letters of new words in the last line.
"""

from __future__ import annotations

import os

import lightning
import torch
from gpt2_task import BATCH_SIZE, EPOCHS, RATE, make_model, make_texts
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

Batch = dict[str, Tensor]


class LanguageModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def step(self, batch: Batch, name: str) -> Tensor:
        output = self.model(**batch)
        labels = batch["labels"][:, 1:]
        counted = labels != -100
        accuracy = (output.logits[:, :-1].argmax(2) == labels)[counted].float().mean()
        numbers = {f"{name}_loss": output.loss, f"{name}_accuracy": accuracy}
        weight = int(counted.sum())
        self.log_dict(numbers, on_step=False, on_epoch=True, prog_bar=True, batch_size=weight, sync_dist=True)
        return output.loss

    def training_step(self, batch: Batch) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: Batch) -> None:
        self.step(batch, "val")

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
        schedule = get_linear_schedule_with_warmup(optimizer, 20, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    lightning.seed_everything(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    train = DataLoader(make_texts(3000, seed=0), batch_size=BATCH_SIZE // ranks, shuffle=True)
    test = DataLoader(make_texts(500, seed=1), batch_size=BATCH_SIZE // ranks)
    module = LanguageModel()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, train, test)
    [measured] = trainer.validate(module, test, verbose=False)
    if trainer.is_global_zero:
        print(f"loss {measured['val_loss']:.4f}  accuracy {measured['val_accuracy']:.4f}")


if __name__ == "__main__":
    main()
