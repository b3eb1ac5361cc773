"""The text classifier with Accelerate.

Run it alone, or on two ranks (`pip install accelerate`):

    python examples/side_by_side/text_accelerate.py
    torchrun --nproc-per-node 2 examples/side_by_side/text_accelerate.py

Expect a test accuracy of at least 0.95 in the last line.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from text_task import BATCH_SIZE, EPOCHS, RATE, TextClassifier, collate, make_reviews
from torch.nn import functional
from torch.utils.data import DataLoader


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> tuple[float, float]:
    model.eval()
    found = []
    with torch.no_grad():
        for batch in loader:
            scores = model(batch["tokens"])
            losses = functional.cross_entropy(scores, batch["labels"], reduction="none")
            right = scores.argmax(1) == batch["labels"]
            found.append(accelerator.gather_for_metrics(torch.stack([losses, right.float()], dim=1)))
    loss, accuracy = torch.cat(found).mean(0).tolist()
    return loss, accuracy


def main() -> None:
    accelerator = Accelerator(cpu=True, split_batches=True)
    set_seed(0)
    model = TextClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    train = DataLoader(make_reviews(3000, seed=0), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    test = DataLoader(make_reviews(500, seed=1), batch_size=BATCH_SIZE, collate_fn=collate)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for epoch in range(EPOCHS):
        model.train()
        total = 0.0
        for batch in train:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch["tokens"]), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            total += accelerator.reduce(loss.detach(), "mean").item()
        loss, accuracy = evaluate(accelerator, model, test)
        accelerator.print(f"epoch {epoch}  loss {total / len(train):.4f}  val {loss:.4f}  {accuracy:.4f}")
    loss, accuracy = evaluate(accelerator, model, test)
    accelerator.print(f"loss {loss:.4f}  accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
