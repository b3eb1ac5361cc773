"""Sequence to sequence with teacher forcing: dates such as "7 may 1998" become "1998-5-7".

Run it alone, or on two ranks:

    python examples/ported/seq2seq.py
    cyxtrain launch -n 2 -- python examples/ported/seq2seq.py

In training, the decoder gets the right answer up to each character, and predicts the next one. The targets are padded
with 0, which the loss ignores. Expect that it translates at least 90 % of new dates in the last line: the same results
on any number of ranks.
"""

from __future__ import annotations

import calendar
import datetime

import torch
from torch import Tensor, nn

import cyxtrain as cx

LETTERS = " -0123456789abcdefghijklmnopqrstuvwxyz"
PAD, START, END, WORDS = 0, 1, 2, len(LETTERS) + 3
LONGEST, ANSWER = 18, 11


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32, padding_idx=PAD)
        self.encoder = nn.GRU(32, 96, batch_first=True)
        self.decoder = nn.GRU(32, 96, batch_first=True)
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)
        self.scores = nn.Linear(2 * 96, WORDS)

    def forward(self, source: Tensor, answer: Tensor) -> Tensor:
        """Return scores for the next characters (n, words, length), given the right ones before them."""
        letters, state = self.encoder(self.embedding(source))
        output, _ = self.decoder(self.embedding(answer), state)
        found, _ = self.attention(output, letters, letters, key_padding_mask=source == PAD, need_weights=False)
        return self.scores(torch.cat([output, found], dim=2)).transpose(1, 2)

    @torch.no_grad()
    def translate(self, source: Tensor) -> Tensor:
        answer = torch.full((len(source), 1), START)
        for _ in range(ANSWER):
            answer = torch.cat([answer, self(source, answer)[:, :, -1:].argmax(1)], dim=1)
        return answer[:, 1:]


def encode(text: str, length: int) -> list[int]:
    return ([LETTERS.index(letter) + 3 for letter in text] + [END] + [PAD] * length)[:length]


def make_data(rows: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return {source, answer} and the answer shifted by one character."""
    days = torch.randint(1, 40_000, (rows,), generator=torch.Generator().manual_seed(seed))
    dates = [datetime.date(1930, 1, 1) + datetime.timedelta(days=int(day)) for day in days]
    sources = [f"{date.day} {calendar.month_name[date.month].lower()} {date.year}" for date in dates]
    answers = torch.tensor([encode(f"{date.year}-{date.month}-{date.day}", ANSWER) for date in dates])
    shifted = torch.cat([torch.full((rows, 1), START), answers[:, :-1]], dim=1)
    return {"source": torch.tensor([encode(text, LONGEST) for text in sources]), "answer": shifted}, answers


def main() -> cx.TrainingHistory:
    x, y = make_data(3000, seed=0)
    x_test, y_test = make_data(300, seed=1)
    torch.manual_seed(0)
    model = Translator()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(ignore_index=PAD), optimizer, scheduler="one_cycle")
    history = trainer.fit(x, y, validation_data=(x_test, y_test), epochs=4, effective_batch_size=64)
    if cx.is_master():
        right = ((model.translate(x_test["source"]) == y_test) | (y_test == PAD)).all(1).double().mean()
        print(f"translated: {right:.4f}")
    return history


if __name__ == "__main__":
    with cx.init():
        main()
