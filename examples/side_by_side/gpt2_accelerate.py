"""GPT-2 from a config with Accelerate.

Run it alone, or on two ranks (`pip install accelerate transformers`):

    python examples/side_by_side/gpt2_accelerate.py
    torchrun --nproc-per-node 2 examples/side_by_side/gpt2_accelerate.py

Each step counts the tokens of all ranks, as the guide of Accelerate recommends. Expect an accuracy of at least 0.95 on
the letters of new words in the last line.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from gpt2_task import BATCH_SIZE, EPOCHS, RATE, make_model, make_texts
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> tuple[float, float]:
    model.eval()
    found: list[Tensor] = []
    with torch.no_grad():
        for batch in loader:
            scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            labels = batch["labels"][:, 1:]
            losses = functional.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
            sums = torch.stack([losses, scores.argmax(2) == labels, labels != -100]).sum(2).T
            found.append(accelerator.gather_for_metrics(sums))
    loss, right, tokens = torch.cat(found).sum(0).tolist()
    return loss / tokens, right / tokens


def main() -> None:
    accelerator = Accelerator(cpu=True, split_batches=True)
    set_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    train = DataLoader(make_texts(3000, seed=0), batch_size=BATCH_SIZE, shuffle=True)
    test = DataLoader(make_texts(500, seed=1), batch_size=BATCH_SIZE)
    schedule = get_linear_schedule_with_warmup(optimizer, 20, EPOCHS * len(train))
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for epoch in range(EPOCHS):
        model.train()
        total = 0.0
        for batch in train:
            optimizer.zero_grad()
            tokens = accelerator.reduce((batch["labels"][:, 1:] != -100).sum())
            loss = model(**batch, num_items_in_batch=tokens).loss * accelerator.num_processes
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += accelerator.reduce(loss.detach(), "mean").item()
        loss, accuracy = evaluate(accelerator, model, test)
        accelerator.print(f"epoch {epoch}  loss {total / len(train):.4f}  val {loss:.4f}  {accuracy:.4f}")
    loss, accuracy = evaluate(accelerator, model, test)
    accelerator.print(f"loss {loss:.4f}  accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
