"""Nightly tests: each is in one shard, one that does not end is a failure, and no mark of combinations is in vain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from markers import mark_nightly_cases, nightly_where
from pages import IS_CHECKOUT
from worlds import TESTS

from tests.night.__main__ import NOT_HERE, SHARDS, arguments_of


def test_each_test_file_is_in_one_shard():
    for file in TESTS.rglob("test_*.py"):
        path = file.relative_to(TESTS.parent)
        shards = [shard for shard in SHARDS if is_run(path, arguments_of(shard))]
        expected = 0 if str(path) == NOT_HERE else 1
        assert len(shards) == expected, f"{path} is in {shards}"


def is_run(path: Path, arguments: list[str]) -> bool:
    """Returns whether pytest with these arguments collects a file."""
    chosen = [Path(argument) for argument in arguments if not argument.startswith("--ignore=")]
    ignored = [Path(argument.removeprefix("--ignore=")) for argument in arguments if argument.startswith("--ignore=")]
    return any(path.is_relative_to(each) for each in chosen) and not any(path.is_relative_to(each) for each in ignored)


@pytest.mark.skipif(not IS_CHECKOUT, reason="the results name the commit")
def test_a_shard_that_does_not_end_is_kept_as_a_failure(tmp_path):
    results = tmp_path / "results.json"
    limits = ("--seconds", "0", "--out", str(tmp_path), "--results", str(results))
    command = [sys.executable, "-m", "tests.night", "contract", *limits]
    ended = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert json.loads(results.read_text("utf-8"))["contract"]["failed"] == ["pytest did not end"]
    assert "- failed in contract: pytest did not end" in ended.stdout


def marked(is_nightly: Any, world_sizes: list[int]) -> list[int]:
    """Return the numbers of ranks whose case of a test is marked."""
    found: list[int] = []
    test = nightly_where(is_nightly)(lambda world_size: None)
    cases: Any = [
        SimpleNamespace(
            function=test,
            originalname="test",
            callspec=SimpleNamespace(params={"world_size": world_size, "other": None}),
            get_closest_marker=lambda name: None,
            add_marker=lambda mark, world_size=world_size: found.append(world_size),
        )
        for world_size in world_sizes
    ]
    mark_nightly_cases(cases)
    return found


def test_combinations_are_marked_by_their_values():
    assert marked(lambda world_size: world_size > 2, [1, 2, 3, 4]) == [3, 4]


@pytest.mark.parametrize("answer", [False, True])
def test_a_mark_of_no_case_or_of_all_is_an_error(answer):
    with pytest.raises(pytest.Collector.CollectError, match=f"nightly_where marks {4 * answer} of 4 daily cases"):
        marked(lambda world_size: answer, [1, 2, 3, 4])
