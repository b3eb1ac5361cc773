"""torchdata's StatefulDataLoader of a Dataset: split, shuffled and resumed as a DataLoader is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fitting import everywhere, flat, make_model, make_rows, one_process
from torch.utils.data import DataLoader, Dataset

import cyxtrain as cx

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("rank_server")]
ROWS = 41
SETTINGS: dict[str, dict[str, Any]] = {
    "shuffled": {"batch_size": 4, "shuffle": True},
    "in order": {"batch_size": 4, "drop_last": True},
    "workers": {"batch_size": 4, "shuffle": True, "num_workers": 2, "persistent_workers": True},
    "own batches": {"batch_sampler": [list(range(first, first + 4)) for first in range(0, 40, 4)]},
}


class Counted(Dataset):
    """Rows, and how often this process has read one."""

    def __init__(self) -> None:
        self.rows = make_rows(ROWS)
        self.num_reads = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_reads += 1
        return self.rows[0][index], self.rows[1][index]


def fit(kind: type[DataLoader], name: str, folder: str, settings: dict[str, Any]) -> tuple[np.ndarray, int]:
    rows = Counted()
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.Adam(model.parameters(), 0.01))
    trainer.fit(kind(rows, **SETTINGS[name]), verbose=False, checkpoint_dir=folder, **settings)
    return flat(model.parameters()), rows.num_reads


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_it_trains_the_same_bits_as_a_data_loader(name, world_size, tmp_path):
    kinds = (DataLoader, stateful.StatefulDataLoader)
    plain, same = (everywhere(world_size, fit, kind, name, str(tmp_path), {"epochs": 2}) for kind in kinds)
    for (weights, num_reads), (plain_weights, plain_reads) in zip(same, plain, strict=True):
        np.testing.assert_array_equal(weights, plain_weights)
        assert num_reads == plain_reads


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_row_is_read_once_by_all_ranks_together(world_size, tmp_path):
    loader = stateful.StatefulDataLoader
    epochs = [everywhere(world_size, fit, loader, "shuffled", str(tmp_path), {"epochs": number}) for number in (1, 2)]
    first, second = (sum(num_reads for _, num_reads in ranks) for ranks in epochs)
    assert second - first == ROWS  # the first one has the dry run's, too


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_it_is_resumed_by_its_position_on_any_number_of_ranks(before, after, tmp_path):
    loader = stateful.StatefulDataLoader
    common = {"epochs": 1, "effective_batch_size": 4}
    [(whole, _)] = everywhere(1, fit, loader, "shuffled", str(tmp_path / "whole"), common)
    folder = str(tmp_path / "parts")
    everywhere(before, fit, loader, "shuffled", folder, {**common, "max_steps": 6, "checkpoint_every_n_steps": 6})
    for weights, num_reads in everywhere(after, fit, loader, "shuffled", folder, {**common, "resume": "auto"}):
        np.testing.assert_allclose(weights, whole, atol=1e-6)  # two ranks add in another order
        assert num_reads <= ROWS - 6 * 4 + 8  # what is left, and the dry run's


def test_a_loaded_state_is_refused():
    loader = stateful.StatefulDataLoader(Counted(), batch_size=4)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    model = make_model()
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.Adam(model.parameters(), 0.01))
    with one_process(), pytest.raises(cx.ConfigError, match=r'a loaded state.*resume="auto"'):
        trainer.fit(loader, epochs=1, verbose=False)
