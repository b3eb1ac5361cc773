"""After a fit has failed, the next one works on all ranks, or says that this world has ended and how to go on."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from fitting import fingerprint, make_model, make_rows
from rank_processes import rank_server, run_ranks, values  # noqa: F401 - a fixture
from torch import nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
PLACES = ("forward", "loss", "a callback", "the optimizer", "every rank's forward", "evaluate")
X, Y = make_rows(24)


class Breaks(cx.callbacks.Callback):
    """Raises an error of this rank's own, at one place of a fit."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.has_begun = False
        self.is_own = place.startswith("every") or cx.get_rank() == cx.get_world_size() - 1

    def at(self, place: str, rows: int = 4) -> None:
        tries = rows <= 2 if place == "evaluate" else not self.has_begun  # the dry run's errors end no world
        if self.place.endswith(place) and self.is_own and not tries:
            raise RuntimeError(f"broken in {place}")

    def on_epoch_begin(self, epoch, logs=None):
        self.has_begun = True

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.at("a callback")


class Model(nn.Module):
    def __init__(self, breaks: Breaks) -> None:
        super().__init__()
        self.layers, self.breaks = make_model(), breaks

    def forward(self, x):
        self.breaks.at("forward" if self.training else "evaluate", len(x))
        return self.layers(x)


def make_trainer(place):
    breaks = Breaks(place)
    model = Model(breaks)

    def loss(output, target):
        breaks.at("loss", len(output))
        return nn.functional.cross_entropy(output, target)

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: breaks.at("the optimizer"))
    return cx.DistributedTrainer(model, loss, optimizer, callbacks=[breaks])


def fit(trainer):
    return trainer.fit(X, Y, epochs=2, batch_size=4, verbose=False).train_losses


def outcome(function, *arguments):
    """Returns (name of the class, text) of the error that a call raises, or what it returns."""
    try:
        return function(*arguments)
    except (RuntimeError, cx.CyxtrainError) as error:
        return type(error).__name__, str(error)


def fail_and_fit_again():
    with cx.init():
        right = fit(make_trainer("nowhere"))
        wrapper = cx.DistributedDataParallel(make_model())
        found = []
        for place in PLACES:
            trainer = make_trainer(place)
            errors = [outcome(fit, trainer)]
            if place == "evaluate":
                errors.append(outcome(trainer.evaluate, X, Y))
            trainer.callbacks[0].place = "nowhere"
            again, anew = outcome(fit, trainer), outcome(fit, make_trainer("nowhere"))
            found.append((errors, again, anew == right, fingerprint(trainer.model)))
        nn.functional.cross_entropy(wrapper(X[cx.get_rank() :]), Y[cx.get_rank() :]).backward()
        gradient = next(wrapper.module.parameters()).grad
        return found, gradient.sum().item()


def come_back_without_the_last_rank():
    """The last rank fails, and makes no other call; the others wait for it until the deadline."""
    cx.init(cx.DistributedConfig(timeout_ms=800))
    trainer = make_trainer("forward")
    found = [outcome(fit, trainer), None, None]
    if cx.get_rank() < cx.get_world_size() - 1:
        found[1:] = [outcome(fit, trainer), outcome(fit, trainer)]
    return found


def fit_without_a_rank_that_was_killed():
    cx.init()
    trainer = make_trainer("nowhere")
    if cx.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [outcome(fit, trainer) for _ in range(3)]


def fail_in_a_group_that_pytorch_made():
    dist.init_process_group("ring")
    found = [outcome(fit, make_trainer(place)) for place in ("forward", "nowhere")]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_after_a_failed_fit_the_next_one_is_as_right_as_the_first(world_size):
    ranks = values(run_ranks(world_size, fail_and_fit_again, seconds=60))
    for number, place in enumerate(PLACES):
        for rank, (found, _) in enumerate(ranks):
            errors, again, is_right, parameters = found[number]
            text = [error[1] for error in errors if "broken" in str(error)]
            assert len(text) == 1, (place, rank, errors)
            assert is_right, (place, rank)
            if place == "the optimizer":  # the others have taken a step that the last rank has not
                assert "differs from rank 0 in the optimizer's state" in again[1]
            else:
                assert len(again) == 2, (place, rank, again)
                assert parameters == ranks[0][0][number][3]
    assert len({gradient for _, gradient in ranks}) == 1


def test_rank_that_does_not_come_back_is_named_at_the_deadline_with_the_earlier_error():
    first, second, last = values(run_ranks(3, come_back_without_the_last_rank))
    assert last[0] == ("RuntimeError", "broken in forward")
    for errors in (first, second):
        assert errors[0][0] == "DistributedTrainingError"
        kind, text = errors[1]
        assert kind == "RendezvousError"
        assert "a new world could not begin after an earlier error" in text
        assert "broken in forward" in text
        assert errors[2][0] == "RendezvousError"
    assert "rank 2" in first[1][1]


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_world_that_lost_a_rank_has_ended_and_says_so_at_once():
    first, _, last = run_ranks(3, fit_without_a_rank_that_was_killed)
    for errors in (first.value, last.value):
        assert [kind for kind, _ in errors] == ["PeerLostError"] * 3
        assert not errors[0][1].startswith("this world has ended")
        for _, text in errors[1:]:
            assert text.startswith("this world has ended with an earlier error. To continue, start all ranks again.")
            assert text.count("this world has ended") == 1
            assert "rank 1 died" in text


def test_group_that_pytorch_made_is_the_programs_to_make_anew():
    for failed, refused in values(run_ranks(2, fail_in_a_group_that_pytorch_made)):
        assert "broken in forward" in failed[1]
        assert refused[0] == "DistributedTrainingError"
        assert "To continue, make a new default process group on every rank." in refused[1]
