"""The text classifier with Hugging Face's Trainer.

Run it alone, or on two ranks (`pip install transformers accelerate`):

    python examples/side_by_side/text_trainer.py
    torchrun --nproc-per-node 2 examples/side_by_side/text_trainer.py

Expect a test accuracy of at least 0.95 in the last line.
"""

from __future__ import annotations

import os
import tempfile

from text_task import BATCH_SIZE, EPOCHS, RATE, TextClassifier, collate, make_reviews
from torch import Tensor, nn
from torch.nn import functional
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.model(tokens)
        return {"loss": functional.cross_entropy(scores, labels), "logits": scores}


def count_right(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()}


def main() -> None:
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        size = BATCH_SIZE // ranks
        settings = TrainingArguments(
            output_dir=folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=size,
            per_device_eval_batch_size=size,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            eval_strategy="epoch",
            save_strategy="no",
            logging_strategy="epoch",
            report_to="none",
            use_cpu=True,
            ddp_backend="gloo" if ranks > 1 else None,
        )
        trainer = Trainer(
            WithLoss(TextClassifier()),
            settings,
            train_dataset=make_reviews(3000, seed=0),
            eval_dataset=make_reviews(500, seed=1),
            data_collator=collate,
            compute_metrics=count_right,
        )
        trainer.train()
        measured = trainer.evaluate()
        if trainer.is_world_process_zero():
            print(f"loss {measured['eval_loss']:.4f}  accuracy {measured['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
