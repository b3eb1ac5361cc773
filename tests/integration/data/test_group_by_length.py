"""Claims about group_by_length: rows of similar length in a step, each once, in one order on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, fingerprint, one_process, run_world, seeded
from refusals import refuses
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import cyxtrain as cx
from cyxtrain.data.order import SeededOrder

pytestmark = pytest.mark.usefixtures("rank_server")
COUNT, BATCH = 120, 4
LENGTHS = [1 + (row * 37) % 19 for row in range(COUNT)]
FIT: dict[str, Any] = {"epochs": 2, "effective_batch_size": BATCH, "verbose": False}


class Texts(Dataset[Any]):
    """Each text is its number, as often as it is long."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> tuple[list[int], int]:
        return [row] * LENGTHS[row], row % 2


def padded(texts: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    most = max(len(text) for text, _ in texts)
    rows = torch.tensor([text + [-1] * (most - len(text)) for text, _ in texts])
    return rows, torch.tensor([label for _, label in texts])


class Noting(nn.Module):
    """A model that notes the numbers of the texts of each batch that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.layers = nn.Sequential(nn.Embedding(COUNT + 1, 4), nn.Dropout(0.2), nn.Linear(4, 2))
        self.seen: list[list[int]] = []

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.seen.append(rows[:, 0].tolist())
        scores: Tensor = self.layers(rows + 1).mean(1)
        return scores


def loader(**more: Any) -> DataLoader[Any]:
    return DataLoader(Texts(), **{"batch_size": BATCH, "shuffle": True, "collate_fn": padded, **more})


def arrays() -> tuple[Tensor, Tensor]:
    return padded([Texts()[row] for row in range(COUNT)])


def steps_of(*data: Any, **more: Any) -> tuple[list[list[int]], str]:
    """Returns the texts of each step of this rank, and the bits of the model."""
    model = Noting()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    begin = cx.callbacks.LambdaCallback(on_train_begin=lambda logs: model.seen.clear())
    trainer.fit(*data, callbacks=begin, **{**FIT, **more})
    return model.seen, fingerprint(model)


def spread(steps: list[list[int]]) -> float:
    """How many lengths the texts of a step have between the shortest and the longest, on average."""
    return sum(max(LENGTHS[row] for row in step) - min(LENGTHS[row] for row in step) for step in steps) / len(steps)


def every_way() -> list[list[list[int]]]:
    ways: list[tuple[tuple[Any, ...], Any]] = [
        ((loader(),), True),
        ((loader(),), LENGTHS),
        ((loader(),), lambda sample: len(sample[0])),
        (arrays(), torch.tensor(LENGTHS)),
    ]
    return [steps_of(*data, group_by_length=asked)[0] for data, asked in ways]


def test_steps_have_texts_of_similar_length_each_once_on_any_number_of_ranks():
    [found] = everywhere(1, every_way)
    with one_process():
        plain, _ = steps_of(loader())
    assert found[0] == found[1] == found[2] == found[3]
    first, second = found[0][: COUNT // BATCH], found[0][COUNT // BATCH :]
    for epoch in (first, second):
        assert sorted(row for step in epoch for row in step) == list(range(COUNT))
        assert spread(epoch) < spread(plain) / 2
    assert first != second
    ranks = run_world(2, every_way)
    for way in range(4):
        joined = [sorted(one + other) for one, other in zip(ranks[0][way], ranks[1][way], strict=True)]
        assert joined == [sorted(step) for step in found[0]]


def order_of_lengths(steps: int, shuffle: bool = True, rest: int = 0) -> list[np.ndarray[Any, Any]]:
    """Returns the lengths of each step's texts in ten epochs, and those that fill no step; longer texts, more often."""
    order = SeededOrder(steps * BATCH + rest, shuffle, seed=3)
    order.lengths, order.rows_per_step = np.arange(len(order)), BATCH
    return [order.of(epoch).indices for epoch in range(10)]


@pytest.mark.parametrize("steps", [3, 20, 60, 400])
def test_steps_of_any_length_come_at_any_time_of_an_epoch_but_the_longest_first(steps):
    means, places = [], np.arange(1, steps)
    for epoch in order_of_lengths(steps, rest=3):
        assert sorted(epoch) == list(range(steps * BATCH + 3))
        found = epoch[: steps * BATCH].reshape(steps, BATCH)
        assert found[0].max() == found.max()
        means.append(found[1:].mean(1))
    at_a_place = np.mean(means, axis=0)
    early, late = at_a_place[: steps // 2].mean(), at_a_place[steps // 2 :].mean()
    assert abs(early - late) < 0.2 * steps * BATCH
    if steps >= 10:
        assert abs(np.mean([np.corrcoef(places, each)[0, 1] for each in means])) < 0.2


def test_a_group_that_is_sorted_is_at_most_a_fifth_of_an_epoch_and_fifty_steps():
    """Of rows in their own order, a step has only rows of its own group."""
    for steps, largest in ((20, 4), (12, 2), (4, 1), (400, 50)):
        epoch = order_of_lengths(steps, shuffle=False)[0].reshape(steps, BATCH)
        moved = epoch.max(1) - np.arange(steps) * BATCH
        assert abs(moved).max() < largest * BATCH
        assert (np.diff(epoch.reshape(-1)) == -1).sum() == steps * BATCH - -(-steps // largest)


def test_it_resumes_and_other_lengths_are_other_data(tmp_path):
    kept = {"checkpoint_dir": str(tmp_path), "group_by_length": LENGTHS}
    with one_process():
        _, whole = steps_of(loader(), checkpoint_every_n_steps=8, **kept)
        for path in sorted(Path(tmp_path).glob("*.ckpt"))[:4]:
            assert steps_of(loader(), resume=str(path), **kept)[1] == whole
        with pytest.raises(cx.ConfigError, match="the training data differ"):
            steps_of(loader(), resume=str(path), **{**kept, "group_by_length": LENGTHS[::-1]})


def test_a_held_out_part_keeps_the_lengths_of_the_others():
    with one_process():
        given = {"group_by_length": LENGTHS, "validation_split": 0.2}
        for more in ({}, {"validation_stratify": True}):
            steps, _ = steps_of(*arrays(), **given, **more)
            assert spread(steps) < 6


def group(asked: Any, *data: Any) -> None:
    steps_of(*data, group_by_length=asked, effective_batch_size=None)


test_what_cannot_be_grouped_is_refused = refuses(
    (lambda: group(True, *arrays()), "X is arrays: give the length of each sample"),
    (lambda: group(LENGTHS[1:], loader()), r"has the shape \[119\] and the type int64, and X has 120 samples"),
    (lambda: group(["long"] * COUNT, loader()), "group_by_length has the shape"),
    (lambda: group(True, lambda: iter(loader())), "X gives batches one after the other"),
    (
        lambda: group(True, loader(shuffle=None, sampler=RandomSampler(Texts(), replacement=True))),
        "leave the sampler out",
    ),
)
