"""What a loss counts stays on an accelerator: no step waits for it, and training is that of the CPU to the bit."""

from __future__ import annotations

import pytest
from device_losses import CASES, ONCE_PER_EPOCH, draw, fit_on_both, fit_on_both_with_ranks, step_by_hand, sums_of_losses
from stand_in import fakegpu
from stand_in.running import run_on_stand_in


@pytest.mark.nightly
def test_no_step_waits_for_what_a_loss_counts_and_the_bits_are_those_of_the_cpu(fakegpu_folder):
    (found,) = run_on_stand_in(fakegpu_folder, 1, fit_on_both, list(CASES))
    for name, (agrees, values, waits) in found.items():
        assert agrees, (name, values)
        assert sum(waits.values()) <= ONCE_PER_EPOCH, (name, waits)


@pytest.mark.nightly
def test_ranks_on_a_device_have_the_bits_of_ranks_on_cpus(fakegpu_folder):
    names = ["ignored rows", "ignored rows, accumulated", "several losses", "number of items, accumulated", "a pair"]
    for found in run_on_stand_in(fakegpu_folder, 2, fit_on_both_with_ranks, names):
        for name, (agrees, values) in found.items():
            assert agrees, (name, values)


@pytest.mark.nightly
def test_the_progress_bar_shows_what_was_true_when_it_was_drawn_before(fakegpu_folder):
    ((wanted, shown, waits),) = run_on_stand_in(fakegpu_folder, 1, draw)
    assert shown[0] == {}
    later = [numbers for numbers in shown if numbers]
    assert later
    assert [numbers for numbers in wanted if numbers in later] == list({str(each): each for each in later}.values())
    assert later[-1] != wanted[-1]
    assert sum(waits.values()) <= ONCE_PER_EPOCH, waits


@pytest.mark.nightly
def test_a_step_by_hand_copies_its_numbers_once(fakegpu_folder):
    ((wanted, ours, waits, device, are_equal),) = run_on_stand_in(fakegpu_folder, 1, step_by_hand)
    assert device == fakegpu.NAME
    assert ours == wanted
    assert waits == len(ours)
    assert are_equal == [True] * 4


@pytest.mark.nightly
def test_on_a_device_too_only_a_loss_of_weight_0_is_left_out_of_the_sum(fakegpu_folder):
    ((on_cpu, *on_device),) = run_on_stand_in(fakegpu_folder, 1, sums_of_losses)
    assert on_cpu == ["3.0", "1.0", "nan", "nan"]
    assert on_device == [on_cpu, on_cpu]
