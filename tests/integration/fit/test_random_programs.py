"""Claims about random programs: ranks, loops, transports, pools and resumed runs agree, and what errs is found.

`python -m tests.fuzz` runs more of them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from fuzzing.checks import difference
from fuzzing.faults import FAULTS
from fuzzing.generate import generate
from fuzzing.ranks import Worlds
from fuzzing.session import ACCEPTED, REFUSED, as_line, examine, read, run_seeds, table
from fuzzing.spec import Checks, Spec, as_checks, as_spec, features, simpler

pytestmark = pytest.mark.usefixtures("rank_server")
SEEDS = range(20_000, 20_100)
SEEDS_OF_A_FAULT = range(30_000, 30_300)
MOST_REFUSED = len(SEEDS) // 20


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_random_programs_agree(tmp_path: Path) -> None:
    with Worlds(tmp_path) as worlds:
        results = list(run_seeds(SEEDS, worlds))
    assert [as_line(result) for result in results if result.disagrees] == []
    refused = [result.detail for result in results if result.outcome == REFUSED]
    assert len(refused) <= MOST_REFUSED, refused


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    with Worlds(tmp_path, fault) as worlds:
        found = next(result for result in run_seeds(SEEDS_OF_A_FAULT, worlds) if result.disagrees)
    with Worlds(tmp_path) as worlds:
        assert examine(*generate(found.seed), worlds).outcome == ACCEPTED, "it is found without the fault, too"


def test_a_program_runs_everywhere_and_is_kept(tmp_path: Path) -> None:
    checks = Checks(worlds=(1, 2), resumes=("path",))
    with Worlds(tmp_path) as worlds:
        result = examine(Spec(rows=21, metrics=("f1",), validation="pair"), checks, worlds, seed=3)
    assert (result.outcome, result.detail) == (ACCEPTED, "")
    assert result.made == ["run", "ranks", "plain loop", "resume path"]
    file = tmp_path / "results.jsonl"
    file.write_text(as_line(result), encoding="utf-8")
    assert read(file) == [result]
    assert "metric: f1" in table(read(file))


def test_a_program_is_drawn_from_its_seed_alone() -> None:
    for seed in range(200):
        spec, checks = generate(seed)
        assert (spec, checks) == generate(seed)
        assert as_spec(spec.changed()) == spec
        assert as_checks(vars(checks)) == checks


@pytest.mark.nightly
def test_every_feature_is_drawn_often_enough() -> None:
    """In 2,000 programs each feature comes 25 times or more, so that 20 or more are accepted."""
    found = Counter(feature for seed in range(2000) for feature in features(*generate(seed)))
    assert {name: count for name, count in found.items() if count < 25} == {}


def test_a_program_is_made_simpler_step_by_step() -> None:
    spec, checks = generate(7)
    steps = 0
    while smaller := next(simpler(spec, checks), None):
        spec, checks = smaller
        steps += 1
        assert steps < 500
    assert features(spec, checks) == features(Spec(rows=1, epochs=1), Checks(worlds=checks.worlds, plain_loop=False))


def test_differences_are_named() -> None:
    one = {"a": [1.0, torch.ones(2).numpy()], "b": "x"}
    assert difference(one, one) is None
    assert difference({"a": [1.0]}, {"a": [1.0 + 1e-15]}) == "/a/0: 1.0 and 1.000000000000001"
    assert difference({"a": [1.0]}, {"a": [1.0 + 1e-15]}, (1e-12, 0.0)) is None
    assert difference(float("nan"), float("nan")) is None
    assert difference(one, one | {"b": "y"}) == "/b: 'x' and 'y'"
    assert difference({"a": 1}, {"b": 1}) == ": ['a'] and ['b']"
