"""A language model of characters that reads packed sequences: it learns to write names like Python's own.

Run it alone, or on two ranks:

    python examples/ported/char_rnn.py
    cyxtrain launch -n 2 -- python examples/ported/char_rnn.py

Names have different lengths. The loader's `collate_fn` pads them to the longest name of its batch, and
`pack_padded_sequence` leaves the padding out of the GRU. The loss is a mean over characters, not over names:
CrossEntropyLoss ignores targets of -100, and every rank counts. Expect a loss of about 1.7 in the last epoch, and a few
invented names: the same results on any number of ranks.
"""

from __future__ import annotations

import builtins

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

import cyxtrain as cx

END = 0
Batch = tuple[tuple[Tensor, Tensor], Tensor]


class CharRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.memory = nn.GRU(32, 96, batch_first=True)
        self.scores = nn.Linear(96, 128)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        """Return scores for the next character (n, 128, length)."""
        packed = pack_padded_sequence(self.embedding(text), lengths.cpu(), batch_first=True, enforce_sorted=False)
        seen, _ = pad_packed_sequence(self.memory(packed)[0], batch_first=True, total_length=text.shape[1])
        return self.scores(seen).transpose(1, 2)


def read_names() -> list[Tensor]:
    names = sorted({*dir(builtins), *dir(str), *dir(int), *dir(dict), *dir(list)})
    return [torch.tensor([END, *name.encode(), END]) for name in names]


def collate(names: list[Tensor]) -> Batch:
    """Return ((characters, lengths), next characters), padded to the longest name of the batch."""
    text = pad_sequence([name[:-1] for name in names], batch_first=True)
    following = pad_sequence([name[1:] for name in names], batch_first=True, padding_value=-100)
    return (text, torch.tensor([len(name) - 1 for name in names])), following


def write(model: CharRNN, seed: int) -> str:
    """Return a name, drawn character by character."""
    generator, text = torch.Generator().manual_seed(seed), [END]
    with torch.no_grad():
        while len(text) < 20 and (len(text) == 1 or text[-1] != END):
            chances = model(torch.tensor([text]), torch.tensor([len(text)]))[0, :, -1].softmax(0)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).strip(b"\0").decode(errors="replace")


def main() -> cx.TrainingHistory:
    torch.manual_seed(0)
    model = CharRNN()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.01))
    loader = DataLoader(read_names(), batch_size=32, shuffle=True, collate_fn=collate)
    history = trainer.fit(loader, epochs=8, effective_batch_size=32)
    if cx.is_master():
        print("invented:", *(write(model.eval(), seed) for seed in range(5)))
    return history


if __name__ == "__main__":
    with cx.init():
        main()
