"""Fits on GPUs: what holds on CPUs holds there. One GPU suffices, which two ranks share over the ring."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import warnings
from pathlib import Path
from typing import Any

import device_losses
import numpy as np
import placement_runs
import pytest
import torch
import torch.distributed as dist
from failing_step import FailsInStep3
from fitting import fingerprint, flat, make_model, make_rows, one_process, seeded
from torch import nn
from worlds import run_processes

import cyxtrain as cx
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.data.batches.batch import BatchShare
from cyxtrain.data.batches.prefetch import Placement
from cyxtrain.data.feed import Place
from cyxtrain.data.sources.arrays import ArraySource
from cyxtrain.environment import accelerator
from cyxtrain.world.world import World

GPU = os.environ.get("CYXTRAIN_TEST_GPU", "cuda")
"""Or the stand-in of tests/support/stand_in, on which test_stand_in.py runs some of these."""
pytestmark = pytest.mark.skipif(str(accelerator.visible()) != GPU, reason="no CUDA device is here")
IS_REAL = GPU == "cuda"
OF_CUDA = pytest.mark.skipif(not IS_REAL, reason="it needs NCCL, or what PyTorch has for CUDA alone")
ROWS, STEP = 50, 12


def fit(device: str, model: str = "quiet", compression: str | None = None, **settings: Any) -> dict[str, Any]:
    """Trains in this process' world, evaluates and predicts; returns JSON types."""
    with seeded():
        between = {"quiet": nn.Identity(), "batch norm": nn.BatchNorm1d(24), "dropout": nn.Dropout(0.2)}[model]
        module = nn.Sequential(nn.Linear(4, 24), between, nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    trainer = cx.DistributedTrainer(
        module,
        nn.CrossEntropyLoss(),
        torch.optim.Adam(module.parameters(), 1e-2),
        ddp_config=cx.DDPConfig(
            compression=compression, matrix_approximation_rank=STEP if compression == "powersgd" else 1
        ),
        device=device,
    )
    given = {"epochs": 3, "effective_batch_size": STEP, "verbose": False, "validation_data": make_rows(20, seed=1)}
    history = trainer.fit(*make_rows(ROWS), **{**given, **settings})
    evaluation = trainer.evaluate(*make_rows(ROWS))
    devices = sorted({parameter.device.type for parameter in module.parameters()})
    module.cpu()
    return {
        "devices": devices,
        "bits": fingerprint(module),
        "numbers": [*flat(module.parameters()).tolist(), *history.train_losses, *history.val_losses, evaluation.loss],
        "output": trainer.predict(make_rows(ROWS)[0]).flatten().tolist(),
    }


def fit_in_world(device: str, settings: dict[str, Any]) -> dict[str, Any]:
    with cx.init():
        return fit(device, **settings)


def fits(world_size: int, device: str, backend: str = "cpu", **settings: Any) -> list[dict[str, Any]]:
    """A fit on each rank of a world of processes."""
    environment = {"DISTRIBUTED_BACKEND": backend}
    found = run_processes(world_size, fit_in_world, device, settings, env=environment, seconds=100.0)
    return [result.value for result in found]


@functools.cache
def plain_fit() -> dict[str, Any]:
    """What one rank on the GPU does, with which several tests compare."""
    return fits(1, GPU)[0]


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-3) -> None:
    for name in ("numbers", "output"):
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(("backend", "device"), [pytest.param("nccl", "auto", marks=OF_CUDA), ("cpu", GPU)])
@pytest.mark.parametrize("model", ["quiet", "batch norm"])
def test_a_fit_on_a_gpu_is_that_on_a_cpu(model, backend, device):
    [alone], [found] = fits(1, "cpu", model=model), fits(1, device, backend, model=model)
    assert found["devices"] == [GPU]
    assert_close(found, alone)


def losses_on_both() -> dict[str, Any]:
    """Returns, of each kind of loss, (numbers of the CPU, of the GPU, how often its files made the host wait)."""
    found = {}
    with cx.init():
        for name in device_losses.CASES:
            _, wanted = device_losses.fit(name, "cpu")
            with warnings.catch_warnings(record=True) as received:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                _, ours = device_losses.fit(name, GPU)
                torch.cuda.set_sync_debug_mode("default")
            waits = [f"{each.filename}:{each.lineno}" for each in received if "synchronizing" in str(each.message)]
            found[name] = [
                wanted,
                ours,
                [each for each in waits if Path(each).name.split(":")[0] in device_losses.OURS],
            ]
    return found


@OF_CUDA
def test_no_step_waits_for_what_a_loss_counts():
    [found] = run_processes(1, losses_on_both, seconds=100.0)
    for name, (wanted, ours, waits) in found.value.items():
        assert ours == pytest.approx(wanted, abs=1e-2), name
        # Tries before the fit, and sums when it is over, may wait.
        assert len(waits) < device_losses.STEPS / 2, (name, waits)


@pytest.mark.parametrize("compression", [None, "fp16", "powersgd"])
def test_two_ranks_that_share_a_gpu_are_one(compression):
    together = fits(2, GPU, compression=compression)
    assert together[0]["bits"] == together[1]["bits"]
    assert_close(together[0], plain_fit(), 1e-2)


@OF_CUDA
def test_batch_norm_over_two_ranks_that_share_a_gpu_is_that_of_one():
    [alone] = fits(1, GPU, model="batch norm")
    for found in fits(2, GPU, model="batch norm", sync_batchnorm=True):
        assert_close(found, alone, 1e-2)


def resume_each(folder: str, settings: dict[str, Any]) -> list[str]:
    """The bits of an uninterrupted fit, then of one resumed from each of its checkpoints."""
    with cx.init():
        whole = fit(GPU, checkpoint_dir=folder, checkpoint_every_n_steps=4, **settings)
        paths = sorted(Path(folder).glob("*.ckpt"))
        resumed = [fit(GPU, checkpoint_dir=folder, resume=str(path), **settings) for path in paths]
        return [found["bits"] for found in (whole, *resumed)]


@pytest.mark.parametrize(("world_size", "backend"), [pytest.param(1, "nccl", marks=OF_CUDA), (2, "cpu")])
def test_a_resumed_fit_equals_the_uninterrupted_one(world_size, backend, tmp_path):
    settings = {"model": "dropout", "precision": "fp16", "compression": "powersgd", "accumulation_steps": 2}
    settings |= {"effective_batch_size": None, "batch_size": 3}
    environment = {"DISTRIBUTED_BACKEND": backend}
    for found in run_processes(world_size, resume_each, str(tmp_path), settings, env=environment, seconds=100.0):
        assert len(found.value) > 4
        assert len(set(found.value)) == 1


COMPILED = [{"compile": True}, {"compile": "reduce-overhead", "accumulation_steps": 2}]
ROUNDED = [{"precision": "fp16"}, {"precision": "bf16"}, {"float32_precision": "high"}]


@pytest.mark.parametrize("settings", [*ROUNDED, *COMPILED], ids=str)
def test_16_bits_and_a_compiled_model_train_as_well(settings):
    if settings.get("compile"):
        pytest.importorskip("triton", reason="PyTorch compiles for GPUs by Triton, which is not here")
    asked = ("auto", "nccl") if IS_REAL else (GPU, "cpu")
    [found] = fits(1, *asked, **settings)
    assert_close(found, plain_fit(), 0.1)


def test_parameters_of_bfloat16_are_trained():
    model = nn.Linear(4, 3, dtype=torch.bfloat16)
    with one_process():
        trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), "adamw", device=GPU)
        trainer.fit(*make_rows(ROWS), epochs=1, effective_batch_size=STEP, verbose=False)
    assert bool(model.weight.isfinite().all())


class SyncsCounted(cx.callbacks.Callback):
    """Lets PyTorch warn of each operation that stops the host, from step 6 of a fit on."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 5:
            torch.cuda.set_sync_debug_mode("warn")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        torch.cuda.set_sync_debug_mode("default")


@OF_CUDA
@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)], ids=["adamw", "sgd"]
)
def test_the_host_does_not_stop_in_a_step(make):
    model = make_model()
    trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), make(model.parameters()), device=GPU)
    settings = {"epochs": 1, "effective_batch_size": STEP, "clip_norm": 1.0, "verbose": False}
    with one_process(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(*make_rows(50 * STEP), callbacks=[SyncsCounted()], **settings)
    syncs = [f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]
    assert len(syncs) <= 5, syncs  # at the end of the epoch


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)], ids=["adamw", "sgd"]
)
@pytest.mark.parametrize("bad", [0, 3, 7])
def test_a_step_that_is_not_finite_leaves_everything_as_it_was(make, bad):
    with seeded():
        module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    models = [module, copy.deepcopy(module)]
    inputs, targets = make_rows(8 * STEP)
    inputs[bad * STEP] = float("nan")
    trainers = [cx.DistributedTrainer(m, nn.CrossEntropyLoss(), make(m.parameters()), device=GPU) for m in models]
    settings = {"epochs": 1, "effective_batch_size": STEP, "shuffle": False, "warmup_steps": 6, "verbose": False}
    with one_process():
        with pytest.raises(cx.NonFiniteError, match=rf"step {bad + 1} \({bad + 1} in all\): on rank 0, X holds NaN"):
            trainers[0].fit(inputs, targets, **settings)
        if bad:  # the good steps alone; with schedules that do not depend on how many there are
            trainers[1].fit(inputs[: bad * STEP], targets[: bad * STEP], **settings)
    assert trainers[0].step == bad
    assert fingerprint(models[0].cpu()) == fingerprint(models[1].cpu())
    states = [[v.cpu() for own in t.optimizer.state.values() for v in own.values()] for t in trainers]
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


@pytest.mark.parametrize("kind", ["bytes", "bytes on the GPU", "bytes, and targets on the GPU", "inputs alone"])
def test_rows_that_are_copied_ahead_are_the_rows_that_were_asked_for(kind):
    inputs, targets = torch.randint(0, 255, (5000, 64), dtype=torch.uint8), torch.arange(5000)
    given = {
        "bytes": (inputs, targets),
        "bytes on the GPU": (inputs.to(GPU), targets.to(GPU)),
        "bytes, and targets on the GPU": (inputs, targets.to(GPU)),
        "inputs alone": (inputs,),
    }[kind]
    source, placement = ArraySource(*given), Placement(torch.device(GPU), torch.float32, lambda values, dtype: values)
    feed = source.feed(DistributedTrainingConfig(batch_size=100, accumulation_steps=2), World())
    kept, wrong = [], torch.zeros((), dtype=torch.int64, device=GPU)
    expected = inputs.to(GPU, torch.float32)
    side = 2000 if IS_REAL else 200  # the stand-in computes at once, with one core
    for share in feed.shares(Place(0, 0, 0), placement, None):
        for batch in share:
            torch.mm(*torch.ones(2, side, side, device=GPU))  # so that the stream is behind
            share.prefetch_next(contextlib.nullcontext())
            torch.full((100, 64), 7.0, device=GPU)  # takes memory that was freed too early
            if batch.targets is not None:
                wrong += (batch.inputs != expected[batch.targets]).sum()
            kept.append(batch.inputs.sum(0))
    assert not wrong.item()
    assert torch.equal(torch.stack(kept).sum(0), expected.sum(0))
    batches = [batch.inputs.clone() for batch in source.whole_batches(100, placement, BatchShare())]
    assert torch.equal(torch.cat(batches), expected)


def test_bytes_on_the_gpu_train_as_bytes_on_the_host():
    rows = 20_000 if IS_REAL else 2_000  # on a GPU enough for copies to be under way while a step computes
    inputs, targets = torch.randint(0, 255, (rows, 3072), dtype=torch.uint8), torch.randint(0, 10, (rows,))

    def bits(*data: torch.Tensor) -> str:
        with seeded():
            model = nn.Sequential(
                nn.LayerNorm(3072, elementwise_affine=False), nn.Linear(3072, 256), nn.Tanh(), nn.Linear(256, 10)
            )
        cx.DistributedTrainer(model, "cross_entropy", "adam", device=GPU).fit(*data, epochs=3, batch_size=512)
        return fingerprint(model.cpu())

    with cx.init():
        assert len({bits(inputs, targets), *(bits(inputs.to(GPU), targets.to(GPU)) for _ in range(5))}) == 1


def fit_convnet(settings: dict[str, Any]) -> dict[str, Any]:
    """A fit of a convnet on the GPU: its losses, where its weights lie, and what it used."""
    with seeded():
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 3))
        images, classes = torch.randn(ROWS, 3, 8, 8), torch.arange(ROWS) % 3
    with cx.init():
        trainer = cx.DistributedTrainer(model, "cross_entropy", "adam", device=GPU)
        history = trainer.fit(images, classes, epochs=3, effective_batch_size=STEP, verbose=False, **settings)
    is_last = model[2].weight.is_contiguous(memory_format=torch.channels_last)
    return {"losses": history.train_losses, "is_last": is_last, "usage": trainer.device_usage}


def test_channels_last_changes_no_number_and_a_fit_tells_what_it_used():
    plain, last = (
        run_processes(1, fit_convnet, settings, env={"DISTRIBUTED_BACKEND": "cpu"})[0].value
        for settings in ({}, {"channels_last": True})
    )
    assert (plain["is_last"], last["is_last"]) == (False, True)
    np.testing.assert_allclose(last["losses"], plain["losses"], rtol=1e-2)
    assert last["usage"]["peak_memory"] > 4 * (3 * 16 * 9 + 16 * 8 * 9 + 128 * 3)
    assert last["usage"]["flops_per_second"] > 0
    assert 0 <= last["usage"].get("mfu", 0) < 1


def fit_with_graphs(compiles: bool) -> list[float]:
    """The losses and metrics of a model that its user has compiled so that CUDA graphs run it, in two micro-batches."""
    with seeded():
        model = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 1)).to(GPU)
    if compiles:
        model.compile(mode="reduce-overhead")
    rows, classes = make_rows(ROWS)
    with cx.init():
        trainer = cx.DistributedTrainer(model, "bce_with_logits", "adam", metrics=["mae"], device=GPU)
        given = {"epochs": 3, "batch_size": 5, "accumulation_steps": 2, "verbose": False, "drop_last": True}
        targets = (classes > 0).float().reshape(-1, 1)
        history = trainer.fit(rows, targets, validation_data=(rows, targets), **given)
        return [value for name in sorted(history.history) for value in history.history[name]]


@OF_CUDA
def test_a_model_that_its_user_runs_by_cuda_graphs_is_fitted_as_without():
    pytest.importorskip("triton", reason="PyTorch compiles for GPUs by Triton, which is not here")
    plain, graphs = (
        run_processes(1, fit_with_graphs, each, env={"DISTRIBUTED_BACKEND": "cpu"}, seconds=200.0)[0].value
        for each in (False, True)
    )
    np.testing.assert_allclose(graphs, plain, rtol=0, atol=1e-3)


def meet() -> dict[str, Any]:
    """Joins without a backend, and fits; returns what was chosen."""
    with cx.init():
        found = fit("auto")
        cx.barrier()
        mine = torch.ones(2)
        cx.all_reduce(mine)  # of the CPU, also over NCCL
        return {"backend": dist.get_backend(), "devices": found["devices"], "sum": mine.tolist()}


def adopt_nccl() -> dict[str, Any]:
    """Fits over a group of PyTorch's own, which carries no CPU tensors."""
    dist.init_process_group("nccl")
    cx.init()
    found = fit("auto")
    dist.destroy_process_group()
    return found


def refuse_another_gpu() -> str:
    with cx.init(), pytest.raises(cx.ConfigError) as error:
        fit(f"cuda:{(cx.get_rank() + 1) % 2}")
    return str(error.value)


def test_without_a_backend_a_visible_gpu_is_used_over_nccl_where_each_rank_has_one():
    several = torch.cuda.device_count() > 1
    for world_size in (1, 2):
        backend = "nccl" if several and world_size == 2 else "ring"
        for found in run_processes(world_size, meet, seconds=100.0):
            assert found.value == {"backend": backend, "devices": [GPU], "sum": [float(world_size)] * 2}
            assert "barrier()" not in found.stderr


@OF_CUDA
def test_a_group_of_nccl_is_adopted_and_trains_on_its_gpu():
    [alone] = fits(1, "cpu")
    [found] = run_processes(1, adopt_nccl, seconds=100.0)
    assert found.value["devices"] == [GPU]
    assert_close(found.value, alone)


@OF_CUDA
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="each rank has its own GPU")
def test_two_ranks_of_nccl_on_one_gpu_are_refused_when_they_join():
    found = run_processes(2, meet, env={"DISTRIBUTED_BACKEND": "nccl"}, seconds=100.0, succeed=False)
    assert all("RendezvousError" in each.stderr and "Two ranks use one GPU" in each.stderr for each in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_the_gpu_of_another_rank_is_refused_over_nccl():
    for rank, found in enumerate(run_processes(2, refuse_another_gpu, seconds=100.0)):
        assert f"local rank {rank}, is connected over NCCL on cuda:{rank}" in found.value


def fail_in_step_3(how: str) -> None:
    with cx.init():
        model = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 3))
        trainer = cx.DistributedTrainer(model, "cross_entropy", "sgd", callbacks=[FailsInStep3(how)])
        trainer.fit(*make_rows(ROWS), epochs=1, batch_size=4, verbose=False)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU per rank")
@pytest.mark.parametrize(("how", "words"), [("raises", "rank 1 has failed: KeyError"), ("killed", "rank 1 died")])
def test_ranks_of_nccl_end_with_the_error_of_the_one_that_failed(how, words):
    env = {"DISTRIBUTED_BACKEND": "nccl"}
    first, last = run_processes(2, fail_in_step_3, how, env=env, seconds=60.0, succeed=False)
    assert first.returncode == 1, first.stderr  # neither killed by the helper nor by PyTorch's watchdog
    assert words in first.stderr
    assert last.returncode == (1 if how == "raises" else -9), last.stderr


def test_state_checkpoints_generators_and_the_default_device_are_where_they_have_to_be(tmp_path):
    environment = {"DISTRIBUTED_BACKEND": "cpu"}
    [result] = run_processes(
        1, placement_runs.all_alone, str(tmp_path), [*placement_runs.OPTIMIZERS], GPU, env=environment, seconds=200.0
    )
    found = result.value
    for on_cpu, on_gpu in (*found["optimizers"].values(), found["default device"]):
        np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-2, atol=1e-3)
    moved = ["deep", "exp_avg", "exp_avg_sq", "own"]
    assert found["state"] == [[moved, []], [sorted([*moved, "mu_product", "step"]), []]]
    assert all(found["checkpoints"][0])
    assert found["generators"] == [1, [True]]


def test_ranks_compare_and_share_tensors_on_a_gpu():
    environment = {"DISTRIBUTED_BACKEND": "cpu"}
    for result in run_processes(2, placement_runs.all_in_world, GPU, env=environment, seconds=100.0):
        found = result.value
        assert (found["equal"], found["mixed"], found["buffers"]) == ("", "", [[], []])
        assert "differ from each other in large, small" in found["flipped"]
        assert "differ from each other in turned" in found["mixed and flipped"]
        assert found["gathered"] == [0, 1, 300, 301]
        np.testing.assert_allclose(*found["losses"], rtol=1e-3)
