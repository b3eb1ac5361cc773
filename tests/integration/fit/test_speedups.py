"""What makes a GPU fast, as far as CPUs can tell: precision of float32, memory formats; and what a fit uses of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fitting import adam, everywhere, flat, make_model, make_rows, one_process, outcome, run_world, seeded
from markers import by_night
from stand_in.running import run_on_stand_in
from torch import Tensor, nn

import cyxtrain as cx
from cyxtrain.optim.precision import float32_products
from cyxtrain.progress import flops
from cyxtrain.training import header
from cyxtrain.training.model.placement import put_channels_last

pytestmark = pytest.mark.usefixtures("rank_server")
BACKENDS: Any = torch.backends


def make_images(count: int, dims: int = 2) -> tuple[Tensor, Tensor]:
    """Returns X (count, 3, 6, ...) and y (count,), classes 0 to 2."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, *[6] * dims, generator=generator), torch.randint(3, (count,), generator=generator)


def make_convnet(dims: int = 2) -> nn.Sequential:
    conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
    with seeded():
        return nn.Sequential(
            conv(3, 8, 3, padding=1), norm(8), nn.Tanh(), conv(8, 4, 3), nn.Flatten(), nn.Linear(4 * 4**dims, 3)
        )


OWNERS = (BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)


def products() -> list[Any]:
    """How PyTorch multiplies float32, by its old names and its new ones."""
    names = [owner.fp32_precision for owner in OWNERS]
    try:
        return [torch.get_float32_matmul_precision(), BACKENDS.cudnn.allow_tf32, *names]
    except RuntimeError:  # the new names say what the old ones do not have
        return names


class Look(cx.callbacks.Callback):
    """Notes how float32 is multiplied in steps and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(products()[:3])

    def on_test_begin(self, logs: Any = None) -> None:
        self.seen.append(products()[:3])


def float32_in_a_fit(precision: str | None) -> list[Any]:
    look, rows = Look(), make_rows(8)
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd", callbacks=[look])
    settings = {"epochs": 1, "effective_batch_size": 4, "verbose": False, "float32_precision": precision}
    before = products()
    trainer.fit(*rows, validation_data=rows, **settings)
    assert products() == before
    return look.seen


@pytest.mark.parametrize("world_size", [1, by_night(2)])
def test_float32_precision_holds_for_the_fit_on_every_rank_and_is_put_back(world_size):
    for seen in everywhere(world_size, float32_in_a_fit, "high"):
        assert seen == [["high", True, "tf32"]] * 3


def test_without_float32_precision_nothing_is_touched():
    with one_process():
        assert float32_in_a_fit(None) == [products()[:3]] * 3


def test_float32_precision_holds_in_evaluate_and_predict_as_in_the_fit_before():
    class Probe(nn.Linear):
        def forward(self, x):
            seen.append(torch.get_float32_matmul_precision())
            return super().forward(x)

    seen: list[str] = []
    with one_process():
        trainer, rows = cx.DistributedTrainer(Probe(4, 3), "cross_entropy", "sgd"), make_rows(8)
        trainer.fit(*rows, epochs=1, float32_precision="medium", verbose=False)
        seen.clear()
        trainer.evaluate(*rows)
        trainer.predict(rows[0])
    assert seen[-1] == "medium"
    assert "medium" in seen[:-1]
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_what_was_set_by_new_names_alone_is_put_back(precision):
    kept = [(owner, owner.fp32_precision) for owner in OWNERS]
    try:
        BACKENDS.cuda.matmul.fp32_precision, BACKENDS.cudnn.conv.fp32_precision = "tf32", "ieee"
        with float32_products(precision):
            assert torch.get_float32_matmul_precision() == precision  # the old getter works, where inductor reads it
            assert BACKENDS.cudnn.allow_tf32 is (precision != "highest")
        assert (BACKENDS.cuda.matmul.fp32_precision, BACKENDS.cudnn.conv.fp32_precision) == ("tf32", "ieee")
    finally:
        torch.set_float32_matmul_precision("highest")
        BACKENDS.cudnn.allow_tf32 = True
        for owner, value in kept:
            owner.fp32_precision = value


def fit_images(channels_last: bool, dims: int = 2) -> dict[str, Any]:
    """A fit of two epochs, and how many of its convolutions had pixels beside each other, of inputs and weights."""
    model, formats = make_convnet(dims), (torch.channels_last, torch.channels_last_3d)[dims - 2]
    found: list[bool] = []

    def look(module: nn.Module, inputs: tuple[Tensor]) -> None:
        found.extend(tensor.is_contiguous(memory_format=formats) for tensor in (inputs[0], module.weight))

    for module in model:
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            module.register_forward_pre_hook(look)
    trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
    settings = {"epochs": 2, "effective_batch_size": 8, "verbose": False, "channels_last": channels_last}
    history = trainer.fit(*make_images(20, dims), **settings)
    assert model[0].weight is trainer.optimizer.param_groups[0]["params"][0]
    strides = {tuple(value.stride()) for value in trainer.optimizer.state[model[0].weight].values() if value.dim()}
    return {"losses": history.train_losses, "used": found, "strides": strides == {model[0].weight.stride()}}


@pytest.mark.parametrize(("world_size", "dims"), [(1, 2), by_night(1, 3), by_night(2, 2)])
def test_channels_last_is_used_by_all_convolutions_and_changes_no_number(world_size, dims):
    with one_process():
        usual = fit_images(False, dims)
    assert not all(usual["used"])
    for found in everywhere(world_size, fit_images, True, dims):
        assert all(found["used"])
        assert found["strides"]
        assert found["losses"] == pytest.approx(usual["losses"], rel=1e-4 if world_size == 1 else 1e-2)


def test_two_ranks_with_channels_last_are_as_one():
    settings = {"epochs": 2, "effective_batch_size": 8, "verbose": False}
    with one_process():
        usual = fit_bare(settings)
    for found in run_world(2, fit_bare, {**settings, "channels_last": True}):
        assert abs(found - usual).max() < 1e-5


def make_bare() -> nn.Sequential:
    """A convnet without batch norm: before it a bias has no gradient but rounding, which Adam makes large."""
    model = make_convnet()
    del model[1]
    return model


def fit_bare(settings: dict[str, Any]) -> Any:
    model = make_bare()
    cx.DistributedTrainer(model, "cross_entropy", adam(model)).fit(*make_images(20), **settings)
    return flat(model.parameters())


@pytest.mark.parametrize("before", [by_night(False), True])
@pytest.mark.filterwarnings("ignore:.*channels_last was:UserWarning")
def test_a_checkpoint_resumes_in_either_memory_format(tmp_path, before):
    def fit(epochs: int, channels_last: bool, **more: Any) -> Any:
        model = make_bare()
        trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
        settings = {"checkpoint_every_n_epochs": 1, "checkpoint_dir": tmp_path, "batch_size": 8, "verbose": False}
        trainer.fit(*make_images(20), epochs=epochs, channels_last=channels_last, **settings, **more)
        return flat(model.parameters())

    with one_process():
        whole = fit(3, False)
        for path in tmp_path.iterdir():
            path.unlink()
        fit(1, before)
        resumed = fit(3, not before, resume="auto")
    assert abs(resumed - whole).max() < 1e-5


def test_state_of_an_optimizer_follows_a_model_that_its_user_has_laid_out_anew():
    """PyTorch's fused kernels for CPUs go through memory: state in another order would meet other elements."""
    found = []
    with one_process():
        for changes in (False, True):
            model = make_bare()
            trainer = cx.DistributedTrainer(model, "cross_entropy", adam(model))
            trainer.fit(*make_images(20), epochs=1, batch_size=8, verbose=False)
            if changes:
                put_channels_last(model)
            found.append(outcome(trainer, trainer.fit(*make_images(20), epochs=1, batch_size=8, verbose=False)))
    assert abs(found[0]["parameters"] - found[1]["parameters"]).max() < 1e-5


def test_channels_last_is_refused_where_it_does_nothing():
    with one_process(), pytest.raises(cx.ConfigError, match="no parameter of Sequential has 4 or 5 dimensions: leave"):
        cx.DistributedTrainer(make_model(), "cross_entropy", "sgd").fit(*make_rows(8), channels_last=True)


def test_a_precision_that_is_set_to_what_it_is_anyway_is_no_difference():
    device = torch.device("cpu")
    with float32_products("highest"):
        assert BACKENDS.mkldnn.matmul.fp32_precision == "ieee"
        assert header._product_precision(device, None) == "none"
    assert header._product_precision(device, "highest") == "none"
    assert header._product_precision(device, "high") == "tf32"


def test_a_resumed_fit_says_what_is_computed_otherwise(tmp_path, capsys):
    def fit(epochs: int, **settings: Any) -> None:
        trainer = cx.DistributedTrainer(make_convnet(), "cross_entropy", "sgd")
        trainer.fit(*make_images(8), epochs=epochs, checkpoint_every_n_epochs=1, checkpoint_dir=tmp_path, **settings)

    with one_process():
        fit(1, float32_precision="highest")
        with pytest.warns(UserWarning, match="resumed") as warned:
            fit(2, float32_precision="high", channels_last=True, resume="auto")
    words = " ".join(str(each.message) for each in warned)
    assert "the precision of float32 products was none and is tf32" in words
    assert "channels_last was False and is True" in words
    said = capsys.readouterr().out
    assert "float32_precision='high': products of matrices and convolutions may use TF32, 10 bits of mantissa" in said


def test_flops_of_a_step_are_those_of_its_products():
    model, rows = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), torch.randn(32, 64)
    products_of_weights = 2 * 32 * (64 * 128 + 128 * 10)
    counted = flops.flops_of_step(lambda: model(rows).sum().backward())
    assert counted == 3 * products_of_weights - 2 * 32 * 64 * 128  # no gradient of the rows


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.float16, 756),
        ("NVIDIA H200", torch.float32, 495),
        ("NVIDIA A100-SXM4-40GB", torch.bfloat16, 312),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("Tesla T4", torch.float16, 65),
        ("Tesla T4", torch.bfloat16, None),
        ("Tesla V100-PCIE-16GB", torch.float32, 14),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3", torch.float64, None),
    ],
)
def test_peaks_are_found_by_a_gpu_s_name_and_by_nothing_like_it(name, dtype, tflops):
    found = flops.peak_of(name, dtype, uses_tf32=True)
    assert found == (None if tflops is None else pytest.approx(1e12 * tflops))


@pytest.mark.parametrize(
    ("name", "capability", "times"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "about 7 times "),
        ("NVIDIA A100-SXM4-40GB", (8, 0), "about 8 times "),
        ("NVIDIA A10G", (8, 6), "several times "),  # not in the table
        ("NVIDIA GeForce RTX 4090", (8, 9), None),  # as fast in float32
        ("Tesla T4", (7, 5), None),
    ],
)
def test_the_header_hints_at_tf32_where_it_is_off_and_much_faster(monkeypatch, name, capability, times):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    gpu = SimpleNamespace(placement=SimpleNamespace(device=torch.device("cuda")))

    def hints(device: Any = gpu, dtype: torch.dtype = torch.float32, **settings: Any) -> list[str]:
        run: Any = SimpleNamespace(config=cx.DistributedTrainingConfig(**settings), data=device)
        return [how for what, how in header._precision(make_model().to(dtype), run) if what == "hint"]

    words = f"float32_precision='high' lets matrix products use TF32: {times}as fast on this GPU, 10 bits of mantissa"
    assert hints() == ([] if times is None else [words])
    assert hints(SimpleNamespace(placement=SimpleNamespace(device=torch.device("cpu")))) == []
    assert hints(dtype=torch.bfloat16) == hints(precision="bf16") == hints(float32_precision="highest") == []
    with float32_products("high"):
        assert hints() == []


def test_a_profiled_fit_on_cpus_tells_its_flops_and_another_counts_none(tmp_path, capsys, monkeypatch):
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd")
        trainer.fit(*make_rows(64), epochs=1, profile=tmp_path.as_posix())
        # 56 weights forward and for their gradients, and 24 for those of the values between two layers.
        assert "flops      272 FLOP per sample, forward and backward\n" in capsys.readouterr().out
        assert list(trainer.device_usage) == ["flops_per_second"]
        used = trainer.device_usage["flops_per_second"]
        assert used == pytest.approx(272 * trainer.history.samples_per_second, rel=1e-6)
        monkeypatch.setattr("cyxtrain.training.inputs.dry_run.flops_of_step", None)
        trainer.fit(*make_rows(64), epochs=1)
        assert trainer.device_usage == {}
    assert "FLOP" not in capsys.readouterr().out


@pytest.mark.parametrize("runs", [False, True])
def test_a_step_whose_operations_cannot_be_counted_is_tried_without_that(runs, tmp_path, monkeypatch):
    calls: list[bool] = []

    def fail(step: Any) -> int:
        calls.append(runs)
        if runs:
            step()
        raise RuntimeError("no formula for this operation")

    monkeypatch.setattr("cyxtrain.training.inputs.dry_run.flops_of_step", fail)
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd")
        history = trainer.fit(*make_rows(64), epochs=1, profile=tmp_path.as_posix(), verbose=False)
    assert calls == [runs]
    assert len(history.train_losses) == 1
    assert trainer.device_usage == {}


def use_a_device(folder: str) -> dict[str, Any]:
    """A fit on the stand-in, what it printed, and what TensorBoard has been told."""
    from contextlib import redirect_stdout
    from io import StringIO

    told: dict[str, float] = {}

    class Writer:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told[name] = value

        add_text = flush = close = lambda *_: None

    board = cx.callbacks.TensorBoard(folder)
    board._open = Writer  # type: ignore[method-assign, assignment]
    with cx.init(), redirect_stdout(StringIO()) as printed:
        settings: dict[str, Any] = {"callbacks": [board], "device": "fakegpu"}
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd", **settings)
        history = trainer.fit(*make_rows(8), epochs=2, batch_size=4)
    return {
        "printed": printed.getvalue(),
        "told": told,
        "usage": trainer.device_usage,
        "losses": history.train_losses,
        "weights": sum(each.numel() * each.element_size() for each in trainer.model.parameters()),
    }


@pytest.mark.nightly
def test_a_fit_on_an_accelerator_tells_memory_and_flops_in_the_epochs_line_and_to_tensorboard(fakegpu_folder, tmp_path):
    [found] = run_on_stand_in(fakegpu_folder, 1, use_a_device, tmp_path.as_posix())
    usage, told = found["usage"], found["told"]
    assert usage["peak_memory"] > found["weights"]
    assert f"peak memory {usage['peak_memory'] / 2**20:.1f} MiB" in found["printed"]
    assert flops.explain_usage({"peak_memory": 71.25 * 2**30}) == ["peak memory 71.2 GiB"]
    assert "FLOP/s" in found["printed"]
    assert "MFU" not in found["printed"]  # nobody knows what this device can
    assert told["epoch/peak memory (GiB)"] == pytest.approx(usage["peak_memory"] / 2**30)
    assert told["epoch/TFLOP per second"] == pytest.approx(usage["flops_per_second"] / 1e12)
    with one_process():
        trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "sgd")
        usual = trainer.fit(*make_rows(8), epochs=2, batch_size=4, verbose=False)
    assert found["losses"] == pytest.approx(usual.train_losses, rel=1e-4)
