"""`python -m tests.night`: no test is in no shard or in two, and what does not end is a failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
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


@pytest.mark.skipif(not IS_CHECKOUT, reason="a result is kept with git's commit")
def test_a_shard_that_does_not_end_is_kept_as_a_failure(tmp_path):
    results = tmp_path / "results.json"
    limits = ("--seconds", "0", "--out", str(tmp_path), "--results", str(results))
    command = [sys.executable, "-m", "tests.night", "contract", *limits]
    ended = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert json.loads(results.read_text("utf-8"))["contract"]["failed"] == ["pytest did not end"]
    assert "- failed in contract: pytest did not end" in ended.stdout
