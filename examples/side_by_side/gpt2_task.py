"""The language model that four libraries train: examples/side_by_side/gpt2_task.py has model and data.

Expect no output: the other programs import it. A text is a word, ">", and the word reversed; the
model learns the second half: the labels of the first half, and of the padding, are -100.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

PAD, ARROW, END, WORDS, LONGEST = 0, 1, 2, 20, 16
EPOCHS, BATCH_SIZE, RATE = 8, 64, 0.003


def make_model() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=WORDS, n_positions=LONGEST, n_embd=64, n_layer=2, n_head=4, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = END
    return GPT2LMHeadModel(config)


def make_texts(rows: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(rows):
        length = int(torch.randint(3, 8, (), generator=generator))
        word = torch.randint(3, WORDS, (length,), generator=generator)
        text = torch.cat([word, torch.tensor([ARROW]), word.flip(0), torch.tensor([END])])
        padded = torch.full((LONGEST,), PAD)
        padded[: len(text)] = text
        place = torch.arange(LONGEST)
        labels = padded.masked_fill((place <= length) | (place >= len(text)), -100)
        texts.append({"input_ids": padded, "attention_mask": (place < len(text)).long(), "labels": labels})
    return texts
