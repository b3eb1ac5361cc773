"""The text classifier that four libraries train: examples/side_by_side/text_task.py has model and data.

Expect no output: the other programs import it. A review is a few words, one of them good or bad;
"not" in front of it reverses its meaning. Reviews have different lengths, and are padded with 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

NOT, GOOD, BAD, WORDS, LONGEST = 1, range(2, 12), range(12, 22), 60, 16
EPOCHS, BATCH_SIZE, RATE = 6, 64, 0.003


class TextClassifier(nn.Module):
    """A small transformer: the mean over the words that are no padding gives the class."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 64, padding_idx=0), nn.Embedding(LONGEST, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(64, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        is_word = tokens != 0
        hidden = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        hidden = self.encoder(hidden, src_key_padding_mask=~is_word)
        return self.scores((hidden * is_word[:, :, None]).sum(1) / is_word.sum(1, keepdim=True))


def make_reviews(rows: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    reviews = []
    for _ in range(rows):
        words, opinion, negated = draw(BAD.stop, WORDS, int(draw(5, LONGEST + 1))), draw(2, 22), draw(0, 2)
        place = int(draw(1, len(words)))
        words[place] = opinion
        words[place - 1] = NOT if negated else words[place - 1]
        reviews.append({"tokens": words, "labels": (opinion < BAD.start).long() ^ negated})
    return reviews


def collate(reviews: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch, padded to its longest review."""
    tokens = pad_sequence([review["tokens"] for review in reviews], batch_first=True)
    return {"tokens": tokens, "labels": torch.stack([review["labels"] for review in reviews])}
