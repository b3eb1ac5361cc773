"""The table of all_reduce over the ring and Gloo: its shape, and that its figures are those that were measured."""

from __future__ import annotations

import re

import pytest
from doctor_ranks import bench_here
from rank_processes import run_ranks, values

from cyxtrain.config import DistributedConfig
from cyxtrain.doctor.terminal import print_report
from cyxtrain.launch import bench
from cyxtrain.launch.bench import Row

pytestmark = pytest.mark.usefixtures("rank_server")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
ROW = re.compile(r"^ *(\d+ \w+)  +([\d.]+) (\w+)  +([\d.]+) (\w+)  +([\d.]+)  +([\d.]+) ([kMG]B/s)$", re.M)


def parsed(out):
    """(size, ring seconds, Gloo seconds, ratio, bytes per second) of each row."""
    return [
        (size, float(ring) * UNITS[a], float(gloo) * UNITS[b], float(ratio), float(bus) * UNITS[c])
        for size, ring, a, gloo, b, ratio, bus, c in ROW.findall(out)
    ]


def test_two_ranks_measure_both_and_rank_0_shows_it():
    first, second = values(run_ranks(2, bench_here, [4, 64 << 10], 0.3))
    assert (first["code"], second["code"], second["out"]) == (0, 0, "")
    assert first["out"].startswith("all_reduce (SUM, float32) on 2 ranks, ring and Gloo in turns: about 0.3 s\n")
    rows = parsed(first["out"])
    assert [row[0] for row in rows] == ["4 B", "64 KiB"]
    for _, ring, gloo, ratio, _ in rows:
        assert ratio == pytest.approx(gloo / ring, rel=0.05)
    assert rows[1][4] == pytest.approx((64 << 10) / rows[1][1], rel=0.05)  # of 2 ranks: bytes / seconds


def test_ratios_are_those_of_the_two_times_and_the_bus_bandwidth_is_that_of_nccl_tests(capsys):
    print_report(bench.report_of([Row(1 << 20, 0.5e-3, 2e-3)], 4))
    out = capsys.readouterr().out
    assert parsed(out) == [("1 MiB", 0.5e-3, 2e-3, 4.0, pytest.approx(1.5 * 2**20 / 0.5e-3, rel=0.01))]
    assert "2 (N - 1) / N x bytes / seconds" in " ".join(out.split())


def test_where_there_is_no_gloo_the_ring_is_measured_alone(capsys):
    print_report(bench.report_of([Row(4, 1e-4, None)], 2))
    assert re.search(r"^ *4 B +100 us +none +40\.0 kB/s$", capsys.readouterr().out, re.M)


def test_alone_there_is_nothing_to_measure(capsys):
    assert bench.bench(DistributedConfig(rank=0, world_size=1)) == 2
    assert capsys.readouterr().out.endswith("cyxtrain launch -n 2 -- cyxtrain bench\n")
