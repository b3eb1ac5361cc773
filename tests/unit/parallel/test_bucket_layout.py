"""The bucket layout is pure arithmetic: every parameter once, in an order and in sizes that nothing can change."""

from __future__ import annotations

import random

import pytest
import torch

from cyxtrain.parallel.bucket import Bucket
from cyxtrain.parallel.layout import NUM_SIGNALS, BucketSpec, ParameterSpec, bucket_layout
from cyxtrain.ring import DIGITS
from cyxtrain.world.slices import Slices

MIB = 1 << 20
CPU = torch.device("cpu")


def spec(count, dtype=torch.float32, device=CPU):
    return ParameterSpec(count, dtype, device)


def random_specs(seed):
    """Parameters as models have them: mostly small, some large, some empty, of several kinds."""
    dice = random.Random(seed)
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float64)
    return [
        spec(dice.choice((0, 1, 10, 1000, 300_000)), dice.choice(dtypes), torch.device(dice.choice(("cpu", "meta"))))
        for _ in range(dice.randrange(1, 60))
    ]


def size(bucket: BucketSpec, parameters):
    """Bytes of the gradients."""
    return sum(parameters[index].count for index in bucket.parameters) * bucket.dtype.itemsize


@pytest.mark.parametrize("seed", range(20))
def test_every_parameter_is_in_exactly_one_bucket(seed):
    parameters = random_specs(seed)
    layout = bucket_layout(parameters, MIB)
    assert sorted(index for bucket in layout for index in bucket.parameters) == list(range(len(parameters)))


@pytest.mark.parametrize("seed", range(20))
def test_a_bucket_is_of_one_dtype_and_device(seed):
    parameters = random_specs(seed)
    for bucket in bucket_layout(parameters, MIB):
        kinds = {(parameters[index].dtype, parameters[index].device) for index in bucket.parameters}
        assert kinds == {(bucket.dtype, bucket.device)}


@pytest.mark.parametrize("seed", range(20))
def test_places_follow_each_other_and_the_flags_come_last(seed):
    parameters = random_specs(seed)
    layout = bucket_layout(parameters, MIB)
    for bucket in layout:
        ends = [offset + parameters[i].count for offset, i in zip(bucket.offsets, bucket.parameters, strict=True)]
        assert list(bucket.offsets) == [0, *ends[:-1]]
        assert bucket.flags_offset == ends[-1]
        signals = NUM_SIGNALS + DIGITS + 1 if bucket is layout[-1] else 0  # and weight and loss
        assert bucket.count == ends[-1] + len(bucket.parameters) + 1 + signals


@pytest.mark.parametrize("seed", range(20))
def test_layout_is_the_same_every_time(seed):
    assert bucket_layout(random_specs(seed), MIB) == bucket_layout(random_specs(seed), MIB)


@pytest.mark.parametrize("seed", range(20))
def test_only_the_last_bucket_of_a_kind_is_smaller_than_its_limit(seed):
    parameters, limit = random_specs(seed), 2 * MIB
    kinds = {}
    for bucket in bucket_layout(parameters, limit):
        kinds.setdefault((bucket.dtype, bucket.device), []).append(bucket)
    for buckets in kinds.values():
        # In the order of making, not of launching: the last one holds the first parameter of its kind.
        buckets.sort(key=lambda bucket: -bucket.parameters[0])
        limits = [MIB] + [limit] * (len(buckets) - 1)
        for bucket, reached in list(zip(buckets, limits, strict=True))[:-1]:
            assert size(bucket, parameters) >= reached
            without_last = size(bucket, parameters) - parameters[bucket.parameters[-1]].count * bucket.dtype.itemsize
            assert without_last < reached, "it should have been closed before"


def test_buckets_are_launched_in_the_order_in_which_backward_fills_them():
    parameters = [spec(MIB) for _ in range(6)]
    layout = bucket_layout(parameters, 4 * MIB)
    assert [bucket.parameters for bucket in layout] == [(5,), (4,), (3,), (2,), (1,), (0,)]


def test_buckets_of_two_kinds_are_launched_by_the_parameter_that_is_ready_last():
    kinds = (torch.float32, torch.float64)
    parameters = [spec(10, kinds[index % 2]) for index in range(6)]
    layout = bucket_layout(parameters, MIB)
    assert [bucket.parameters for bucket in layout] == [(5, 3, 1), (4, 2, 0)]


def test_first_bucket_is_small_so_that_communication_begins_early():
    parameters = [spec(MIB // 4) for _ in range(100)]
    layout = bucket_layout(parameters, 25 * MIB)
    assert [len(bucket.parameters) for bucket in layout] == [1, 25, 25, 25, 24]


def test_bucket_size_decides_how_many_buckets_there_are():
    parameters = [spec(1000) for _ in range(100)]
    assert len(bucket_layout(parameters, 25 * MIB)) == 1
    assert len(bucket_layout(parameters, 40_000)) == 10
    assert len(bucket_layout(parameters, 1)) == 100


def test_one_large_parameter_is_a_bucket_of_its_own():
    parameters = [spec(10), spec(100 * MIB), spec(10)]
    assert [bucket.parameters for bucket in bucket_layout(parameters, 25 * MIB)] == [(2, 1), (0,)]


def test_no_parameters_make_no_buckets():
    assert bucket_layout([], MIB) == []


def test_layout_of_many_small_parameters_takes_no_time():
    parameters = [spec(1) for _ in range(100_000)]
    assert len(bucket_layout(parameters, 25 * MIB)) == 1  # quadratic, it would take minutes


def test_a_bucket_is_not_filled_again_before_what_it_sent_is_over():
    """A backward that raised has left it on its way; what is copied in now would travel in its place."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    spec = bucket_layout([ParameterSpec(3, torch.float32, torch.device("cpu"))], 100)[0]
    bucket = Bucket(spec, [("weight", parameter)], 0, True, Slices())
    over = []

    class Work:
        def wait(self):
            over.append(True)
            raise RuntimeError("its group has failed since")

    bucket.exchange._pending = [Work(), Work()]
    bucket.clear()
    assert over == [True, True]
    bucket.clear()
    assert over == [True, True]
