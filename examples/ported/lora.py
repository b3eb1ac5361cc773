"""LoRA with peft: low-rank adapters of a BERT classifier are trained, and the model itself stays frozen.

Run it alone, or on two ranks (`pip install transformers peft`):

    python examples/ported/lora.py
    cyxtrain launch -n 2 -- python examples/ported/lora.py

Nothing is downloaded: BERT is created from a config; your program calls `from_pretrained`. The reviews are synthetic:
good or bad words among neutral ones. Expect that 5 % of the parameters are trained, and an accuracy of at least 0.95 on
new reviews: the same results on any number of ranks.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import cyxtrain as cx

GOOD, BAD, WORDS, LENGTH = range(1, 11), range(11, 21), 60, 12


def make_data(rows: int, seed: int) -> dict[str, Tensor]:
    """Return reviews: neutral words, and two good words or two bad ones, in any places."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(BAD.stop, WORDS, (rows, LENGTH), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (rows,), generator=generator)
    is_bad = torch.randint(2, (rows,), generator=generator)
    for _ in range(2):
        place = (torch.rand(rows, generator=generator) * lengths).long()
        words[torch.arange(rows), place] = torch.randint(1, 11, (rows,), generator=generator) + len(GOOD) * is_bad
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": words * mask, "attention_mask": mask, "labels": is_bad}


def make_model() -> torch.nn.Module:
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,  # the same results on any number of ranks; without this line they are similar
        attention_probs_dropout_prob=0.0,
    )
    adapters = LoraConfig(TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["query", "key", "value"])
    return get_peft_model(BertForSequenceClassification(config), adapters)


def main() -> cx.TrainingHistory:
    torch.manual_seed(0)
    model = make_model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainer = cx.DistributedTrainer(model, None, torch.optim.AdamW(trained, lr=0.01))
    history = trainer.fit(make_data(2000, seed=0), epochs=4, effective_batch_size=64, validation_split=0.1)
    measured = trainer.evaluate(make_data(500, seed=1))
    share = sum(parameter.numel() for parameter in trained) / sum(each.numel() for each in model.parameters())
    if cx.is_master():
        print(f"trained {share:.1%} of the parameters, accuracy {measured.accuracy:.4f}")
    return history


if __name__ == "__main__":
    with cx.init():
        main()
