"""Other people's code runs unchanged over "ring": PyTorch's own wrappers, optimizers, checkpoints and collectives.

The cases are functions of the modules unchanged_*.py; those of one module run in one world of processes.
"""

from __future__ import annotations

import sys

import pytest
import unchanged
from markers import nightly_where
from rank_processes import run_ranks, values

DDP = [
    "by_default",
    "with_unused_parameters",
    "with_a_static_graph",
    "with_gradients_as_views_of_buckets",
    "with_many_small_buckets",
    "with_no_sync",
    "with_and_without_broadcast_buffers",
    "with_mixed_dtypes",
    "with_forward_in_evaluation",
    "as_one_process_with_all_the_samples",
    "with_debugging_on",
    "sync_batch_norm_wants_a_gpu_over_gloo_too",
    "joined_with_uneven_inputs",
    "joined_with_a_divisor_that_shrinks",
    "joined_with_a_throw_on_early_end",
    "with_sparse_gradients",
    "hooks_that_compress",
    "the_bf16_hook",
    "a_hook_that_does_nothing",
    "the_power_sgd_hook",
    "the_power_sgd_hook_in_several_buckets",
    "the_batched_power_sgd_hook_fails_over_gloo_too",
    "the_post_local_sgd_hook",
    "the_quantization_hooks",
    "builtin_hooks",
    "the_zero_redundancy_optimizer",
]
COMPILED_DDP = ["that_is_compiled"]
SHARDING = [
    "fully_sharded_as_one_process",
    "fully_sharded_as_over_gloo",
    "fully_sharded_with_accumulation",
    "checkpoints_of_plain_tensors",
    "checkpoints_of_a_sharded_model",
    "checkpoints_in_the_background",
    "state_dicts_gathered_on_rank_0",
    "checkpoints_fit_another_number_of_ranks",
    "tensors_in_every_placement",
    "parallel_layers_as_whole_ones",
    "parallel_sequences",
    "pipelines_as_one_process",
]
SHARDING_OF_FOUR = [
    "sharded_in_one_dimension_and_replicated_in_another",
    "layers_split_over_ranks_and_sharded_over_others",
]
GROUPS = [
    "groups_say_what_they_are",
    "groups_of_neighbours",
    "groups_are_not_split",
    "groups_of_other_backends_beside_it",
    "the_monitored_barrier_is_gloos_own",
    "objects_within_a_part_of_the_world",
    "barriers_and_their_work",
    "collectives_of_several_threads",
    "batches_of_messages",
    "bundled_calls",
    "functional_collectives",
    "collectives_that_autograd_knows",
    "metrics_of_torchmetrics",
]
GROUPS_AT_NIGHT = ["plain_collectives_that_are_compiled", "functional_collectives_that_are_compiled"]
GROUPS_OF_FOUR = ["meshes_of_two_dimensions"]

WORLDS = {
    (2, "unchanged_ddp"): DDP,
    (3, "unchanged_groups"): GROUPS,
    (4, "unchanged_groups"): GROUPS_OF_FOUR,
}
NIGHTLY_WORLDS = {
    (3, "unchanged_ddp"): DDP + COMPILED_DDP,
    (2, "unchanged_sharding"): SHARDING,
    (3, "unchanged_sharding"): SHARDING,
    (4, "unchanged_sharding"): SHARDING_OF_FOUR,
    (2, "unchanged_groups"): GROUPS + GROUPS_AT_NIGHT,
}
ONLY_AT_NIGHT = {"groups_say_what_they_are", "groups_of_neighbours"}
CASES = [
    pytest.param(*world, name, id=f"{world[1].removeprefix('unchanged_')}-{world[0]}-{name}", marks=marks)
    for worlds, marks in ((WORLDS, ()), (NIGHTLY_WORLDS, (pytest.mark.nightly,)))
    for world, names in worlds.items()
    for name in names
]


@pytest.fixture(scope="module")
def found(rank_server, tmp_path_factory):
    """Runs a world when its first case is asked for; returns what went wrong in each case, by rank."""
    results = {}

    def of(world_size, module):
        world = (world_size, module)
        if world not in results:
            names = (WORLDS | NIGHTLY_WORLDS)[world]
            folder = str(tmp_path_factory.mktemp("shared"))
            results[world] = values(run_ranks(world_size, unchanged.run_cases, module, names, folder, seconds=100.0))
        return results[world]

    return of


@nightly_where(lambda name: name in ONLY_AT_NIGHT)
@pytest.mark.skipif(sys.platform == "win32", reason="PyTorch's Gloo for Windows knows less")
@pytest.mark.parametrize(("world_size", "module", "name"), CASES)
def test_unchanged(found, world_size, module, name):
    for rank, cases in enumerate(found(world_size, module)):
        if str(cases[name]).startswith(unchanged.MISSING):
            pytest.skip(cases[name])
        assert cases[name] is None, f"rank {rank}: {cases[name]}"


@pytest.mark.parametrize("backend", ["ring", "cpu:ring", "cpu:ring,cuda:nccl"])
@pytest.mark.usefixtures("rank_server")
def test_a_backend_per_device(backend):
    """PyTorch takes a backend written in Python for all devices: the ring then says what it cannot carry."""
    for found in values(run_ranks(2, unchanged.join_as, backend)):
        assert found["sum"] == 1.0
        assert found["class"] == "RingProcessGroup"
        assert found["refused"].endswith("such as CUDA's; this one is on meta. Call cpu() first.")
