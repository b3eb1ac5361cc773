"""Claims about models as `from_pretrained` returns them: in evaluation mode, with dropout, and their own loss.

By night Hugging Face's own; each day a small model that behaves like them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import flat, run_world, seeded
from markers import by_night
from torch import Tensor, nn
from torch.nn import functional

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")

ROWS, WORDS, LABELS = 40, 20, 3


class Output(dict[str, Any]):
    """Gives its parts by name and as attributes, as Hugging Face's do."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Small(nn.Module):
    """A classifier of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.norm, self.dropout, self.head = nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, LABELS)

    @classmethod
    def from_pretrained(cls, path: str) -> Small:
        model = cls()
        model.load_state_dict(torch.load(f"{path}/weights.pt", weights_only=True))
        return model.eval()

    def save_pretrained(self, path: str) -> None:
        torch.save(self.state_dict(), f"{path}/weights.pt")

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        mask = attention_mask.unsqueeze(-1)
        pooled = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.head(self.dropout(self.norm(pooled)))
        if labels is None:
            return Output(logits=logits)
        return Output(loss=functional.cross_entropy(logits, labels), logits=logits)


def hugging_face() -> Any:
    """Returns a class and a model of it, with the dropout that BERT has."""
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=LABELS,
    )
    return BertForSequenceClassification(config)


def texts() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (ROWS, 6), generator=generator)
    return {"input_ids": words, "attention_mask": (words > 2).long() | (words[:, :1] >= 0)}, words[:, 0] % LABELS


def train(kind: str, folder: str, *, drops: bool) -> dict[str, Any]:
    """Trains a model that was saved, as it is read; returns what came of it."""
    with seeded():
        model = hugging_face() if kind == "hugging face" else Small()
    if cx.get_rank() == 0:
        model.save_pretrained(folder)
    cx.barrier()
    model = type(model).from_pretrained(folder)
    assert not model.training
    seen: list[bool] = []
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = part.p if drops else 0.0
            part.register_forward_hook(lambda module, *_: seen.append(module.training))
    inputs, labels = texts()
    trainer = cx.DistributedTrainer(model, None, torch.optim.SGD(model.parameters(), 0.1))
    history = trainer.fit(
        inputs, labels, inputs, labels, epochs=3, effective_batch_size=12, checkpoint_dir=f"{folder}/{drops}",
        checkpoint_every_n_epochs=1, resume="auto", verbose=False,
    )  # fmt: skip
    scores = trainer.predict(inputs)["logits"]
    return {
        "parameters": flat(model.parameters()),
        "losses": [history.train_losses, history.val_losses],
        "modes": [seen[0], any(seen), all(seen), model.training],
        "val_loss": functional.cross_entropy(scores, labels).item(),
    }


def train_and_resume(kind: str, folder: str) -> list[dict[str, Any]]:
    found = [train(kind, folder, drops=True), train(kind, folder, drops=False)]
    cx.barrier()
    if cx.get_rank() == 0:
        for path in Path(folder).glob("*/epoch-0003.ckpt"):
            path.unlink()
    cx.barrier()
    return [*found, train(kind, folder, drops=True)]


@pytest.mark.parametrize(
    ("kind", "world_sizes"), [("small", (2,)), by_night("small", (3,)), by_night("hugging face", (2, 3))]
)
def test_it_is_trained_in_training_mode_as_one_rank_does_and_resumed(
    kind: str, world_sizes: tuple[int, ...], tmp_path: Path
) -> None:
    if kind == "hugging face":
        pytest.importorskip("transformers")
    (tmp_path / "1").mkdir()
    alone = run_world(1, train_and_resume, kind, str(tmp_path / "1"))[0]
    for world_size in world_sizes:
        folder = tmp_path / str(world_size)
        folder.mkdir()
        for dropped, whole, resumed in run_world(world_size, train_and_resume, kind, str(folder)):
            np.testing.assert_allclose(whole["parameters"], alone[1]["parameters"], rtol=0, atol=1e-6)
            np.testing.assert_allclose(whole["losses"], alone[1]["losses"], rtol=0, atol=1e-6)
            np.testing.assert_array_equal(resumed["parameters"], dropped["parameters"])
            assert resumed["losses"] == dropped["losses"]
    for found in (alone[0], alone[1]):
        assert found["modes"] == [True, True, False, False]  # training, then evaluation; handed back as it was
        assert found["losses"][1][-1] == pytest.approx(found["val_loss"], abs=1e-6)
    assert alone[0]["losses"][0] != alone[1]["losses"][0]  # dropout was on
