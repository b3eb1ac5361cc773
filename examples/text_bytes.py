"""A language model of bytes: a small recurrent network learns to say what comes next, and then goes on by itself.

Run it alone, or on two ranks:

    python examples/text_bytes.py
    cyxtrain launch -n 2 -- python examples/text_bytes.py

The text is the Zen of Python, which travels with every Python: 856 bytes, so few that the network learns them by heart,
and nothing about English (give it a longer text). Expect about 0.3 bits per byte, where guessing takes 8, and as the
last line what it makes of "Although practicality": "Although practicality beats purity."
"""

from __future__ import annotations

import codecs
import contextlib
import io
import math

import torch
from torch import Tensor, nn

import cyxtrain as cx

WINDOW = 32  # bytes that a row has


class NextByte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.memory = nn.GRU(32, 96, batch_first=True)
        self.scores = nn.Linear(96, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Takes bytes (n, length); returns scores of what comes next (n, 256, length), as CrossEntropyLoss has it."""
        seen, _ = self.memory(self.embedding(text))
        return self.scores(seen).transpose(1, 2)


def read_text() -> bytes:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints itself where it is imported
        import this
    return codecs.decode(this.s, "rot13").encode()


def write(model: nn.Module, start: bytes, length: int) -> str:
    """Goes on with a text, by the likeliest byte each time."""
    text = list(start)
    with torch.no_grad():
        while len(text) < length:
            text.append(int(model(torch.tensor([text[-WINDOW:]]))[0, :, -1].argmax()))
    return bytes(text).decode(errors="replace")


def main() -> None:
    text = torch.tensor(list(read_text()))
    windows = text.unfold(0, WINDOW + 1, 3)  # a row begins at every third byte
    x, y = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()  # y: the same, one byte further

    torch.manual_seed(0)
    model = NextByte()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.02))
    history = trainer.fit(x, y, epochs=15, effective_batch_size=32, verbose=False)
    bits = trainer.evaluate(x, y).loss / math.log(2)
    if cx.is_master():  # the model is the same on every rank: one may go on alone
        print("loss", *(f"{loss:.2f}" for loss in history.train_losses))
        print(f"{bits:.2f} bits per byte")
        print(write(model.eval(), b"Although practicality", 35))


if __name__ == "__main__":
    with cx.init():
        main()
