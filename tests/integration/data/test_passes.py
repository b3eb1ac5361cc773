"""Each pass through a data set: its number is told, its length may change, a sampler's own state is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, fingerprint, make_model, make_rows, one_process
from kept_worlds import close_worlds
from markers import by_night
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS = 24


class Curriculum(Dataset):
    """Longer in each epoch; each row shows in which epoch it is."""

    def __init__(self, grows: bool = True) -> None:
        self.inputs, self.targets = make_rows(ROWS)
        self.grows, self.epoch, self.told = grows, 0, []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)

    def __len__(self) -> int:
        return 12 + 4 * self.epoch if self.grows else ROWS

    def __getitem__(self, row: int) -> Any:
        return torch.cat([torch.tensor([float(self.epoch)]), self.inputs[row][1:]]), self.targets[row]


class Grown(Sampler):
    """As many rows as the epoch says."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12 + 4 * self.epoch

    def __iter__(self) -> Any:
        return iter(range(len(self)))


class Remembering(Sampler):
    """Draws from its own generator, which continues from epoch to epoch."""

    def __init__(self) -> None:
        self.generator_of_its_own = np.random.RandomState(5)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(self.generator_of_its_own.permutation(ROWS).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator_of_its_own.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator_of_its_own.set_state(state["generator"])


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.seen: list[float] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += rows[:, 0].tolist()
        return self.layers(rows)


def trained(data: Any, **settings: Any) -> tuple[list[float], str, int]:
    model = Noting()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    trainer.fit(data, **{"epochs": 3, "verbose": False, **settings})
    return model.seen, fingerprint(model), trainer.step


def told_epochs() -> list[Any]:
    size = 4 // cx.get_world_size()
    alone, within = Curriculum(grows=False), Curriculum(grows=False)
    found = [
        trained(alone, effective_batch_size=4)[0],
        trained(DataLoader(Subset(within, range(ROWS)), size), epochs=3)[0],
        trained(DataLoader(Curriculum(grows=False), size, num_workers=1, persistent_workers=True), epochs=3)[0],
    ]
    return [*found, alone.told, within.told]


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_data_set_is_told_each_epoch_also_in_workers_that_stay(world_size):
    for *seen, alone, within in everywhere(world_size, told_epochs):
        assert alone == within == [0, 1, 2]
        for rows in seen:
            assert rows == sorted([0.0, 1.0, 2.0] * (ROWS // world_size))


def lengths() -> list[tuple[list[float], str, int]]:
    size = 4 // cx.get_world_size()
    plain = Curriculum(grows=False)
    return [trained(Curriculum(), effective_batch_size=4), trained(DataLoader(plain, size, sampler=Grown()))]


@pytest.mark.filterwarnings("ignore:epoch 2 has")
@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_each_epoch_is_as_long_as_its_data(world_size):
    for found in everywhere(world_size, lengths):
        for seen, _, steps in found:
            assert steps == 3 + 4 + 5
            assert [seen.count(float(epoch)) for epoch in range(3)] == [n // world_size for n in (12, 16, 20)]


def test_another_length_is_said():
    with one_process(), pytest.warns(UserWarning, match="epoch 2 has 4 steps and the first one had 3"):
        trained(Curriculum(), batch_size=4)


def fit_remembering(folder: str, resume: str | None) -> tuple[list[float], str, int]:
    data = Curriculum(grows=False)
    data.inputs[:, 1] = torch.arange(ROWS)
    loader = DataLoader(data, 4 // cx.get_world_size(), sampler=Remembering())
    return trained(loader, checkpoint_every_n_steps=1, checkpoint_dir=folder, resume=resume)


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_samplers_own_state_is_resumed_bit_for_bit(world_size, tmp_path):
    whole = everywhere(world_size, fit_remembering, str(tmp_path), None)
    assert len({bits for _, bits, _ in whole}) == 1
    for step in (2, 6, 15):  # in the middle of the first epoch; between two; in the last
        path = Path(tmp_path, f"step-{step:08d}.ckpt")
        close_worlds()  # what resumes is another process
        again = everywhere(world_size, fit_remembering, str(tmp_path / f"{step}"), str(path))
        assert [bits for _, bits, _ in again] == [bits for _, bits, _ in whole]
