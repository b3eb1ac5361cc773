"""Gradients that travel as fewer bytes: what is lost, what is kept for the next step, and what stays as it was."""

from __future__ import annotations

import contextlib
import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddp_models import assert_close, assert_same_on_all_ranks, gradients, mean_gradients
from fitting import FEATURES, everywhere, fingerprint, flat, make_rows, run_world, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_worlds import close_worlds, on_ranks
from markers import by_night
from refusals import warning_texts
from torch import Tensor, nn

import cyxtrain as cx
from cyxtrain.checkpoint.checkpoint_file import read_checkpoint
from cyxtrain.parallel.compression import LowRankGradient, as_matrix, load_state
from cyxtrain.world.world import World

pytestmark = pytest.mark.usefixtures("rank_server")
MANY_BUCKETS = 1e-4  # MiB: about a parameter each
WIDE = 24
NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A convolution in another memory format, matrices that are worth approximating, and one that is not."""
    with seeded():
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Tanh(), nn.Linear(64, WIDE), nn.Tanh(), nn.Linear(WIDE, 2)
        )
    model[0] = model[0].to(memory_format=torch.channels_last)
    return model.to(dtype)


def images(rank: int, rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, 3, 4, 4, generator=torch.Generator().manual_seed(100 + rank), dtype=dtype)


def loss_on(model: nn.Module, rank: int) -> Tensor:
    loss: Tensor = model(images(rank, 5)).square().mean()
    return loss


def sent_bytes(ddp: cx.DistributedDataParallel) -> int:
    """Returns how many bytes this rank hands to all_reduce in a step."""
    counted, original = [0], dist.all_reduce

    def all_reduce(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        counted[0] += tensor.numel() * tensor.element_size()
        return original(tensor, *arguments, **keywords)

    dist.all_reduce = all_reduce
    try:
        loss_on(ddp, cx.get_rank()).backward()
    finally:
        dist.all_reduce = original
    return counted[0]


# --- 16 bits --------------------------------------------------------------------------------------------------------


@on_ranks(2, by_night(3))
def test_in_16_bits_gradients_are_the_mean_as_closely_as_the_type_allows():
    for compression, dtype in NARROW.items():
        for fields in ({}, {"bucket_size_mb": MANY_BUCKETS}, {"gradient_as_bucket_view": False}):
            model = network()
            ddp = cx.DistributedDataParallel(model, compression=compression, **fields)
            loss_on(ddp, cx.get_rank()).backward()
            expected = mean_gradients(model, loss_on)
            largest = max(float(gradient.abs().max()) for gradient in expected.values())
            assert_close(gradients(model), expected, rtol=0, atol=8 * torch.finfo(dtype).eps * largest)
            assert any(not torch.equal(expected[name], found) for name, found in gradients(model).items())
            assert_same_on_all_ranks(gradients(model))


@on_ranks(2, backend="gloo")
def test_in_16_bits_over_gloo_too():
    model = network()
    ddp = cx.DistributedDataParallel(model, compression="bf16")
    loss_on(ddp, cx.get_rank()).backward()
    assert_close(gradients(model), mean_gradients(model, loss_on), rtol=0, atol=1e-2)


@on_ranks(2)
def test_fewer_bytes_travel():
    found = {
        compression: sent_bytes(cx.DistributedDataParallel(network(torch.float64), compression=compression))
        for compression in ("fp16", "bf16", "powersgd")
    }
    buckets = cx.DistributedDataParallel(network(torch.float64))._reducer._buckets
    whole = sum(bucket.numbers.numel() * bucket.numbers.element_size() for bucket in buckets)
    assert found["fp16"] == found["bf16"] == whole / 4  # of 64 bits
    assert found["powersgd"] < whole / 5


@pytest.mark.nightly
@on_ranks(3)
def test_unused_parameters_are_named_in_16_bits_and_among_thin_matrices():
    for compression in ("fp16", "bf16", "powersgd"):
        for allowed in (True, False):
            model = nn.ModuleDict({"used": nn.Linear(WIDE, WIDE), "unused": nn.Linear(WIDE, WIDE)}).double()
            ddp = cx.DistributedDataParallel(model, compression=compression, find_unused_parameters=allowed)
            ddp.share_buffers_once()
            loss = model["used"](torch.ones(2, WIDE, dtype=torch.float64)).sum()
            if allowed:
                loss.backward()
                assert model["unused"].weight.grad is None
                assert model["used"].weight.grad is not None
            else:
                with pytest.raises(cx.DistributedTrainingError, match=r"unused\.weight"):
                    loss.backward()


# --- PowerSGD -------------------------------------------------------------------------------------------------------


@on_ranks(2, by_night(3))
def test_what_is_sent_and_what_is_kept_are_the_gradient():
    """Of all ranks together, in each of many steps: mean gradient + mean error before = approximation + mean error."""
    for fields in ({}, {"bucket_size_mb": MANY_BUCKETS}, {"matrix_approximation_rank": 3}):
        model = network()
        ddp = cx.DistributedDataParallel(model, compression="powersgd", **fields)
        assert sorted(ddp._reducer.low_rank) == ["0.weight", "3.weight"]
        before = mean_errors(ddp, model)
        assert all(not error.any() for error in before.values())
        for step in range(6):

            def loss(module: nn.Module, rank: int, step: int = step) -> Tensor:
                return loss_on(module, 10 * step + rank)

            expected = mean_gradients(model, loss)
            model.zero_grad()
            ddp(images(10 * step + cx.get_rank(), 5)).square().mean().backward()
            found, after = gradients(model), mean_errors(ddp, model)
            assert_same_on_all_ranks(found)
            for name, gradient in expected.items():
                if name not in after:
                    torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)
                    continue
                torch.testing.assert_close(found[name] + after[name], gradient + before[name], rtol=1e-12, atol=1e-12)
                assert after[name].norm() > 1e-3 * gradient.norm()
                width = fields.get("matrix_approximation_rank", 1)
                assert torch.linalg.matrix_rank(as_matrix(found[name]), rtol=1e-9) == width
            before = after
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad


def mean_errors(ddp: cx.DistributedDataParallel, model: nn.Module) -> dict[str, Tensor]:
    """The mean over ranks of what each has kept, in the order of each parameter's dimensions."""
    found = {}
    shapes = dict(model.named_parameters())
    for name, gradient in ddp._reducer.low_rank.items():
        error = gradient.error.clone()
        dist.all_reduce(error, dist.ReduceOp.AVG)
        found[name] = error.as_strided(shapes[name].shape, shapes[name].stride())
    return found


@on_ranks(2, by_night(3))
def test_a_gradient_of_few_directions_is_exact():
    """A linear layer's gradient has no more than one per row of the joined batch."""
    model = network()[3]
    ranks = cx.get_world_size()
    ddp = cx.DistributedDataParallel(model, compression="powersgd", matrix_approximation_rank=ranks)

    def loss(module: nn.Module, rank: int) -> Tensor:
        return module(images(rank, 1).flatten()[:48].repeat(2)[None, :64]).square().mean()

    for _ in range(3):
        model.zero_grad()
        loss(ddp, cx.get_rank()).backward()
        assert_close(gradients(model), mean_gradients(model, loss), rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_what_is_kept_does_not_depend_on_the_loss_scale():
    """A power of two: the same bits, also where it changes between two steps."""
    plain, scaled = network(), network()
    wrapped = [cx.DistributedDataParallel(model, compression="powersgd") for model in (plain, scaled)]
    for scale in (1.0, 2.0**10, 2.0**9, 2.0**12):
        wrapped[1].begin_sync(scale)
        for ddp, factor in zip(wrapped, (1.0, scale), strict=True):
            ddp.module.zero_grad()
            (loss_on(ddp, cx.get_rank()) * factor).backward()
        for name, gradient in gradients(scaled).items():
            torch.testing.assert_close(gradient / scale, gradients(plain)[name], rtol=1e-12, atol=1e-15)
        for own, other in zip(*(ddp._reducer.low_rank.values() for ddp in wrapped), strict=True):
            torch.testing.assert_close(own.error, other.error, rtol=1e-12, atol=1e-15)


@on_ranks(2)
def test_a_step_that_cannot_be_taken_changes_nothing_that_is_kept():
    for where in ("a gradient that is approximated", "one that is not", "the loss"):
        model = network()
        ddp = cx.DistributedDataParallel(model, compression="powersgd", bucket_size_mb=MANY_BUCKETS)
        loss_on(ddp, cx.get_rank()).backward()
        kept = copy.deepcopy([[each.error, each.query] for each in ddp._reducer.low_rank.values()])
        assert ddp.is_finite()
        model.zero_grad()
        parameter = {"a gradient that is approximated": model[3].weight, "one that is not": model[3].bias}.get(where)
        if parameter is not None and cx.get_rank() == 1:
            parameter.register_hook(lambda gradient: gradient * float("inf"))
        loss = loss_on(ddp, cx.get_rank())
        ddp.begin_sync().watch(loss * float("nan") if where == "the loss" and cx.get_rank() == 1 else loss)
        loss.backward()
        assert not ddp.is_finite(), where
        for before, each in zip(kept, ddp._reducer.low_rank.values(), strict=True):
            assert torch.equal(before[0], each.error), where
            assert torch.equal(before[1], each.query), where


@on_ranks(2)
def test_what_a_parameter_keeps_waits_until_it_is_used_again():
    model = nn.ModuleDict({"first": nn.Linear(WIDE, WIDE), "second": nn.Linear(WIDE, WIDE)}).double()

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, name: str) -> Tensor:
            rows = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(cx.get_rank()), dtype=torch.float64)
            return self.parts[name](rows).square().mean()

    ddp = cx.DistributedDataParallel(Chosen(), compression="powersgd", find_unused_parameters=True)
    ddp("first").backward()
    kept = ddp._reducer.low_rank["parts.first.weight"].error.clone()
    assert kept.any()
    ddp.zero_grad()
    ddp("second").backward()
    assert torch.equal(ddp._reducer.low_rank["parts.first.weight"].error, kept)
    assert model["first"].weight.grad is None


@on_ranks(2)
def test_a_comm_hook_beside_compression_is_refused():
    ddp = cx.DistributedDataParallel(network(), compression="fp16")
    with pytest.raises(cx.ConfigError, match="exclude each other"):
        ddp.register_comm_hook(None, lambda state, bucket: None)


@given(st.lists(st.integers(1, 5), min_size=0, max_size=5), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_any_dense_gradient_is_a_matrix_in_place(shape, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = torch.zeros(3 + int(np.prod(shape, dtype=int)))[3:].view([shape[d] for d in order])
    gradient = tensor.permute([order.index(d) for d in range(len(shape))])
    assert list(gradient.shape) == shape
    matrix = as_matrix(gradient)
    assert matrix.numel() == gradient.numel()
    matrix += torch.arange(1.0, matrix.numel() + 1).view(matrix.shape)
    assert sorted(gradient.reshape(-1).tolist()) == list(range(1, gradient.numel() + 1))


def first_directions(bucket_size_mb: float) -> dict[str, Tensor]:
    ddp = cx.DistributedDataParallel(
        network(), compression="powersgd", matrix_approximation_rank=2, bucket_size_mb=bucket_size_mb
    )
    return {name: gradient.query for name, gradient in ddp._reducer.low_rank.items()}


@on_ranks(2)
def test_the_first_directions_depend_on_the_name_and_not_on_the_size_of_buckets():
    one_each, together = first_directions(MANY_BUCKETS), first_directions(25)
    assert len(together) > 1
    assert one_each.keys() == together.keys()
    assert_same_on_all_ranks(together)
    for name, query in together.items():
        assert torch.equal(one_each[name], query)
        assert torch.linalg.matrix_rank(query) == 2


def kept(name: str, rows: int = 8) -> dict[str, LowRankGradient]:
    return {name: LowRankGradient(3, torch.zeros(rows, 6), 2, seed=3)}


def test_what_a_checkpoint_does_not_know_begins_anew():
    state = {"queries": {"old": torch.ones(6, 2)}, "errors": [{"old": torch.ones(8, 6)}]}
    known, new, reshaped = kept("old"), kept("new"), kept("old", rows=9)
    for own in (known, new, reshaped):
        load_state(own, state, World())
    assert torch.equal(known["old"].error, torch.ones(8, 6))
    assert torch.equal(known["old"].query, torch.ones(6, 2))
    assert not new["new"].error.any()
    assert torch.equal(new["new"].query, kept("new")["new"].query)
    assert not reshaped["old"].error.any()


@pytest.mark.parametrize("state", [{}, {"queries": {}, "errors": 3}, {"queries": {"old": 3}, "errors": []}])
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(cx.CheckpointError, match="the saved state of gradient compression cannot be used"):
        load_state(kept("old"), state, World())


# --- fits -----------------------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(FEATURES, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 3))


def fit(
    compression: str | None, width: int = 1, folder: str = "", dtype: str = "float32", **fields: Any
) -> dict[str, Any]:
    """Trains; returns what came out, and the warnings."""
    model, (inputs, targets) = make_model().to(getattr(torch, dtype)), make_rows(39)
    factor = fields.pop("factor", 1.0)
    trainer = cx.DistributedTrainer(
        model,
        lambda output, target: factor * nn.functional.cross_entropy(output, target),
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        ddp_config=cx.DDPConfig(compression=compression, matrix_approximation_rank=width),
    )
    given = {"epochs": 3, "effective_batch_size": 6, "verbose": False, "checkpoint_dir": folder or "./checkpoints"}
    with warning_texts() as caught:
        history = trainer.fit(inputs.to(getattr(torch, dtype)), targets, **{**given, **fields})
    return {
        "parameters": flat(model.parameters()),
        "bits": fingerprint(model),
        "losses": history.train_losses,
        # A scale that is meant to overflow does so in a whole epoch, which is said.
        "warnings": [text for text in caught if "overflowed 16 bits" not in text],
    }


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("compression", "width", "tolerance"),
    [("fp16", 1, 1e-3), ("bf16", 1, 1e-2), ("powersgd", 6, 1e-6)],
)
def test_n_ranks_equal_one_as_closely_as_the_compression_allows(compression, width, tolerance):
    """With six rows in a joined batch, gradients of linear layers have six directions: six columns hold them all."""
    [alone] = everywhere(1, fit, compression, width, "", "float64")
    for world_size in (2, 3):
        together = run_world(world_size, fit, compression, width, "", "float64")
        assert len({found["bits"] for found in together}) == 1
        assert together[0]["bits"] != alone["bits"]
        np.testing.assert_allclose(together[0]["parameters"], alone["parameters"], rtol=0, atol=tolerance)
        assert together[0]["losses"] == pytest.approx(alone["losses"], abs=tolerance)


def fit_and_resume(compression: str, folder: str, settings: dict[str, Any], every: int = 1) -> list[str]:
    """The bits of an uninterrupted fit, then of one resumed from each of its checkpoints, or from every so many."""
    whole = fit(compression, 1, folder, checkpoint_every_n_steps=2, checkpoint_every_n_epochs=1, **settings)
    assert not whole["warnings"], whole["warnings"]
    paths = sorted(Path(folder).glob("*.ckpt"))[::every]
    found = [fit(compression, 1, folder, resume=str(path), **settings) for path in paths]
    assert not any(each["warnings"] for each in found)
    return [each["bits"] for each in (whole, *found)]


@pytest.mark.parametrize(("compression", "every"), [("fp16", 4), by_night("fp16", 1), by_night("powersgd", 1)])
def test_a_resumed_fit_equals_the_uninterrupted_one(compression, every, tmp_path):
    for found in run_world(2, fit_and_resume, compression, str(tmp_path), {}, every):
        assert len(found) == 1 + -(-(10 + 3) // every)  # 21 steps, every second; three ends of epochs
        assert len(set(found)) == 1


@pytest.mark.nightly
def test_also_with_a_loss_scale_that_overflows(tmp_path):
    half = {"precision": "fp16", "amp": cx.AMPConfig(initial_scale=2.0**24, dynamic_history_size=3)}
    for found in run_world(2, fit_and_resume, "powersgd", str(tmp_path), half):
        assert len(set(found)) == 1


def say(compression: str | None, factor: float, dtype: str = "float32") -> tuple[str, str]:
    """What the header says, and what an overflow does."""
    message = ""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            fit(compression, verbose=True, epochs=1, factor=factor, dtype=dtype)
        except cx.NonFiniteError as error:
            message = str(error)
    return " ".join(out.getvalue().split()), message


def test_the_header_and_the_refusal_of_a_gradient_too_large_say_how_gradients_travel():
    half, plain = run_world(2, say, "fp16", 1e6), run_world(2, say, None, 1e6)
    assert "gradients sent as fp16" in half[0][0]
    assert "too large for compression='fp16'" in half[0][1]
    assert half[0][1] == half[1][1]
    assert "gradients" not in plain[0][0]
    assert not plain[0][1]
    [(alone, _)] = everywhere(1, say, "fp16", 1.0)
    assert "gradients not sent: compression='fp16' has no effect on a single rank" in alone
    [(whole, _), _] = run_world(2, say, "bf16", 1.0, "bfloat16")
    assert "gradients sent as bfloat16: compression='bf16' has no effect on these types" in whole
    [(said, _), _] = run_world(2, say, "powersgd", 1.0)
    assert "gradients sent as matrices of rank 1; what they leave out joins the next step" in said


def resume_otherwise(folder: str) -> list[str]:
    fit("fp16", 1, folder, checkpoint_every_n_steps=9)
    warned: list[str] = fit("powersgd", 1, folder, resume=f"{folder}/step-00000009.ckpt")["warnings"]
    return warned


def test_resuming_with_another_compression_says_so(tmp_path):
    found = run_world(2, resume_otherwise, str(tmp_path))
    assert any("the compression of gradients was fp16 and is powersgd" in text for text in found[0]), found


@pytest.mark.nightly
def test_on_another_number_of_ranks_each_has_the_mean_of_what_was_kept(tmp_path):
    run_world(3, fit_with_checkpoint, str(tmp_path))
    kept = read_checkpoint(tmp_path / "step-00000009.ckpt").others["compression"]
    assert len(kept["errors"]) == 3
    close_worlds()  # what resumes is another process
    for found in run_world(2, errors_after_load, str(tmp_path / "step-00000009.ckpt")):
        for name, error in found.items():
            np.testing.assert_allclose(error, torch.stack([own[name] for own in kept["errors"]]).mean(0), atol=1e-9)


def fit_with_checkpoint(folder: str) -> None:
    fit("powersgd", 1, folder, checkpoint_every_n_steps=9)


def errors_after_load(path: str) -> dict[str, Any]:
    ddp = cx.DistributedDataParallel(make_model(), compression="powersgd")
    ddp.load_compression_state(read_checkpoint(path).others["compression"])
    return {name: gradient.error.numpy() for name, gradient in ddp._reducer.low_rank.items()}
