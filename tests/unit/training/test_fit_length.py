"""How long a fit is: arithmetic on its settings, without data or ranks."""

from __future__ import annotations

from typing import Any

import pytest

import cyxtrain as cx
from cyxtrain.training.inputs.fit_length import FitLength
from cyxtrain.training.state import Position


def length_of(steps: int | None = 5, *, has_validation: bool = True, **settings: Any) -> FitLength:
    return FitLength(cx.DistributedTrainingConfig(**settings), steps, has_validation)


def test_max_steps_shortens_the_last_epoch():
    length = length_of(epochs=3, max_steps=7)
    assert (length.all_steps, length.epochs) == (7, 2)
    assert length.end_of_epoch(Position(epoch=1, step=5), 5) == 2
    assert not length.is_over(Position(epoch=1, step=7, samples=16, epoch_steps=2))
    assert length.is_over(Position(epoch=2, step=7))
    assert length.steps_left(Position(step=12, first_step=10)) == 5


def test_an_unknown_number_of_steps_is_not_guessed():
    assert length_of(None, epochs=4).all_steps is None
    assert length_of(None, epochs=4).knows_epochs
    assert not length_of(None, epochs=4, max_steps=4).knows_epochs
    with pytest.raises(cx.ConfigError, match="the number of batches is unknown"):
        _ = length_of(None, epochs=4, warmup_steps=0.1).warmup_steps


def test_validations_by_steps_end_with_one_of_the_last_epoch():
    length = length_of(epochs=2, validate_every_n_steps=3)
    assert not length.validates_epoch(Position(epoch=0, step=5, epoch_steps=5))
    assert length.validates_epoch(Position(epoch=1, step=10, epoch_steps=5))
    assert length.validates_epoch(Position(epoch=0, step=5, epoch_steps=5, stopped=1))
    alone = length_of(epochs=2, validate_every_n_steps=3, has_validation=False)
    assert not alone.validates_epoch(Position(epoch=1, step=10, epoch_steps=5))


def test_whether_a_longer_fit_would_continue_depends_on_the_steps_of_an_epoch():
    position = Position(epoch=1, step=9, epoch_steps=4)
    assert not length_of(5, epochs=2, validate_every_n_steps=3).ends_early(position)
    assert length_of(4, epochs=2, validate_every_n_steps=3).ends_early(position)
    assert length_of(5, epochs=2, max_steps=9).ends_early(position)


def test_a_schedule_is_stepped_after_the_warm_up():
    assert length_of(epochs=3).schedule_steps(2) == 13
    assert length_of(epochs=3).schedule_steps(0, Position(epoch=1, step=7, epoch_steps=2)) == 8
    assert length_of(epochs=3, scheduler_interval="epoch").schedule_steps(6) == 2
