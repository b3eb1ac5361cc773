"""A loss or a gradient that is NaN or infinite: every rank comes to the same verdict, and the culprit is named."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import FEATURES, adam, everywhere, fingerprint, flat, make_model, make_rows, one_process, run_world, seeded
from markers import by_night
from refusals import refusal
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import cyxtrain as cx
from cyxtrain.parallel.finite import all_finite

pytestmark = pytest.mark.usefixtures("rank_server")

BATCH, BATCHES = 12, 5
BAD_BATCH = 2
MARK = 777.0
INPUTS, TARGETS = make_rows(BATCH * BATCHES)


class Spoilt(nn.Module):
    """A network with running means, whose output is NaN where a row is marked."""

    def __init__(self, factor: float = math.nan) -> None:
        super().__init__()
        with seeded():
            self.first, self.norm, self.last = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.factor = factor

    def forward(self, rows: Tensor) -> Tensor:
        marked = (rows[:, :1] == MARK).any()
        output: Tensor = self.last(self.norm(self.first(rows)).tanh())
        return output * self.factor if marked else output


class SpoiltLoss(nn.Module):
    """A loss that is infinite where a row is marked, with gradients that are not."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output, target)
        return loss + math.inf if bool((target == 2).all()) else loss


def marked(*batches: int, row: int = 0) -> Tensor:
    """Returns the data with a mark in a row of each of these batches."""
    inputs = INPUTS.clone()
    for batch in batches:
        inputs[batch * BATCH + row, 0] = MARK
    return inputs


def rank_of(row: int, world_size: int) -> int:
    """Returns which rank sees a row of the first epoch."""
    samplers = [
        cx.DistributedSampler(len(INPUTS), shuffle=False, rank=rank, world_size=world_size, pad=False)
        for rank in range(world_size)
    ]
    [rank] = [rank for rank, sampler in enumerate(samplers) if row in list(sampler)]
    return rank


def fit(inputs: Tensor, targets: Tensor = TARGETS, loss_fn: Any = "cross_entropy", **settings: Any) -> dict[str, Any]:
    """Fits one epoch, and says what came of it."""
    model = Spoilt()
    trainer = cx.DistributedTrainer(model, loss_fn, adam(model))
    common = {"epochs": 1, "effective_batch_size": BATCH, "shuffle": False, "verbose": False}
    error: cx.NonFiniteError | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(inputs, targets, **{**common, **settings})
        except cx.NonFiniteError as found:
            error = found
        said = [str(warning.message) for warning in caught]
    alive = torch.ones(1)
    cx.all_reduce(alive)  # the group is as good as before
    return {
        "fingerprint": fingerprint(model),
        "losses": trainer.history.train_losses,
        "error": None if error is None else [str(error), error.rank, error.during],
        "warnings": said,
        "ranks": alive.item(),
    }


def fit_marked(batches: tuple[int, ...], row: int, settings: dict[str, Any]) -> dict[str, Any]:
    return fit(marked(*batches, row=row), **settings)


def fit_first(batches: int) -> dict[str, Any]:
    return fit(INPUTS[: batches * BATCH], TARGETS[: batches * BATCH])


def fit_without(batch: int) -> dict[str, Any]:
    kept = [row for row in range(len(INPUTS)) if row // BATCH != batch]
    return fit(INPUTS[kept], TARGETS[kept])


@pytest.mark.parametrize("world_size", [1, by_night(2), by_night(3)])
def test_every_rank_raises_at_the_same_step_and_names_the_rank_and_the_parameters(world_size):
    row = BATCH - 1
    culprit = rank_of(BAD_BATCH * BATCH + row, world_size)
    for found in everywhere(world_size, fit_marked, (BAD_BATCH,), row, {}):
        text, rank, during = found["error"]
        assert (rank, during) == (culprit, "step 3")
        assert text.startswith(
            f"epoch 1, step 3 (3 in all): on rank {culprit}, the loss is nan, gradients are not finite (first."
        )
        assert "on_nonfinite" in text
        assert "; on rank" not in text
        assert found["ranks"] == world_size


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_the_model_is_as_before_the_step_running_means_too(world_size):
    before = everywhere(world_size, fit_first, BAD_BATCH)
    after = everywhere(world_size, fit_marked, (BAD_BATCH,), 0, {})
    # Running means are rank 0's; the others take them over in the next forward.
    assert after[0]["fingerprint"] == before[0]["fingerprint"]


@pytest.mark.parametrize("world_size", [1, by_night(2), by_night(3)])
def test_a_step_that_is_skipped_is_as_if_its_rows_were_not_there(world_size):
    without = everywhere(world_size, fit_without, BAD_BATCH)
    skipping = everywhere(world_size, fit_marked, (BAD_BATCH,), 0, {"on_nonfinite": "skip"})
    for rank, (found, expected) in enumerate(zip(skipping, without, strict=True)):
        assert found["error"] is None
        assert (found["fingerprint"], found["losses"]) == (expected["fingerprint"], expected["losses"])
        mine = [text for text in found["warnings"] if "The step is skipped" in text]
        assert len(mine) == (1 if rank == 0 else 0)
        assert not mine or mine[0].startswith(
            f"epoch 1, step 3 (3 in all): on rank {rank_of(BAD_BATCH * BATCH, world_size)}, "
        )


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_loss_that_is_infinite_is_found_where_its_gradients_are_not(world_size):
    targets = TARGETS.clone()
    targets[BATCH : 2 * BATCH] = 2
    targets[BATCH + 1 : 2 * BATCH : 2] = 2 if world_size == 1 else 0
    for found in everywhere(world_size, fit, INPUTS, targets, SpoiltLoss()):
        assert found["error"][0].startswith(
            "epoch 1, step 2 (2 in all): on rank 0, the loss is inf. The step was not taken"
        )
        assert found["error"][1] == 0


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_it_gives_up_after_ten_in_a_row(world_size):
    short = {"effective_batch_size": 4, "on_nonfinite": "skip"}
    for rank, found in enumerate(everywhere(world_size, fit, torch.full_like(INPUTS, MARK), TARGETS, "cross_entropy")):
        assert found["error"][2] == "step 1", rank
    bad = torch.full((11 * 4, FEATURES), MARK)
    for found in everywhere(world_size, fit_settings, bad, short):
        assert found["error"][2] == "step 10"
        assert "That is 10 steps in a row." in found["error"][0]
    bad[9 * 4 : 10 * 4] = 1.0  # nine, a good one, and one more
    for found in everywhere(world_size, fit_settings, bad, short):
        assert found["error"] is None


def fit_settings(inputs: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    return fit(inputs, TARGETS[: len(inputs)], **settings)


def test_a_bad_batch_is_told_from_a_bad_model():
    with one_process():
        inputs = INPUTS.clone()
        inputs[BATCH + 3, 1] = math.nan
        found = fit(inputs)
        assert found["error"][0].startswith(
            f"epoch 1, step 2 (2 in all): on rank 0, X holds NaN or infinities (sample {BATCH + 3}), the loss is nan"
        )
        assert "Fix or drop those samples, or skip such steps" in found["error"][0]
        assert "Lower the learning rate" not in found["error"][0]
        # In the order of an epoch the rows lie elsewhere; they are named as the user knows them.
        assert f"X holds NaN or infinities (sample {BATCH + 3}), the loss" in fit(inputs, shuffle=True)["error"][0]
        model = make_model()
        with torch.no_grad():
            model[2].bias[1] = math.inf
        trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
        with pytest.raises(
            cx.NonFiniteError, match=r"step 1 \(1 in all\): on rank 0, parameters are not finite \(2\.bias\)"
        ):
            trainer.fit(INPUTS, TARGETS, epochs=1, verbose=False)


class Large(nn.Module):
    """A weight whose gradient is large, and finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1e-38]))

    def forward(self, rows: Tensor) -> Tensor:
        return (self.weight * 3e38).expand(len(rows)).mean()


def fit_large() -> list[Any]:
    model = Large()
    trainer = cx.DistributedTrainer(model, None, torch.optim.SGD(model.parameters(), 1e-39))
    with pytest.raises(cx.NonFiniteError) as caught:
        trainer.fit(INPUTS, epochs=1, batch_size=4, verbose=False)
    return [str(caught.value), caught.value.rank]


def test_gradients_that_only_overflow_together_are_nobodys_fault():
    for text, rank in run_world(2, fit_large):
        assert text.startswith(
            "epoch 1, step 1 (1 in all): the gradients of weight are not finite in the average over ranks"
        )
        assert rank is None


class Once(nn.Module):
    """A network whose output is NaN in its third forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.forwards = make_model(), 0

    def forward(self, rows: Tensor) -> Tensor:
        self.forwards += torch.is_grad_enabled()
        output: Tensor = self.body(rows)
        return output * math.nan if self.forwards == 3 else output


def test_a_loss_that_is_nan_by_chance_is_named_too():
    model = Once()
    trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
    with one_process(), pytest.raises(cx.NonFiniteError) as caught:
        trainer.fit(INPUTS, TARGETS, epochs=1, batch_size=BATCH, verbose=False)
    assert "on rank 0, the loss is nan, and finite when its batch runs again: the computation is random" in str(
        caught.value
    )
    assert caught.value.rank == 0


def overflow_in_a_hook(backend_hook: bool) -> bool:
    model = nn.Linear(2, 1, bias=False)
    ddp = cx.DistributedDataParallel(model)
    if backend_hook:
        ddp.register_comm_hook(None, fp16_compress_hook)
    ddp(torch.full((1, 2), 1e6)).sum().backward()
    return ddp.is_finite()


def test_what_overflows_while_it_is_compressed_is_found():
    assert run_world(2, overflow_in_a_hook, False) == [True, True]
    assert run_world(2, overflow_in_a_hook, True) == [False, False]


def fit_and_resume(folder: str) -> list[Any]:
    """Returns what an uninterrupted fit with two bad batches comes to, and what each resumed one does."""
    inputs, settings = marked(1, 3), {"on_nonfinite": "skip", "checkpoint_dir": folder, "checkpoint_every_n_steps": 1}
    found = [fit(inputs, **settings)]
    for path in sorted(Path(folder).glob("step-*.ckpt")):
        found.append(fit(inputs, resume=str(path), on_nonfinite="skip", checkpoint_dir=folder))
    return [[each["fingerprint"], each["losses"]] for each in found]


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_fit_that_has_skipped_steps_resumes_bit_for_bit(world_size, tmp_path):
    for found in everywhere(world_size, fit_and_resume, str(tmp_path)):
        assert len(found) == 1 + BATCHES
        assert all(each == found[0] for each in found), found


@pytest.mark.parametrize("others", [0, 20])  # few are added up one by one, many are put together
def test_sums_that_overflow_are_no_alarm(others):
    rest = [torch.zeros(2)] * others
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
        largest = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
        assert all_finite([*rest, largest, largest])
        for bad in (math.nan, math.inf, -math.inf):
            assert not all_finite([*rest, torch.zeros(2), torch.tensor([1.0, bad]).to(dtype)])
            large = torch.ones(1 << 17, dtype=dtype)
            assert all_finite([*rest, large])
            large[5] = bad
            assert not all_finite([*rest, torch.zeros(2), large])
    assert not all_finite([*rest, torch.tensor([math.inf, -math.inf])])
    assert all_finite(rest)


def test_adam_sees_nothing_of_a_step_that_was_skipped():
    with one_process():
        model = Spoilt()
        optimizer = adam(model)
        seen: list[Any] = []
        look = cx.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.extend(parameter.grad for parameter in model.parameters())
        )
        trainer = cx.DistributedTrainer(model, "cross_entropy", optimizer, callbacks=[look])
        with pytest.warns(UserWarning, match="The step is skipped"):
            trainer.fit(
                marked(0)[:BATCH], TARGETS[:BATCH], epochs=1, batch_size=BATCH, on_nonfinite="skip", verbose=False
            )
        assert optimizer.state_dict()["state"] == {}
        assert seen
        assert {*seen} == {None}  # not those of the search for the cause
        assert math.isnan(trainer.history.train_losses[0])  # of no row
        assert flat(model.parameters()).tolist() == flat(Spoilt().parameters()).tolist()


# --- float16 ----------------------------------------------------------------------------------------------------------


class InfiniteGradient(torch.autograd.Function):
    """Passes rows on; the gradient of a marked batch is infinite."""

    @staticmethod
    def forward(context: Any, output: Tensor, is_marked: bool) -> Tensor:  # type: ignore[override]
        context.is_marked = is_marked
        return output.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * math.inf if context.is_marked else gradient, None


class MarkedTagger(nn.Module):
    """Classes of many positions of a row; a row that is marked has an infinite gradient."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.last = nn.Linear(4, 3)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = InfiniteGradient.apply(self.last(rows), bool((rows == MARK).any()))
        return output.transpose(1, 2)


def blamed_in_float16() -> str:
    with seeded():
        rows, labels = torch.randn(16, 50, 4), torch.randint(0, 3, (16, 50))
    labels[:, ::7] = -100
    rows[1, 0, 0] = MARK
    model = MarkedTagger()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1))
    scale = cx.AMPConfig(initial_scale=2.0**13, use_dynamic_scaling=False)
    settings = {"batch_size": 8, "shuffle": False, "precision": "fp16", "amp": scale}
    return refusal(trainer.fit, rows, labels, epochs=1, verbose=False, error=cx.NonFiniteError, **settings)


def test_a_masked_loss_in_float16_blames_only_the_rank_whose_gradients_overflow() -> None:
    """Its sum, which is divided only after the exchange, times the scale is beyond float16 on every rank."""
    for message in everywhere(2, blamed_in_float16):
        assert "on rank 1, gradients are not finite" in message
        assert "on rank 0" not in message
