"""`DistributedAMPTrainer`: a call per micro-batch makes the steps that PyTorch's autocast and GradScaler make."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import CLASSES, FEATURES, Floats, flat, make_model, make_rows, one_process, run_world, seeded
from kept_worlds import close_worlds
from markers import by_night, nightly_where
from refusals import ending, refusal, refuses
from torch import Tensor, nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
ROWS, JOINED = 48, 12


class OwnLoss(nn.Module):
    """A model that takes a batch by name and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, image: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.net(image)
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


class TwoHeads(nn.Module):
    """A model with two outputs, each of which has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        scores = self.net(image)
        return {"one": scores, "other": 0.5 * scores.tanh()}


def make_loss(name: str) -> Any:
    if name.startswith("several"):
        kind = nn.MultiMarginLoss(reduction=name.removeprefix("several "))
        return {"one": kind, "other": kind}
    if name == "weighted":
        return nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]))
    if name == "pair":
        return lambda output, target: (nn.functional.cross_entropy(output, target, reduction="sum"), len(target))
    return None if name == "own" else nn.CrossEntropyLoss(reduction=name)


def train_in_steps(name: str, accumulation_steps: int, cuts: list[int]) -> dict[str, Any]:
    """Four steps of 12 rows over all ranks, in micro-batches; `cuts` says where each rank's rows end."""
    rank, (inputs, targets) = cx.get_rank(), make_rows(ROWS)
    own, several = name == "own", name.startswith("several")
    rate = 0.02 if name.endswith("sum") else 0.2
    # Not Adam, whose steps hardly depend on the size of gradients.
    trainer = cx.DistributedAMPTrainer(
        OwnLoss() if own else TwoHeads() if several else make_model(),
        cx.AMPConfig(initial_scale=256.0) if several else None,  # so that no step overflows
        loss_fn=make_loss(name),
        accumulation_steps=accumulation_steps,
        optimizer=partial(torch.optim.SGD, lr=rate),
    )
    steps, before = [], flat(trainer.model.parameters())
    for first in range(0, ROWS, JOINED):
        mine = slice(first + cuts[rank], first + cuts[rank + 1])
        parts = zip(inputs[mine].chunk(accumulation_steps), targets[mine].chunk(accumulation_steps), strict=True)
        for x, y in parts:
            targets_of_all = {"one": y, "other": y} if several else y
            trainer.training_step({"image": x, "labels": y} if own else (x, targets_of_all))
            steps.append(trainer.step)
    after = flat(trainer.model.parameters())
    return {"parameters": after, "steps": steps, "moved": not np.array_equal(before, after)}


@nightly_where(lambda name: name not in ("mean", "several sum"))
@pytest.mark.parametrize("name", ["mean", "sum", "weighted", "pair", "own", "several mean", "several sum"])
def test_two_ranks_with_uneven_batches_train_as_one_does_with_all_rows(name):
    with one_process():
        alone = train_in_steps(name, 1, [0, JOINED])
    assert alone["moved"]
    for accumulation_steps in (1, 2):
        first, second = run_world(2, train_in_steps, name, accumulation_steps, [0, 4, JOINED])
        assert np.array_equal(first["parameters"], second["parameters"])
        # In 16 bits the forward of other batches rounds alike; the sums over rows are in another order.
        np.testing.assert_allclose(first["parameters"], alone["parameters"], rtol=0, atol=2e-4)


def test_the_optimizer_steps_with_every_third_call():
    with one_process():
        assert train_in_steps("mean", 3, [0, JOINED])["steps"] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]


def test_a_step_returns_the_mean_of_what_counts_and_0_if_nothing_does():
    def pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        count = (target >= 0).sum()
        return nn.functional.cross_entropy(output, target, ignore_index=-1) * count, count  # 0 / 0 without any

    inputs, targets = make_rows(12)
    found: dict[str, list[float]] = {}
    with one_process():
        for name, loss_fn in (
            ("mean", nn.CrossEntropyLoss(ignore_index=-1)),
            ("pair", pair),
            ("sum", make_loss("sum")),
        ):
            trainer = cx.DistributedAMPTrainer(
                make_model(), loss_fn=loss_fn, optimizer=partial(torch.optim.SGD, lr=0.0)
            )
            ignored = targets.clone() if name == "sum" else torch.full_like(targets, -1)
            found[name] = [trainer.training_step((inputs, each)) for each in (targets, ignored)]
    assert found["mean"][0] > 0
    assert found["pair"] == found["mean"] == [found["mean"][0], 0.0]
    np.testing.assert_allclose(found["sum"], [found["mean"][0] * 12] * 2, rtol=1e-4)


def by_hand(config: cx.AMPConfig, rows: list[tuple[Tensor, Tensor]]) -> tuple[list[float], Any]:
    """The same with PyTorch's autocast and GradScaler, written out."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=config.initial_scale, growth_interval=config.dynamic_history_size)
    scales = []
    for x, y in rows:
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        scaler.scale(nn.functional.mse_loss(output.float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, flat(model.parameters())


def test_alone_it_takes_the_steps_and_scales_of_gradscaler_to_the_bit():
    config = cx.create_default_amp_config(dynamic_history_size=3, initial_scale=2.0**26)
    inputs = make_rows(160)[0]
    rows = [(x, torch.ones(8, CLASSES)) for x in inputs.split(8)]
    scales, expected = by_hand(config, rows)
    with one_process():
        trainer = cx.DistributedAMPTrainer(make_model(), config, loss_fn="mse")
        assert trainer.scaler.get_scale() == 2.0**26
        found = [(trainer.training_step(batch), trainer.scaler.get_scale())[1] for batch in rows]
    assert found == scales
    assert min(scales) < 2.0**26  # it has fallen,
    assert any(later > before for before, later in itertools.pairwise(scales))  # and grown again
    assert np.array_equal(flat(trainer.model.parameters()), expected)


def overflow_with_buffers() -> dict[str, Any]:
    with seeded():
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    trainer = cx.DistributedAMPTrainer(model, cx.AMPConfig(initial_scale=2.0**40), loss_fn="mse")
    before = flat([*model.parameters(), *model.buffers()])
    trainer.training_step((make_rows(8)[0], torch.ones(8, CLASSES)))
    after = flat([*model.parameters(), *model.buffers()])
    return {"same": np.array_equal(before, after), "scale": trainer.scaler.get_scale(), "step": trainer.step}


@pytest.mark.parametrize("world_size", [by_night(1), 2])
def test_a_step_that_overflows_changes_neither_parameters_nor_buffers(world_size):
    for found in run_world(world_size, overflow_with_buffers):
        assert found == {"same": True, "scale": 2.0**39, "step": 1}


def train_on_nan() -> Any:
    trainer = cx.DistributedAMPTrainer(make_model(), loss_fn="mse")
    rows = make_rows(8)[0]
    if cx.get_rank() == 1:
        rows[[3, 5]] = torch.nan
    before = flat(trainer.model.parameters())
    with pytest.raises(cx.NonFiniteError) as caught:
        trainer.training_step((rows, torch.ones(8, CLASSES)))
    trainer.training_step((make_rows(8)[0], torch.ones(8, CLASSES)))  # all may go on
    return caught.value.rank, str(caught.value), np.array_equal(before, flat(trainer.model.parameters()))


def test_a_loss_that_is_nan_on_one_rank_is_an_error_on_all_that_names_it():
    for rank, message, unchanged in run_world(3, train_on_nan):
        assert rank == 1
        assert "step 1: on rank 1, X holds NaN or infinities (samples 3, 5 of this rank's part of the step)" in message
        assert "the loss is nan" in message
        assert not unchanged  # by the step that came after


def test_an_overflow_that_no_smaller_scale_may_cure_is_an_error():
    config = cx.AMPConfig(use_dynamic_scaling=False, initial_scale=2.0**40)
    with one_process():
        trainer = cx.DistributedAMPTrainer(make_model(), config, loss_fn="mse")
        with pytest.raises(
            cx.NonFiniteError, match=r"gradients are not finite \(0\.weight.*the loss was multiplied by 1\.09951e"
        ):
            trainer.training_step((make_rows(8)[0], torch.ones(8, CLASSES)))


def ask_for_another_world() -> list[str]:
    messages = []
    for arguments in ({"rank": 1 - cx.get_rank()}, {"world_size": 4}):
        messages.append(refusal(cx.DistributedAMPTrainer, make_model(), **arguments))
    trainer = cx.DistributedAMPTrainer(make_model(), None, cx.get_rank(), cx.get_world_size())
    assert (trainer.rank, trainer.world_size) == (cx.get_rank(), cx.get_world_size())
    assert trainer.is_main_process == (cx.get_rank() == 0)
    return messages


def test_rank_and_world_size_must_be_those_of_the_world():
    for rank, messages in enumerate(run_world(2, ask_for_another_world)):
        assert f"given rank={1 - rank}, and this process has rank {rank}" in messages[0]
        assert "given world_size=4, and this process has world_size 2" in messages[1]


def train_on_sums_and_means() -> None:
    losses = {"one": nn.MultiMarginLoss(reduction="sum"), "other": nn.MultiMarginLoss()}
    inputs, targets = make_rows(ROWS)
    cx.DistributedAMPTrainer(TwoHeads(), loss_fn=losses).training_step((inputs, {"one": targets, "other": targets}))


def make(**arguments: Any) -> None:
    cx.DistributedAMPTrainer(make_model(), **arguments)


test_what_cannot_work_is_refused = refuses(
    (lambda: make(accumulation_steps=0), "accumulation_steps must be a whole number of at least 1"),
    (lambda: make(learning_rate=-1), "learning_rate must be a number of at least 0"),
    (lambda: make(learning_rate=0.1, optimizer="sgd"), "learning_rate is for AdamW"),
    (lambda: make(config={"initial_scale": 1.0}), r"config must be a cyxtrain\.AMPConfig"),
    (lambda: make(config=cx.AMPConfig(initial_scale=-1.0)), "AMPConfig.initial_scale"),
    (lambda: make(optimizer="adamm"), "Did you mean 'adam'"),
    (train_on_sums_and_means, "unless all are means over samples, or sums"),
)


def differ() -> str:
    return refusal(cx.DistributedAMPTrainer, make_model(), accumulation_steps=1 + cx.get_rank())


def test_ranks_that_ask_for_different_things_are_refused():
    assert all("rank 1 differs from rank 0 in accumulation_steps: 2" in text for text in run_world(2, differ))


def fail_on_one_rank() -> str:
    trainer = cx.DistributedAMPTrainer(make_model(), loss_fn="cross_entropy")
    inputs, targets = make_rows(8)
    return ending(trainer.training_step, (inputs[:, :3] if cx.get_rank() else inputs, targets))


def test_an_error_on_one_rank_ends_all():
    first, second = run_world(2, fail_on_one_rank)
    assert "rank 1" in first
    assert first.startswith("DistributedTrainingError")
    assert "RuntimeError: mat1 and mat2 shapes" in second


def resume_from(folder: str) -> dict[str, Any]:
    rows = [(x, y) for x, y in zip(*(part.split(8) for part in make_rows(80)), strict=True)]
    config = cx.AMPConfig(dynamic_history_size=4)
    first = cx.DistributedAMPTrainer(make_model(), config, loss_fn="cross_entropy", accumulation_steps=2)
    for batch in rows[:6]:
        first.training_step(batch)
    first.save_checkpoint(f"{folder}/whole.ckpt", metadata={"dataset": "rows"})
    if first.is_main_process:
        first.save_checkpoint(f"{folder}/weights.ckpt", include_optimizer=False)
    kept = flat(first.model.parameters())
    for batch in rows[6:]:
        first.training_step(batch)
    second = cx.DistributedAMPTrainer(make_model(), config, loss_fn="cross_entropy", accumulation_steps=2)
    second.load_checkpoint(f"{folder}/whole.ckpt")
    assert (second.step, second.metadata) == (3, {"dataset": "rows"})
    for batch in rows[6:]:
        second.training_step(batch)
    assert second.scaler.get_scale() == first.scaler.get_scale() == 2.0**16
    loaded = make_model()
    if first.is_main_process:
        cx.load_weights(loaded, f"{folder}/weights.ckpt")
        assert np.array_equal(flat(loaded.parameters()), kept)
    with pytest.raises(cx.CheckpointError, match=r"without the optimizer.*load_weights"):
        second.load_checkpoint(f"{folder}/weights.ckpt")
    return {"went on": flat(second.model.parameters()), "never stopped": flat(first.model.parameters())}


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_a_checkpoint_is_gone_on_from_to_the_bit(world_size, tmp_path):
    close_worlds()  # what resumes is another process
    for found in run_world(world_size, resume_from, str(tmp_path)):
        assert np.array_equal(found["went on"], found["never stopped"])


def test_a_checkpoint_is_one_that_a_trainer_can_load(tmp_path):
    with one_process():
        amp = cx.DistributedAMPTrainer(make_model(), loss_fn="cross_entropy")
        amp.training_step(make_rows(8))
        amp.save_checkpoint(tmp_path / "amp.ckpt", metadata={"a": 1})
        model = make_model()
        trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.AdamW(model.parameters(), lr=1e-3))
        trainer.load_checkpoint(tmp_path / "amp.ckpt")
        assert (trainer.step, trainer.metadata) == (1, {"a": 1})
        assert np.array_equal(flat(model.parameters()), flat(amp.model.parameters()))


def test_metadata_that_a_checkpoint_cannot_hold_is_refused(tmp_path):
    with one_process():
        trainer = cx.DistributedAMPTrainer(make_model(), loss_fn="cross_entropy")
        with pytest.raises(cx.CheckpointError, match="metadata"):
            trainer.save_checkpoint(tmp_path / "amp.ckpt", metadata={"file": Path("x")})
        assert list(tmp_path.iterdir()) == []
        assert json.dumps(trainer.metadata) == "{}"


def test_the_model_trains_in_training_mode_wherever_it_was():
    with one_process():
        trainer = cx.DistributedAMPTrainer(make_model(), loss_fn="cross_entropy")
        trainer.model.eval()
        with torch.no_grad():
            trainer.training_step(make_rows(8))
        assert trainer.model.training
        assert trainer.step == 1


def test_a_batch_with_other_parts_than_the_first_is_refused():
    inputs, targets = make_rows(8)
    with one_process():
        trainer = cx.DistributedAMPTrainer(make_model(), loss_fn="cross_entropy")
        trainer.training_step((inputs, targets))
        with pytest.raises(cx.ConfigError, match="has some sample_weight, and the first one had none"):
            trainer.training_step((inputs, targets, torch.ones(8)))
        trainer.training_step((inputs, targets))
        assert trainer.step == 2


def train_with_empty_tails(cuts: list[list[int]]) -> Any:
    inputs, targets = make_rows(8)
    trainer = cx.DistributedAMPTrainer(make_model(), loss_fn="cross_entropy", accumulation_steps=2)
    for micro_batch in cuts:
        own = slice(micro_batch[cx.get_rank()], micro_batch[cx.get_rank() + 1])
        trainer.training_step((inputs[own], targets[own]))
    return flat(trainer.model.parameters())


def test_a_rank_without_rows_takes_part_with_nothing():
    with one_process():
        alone = train_with_empty_tails([[0, 4], [4, 8], [0, 8], [8, 8]])
    first, second = run_world(2, train_with_empty_tails, [[0, 4, 4], [4, 4, 8], [0, 8, 8], [8, 8, 8]])
    assert np.array_equal(first, second)
    np.testing.assert_allclose(first, alone, rtol=0, atol=2e-4)


def train_wrapped() -> bool:
    results = []
    for wrap in (lambda model: model, cx.DistributedDataParallel):
        trainer = cx.DistributedAMPTrainer(wrap(make_model()), loss_fn="cross_entropy", accumulation_steps=2)
        for seed in range(4):
            trainer.training_step(make_rows(8, seed=2 * seed + cx.get_rank()))
        results.append(flat(trainer.model.parameters()))
    return np.array_equal(*results)


def test_a_model_that_is_wrapped_already_trains_as_the_bare_one():
    assert all(run_world(2, train_wrapped))


class Failing(torch.autograd.Function):
    """Fails in backward, as where memory ends there."""

    @staticmethod
    def forward(context, tensor):
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        raise MemoryError


def fail_in_the_middle(accumulation_steps: int, calls_before: int) -> Floats:
    """A step that fails in the backward of one of its micro-batches, then a whole one."""
    fails = [False] * calls_before + [True] + [False] * accumulation_steps
    model, rows = make_model(), make_rows(8)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        fail = fails.pop(0)
        loss = nn.functional.cross_entropy(Failing.apply(output) if fail else output, target)
        return loss * torch.nan if fail or len(fails) > accumulation_steps else loss

    trainer = cx.DistributedAMPTrainer(model, loss_fn=loss_fn, accumulation_steps=accumulation_steps, optimizer="sgd")
    for _ in range(calls_before):
        trainer.training_step(rows)
    with pytest.raises(MemoryError, match="rank 0 is out of memory"):
        trainer.training_step(rows)
    for _ in range(accumulation_steps):
        trainer.training_step(rows)
    assert trainer.step == 1
    return flat(model.parameters())


def test_a_step_that_fails_half_way_leaves_nothing_to_the_next():
    with one_process():
        whole = cx.DistributedAMPTrainer(make_model(), loss_fn="cross_entropy", optimizer="sgd")
        whole.training_step(make_rows(8))
        for accumulation_steps, calls_before in ((1, 0), (2, 0), (2, 1)):
            found = fail_in_the_middle(accumulation_steps, calls_before)
            assert np.array_equal(found, flat(whole.model.parameters()))


def load_half_way(folder: str) -> bool:
    """The last micro-batch of a step that is begun after loading has no rows on rank 1."""
    inputs, targets = make_rows(8)
    trainer = cx.DistributedAMPTrainer(make_model(), loss_fn="cross_entropy", accumulation_steps=2, optimizer="sgd")
    trainer.save_checkpoint(f"{folder}/first.ckpt")
    results = []
    for half_way in (False, True):
        if half_way:
            trainer.training_step((inputs * torch.nan, targets))
        trainer.load_checkpoint(f"{folder}/first.ckpt")
        trainer.training_step((inputs, targets))
        rows = slice(0, 8 if cx.is_master() else 0)
        trainer.training_step((inputs[rows], targets[rows]))
        results.append(flat(trainer.model.parameters()))
    return np.array_equal(*results)


def test_loading_a_checkpoint_forgets_what_waits_for_the_rest_of_its_step(tmp_path):
    assert run_world(2, load_half_way, str(tmp_path)) == [True, True]


def fit_beside(lives: bool) -> Floats:
    """A fit whose last step has a row on rank 0 alone, of a model that a trainer with its own loop knows."""
    rows = make_rows(17)
    model = make_model()
    first = cx.DistributedAMPTrainer(model, loss_fn="cross_entropy", optimizer=partial(torch.optim.SGD, lr=0.1))
    first.training_step(rows)
    if not lives:
        del first
    trainer = cx.DistributedTrainer(model, "cross_entropy", torch.optim.SGD(model.parameters(), 0.1))
    trainer.fit(*rows, effective_batch_size=8, accumulation_steps=2, verbose=False)
    return flat(model.parameters())


@pytest.mark.nightly
def test_a_fit_of_the_same_model_is_alone_with_its_gradients():
    for found, expected in zip(run_world(2, fit_beside, True), run_world(2, fit_beside, False), strict=True):
        assert np.array_equal(found, expected)


def test_a_micro_batch_in_which_nothing_counts_leaves_the_others_as_they_are():
    def token_mean(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        count = (target != -100).sum()
        return nn.functional.cross_entropy(output, target) * count, count  # 0 / 0 if there is none

    inputs, targets = make_rows(8)
    nothing = torch.full_like(targets, -100)
    ends = []
    with one_process():
        for second in ([(inputs, nothing)], []):
            model = make_model()
            optimizer = partial(torch.optim.SGD, lr=0.1)
            steps = 1 + len(second)
            trainer = cx.DistributedAMPTrainer(model, accumulation_steps=steps, optimizer=optimizer, loss_fn=token_mean)
            for batch in [(inputs, targets), *second]:
                trainer.training_step(batch)
            ends.append(flat(model.parameters()))
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-6)


def test_a_step_makes_pytorch_warn_of_nothing(recwarn):
    torch.set_warn_always(True)
    try:
        with one_process():
            cx.DistributedAMPTrainer(make_model(), loss_fn="cross_entropy").training_step(make_rows(4))
    finally:
        torch.set_warn_always(False)
    assert not [str(each.message) for each in recwarn]
