"""A language model of bytes: a small recurrent network learns to predict the next byte, and then continues a text.

Run it alone, or on two ranks:

    python examples/text_bytes.py
    cyxtrain launch -n 2 -- python examples/text_bytes.py

The text is the Zen of Python, which comes with every Python. It has 856 bytes, so the network memorizes it and learns
no English (for that, use a longer text). Expect about 0.3 bits per byte, where guessing needs 8, and in the last line
the continuation of "Although practicality": "Although practicality beats purity."
"""

from __future__ import annotations

import codecs
import contextlib
import io
import math

import torch
from torch import Tensor, nn

import cyxtrain as cx

WINDOW = 32  # bytes per sample


class NextByte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.memory = nn.GRU(32, 96, batch_first=True)
        self.scores = nn.Linear(96, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores for the next byte (n, 256, length), as CrossEntropyLoss expects them; text: (n, length)."""
        seen, _ = self.memory(self.embedding(text))
        return self.scores(seen).transpose(1, 2)


def read_text() -> bytes:
    with contextlib.redirect_stdout(io.StringIO()):  # importing it prints the text
        import this
    return codecs.decode(this.s, "rot13").encode()


def write(model: nn.Module, start: bytes, length: int) -> str:
    """Continue a text with the most likely byte each time."""
    text = list(start)
    with torch.no_grad():
        while len(text) < length:
            text.append(int(model(torch.tensor([text[-WINDOW:]]))[0, :, -1].argmax()))
    return bytes(text).decode(errors="replace")


def main() -> None:
    text = torch.tensor(list(read_text()))
    windows = text.unfold(0, WINDOW + 1, 3)  # a row starts at every third byte
    x, y = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()  # y: the same, shifted by one byte

    torch.manual_seed(0)
    model = NextByte()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.02))
    history = trainer.fit(x, y, epochs=15, effective_batch_size=32, verbose=False)
    bits = trainer.evaluate(x, y).loss / math.log(2)
    if cx.is_master():  # the model is the same on every rank: one rank is enough
        print("loss", *(f"{loss:.2f}" for loss in history.train_losses))
        print(f"{bits:.2f} bits per byte")
        print(write(model.eval(), b"Although practicality", 35))


if __name__ == "__main__":
    with cx.init():
        main()
