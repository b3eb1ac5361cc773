"""Cores are what affinity, cgroup quotas and schedulers leave; ranks and threads are as many."""

from __future__ import annotations

import math
import os
import sys

import pytest
import torch

from cyxtrain.environment import cpu
from cyxtrain.workers import machine
from cyxtrain.world import join

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has control groups")
V1 = {"cpu.cfs_quota_us": "250000\n", "cpu.cfs_period_us": "100000\n"}
NO_LIMIT_V1 = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}
SRUN = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_CPUS_ON_NODE": "12"}


def make_groups(root, groups, **folders):
    """Writes what the kernel shows: /proc/self/cgroup, and files by folder below /sys/fs/cgroup ("__" is "/")."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, files in folders.items():
        folder = root / "sys/fs/cgroup" / name.replace("__", "/").strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)


@pytest.mark.parametrize(
    ("groups", "folders", "quota"),
    [
        ("0::/\n", {"__": {"cpu.max": "200000 100000\n"}}, 2.0),  # a container with its own groups
        ("0::/\n", {"__": {"cpu.max": "max 100000\n"}}, math.inf),
        ("0::/\n", {}, math.inf),
        ("0::/a/b\n", {"a": {"cpu.max": "150000 100000\n"}, "a__b": {"cpu.max": "max 100000\n"}}, 1.5),  # around it
        ("0::/a/b\n", {"a": {"cpu.max": "400000 100000\n"}, "a__b": {"cpu.max": "50000 100000\n"}}, 0.5),
        ("0::/../other\n", {"__": {"cpu.max": "300000 100000\n"}}, 3.0),
        ("4:cpu,cpuacct:/docker/x\n1:memory:/\n", {"cpu,cpuacct": V1}, 2.5),  # the path is that of the host
        ("4:cpu,cpuacct:/docker/x\n", {"cpu__docker__x": V1, "cpu": NO_LIMIT_V1}, 2.5),
        ("2:cpuacct:/\n1:cpu:/\n0::/\n", {"cpu": NO_LIMIT_V1, "unified": {}}, math.inf),
        ("", {"__": {"cpu.max": "200000 100000\n"}}, math.inf),
    ],
)
def test_quota_is_the_smallest_of_the_groups_of_version_1_and_2(groups, folders, quota, tmp_path):
    make_groups(tmp_path, groups, **folders)
    assert cpu.cgroup_quota(tmp_path) == quota


def test_no_proc_is_no_limit(tmp_path):
    assert cpu.cgroup_quota(tmp_path) == math.inf


@pytest.mark.parametrize(("affinity", "quota", "count"), [(8, math.inf, 8), (8, 2.5, 2), (2, 4.0, 2), (8, 0.5, 1)])
def test_cores_are_what_affinity_and_quota_leave(affinity, quota, count, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    monkeypatch.setattr(cpu, "cgroup_quota", lambda: quota)
    assert cpu.count_usable_cores() == count


@pytest.mark.parametrize(
    ("variables", "ranks", "threads_of_two"),
    [
        ({}, 8, "8"),
        (SRUN | {"SLURM_CPUS_PER_TASK": "4"}, 4, "2"),
        (SRUN, 8, "6"),
        ({"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "3"}, 3, "1"),  # a batch script
        ({"SLURM_CPUS_ON_NODE": "3"}, 8, "8"),  # no job
        ({"PBS_JOBID": "1", "NCPUS": "6"}, 6, "3"),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "node1 5"}, 5, "2"),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "node1 5 node2 3"}, 8, "8"),
        ({"JOB_ID": "1", "NSLOTS": "2", "NHOSTS": "1"}, 2, "1"),
        (SRUN | {"SLURM_CPUS_ON_NODE": "many"}, 8, "8"),
    ],
)
def test_ranks_and_their_threads_are_as_many_as_the_scheduler_leaves_cores(
    variables, ranks, threads_of_two, monkeypatch
):
    monkeypatch.setattr(machine, "count_usable_cores", lambda: 16)
    assert machine.ranks_by_cores(variables) == ranks
    assert machine.launch_environment(variables, 0, 2, "1")["OMP_NUM_THREADS"] == threads_of_two


@pytest.mark.parametrize(
    ("quota", "ranks", "own_cores", "threads"),
    [(2.5, 1, None, 2), (0.5, 1, None, 1), (6.0, 2, None, 3), (math.inf, 1, 4, 4), (math.inf, 2, 5, 4)],
)
def test_threads_are_capped_as_ranks_are(quota, ranks, own_cores, threads, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(join, "cgroup_quota", lambda: quota)
    try:
        torch.set_num_threads(8)
        join._share_cores(ranks, own_cores)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
