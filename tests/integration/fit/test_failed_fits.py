"""After a fit has failed, the next one works on all ranks, or says that this world has ended and how to go on."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from fitting import fingerprint, make_model, make_rows
from markers import by_night
from rank_processes import run_ranks, values
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


def fail_and_fit_again(places):
    with cx.init():
        right = fit(make_trainer("nowhere"))
        wrapper = cx.DistributedDataParallel(make_model())
        found = []
        for place in places:
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


def rows_of(*values):
    return [torch.full((2,), float(value)) for value in values]


def in_place(function, tensor, *arguments, **named):
    function(tensor, *arguments, **named)
    return tensor.tolist()


def collective_calls():
    """Every public collective by name, as a call of this rank, and what is right."""
    rank, size = cx.get_rank(), cx.get_world_size()
    own, zeros, ranks = rows_of(rank)[0], rows_of(*[0] * size), rows_of(*range(size))
    lists = [row.tolist() for row in ranks]
    is_first, is_last = rank == 0, rank == size - 1

    def all_gather():
        cx.all_gather(zeros, own)
        return [row.tolist() for row in zeros]

    def gather():
        cx.gather(own, zeros if is_first else None)
        return [row.tolist() for row in zeros] == lists or not is_first

    def pass_a_message():
        if is_first:
            cx.send(torch.ones(2), size - 1)
        return not is_last or cx.recv(torch.zeros(2), 0) == 0

    return {
        "barrier": (cx.barrier, None),
        "all_reduce": (lambda: in_place(cx.all_reduce, own.clone()), [size * (size - 1) / 2] * 2),
        "broadcast": (lambda: in_place(cx.broadcast, own.clone(), size - 1), lists[-1]),
        "all_gather": (all_gather, lists),
        "reduce_scatter": (lambda: in_place(cx.reduce_scatter, own.clone(), ranks), [float(size * rank)] * 2),
        "scatter": (lambda: in_place(cx.scatter, torch.ones(2), ranks if is_first else None), lists[rank]),
        "gather": (gather, True),
        "reduce": (lambda: in_place(cx.reduce, own.clone(), op=cx.ReduceOp.MAX)[:is_first], [size - 1.0][:is_first]),
        "send": (pass_a_message, True),
        "all_gather_with_grad": (lambda: cx.all_gather_with_grad(own[None]).tolist(), lists),
    }


def training_calls(folder):
    """Other calls that need all ranks."""
    trainer, amp = make_trainer("nowhere"), cx.DistributedAMPTrainer(make_model(), loss_fn="cross_entropy")
    trainer.save_checkpoint(f"{folder}/trainer")
    amp.save_checkpoint(f"{folder}/amp")
    return {
        "DistributedDataParallel": (
            lambda: type(cx.DistributedDataParallel(make_model())).__name__,
            "DistributedDataParallel",
        ),
        "count_steps": (lambda: cx.count_steps(X, Y, epochs=1, effective_batch_size=6), (4, 4)),
        "train_on_batch": (lambda: len(trainer.train_on_batch(X, Y)), 2),
        "predict_on_batch": (lambda: len(trainer.predict_on_batch(X)), len(X)),
        "predict": (lambda: len(trainer.predict(X)), len(X)),
        "load_checkpoint": (lambda: trainer.load_checkpoint(f"{folder}/trainer"), None),
        "training_step": (lambda: type(amp.training_step((X, Y))), float),
        "load_checkpoint of AMP": (lambda: amp.load_checkpoint(f"{folder}/amp"), None),
    }


def fail_before_each(kind, names, *arguments):
    """Fails before each call of a kind, or before those of some names."""
    with cx.init():
        calls = kind(*arguments)
        for name in names or calls:
            function, right = calls[name]
            failed = outcome(fit, make_trainer("a callback"))
            assert "broken in a callback" in str(failed), name
            assert function() == right, name
            cx.barrier()


def fail_in_a_message():
    with cx.init():
        first, second = outcome(exchange), outcome(cx.barrier)
        cx.barrier()
        return first, second


def exchange():
    """The ranks disagree about the size of a message."""
    if cx.get_rank() == 0:
        cx.send(torch.ones(2), 1)
        cx.recv(torch.ones(2), 1)
    else:
        cx.recv(torch.ones(3), 0)


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


@pytest.mark.parametrize(
    ("world_size", "places"),
    [(2, ("forward", "the optimizer", "evaluate")), *(by_night(world_size, PLACES) for world_size in (2, 3))],
    ids=["2-some", "2-all", "3-all"],
)
def test_after_a_failed_fit_the_next_one_is_as_right_as_the_first(world_size, places):
    ranks = values(run_ranks(world_size, fail_and_fit_again, places, seconds=60))
    for number, place in enumerate(places):
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


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(2, ("barrier", "all_reduce", "send", "all_gather_with_grad")), by_night(2, ()), by_night(3, ())],
)
def test_after_a_failed_fit_every_collective_begins_a_new_world(world_size, names):
    values(run_ranks(world_size, fail_before_each, collective_calls, names, seconds=60))


@pytest.mark.parametrize("names", [("DistributedDataParallel", "train_on_batch", "training_step"), by_night(())])
def test_after_a_failed_fit_every_other_call_of_all_ranks_does_too(names, tmp_path):
    values(run_ranks(2, fail_before_each, training_calls, names, str(tmp_path), seconds=60))


def test_a_failed_message_is_followed_by_a_new_world():
    for first, second in values(run_ranks(2, fail_in_a_message)):
        assert first[0] == "CollectiveMismatchError"
        assert second is None
