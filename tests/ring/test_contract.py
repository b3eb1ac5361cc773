"""One contract of all collectives, held against the ring, Gloo and, where there are GPUs, NCCL.

contract_cases.py is the table: what is called, and what a backend does not do. By day it is the ring alone, with two
ranks; 'pytest -m nightly' goes through everything, with one to five ranks, and the ring over TCP. One and
three ranks are enough for Gloo, which shows that the table is right.
"""

from __future__ import annotations

import contract_calls
import contract_cases
import contract_large
import pytest
import torch
import torch.distributed as dist
from contract_calls import COLLECTIVES, MESSAGES, REDUCING
from contract_cases import ROOTED, TENSORS, asked_cases, cases, possible, run_case
from contract_setting import Case
from contract_values import DTYPES, LAYOUTS, given, is_whole, lengths, reductions_of, wrong_bits, wrong_numbers
from markers import by_night
from rank_processes import Ended, environment, run_processes, run_ranks, values
from worlds import free_port

pytestmark = [
    pytest.mark.usefixtures("rank_server"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]
BY_DAY = [("ring", 2)]
SIZES = {"ring": (1, 2, 3, 4, 5), "ring over tcp": (2, 3, 5), "gloo": (1, 3)}
BY_NIGHT = [(backend, size) for backend, sizes in SIZES.items() for size in sizes]
SHOWN = 10

_worlds: dict[tuple[str, int, bool], list[contract_cases.Outcome] | AssertionError] = {}
"""One world for all cases of a backend and a number of ranks, begun by the first test that asks."""


def outcomes(backend: str, world_size: int, full: bool) -> list[contract_cases.Outcome]:
    key = (backend, world_size, full)
    if key not in _worlds:
        try:
            _worlds[key] = values(run_table(backend, world_size, full))
        except AssertionError as error:
            _worlds[key] = error
    found = _worlds[key]
    if isinstance(found, AssertionError):
        raise found
    return found


def run_table(backend: str, world_size: int, full: bool) -> list[Ended]:
    """Runs it, over the transport that is named after "over"; where none is, the ring chooses."""
    name, _, transport = backend.partition(" over ")
    port = free_port()
    variables = [environment(rank, world_size, port, CYXTRAIN_TRANSPORT=transport) for rank in range(world_size)]
    return run_processes(contract_cases.run_table, variables, name, full, seconds=1500.0 if full else 100.0)


def check(backend: str, world_size: int, collective: str, full: bool) -> None:
    """Fails with every wrong case, or where the ranks did not come to all."""
    found = outcomes(backend, world_size, full)
    wrong = [text for outcome in found for name, text in outcome.wrong if name == collective]
    assert not wrong, "\n".join([f"{len(wrong)} cases are wrong:", *wrong[:SHOWN]])
    expected = sum(case.collective == collective for case in asked_cases(backend.partition(" ")[0], world_size, full))
    assert expected > 0 or (world_size == 1 and collective in MESSAGES)
    ends = [text for outcome in found for _, text in outcome.wrong]
    assert [outcome.asked[collective] for outcome in found] == [expected] * world_size, ends[-1:]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("backend", "world_size"), BY_DAY)
def test_every_collective_does_what_pytorch_documents(backend, world_size, collective):
    check(backend, world_size, collective, full=False)


@pytest.mark.nightly
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("backend", "world_size"), BY_NIGHT)
def test_every_collective_does_so_with_every_dtype_reduction_length_and_layout(backend, world_size, collective):
    check(backend, world_size, collective, full=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_collective_does_so_over_nccl(world_size):
    # PyTorch's NCCL gives every rank its own GPU.
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"NCCL needs a GPU for each of {world_size} ranks, this machine has {torch.cuda.device_count()}")
    for collective in COLLECTIVES:
        check("nccl", world_size, collective, full=False)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_collective_carries_more_than_two_gigabytes():
    for found in values(run_ranks(2, contract_large.run_all, seconds=800.0)):
        assert found == dict.fromkeys(found, True)
        assert set(found) == {collective.__name__ for collective in contract_large.ALL}


# --- the table has everything in it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, by_night(5)])
def test_the_whole_table_has_every_collective_dtype_reduction_and_length(world_size):
    table = {(case.collective, case.dtype, case.reduction, case.count) for case in cases(world_size, full=True)}
    for name in TENSORS if world_size > 1 else set(TENSORS) - set(MESSAGES):
        for dtype in DTYPES:
            for reduction in reductions_of(dtype) if name in REDUCING else ("",):
                assert {(name, dtype, reduction, count) for count in lengths(world_size)} <= table
    assert {0, 1, world_size - 1, world_size, world_size + 1, 1037} == set(lengths(world_size))


@pytest.mark.parametrize("full", [False, by_night(True)], ids=["by day", "by night"])
def test_the_table_has_every_layout_and_root_and_both_ways_of_waiting(full):
    table = cases(5, full)
    for name in TENSORS:
        layouts = {case.layout for case in table if case.collective == name}
        may_be = {
            layout
            for layout in LAYOUTS
            if any(possible(Case(name, dtype, "", layout, 1), 5) for dtype in (torch.float32, torch.complex64))
        }
        assert layouts == may_be
        assert {case.async_op for case in table if case.collective == name} == {False, True}
    for name in ROOTED:
        assert {case.root for case in table if case.collective == name} == set(range(5))


def test_by_day_the_table_has_every_dtype_and_every_reduction_of_each_collective():
    everything, by_day = (
        {(case.collective, case.dtype, case.reduction) for case in cases(5, full) if case.layout == "flat"}
        for full in (True, False)
    )
    for part in (slice(0, 2), slice(0, 3, 2)):
        assert {each[part] for each in by_day} == {each[part] for each in everything}
    reduced, whole = ({each for each in table if each[0] == "all_reduce"} for table in (by_day, everything))
    assert reduced == whole


def test_the_ring_lacks_only_what_pytorch_refuses_before_it_asks():
    assert contract_cases.GAPS["ring"] == contract_cases.PYTORCH
    assert {gap.what for gap in contract_cases.PYTORCH} == {contract_cases.REFUSED}


# --- and it can fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_wrong_element_is_found(dtype):
    for reduction in ("", *reductions_of(dtype)):
        brought = given(dtype, 5, reduction, 0)
        found = brought.clone()
        assert difference(found, brought, reduction) == ""
        last_byte = found.view(torch.uint8)[4 * dtype.itemsize - 1 : 4 * dtype.itemsize]
        last_byte ^= 1 if is_whole(dtype) else 32  # a bit of the exponent
        text = difference(found, brought, reduction)
        assert "1 of 5 elements" in text
        assert "first element 3" in text or "first [3]: " in text


def difference(found, brought, reduction):
    return wrong_numbers(found, [brought], reduction) if reduction else wrong_bits(found, brought)


@pytest.mark.parametrize("reduction", ["SUM", "AVG", "PRODUCT"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if reductions_of(d) and not is_whole(d)], ids=str)
def test_a_result_that_lacks_one_rank_is_found_and_one_in_another_order_is_not(dtype, reduction):
    brought = [given(dtype, 1037, reduction, rank) for rank in range(5)]
    wide = torch.complex128 if dtype.is_complex else torch.float64

    def combined(ranks):
        total = brought[ranks[0]].clone()
        for rank in ranks[1:]:
            other = brought[rank].to(wide)
            total = (total.to(wide) * other if reduction == "PRODUCT" else total.to(wide) + other).to(dtype)
        return (total.to(wide) / 5).to(dtype) if reduction == "AVG" else total

    assert wrong_numbers(combined([3, 1, 4, 0, 2]), brought, reduction) == ""
    assert "of 1037 elements are wrong" in wrong_numbers(combined([3, 1, 4, 0]), brought, reduction)


def test_a_failing_case_names_backend_collective_dtype_reduction_shape_and_rank(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, async_op: tensor[1].add_(1))
    case = Case("all_reduce", torch.float32, "SUM", "rows", 3)
    wrong = contract_cases.run_rank("ring", [case], 0, 1).wrong
    assert [name for name, _ in wrong] == ["all_reduce"] * 2
    assert wrong[0][1] == (
        "ring: all_reduce float32 SUM rows [3, 5] (root 0), rank 0 of 1: returned something, though async_op is False"
    )
    assert "rank 0 of 1: 5 of 15 elements are wrong, first [1, 0]: " in wrong[1][1]


def test_a_call_that_raises_or_is_not_refused_or_writes_beside_is_found(monkeypatch):
    case, product = (Case("all_reduce", torch.complex64, name, "a column", 3) for name in ("SUM", "PRODUCT"))

    def raise_it(setting):
        raise ValueError("no")

    def write_beside(setting):
        setting.in_place()._base.zero_()

    for call, wrong in ((raise_it, ["ValueError: no"]), (write_beside, ["something was written beside a tensor"])):
        monkeypatch.setitem(contract_calls.COLLECTIVES, "all_reduce", call)
        assert run_case("ring", case, 0, 1) == (wrong, call is raise_it)
    assert run_case("ring", product, 0, 1)[0][0].startswith("it was not refused, though PyTorch has no products")
