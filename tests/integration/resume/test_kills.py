"""Claims about a fit that is killed at any moment and started again: it ends as the one that never was."""

from __future__ import annotations

import functools
import os
import random
from collections import Counter

import killed_fits
import pytest
from fitting import make_rows, run_new_world
from killed_fits import EPOCHS, ROWS, Moment
from rank_processes import (
    run_ranks,
)

from cyxtrain.checkpoint.folder import CheckpointFolder

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.skipif(os.name == "nt", reason="ranks are killed by POSIX signals here"),
]
PLACES = ("training", "validation", "save")


@functools.cache
def uninterrupted(world_size, folder):
    return run_new_world(world_size, killed_fits.fit, str(folder / f"whole{world_size}"), 0, None)


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


def draw_moment(draw, world_size):
    """Anywhere in the run: it has 3 x 6 or 3 x 4 steps, 3 validations, and 9 saves or more of 3 calls each."""
    where = draw.choice(PLACES)
    count = draw.randrange(1, {"training": 13, "validation": 4, "save": 28}[where])
    victims = tuple(range(world_size)) if draw.random() < 0.3 else (draw.randrange(world_size),)
    return Moment(victims, where, count)


def check_a_kill(seed, world_size, tmp_path, whole_folder):
    draw = random.Random(seed)
    moment = draw_moment(draw, world_size)
    whole = uninterrupted(world_size, whole_folder)
    killed = run_ranks(world_size, killed_fits.fit_in_a_world, str(tmp_path), seed, moment)
    ends = {ended.kind for rank, ended in enumerate(killed) if rank in moment.victims}
    assert ends == {"Killed"}, (moment, killed)
    newest = CheckpointFolder(tmp_path).newest_first()
    at = newest[0].position if newest else {"epoch": 0, "samples": 0}
    resumed = run_new_world(world_size, killed_fits.fit, str(tmp_path), seed + 1000, None)
    for rank in range(world_size):
        for name in ("bits", "history", "epochs"):
            assert resumed[rank][name] == whole[rank][name], (moment, rank, name)
    rows = make_rows(ROWS)[0][:, 0].tolist()
    seen = Counter(row for found in resumed for row in found["seen"])
    left = (EPOCHS - at["epoch"]) * ROWS - at["samples"]
    assert sum(seen.values()) == left, moment  # what was left, and nothing else
    full, rest = divmod(left, ROWS)
    assert all(seen[row] in ((full,) if not rest else (full, full + 1)) for row in rows), moment
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], moment


@pytest.mark.parametrize(("seed", "world_size"), [(2, 2)])
def test_a_fit_that_is_killed_and_started_again_ends_as_the_uninterrupted_one(seed, world_size, tmp_path, whole_folder):
    check_a_kill(seed, world_size, tmp_path, whole_folder)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("seed", range(100, 125))
def test_fifty_kills_at_random_moments_change_nothing(seed, world_size, tmp_path, whole_folder):
    check_a_kill(seed, world_size, tmp_path, whole_folder)
