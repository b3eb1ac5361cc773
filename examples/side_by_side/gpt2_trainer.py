"""GPT-2 from a config with Hugging Face's Trainer.

Run it alone, or on two ranks (`pip install accelerate transformers`):

    python examples/side_by_side/gpt2_trainer.py
    torchrun --nproc-per-node 2 examples/side_by_side/gpt2_trainer.py

Expect an accuracy of at least 0.95 on the letters of new words in the last line.
"""

from __future__ import annotations

import os
import tempfile

from gpt2_task import BATCH_SIZE, EPOCHS, RATE, make_model, make_texts
from torch import Tensor
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed


def best(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.argmax(2)


def count_right(found: EvalPrediction) -> dict[str, float]:
    labels = found.label_ids[:, 1:]
    return {"accuracy": (found.predictions[:, :-1] == labels)[labels != -100].mean()}


def main() -> None:
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        settings = TrainingArguments(
            output_dir=folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH_SIZE // ranks,
            per_device_eval_batch_size=BATCH_SIZE // ranks,
            learning_rate=RATE,
            weight_decay=0.01,
            warmup_steps=20,
            max_grad_norm=1.0,
            eval_strategy="epoch",
            save_strategy="no",
            logging_strategy="epoch",
            report_to="none",
            use_cpu=True,
            ddp_backend="gloo" if ranks > 1 else None,
        )
        trainer = Trainer(
            make_model(),
            settings,
            train_dataset=make_texts(3000, seed=0),
            eval_dataset=make_texts(500, seed=1),
            compute_metrics=count_right,
            preprocess_logits_for_metrics=best,
        )
        trainer.train()
        measured = trainer.evaluate()
        if trainer.is_world_process_zero():
            print(f"loss {measured['eval_loss']:.4f}  accuracy {measured['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
