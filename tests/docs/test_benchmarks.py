"""The benchmarks run, and what they say follows from what they measured. No test looks at how long anything took."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import sys
import threading
from typing import Any

import checkpoint
import collective_ranks
import data_memory
import ddp_step
import fit_ranks
import launches
import limits
import old_vs_new
import pytest
import raw_ranks
import ring_vs_gloo
import torch
import worlds
from benchmark_runs import BENCHMARKS, run_benchmark
from lazy import LazyModule
from markers import nightly_where
from text_tables import Table

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
save_ranks: Any = LazyModule("save_ranks")
saving_ways: Any = LazyModule("saving_ways")
KIB, MIB = 1 << 10, 1 << 20


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_checkouts_take_turns_and_each_is_imported_from_its_own_folder(tmp_path):
    here = BENCHMARKS.parent
    printed, results = run_benchmark(
        *("old_vs_new.py", tmp_path, "--old", str(here), "--new", str(here), "--pairs", "2", "--models", "convnet"),
        *("--ranks", "2", "--transports", "tcp", "--sizes", "4096", "--seconds-per-size", "0.01"),
    )
    assert [row["work"] for row in results["rows"]][:2] == ["fit convnet", "all_reduce 4 KiB (tcp)"]
    assert all(len(row["old_seconds"]) == len(row["new_seconds"]) == 2 for row in results["rows"])
    assert "over 2 pairs each" in printed
    # The folder's package is imported, not the installed one.
    (tmp_path / "cyxtrain").mkdir()
    (tmp_path / "cyxtrain" / "__init__.py").write_text("raise ImportError('the one in this folder')")
    with pytest.raises(launches.LaunchError, match="the one in this folder"):
        old_vs_new.fit_times(tmp_path, "convnet", 1)


@pytest.mark.nightly
def test_ring_and_gloo_are_compared_and_the_results_add_up(tmp_path):
    printed, results = run_benchmark(
        *("ring_vs_gloo.py", tmp_path, "--ranks", "2", "--launches", "1", "--sizes", "4096", "--transports", "tcp"),
        *("--operations", "all_reduce", "reduce_scatter", "barrier", "--seconds-per-size", "0.01", "--floors"),
    )
    assert [(row["operation"], row["bytes"]) for row in results["rows"]] == [
        ("all_reduce", 4096),
        ("reduce_scatter", 4096),
        ("barrier", 0),
    ]
    for row in results["rows"]:
        ring = row["transports"]["tcp"]
        assert row["ranks"] == 2
        assert ring["calls_of_launches"][0] >= 3
        assert ring["times_faster"] == pytest.approx(row["gloo"]["seconds"] / ring["seconds"])
        assert ring["share_of_limit"] == pytest.approx(ring["limit_seconds"] / ring["seconds"])
        assert ring["falls_short"] == (ring["times_faster"] < ring["floor"])
        assert row["operation"] in printed
    assert printed.splitlines()[-1] == ring_vs_gloo.verdict(results["rows"])
    assert results["machine"]["torch"] == torch.__version__


@pytest.mark.nightly
def test_profile_tells_the_parts_of_a_step(tmp_path):
    printed, results = run_benchmark(
        *("ddp_step.py", tmp_path, "--profile", "--models", "convnet", "--batches", "4", "--seconds-per-row", "0.05")
    )
    profile = results["profile"]
    assert list(profile["parts"]) == ["forward", "backward", "averaging", "optimizer"]
    assert profile["seconds"] == pytest.approx(sum(profile["parts"].values()))
    assert "run_backward" in profile["functions"]  # the longest of all
    assert all(part in printed for part in profile["parts"])


@pytest.mark.nightly
def test_a_notebooks_workers_are_timed_and_weighed(tmp_path):
    printed, results = run_benchmark("notebook.py", tmp_path, "--launches", "1")
    found = results["launches"][0]
    assert found["first fit, to its first step, s"] > found["second fit, to its first step, s"] > 0
    assert found["memory, array"] > 0.9 > found["memory, memory map"]
    assert all(name in printed for name in found)


@pytest.mark.nightly
def test_an_epoch_of_a_file_is_compared_with_a_loop(tmp_path):
    pytest.importorskip("h5py")
    printed, results = run_benchmark(
        "stored_rows.py", tmp_path, "--rows", "300", "--launches", "1", "--batch-sizes", "64"
    )
    for row in results["rows"]:
        assert row["ratio"] == pytest.approx([row["fit"][0] / row["loop"][0]] * 3)
        assert row["layout"] in printed


@pytest.mark.nightly
def test_fits_with_a_tracker_are_compared_with_fits_without(tmp_path):
    printed, results = run_benchmark(
        "trackers.py", tmp_path, "--milliseconds", "0.1", "--steps", "20", "40", "--pairs", "2"
    )
    assert [row["steps"] for row in results["rows"]] == [20, 40]
    for row in results["rows"]:
        pairs = [*zip(row["tracker"], row["none"], strict=True)]
        assert row["ratio"][1] == pytest.approx(sum(tracker / none for tracker, none in pairs) / 2)
        assert f"{row['ratio'][1]:.3f}" in printed
        assert row["fit_seconds"] + row["steps"] * row["step_seconds"] == pytest.approx(row["hook_seconds"])


@pytest.mark.nightly
def test_fits_with_virtual_ranks_are_compared_with_others(tmp_path):
    printed, results = run_benchmark("virtual_ranks.py", tmp_path, "--models", "mlp", "--steps", "14", "--pairs", "2")
    others = [row["with"] for row in results["rows"]]
    assert others == ["without", "without", "bare loop", "loop with metrics", "without"]
    for row in results["rows"]:
        pairs = [*zip(row["virtual"], row[row["with"]], strict=True)]
        assert row["ratio"][1] == pytest.approx(sum(virtual / other for virtual, other in pairs) / 2)
        assert f"{row['ratio'][1]:.2f}" in printed


@pytest.mark.nightly
def test_each_kind_of_data_is_compared_with_a_loop(tmp_path):
    printed, results = run_benchmark("data_kinds.py", tmp_path, "--rows", "300", "--launches", "1")
    kinds = [row["kind"] for row in results["rows"]]
    assert {"arrays", "memory maps", "Dataset", "IterableDataset"} <= set(kinds)
    for row in results["rows"]:
        assert row["ratio"] == pytest.approx([row["fit"][0] / row["loop"][0]] * 3)
        assert row["kind"] in printed


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_each_kind_of_data_resumes_from_its_state_and_is_read_again_without(tmp_path):
    printed, results = run_benchmark("data_kinds.py", tmp_path, "--resume", "--rows", "1280")
    rows = {row["kind"].replace("`", ""): row for row in results["rows"]}
    assert {"DataLoader of a Dataset", "readers with a state_dict", "a generator"} <= set(rows)
    saved = 1280 * 9 // 10
    for name, row in rows.items():
        assert row["kind"] in printed
        is_shared = "readers" not in name and "DataLoader of a Dataset" not in name
        of_a_rank = 1280 if is_shared else 640
        assert of_a_rank <= row["epoch"] <= of_a_rank + 400, name
        if "resumed" in row:
            assert row["resumed"]["rows"] <= 400, name
        if "again" in row:
            assert row["again"]["rows"] >= saved * of_a_rank // 1280, name


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux tells")
def test_memory_for_files_is_that_above_a_tiny_file(tmp_path):
    pytest.importorskip("h5py")
    kinds = ["HDF5", "DataLoader of HDF5, 2 workers"]
    if importlib.util.find_spec("pyarrow") is not None:
        kinds.append("Parquet, 8 readers")
    given = ("--megabytes", "64", "--group-megabytes", "8", "--steps", "5", "--ranks", "2", "--folder", str(tmp_path))
    printed, results = run_benchmark("data_memory.py", tmp_path, *given, "--kinds", *kinds)
    assert sorted(row["kind"] for row in results["rows"]) == sorted(kinds)
    for row in results["rows"]:
        peaks = zip(row["large"], row["tiny"], strict=True)
        assert row["own"] == max(large["own"] - tiny["own"] for large, tiny in peaks)
        assert all(rank["own"] > 50 for rank in row["large"])
        assert row["large"][0]["workers"] > 0 or "workers" not in row["kind"]
        assert row["kind"] in printed
    assert [*tmp_path.iterdir()] == [tmp_path / "results.json"]


def test_a_fit_that_needs_too_much_memory_falls_short():
    used = {"kind": "Parquet, 2 readers", "own": 190.0, "workers": 0.0}
    assert not data_memory.falls_short(used, 64)
    assert data_memory.falls_short(used, 60)
    assert not data_memory.falls_short({**used, "kind": "HDF5"}, 60)
    assert data_memory.falls_short({**used, "kind": "HDF5", "workers": 201.0}, 64)


@pytest.mark.nightly
def test_steps_of_all_ways_are_compared(tmp_path):
    printed, results = run_benchmark(
        *("ddp_step.py", tmp_path, "--launches", "1", "--models", "convnet", "--batches", "4", "--floors"),
        *("--transports", "tcp", "--seconds-per-row", "0.05"),
    )
    rows = {row["way"]: row for row in results["rows"]}
    assert list(rows) == ["pytorch-gloo", "cyxtrain-tcp", "pytorch-tcp", "in-step", "apart", "alone"]
    ours = rows["cyxtrain-tcp"]
    assert ours["times_faster"] == pytest.approx(rows["pytorch-gloo"]["seconds"] / ours["seconds"])
    assert ours["efficiency"] == pytest.approx(rows["alone"]["seconds"] / ours["seconds"])
    assert "0 of 0 rows" in printed


@pytest.mark.nightly
def test_checkpoints_of_all_ways_and_fits_are_compared(tmp_path):
    printed, results = run_benchmark(
        *("checkpoint.py", tmp_path, "--rounds", "1", "--folder", str(tmp_path), "--floors", "--megabytes", "1"),
        *("--models", "small", "--ranks", "2", "--seconds", "0.1", "--epochs", "2"),
    )
    rows = {row["way"]: row for row in results["saves"]}
    assert list(rows) == list(saving_ways.WAYS)
    for row in rows.values():
        ratio = row["stall_seconds"] / rows["writer"]["stall_seconds"]
        assert row["times_writer_quartiles"] == pytest.approx([ratio] * 3)
    assert [row["switch"] for row in results["fits"]] == ["checkpoints", "replica checks"]
    for row in results["fits"]:
        assert row["on_off_quartiles"][1] == pytest.approx(row["on_seconds"] / row["off_seconds"])
    assert printed.splitlines()[-1] == checkpoint.verdict(results["fits"])


def test_fit_and_loops_are_compared_on_what_is_here(tmp_path):
    printed, results = run_benchmark("gpu_vs_loop.py", tmp_path, "--tiny", "--precisions", "float32", "bf16")
    assert [row["way"] for row in results["rows"]] == ["fit", "loop", "ddp"] * 4
    for row in results["rows"]:
        [seconds] = row["seconds_per_step"]
        assert row["samples_per_second"] == pytest.approx(2 / seconds)
        assert row["tokens_per_second"] == (pytest.approx(64 / seconds) if row["model"] == "gpt2" else None)
        assert row["way"] in printed
        fit = next(r for r in results["rows"] if all(r[k] == row[k] for k in ("model", "precision")))
        assert row["fit_times_faster"] == pytest.approx(seconds / fit["seconds_per_step"][0])


# --- launches -------------------------------------------------------------------------------------------------------


def test_a_rank_that_fails_ends_the_launch_and_is_shown():
    with pytest.raises(launches.LaunchError, match=r"(?s)rank 1 ended with 1:.*KeyError: 'rows'"):
        launches.launch("raw_ranks.py", 2, {})


def test_ranks_that_do_not_end_in_time_are_killed():
    # The next rank never listens.
    addresses = [("127.0.0.1", worlds.free_port()) for _ in range(2)]
    task = {"addresses": {"tcp": addresses}, "rows": [{"bytes": 1}], "seconds": 0}
    with pytest.raises(launches.LaunchError, match="rank 0 did not end in 1 s"):
        launches.launch("raw_ranks.py", 1, task, seconds=1)


def test_ways_take_turns_in_another_order_each_round():
    calls = []
    found = launches.take_turns(["a", "b", "c"], 3, lambda way: calls.append(way) or len(calls))
    assert calls == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_ratio_is_taken_between_neighbours_and_then_the_median():
    # The machine became ten times slower in the second round, for both.
    assert launches.paired_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == 3.0


def test_quartiles_are_those_of_the_ratios_of_neighbours():
    assert launches.paired_quartiles([2.0, 30.0, 4.0, 5.0, 1.0], [1.0, 10.0, 1.0, 1.0, 1.0]) == (2.0, 3.0, 4.0)
    assert launches.paired_quartiles([3.0], [2.0]) == (1.5, 1.5, 1.5)


def test_a_row_counts_on_the_rank_where_it_is_slowest():
    ranks = [[{"seconds": 1, "rank": 0}, {"seconds": 4, "rank": 0}], [{"seconds": 2, "rank": 1}, {"seconds": 3}]]
    assert launches.slowest(ranks) == [{"seconds": 2, "rank": 1}, {"seconds": 4, "rank": 0}]


def test_calls_are_as_many_as_rank_0_says():
    calls, said = [], iter([1, 6, 0])
    figures = launches.repeat(lambda: calls.append(1), 0.0, lambda count: next(said))
    assert figures["calls"] == len(calls) == 7


@pytest.mark.parametrize(
    ("times", "more"),
    [
        ([], 1),  # to see how long it takes
        ([0.5], 2),  # at least three
        ([0.5] * 3, 0),
        ([0.01], 99),  # as many as a second has room for
        ([0.1] + [0.01] * 9, 42),  # the first one took longer
        ([0.05] + [0.009] * 99, 0),  # nearly
        ([1e-6] * 10, 490),  # at most 500
        ([1e-6] * 500, 0),
    ],
)
def test_calls_fill_the_time_that_there_is(times, more):
    assert launches._calls_to_make(times, 1.0, 3, 500) == more


# --- the ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "function"),
    [
        ("all_reduce", "dist.all_reduce"),
        ("broadcast", "dist.broadcast"),
        ("all_gather", "_all_gather"),
        ("reduce_scatter", "_reduce_scatter"),
    ],
)
def test_a_wrong_result_ends_a_benchmark(monkeypatch, operation, function):
    def wrong(tensor, *_):
        tensor.add_(1)

    with cx.init():
        assert collective_ranks.measure(operation, 64, 0.0)["calls"] == 3
        monkeypatch.setattr(f"collective_ranks.{function}", wrong)
        with pytest.raises(AssertionError, match=f"wrong result of {operation} of 64 bytes"):
            collective_ranks.measure(operation, 64, 0.0)


def test_raw_exchange_moves_every_byte_both_ways():
    size = 3 * MIB + 7  # more than sockets hold
    ends = [socket.socketpair() for _ in range(2)]
    links = [raw_ranks.Links(*pair) for pair in ((ends[0][0], ends[1][1]), (ends[1][0], ends[0][1]))]

    def run(rank):
        links[rank].block(False)
        raw_ranks.exchange(links[rank], size, size)
        links[rank].block(True)
        links[rank].ahead.sendall(b"e")
        assert links[rank].behind.recv(2) == b"e"  # nothing is left but the end

    worlds.join_threads([threading.Thread(target=run, args=(rank,)) for rank in range(2)], 20)
    for link in links:
        link.close()


SAVING_WAYS = ["writer", "writer-first", "write-checkpoint", "torch-save", "torch-save-fsync"]
SAVING_WAYS += ["dcp", "dcp-async", "dcp-async-kept", "bare"]


@nightly_where(lambda name: name not in ("writer", "bare"))
@pytest.mark.parametrize("name", SAVING_WAYS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_a_way_saves_is_what_it_reads_though_training_goes_on(tmp_path, name):
    assert [*saving_ways.WAYS] == SAVING_WAYS
    training = saving_ways.Training(0.01)
    with contextlib.ExitStack() as at_end:
        way = saving_ways.WAYS[name](training, tmp_path / name, at_end)
        for _ in range(2):
            figures = save_ranks.measure(way)
            assert figures["file_bytes"] > 0.01e6
            assert not way.folder.exists()


def test_a_save_that_reads_otherwise_ends_a_benchmark(tmp_path, monkeypatch):
    way = saving_ways.WAYS["write-checkpoint"](saving_ways.Training(0.01), tmp_path / "way", contextlib.ExitStack())
    read = way.load
    monkeypatch.setattr(way, "load", lambda: {name: value + 1 for name, value in read().items() if name != "0.bias"})
    with pytest.raises(AssertionError, match=r"(?s)other values than were saved: \['0.bias', '0.weight'"):
        save_ranks.measure(way)


def test_checkpoints_are_measured_from_one_end_to_the_other(tmp_path, monkeypatch, capsys):
    def launch(program, world_size, task, *, seconds):
        if program == "save_ranks.py":
            return [{way: saved(1.0) * task["rounds"] for way in saving_ways.WAYS}]
        return [[fit_ranks.train(task)]]

    arguments = ["--rounds", "1", "--ranks", "1", "--models", "small", "--seconds", "0.01", "--epochs", "1"]
    arguments += ["--batch-size", "2", "--folder", str(tmp_path), "--floors", "--json", str(tmp_path / "results.json")]
    monkeypatch.setattr(launches, "launch", launch)
    monkeypatch.setattr(checkpoint, "_CALIBRATING_STEPS", 2)
    monkeypatch.setattr(sys, "argv", ["checkpoint.py", *arguments])
    with cx.init():
        checkpoint.main()
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert [row["megabytes"] for row in results["saves"]] == [1] * 9 + [20] * 9 + [100] * 9
    assert [row["switch"] for row in results["fits"]] == ["checkpoints", "replica checks"]
    assert capsys.readouterr().out.splitlines()[-1] == checkpoint.verdict(results["fits"])
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


# --- limits and floors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "ranks", "moved"),
    [
        ("all_reduce", 2, 1200),
        ("all_reduce", 4, 1800),
        ("all_gather", 3, 800),
        ("reduce_scatter", 4, 900),
        ("broadcast", 4, 1200),
        ("barrier", 4, 0),
    ],
)
def test_bytes_that_each_rank_must_move(operation, ranks, moved):
    assert limits.bytes_to_move(operation, 1200, ranks) == moved


def test_limit_is_that_of_bytes_or_that_of_rounds_whichever_is_longer():
    parts = limits.needed("all_reduce", 4 * MIB, 4, "tcp")
    measured = [part | {"seconds": seconds} for part, seconds in zip(parts, (3.0, 2.0, 7.0), strict=True)]
    assert limits.limit_seconds("all_reduce", 4 * MIB, 4, "tcp", measured) == 7.0
    assert limits.limit_seconds("barrier", 0, 4, "tcp", measured) == 2 * 2.0  # rounds x the shorter of two
    measured[2]["seconds"] = 1.0
    assert limits.limit_seconds("all_reduce", 4 * MIB, 4, "tcp", measured) == 2 * 2.0


def test_floors_of_all_reduce():
    sizes = (4, 256 * KIB, MIB, 4 * MIB, 25 * MIB, 100 * MIB)
    floors = {
        (ranks, transport): [ring_vs_gloo.floor_of("all_reduce", size, ranks, transport) for size in sizes]
        for ranks in (2, 4)
        for transport in ("tcp", "auto")
    }
    assert floors == {
        (2, "tcp"): [3, 3, 3, 1.7, 1.4, 1.4],
        (4, "tcp"): [3, 3, 2.5, 1.4, 1, 1],
        (2, "auto"): [4, 4, 4, 3.3, 3.3, 3.3],
        (4, "auto"): [3, 3, 3, 2.5, 2.5, 2.5],
    }


def test_floors_of_the_other_collectives():
    for operation in ("broadcast", "all_gather", "reduce_scatter"):
        assert ring_vs_gloo.floor_of(operation, 100 * MIB, 3, "tcp") == 1
        assert ring_vs_gloo.floor_of(operation, MIB, 3, "auto") == 2
        assert ring_vs_gloo.floor_of(operation, MIB - 4, 3, "auto") == 1


def launched(*seconds):
    return [{"seconds": value, "lower_quartile_seconds": value, "calls": 3} for value in seconds]


def raw_launches(operation, size, seconds):
    return [[part | {"seconds": seconds} for part in limits.needed(operation, size, 2, "tcp")]] * 3


def test_a_row_that_falls_short_is_counted_and_marked(capsys):
    raw = raw_launches("all_reduce", 4, 0.5)
    slow = {"gloo": launched(2.0, 2.0, 2.0), "tcp": launched(1.0, 1.0, 1.0)}
    fast = {"gloo": launched(8.0, 8.0, 2.0), "tcp": launched(2.0, 1.0, 1.0)}
    rows = [ring_vs_gloo.summary(2, ("all_reduce", 4), found, raw) for found in (slow, fast)]
    assert [row["transports"]["tcp"]["times_faster"] for row in rows] == [2.0, 4.0]
    assert rows[0]["transports"]["tcp"]["share_of_limit"] == 0.5
    assert ring_vs_gloo.verdict(rows) == "1 of 2 comparisons fall short of their floor"
    ring_vs_gloo.table_of(rows, floors=True).show()
    printed = capsys.readouterr().out
    assert printed.count("tcp: 3") == 1
    assert "50%" in printed


def test_what_gloo_lacks_is_said_and_has_no_floor(capsys):
    lacking = [{"error": "does not support it", "seconds": 0.0}] * 3
    found = {"gloo": lacking, "tcp": launched(1.0, 1.0, 1.0)}
    row = ring_vs_gloo.summary(2, ("reduce_scatter", 4), found, raw_launches("reduce_scatter", 4, 0.5))
    assert row["gloo"] == {"error": "does not support it"}
    assert "times_faster" not in row["transports"]["tcp"]
    assert ring_vs_gloo.verdict([row]) == "0 of 0 comparisons fall short of their floor"
    ring_vs_gloo.table_of([row], floors=False).show()
    assert "has none" in capsys.readouterr().out


def test_step_ratios_and_floors():
    found = {"pytorch-gloo": [1.0, 2.4], "cyxtrain-auto": [1.0, 2.0], "apart": [1.0, 1.0], "alone": [0.5, 1.0]}
    rows = {row["way"]: row for row in ddp_step.summaries(("convnet", 64), 2, found)}
    ours = rows["cyxtrain-auto"]
    assert (ours["times_faster"], ours["efficiency"]) == (pytest.approx(1.1), 0.5)
    assert ours["falls_short"] == ["times faster: 1.2", "efficiency: 0.9"]
    assert rows["apart"]["falls_short"] == []
    assert "times_faster" not in rows["alone"]
    assert ddp_step.verdict(list(rows.values())) == "1 of 1 rows fall short of their floors"
    assert ddp_step.floor_of("mlp", 64, 2, "cyxtrain-tcp") == 1.15
    assert ddp_step.floor_of("mlp", 64, 2, "cyxtrain-auto") == 1.3
    assert ddp_step.floor_of("mlp", 256, 2, "cyxtrain-auto") is None


def saved(*stalls):
    return [
        {f"{name}_seconds": stall for name in ("stall", "lost", "complete", "load")} | {"file_bytes": 8}
        for stall in stalls
    ]


def test_stalls_are_compared_with_the_writers(capsys):
    found = {"writer": saved(1.0, 10.0, 1.0), "dcp": saved(2.0, 30.0, 4.0)}
    rows = checkpoint.summaries_of_saves(1, found)
    assert [row["times_writer_quartiles"] for row in rows] == [(1, 1, 1), (2.5, 3, 3.5)]
    assert rows[1]["stall_seconds"] == 4.0
    checkpoint.table_of_saves(rows).show()
    assert "2.50 .. 3.50" in capsys.readouterr().out


def fitted(*seconds, digest="a"):
    return [{"seconds": value, "outside_seconds": value / 2, "digest": digest} for value in seconds]


def test_what_costs_a_fit_too_much_is_counted_and_marked(capsys):
    task = {"model": "small", "steps": 5, "epochs": 2}
    found = {"plain": fitted(1.0, 2.0, 1.0), "checkpoints": fitted(1.03, 2.06, 1.0), "unchecked": fitted(1.0, 2.0, 1.0)}
    saving, checking = checkpoint.summaries_of_fits(task, 2, found)
    assert saving["on_off_quartiles"] == pytest.approx((1.015, 1.03, 1.03))
    assert (saving["each_seconds"], saving["end_seconds"]) == (pytest.approx(0.015), pytest.approx(0.015))
    assert (saving["falls_short"], checking["falls_short"]) == (True, False)
    assert checkpoint.verdict([saving, checking]) == "1 of 2 rows fall short of their floors"
    checkpoint.table_of_fits([saving, checking], floors=True).show()
    assert capsys.readouterr().out.count("1.02") == 1
    alone = checkpoint.summaries_of_fits(task, 1, found)
    assert [row["floor"] for row in alone] == [1.02, None]
    found["unchecked"] = fitted(1.0, 2.0, 1.0, digest="b")
    with pytest.raises(AssertionError, match="ended with different weights"):
        checkpoint.summaries_of_fits(task, 2, found)


@pytest.mark.parametrize(("size", "text"), [(0, ""), (4, "4 B"), (16 * KIB, "16 KiB"), (100 * MIB, "100 MiB")])
def test_sizes_are_written_as_people_write_them(size, text):
    assert ring_vs_gloo.size_text(size) == text


def test_tables_are_plain_outside_a_terminal(capsys):
    table = Table("a title [of it]", ["name", "figure"], names=1)
    table.add(["row", "1.00"])
    table.show()
    printed = capsys.readouterr().out
    assert printed.startswith("a title [of it]\n")
    assert printed.isascii()
    assert "| row  |   1.00 |" in printed
