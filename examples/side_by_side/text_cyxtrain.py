"""The text classifier with Cyxtrain, to compare with Lightning, Accelerate and Hugging Face's Trainer.

Run it alone, or on two ranks:

    python examples/side_by_side/text_cyxtrain.py
    cyxtrain launch -n 2 -- python examples/side_by_side/text_cyxtrain.py

Expect a test accuracy of at least 0.95 in the last line: the same results on any number of ranks.
"""

from __future__ import annotations

import torch
from text_task import BATCH_SIZE, EPOCHS, RATE, TextClassifier, collate, make_reviews
from torch.utils.data import DataLoader

import cyxtrain as cx


def main() -> cx.TrainingHistory:
    torch.manual_seed(0)
    model = TextClassifier()
    train = DataLoader(make_reviews(3000, seed=0), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    test = DataLoader(make_reviews(500, seed=1), batch_size=BATCH_SIZE, collate_fn=collate)
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.AdamW(model.parameters(), lr=RATE))
    history = trainer.fit(train, test, epochs=EPOCHS, effective_batch_size=BATCH_SIZE)
    loss, accuracy = trainer.evaluate(test)
    if cx.is_master():
        print(f"loss {loss:.4f}  accuracy {accuracy:.4f}")
    return history


if __name__ == "__main__":
    with cx.init():
        main()
