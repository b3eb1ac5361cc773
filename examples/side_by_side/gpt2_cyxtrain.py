"""GPT-2 from a config with Cyxtrain, to compare with Lightning, Accelerate and Hugging Face's Trainer.

Run it alone, or on two ranks (`pip install transformers`):

    python examples/side_by_side/gpt2_cyxtrain.py
    cyxtrain launch -n 2 -- python examples/side_by_side/gpt2_cyxtrain.py

The model computes its own loss, a mean over tokens; `fit` counts the tokens of all ranks. Expect an accuracy of at
least 0.95 on the letters of new words in the last line: the same results on any number of ranks.
"""

from __future__ import annotations

import torch
from gpt2_task import BATCH_SIZE, EPOCHS, RATE, make_model, make_texts
from torch.utils.data import DataLoader

import cyxtrain as cx


def main() -> cx.TrainingHistory:
    torch.manual_seed(0)
    model = make_model()
    train = DataLoader(make_texts(3000, seed=0), batch_size=BATCH_SIZE, shuffle=True)
    test = DataLoader(make_texts(500, seed=1), batch_size=BATCH_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    trainer = cx.DistributedTrainer(model, None, optimizer, scheduler="linear")
    history = trainer.fit(train, test, epochs=EPOCHS, effective_batch_size=BATCH_SIZE, warmup_steps=20, clip_norm=1.0)
    loss, accuracy = trainer.evaluate(test)
    if cx.is_master():
        print(f"loss {loss:.4f}  accuracy {accuracy:.4f}")
    return history


if __name__ == "__main__":
    with cx.init():
        main()
