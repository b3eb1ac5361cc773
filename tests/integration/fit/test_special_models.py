"""Claims about models that are not a plain chain of layers: N ranks still do what one rank does."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from fitting import FEATURES, adam, fingerprint, make_model, make_rows, one_process, outcome, run_world, seeded
from markers import by_night
from rank_processes import run_ranks
from refusals import ending
from torch import Tensor, nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")


class Tied(nn.Module):
    """An encoder and a decoder that share one matrix, and a decoder with its own bias."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.encoder, self.decoder = nn.Linear(FEATURES, 3, bias=False), nn.Linear(FEATURES, 3)
        self.decoder.weight = self.encoder.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decoder(self.encoder(inputs).tanh() @ self.encoder.weight)


class Experts(nn.Module):
    """Sends each row to one of two experts, so that a rank may use only one of them; a third one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(make_model() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        output = inputs.new_zeros(len(inputs), 3)
        for number, rows in enumerate((inputs[:, 0] > 0, inputs[:, 0] <= 0)):
            if rows.any():
                output[rows] = self.experts[number](inputs[rows])
        return output


class Counting(nn.Module):
    """Counts how often it runs in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = make_model(), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return self.body(inputs)


def frozen() -> nn.Module:
    model = make_model()
    model[0].requires_grad_(False)
    return model


def with_batch_norm() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def of_two_types() -> nn.Module:
    """Its last layer is double; gradients of both types travel."""

    class Double(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs.double())

    with seeded():
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), Double(8, 3).double())


def seeded_by_rank() -> nn.Module:
    """Begins with other weights on each rank."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += cx.get_rank()
    return model


MODELS = {
    "tied weights": Tied,
    "frozen parameters": frozen,
    "unused parameters": Experts,
    "two types": of_two_types,
    "other weights on each rank": seeded_by_rank,
}


def fit(model: nn.Module, rows: int = 7, effective_batch_size: int = 3) -> dict[str, Any]:
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), adam(model))
    history = trainer.fit(*make_rows(rows), epochs=2, effective_batch_size=effective_batch_size, verbose=False)
    left = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    return outcome(trainer, history) | {"gradients left": left}


def fit_all() -> dict[str, Any]:
    return {name: fit(make()) for name, make in MODELS.items()}


@functools.cache
def alone() -> dict[str, Any]:
    with one_process():
        return fit_all()


@pytest.mark.parametrize("world_size", [2, by_night(3)])
def test_n_ranks_do_what_one_rank_does(world_size):
    ranks = run_world(world_size, fit_all)
    for name, expected in alone().items():
        np.testing.assert_allclose(ranks[0][name]["parameters"], expected["parameters"], rtol=0, atol=1e-5)
        assert ranks[0][name]["history"][0] == pytest.approx(expected["history"][0], abs=1e-6)
        assert len({rank[name]["fingerprint"] for rank in ranks}) == 1, name
        assert [rank[name]["gradients left"] for rank in ranks] == [[]] * world_size


def test_frozen_and_unused_parameters_stay_bit_for_bit():
    with one_process():
        for make, parts in ((frozen, "0."), (Experts, "experts.2.")):
            model = make()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            fit(model)
            stayed = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
            assert stayed == {name for name in before if name.startswith(parts)}


def count_calls() -> int:
    model = Counting()
    fit(model, rows=7, effective_batch_size=2)  # batches of 2, 2, 2 and 1 in each of 2 epochs
    return model.calls


@pytest.mark.nightly
def test_a_rank_without_rows_never_runs_the_model_in_a_step():
    assert run_world(3, count_calls) == [8, 6, 0]


def fit_batch_norm() -> dict[str, Any]:
    model = with_batch_norm()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), adam(model))
    validation = make_rows(5, seed=1)
    history = trainer.fit(*make_rows(12), epochs=2, effective_batch_size=6, validation_data=validation, verbose=False)
    again = trainer.evaluate(*validation)
    buffers = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    return outcome(trainer, history) | {"buffers": buffers, "again": list(again)}


@pytest.mark.parametrize("world_size", [2, by_night(3)])
def test_buffers_of_batch_norm_are_the_same_on_every_rank_after_fit(world_size):
    first, *others = run_world(world_size, fit_batch_norm)
    assert first["buffers"]["1.num_batches_tracked"] == 4
    assert first["buffers"]["1.running_mean"] != [0.0] * 8
    for other in others:
        assert other["buffers"] == first["buffers"]
        assert other["fingerprint"] == first["fingerprint"]
    # The model that fit validated is the one that it leaves.
    assert [first["history"][2][-1], first["history"][3][-1]] == first["again"]


def fit_part() -> list[Any]:
    """Trains with an optimizer that has only some of the parameters."""
    model = make_model()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.Adam(model[2].parameters(), 1e-3))
    before = model[0].weight.clone()
    trainer.fit(*make_rows(9), epochs=2, batch_size=2, verbose=False)
    return [torch.equal(model[0].weight, before), model[0].weight.grad is None]


def test_parameters_that_the_optimizer_does_not_have_stay_and_gather_no_gradient():
    assert run_world(2, fit_part) == [[True, True]] * 2


def test_a_wrapped_model_is_unwrapped():
    with one_process():
        model = make_model()
        wrapped = cx.DistributedDataParallel(model)
        assert cx.DistributedTrainer(wrapped, "cross_entropy").model is model
        assert cx.DistributedTrainer(nn.DataParallel(wrapped), "cross_entropy").model is model


class FailsOnce(torch.nn.Linear):
    """Raises at its fourth call while training, on rank 1."""

    calls = 0

    def forward(self, rows):
        self.calls += self.training
        if self.calls == 4 and cx.get_rank() == 1:
            raise LookupError("no such word")
        return super().forward(rows)


def catch_an_error_of_one_rank() -> str:
    inputs, targets = make_rows(40)
    trainer = cx.DistributedTrainer(FailsOnce(inputs.shape[1], 3), "cross_entropy")
    return ending(trainer.fit, inputs, targets, epochs=2, batch_size=4, verbose=False)


@pytest.mark.parametrize("world_size", [2, by_night(3)])
def test_an_error_in_the_model_of_one_rank_that_it_catches_does_not_leave_the_others_waiting(world_size):
    texts = run_world(world_size, catch_an_error_of_one_rank, seconds=20.0)
    assert texts[1] == "LookupError: no such word"
    for rank, text in enumerate(texts):
        if rank != 1:
            assert text.startswith("DistributedTrainingError: rank 1 has failed: LookupError: no such word")


class FailsWithOurError(FailsOnce):
    """Computes its own loss, and once, on rank 1, something else."""

    def forward(self, rows, targets):
        try:
            return nn.functional.cross_entropy(super().forward(rows), targets)
        except LookupError:
            return rows


def catch_an_error_of_ours(adopts: bool) -> str:
    if adopts:
        torch.distributed.init_process_group("ring")
    inputs, targets = make_rows(40)
    trainer = cx.DistributedTrainer(FailsWithOurError(inputs.shape[1], 3))
    try:
        trainer.fit(inputs, targets, epochs=2, batch_size=4, verbose=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if adopts:
            torch.distributed.destroy_process_group()
    return "trained"


@pytest.mark.parametrize("adopts", [False, by_night(True)])
def test_an_error_of_our_own_on_one_rank_does_not_leave_the_others_waiting(adopts):
    run = run_ranks if adopts else run_world
    first, second = (getattr(end, "value", end) for end in run(2, catch_an_error_of_ours, adopts, seconds=20.0))
    assert second.startswith("ConfigError: there is no loss")
    assert first.startswith("DistributedTrainingError: rank 1 has failed: ConfigError: there is no loss")


def train_after_a_step_by_hand() -> str:
    inputs, targets = make_rows(7)
    with seeded():
        model = make_model()
    ddp = cx.DistributedDataParallel(model)
    ddp(inputs).sum().backward()
    ddp.module.zero_grad()
    trainer = cx.DistributedTrainer(ddp, "cross_entropy", adam(model))
    trainer.fit(inputs, targets, epochs=2, effective_batch_size=2, verbose=False)
    return fingerprint(model)


def test_a_wrapped_model_that_has_been_used_by_hand_can_be_fitted():
    assert len(set(run_world(2, train_after_a_step_by_hand))) == 1


def refuse_other_weights() -> str:
    torch.manual_seed(cx.get_rank())
    settings = cx.DDPConfig(broadcast_parameters=False, find_unused_parameters=True)
    trainer = cx.DistributedTrainer(nn.Linear(FEATURES, 3), "cross_entropy", ddp_config=settings)
    with pytest.raises(cx.ConfigError, match=r"weight: hash of its values"):
        trainer.fit(*make_rows(8), epochs=1, verbose=False)
    return "refused"


def test_weights_that_differ_and_shall_not_be_broadcast_are_refused():
    assert run_world(2, refuse_other_weights) == ["refused"] * 2
