"""The benchmark of `fit` beside its peers says what follows from what it measured; no test looks at times."""

from __future__ import annotations

from typing import Any

import fit_vs_peers
import pytest
import torch
from benchmark_runs import run_benchmark
from fit_vs_peers import HAND, OURS, TUNED
from fit_work import MODELS, make_data


def launched(seconds: float, **figures: float) -> dict[str, float]:
    return {"seconds": seconds, "first_step_seconds": 1.0, "peak_bytes": 100.0, "accuracy": 0.95} | figures


def rows_of(ranks: int, model: str, found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    rows = fit_vs_peers.summaries(ranks, model, found)
    fit_vs_peers.judge_memory(rows)
    return {row["way"]: row for row in rows}


def test_fit_is_compared_in_the_same_round_and_what_falls_short_is_said(capsys):
    found = {
        HAND: [launched(2.0), launched(40.0), launched(3.0)],
        TUNED: [launched(1.0), launched(20.0), launched(1.0)],
        OURS: [launched(1.0, peak_bytes=107.0), launched(20.0, peak_bytes=107.0), launched(2.0, peak_bytes=107.0)],
        "Keras": [launched(4.0, accuracy=0.9)] * 3,
    }
    rows = rows_of(1, "mlp", found)
    assert [rows[way].get("times_faster") for way in rows] == [2.0, 1.0, None, 2.0]
    assert rows[HAND]["samples_per_second"] == 60_000 / 3.0
    assert rows[HAND]["falls_short"] == rows[TUNED]["falls_short"] == []
    assert rows[OURS]["falls_short"] == ["1.07 of the memory by hand (1.05)"]
    assert rows["Keras"]["falls_short"] == ["times faster: 2.6", "trains something else"]
    fit_vs_peers.table_of(list(rows.values()), floors=True).show()
    fit_vs_peers.show_verdict(list(rows.values()), [])
    shown = capsys.readouterr().out
    assert "2.00 (1.3)" in shown
    assert "2 of 4 rows fall short" in shown


def test_two_ranks_are_compared_with_one_of_our_own():
    one = fit_vs_peers.summaries(1, "convnet", {HAND: [launched(3.0)] * 2, OURS: [launched(3.0), launched(6.0)]})
    two = fit_vs_peers.summaries(2, "convnet", {HAND: [launched(3.0)] * 2, OURS: [launched(2.0), launched(3.0)]})
    [scaling] = fit_vs_peers.scaling_of([*one, *two])
    assert scaling == {"model": "convnet", "two_ranks_against_one": 1.75, "floor": 1.8}
    assert fit_vs_peers.scaling_of(one) == []


def test_data_can_be_learnt_and_are_the_same_everywhere():
    inputs, targets = make_data(500)
    assert torch.equal(inputs, make_data(500)[0])
    assert not torch.equal(inputs, make_data(500, seed=1)[0])
    assert inputs.min() >= 0
    assert inputs.max() <= 1
    assert targets.bincount(minlength=10).min() > 20
    assert MODELS["large mlp"].make()(inputs).shape == (500, 10)
    assert 4.3e6 < sum(parameter.numel() for parameter in MODELS["large mlp"].make().parameters()) < 4.5e6


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("rank_server")
def test_ways_train_the_same_on_one_rank_and_on_two(tmp_path):
    """Of the libraries, those that are installed."""
    printed, results = run_benchmark("fit_vs_peers.py", tmp_path, "--models", "mlp", "--launches", "1", "--floors")
    ways = [(row["ranks"], row["way"]) for row in results["rows"]]
    assert {(1, HAND), (1, TUNED), (1, OURS), (2, HAND), (2, OURS)} <= set(ways)
    for row in results["rows"]:
        assert row["accuracy"] > 0.9
        assert "trains something else" not in row["falls_short"]
    assert "two ranks of fit against one, mlp" in printed
