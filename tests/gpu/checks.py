"""The steps of `python -m tests.gpu` that are no tests of pytest: `python -m tests.gpu.checks NAME` runs one.

Each result is a line that begins with RESULT, and JSON: its status, a note, perhaps its own name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import cyxtrain as cx

DEVICE = os.environ.get("CYXTRAIN_TEST_GPU", "cuda")
IS_REAL = DEVICE == "cuda"
FIRST, STEPS = 8, 48
MOST_STOPS = 0.1


class Skipped(Exception):  # noqa: N818
    """A check that cannot run here, with why."""


def say(status: str, note: str = "", **more: Any) -> None:
    """Prints one result."""
    print("RESULT " + json.dumps({"status": status, "note": note} | more), flush=True)


def attempt(what: str, function: Callable[[], str]) -> None:
    """Prints what one check came to: it returns a note, raises Skipped, or fails."""
    try:
        say("passed", function(), what=what)
    except Skipped as reason:
        say("skipped", str(reason), what=what)
    except Exception as error:
        traceback.print_exc()
        say("failed", f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}", what=what)


def make_model(*, width: int = 64, features: int = 32, classes: int = 10) -> nn.Sequential:
    """Returns the same network at each call."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(features, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes)
    )


def make_rows(count: int, features: int = 32) -> tuple[Tensor, Tensor]:
    """Returns X and classes, on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    inputs = torch.randn(count, features, generator=generator, device="cpu")
    return inputs, torch.randint(10, (count,), generator=generator, device="cpu")


def train(model: nn.Module, *data: Any, callbacks: Any = (), **settings: Any) -> cx.DistributedTrainer:
    """Returns a trainer after one epoch on the device."""
    trainer = cx.DistributedTrainer(model, "cross_entropy", "adamw", device=DEVICE)
    size = {} if isinstance(data[0], DataLoader) else {"batch_size": 16}
    trainer.fit(*data, **{"epochs": 1, "verbose": False, "callbacks": callbacks} | size | settings)
    return trainer


def bits(model: nn.Module) -> list[bytes]:
    """Returns each parameter's bytes."""
    return [each.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for each in model.parameters()]


# --- the checks -------------------------------------------------------------------------------------------------------


def machine() -> None:
    """What is here."""
    if not IS_REAL:
        say("passed", f"{DEVICE}, PyTorch {torch.__version__}")
        return
    if not torch.cuda.is_available():
        raise SystemExit(
            "PyTorch sees no CUDA device here: python -m tests.gpu --device fakegpu runs what can do without."
        )
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / 2**30
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    say("passed", f"{torch.cuda.device_count()} x {name}, {memory:.0f} GiB, PyTorch {torch.__version__}, NCCL {nccl}")


def wait_for_autograd(loss: Tensor) -> None:
    """Runs one more backward; returns when autograd's thread for the device has let go of it.

    A backward keeps a copy of the caller's context variables, which that thread drops after `backward` has returned. A
    process that ends just then is aborted before Python 3.14: the thread wants the interpreter, which is gone.
    """

    class Mark:
        pass

    dropped = threading.Event()
    variable: ContextVar[Mark | None] = ContextVar("mark", default=None)

    def backward() -> None:
        mark = Mark()
        weakref.finalize(mark, dropped.set)
        variable.set(mark)
        loss.backward()

    copy_context().run(backward)
    assert dropped.wait(30), "autograd's thread still holds the context of a backward"


def reducer() -> None:
    """Gradients through the buckets have the bits of plain ones."""
    width = 2048 if IS_REAL else 64
    with cx.init():

        def made() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(*(nn.Linear(width, width) for _ in range(12))).to(DEVICE)

        plain, averaged, rows = made(), made(), torch.randn(512, width).to(DEVICE)
        ddp = cx.DistributedDataParallel(averaged, cx.DDPConfig(bucket_size_mb=16 if IS_REAL else 0.02))
        for _ in range(50 if IS_REAL else 5):
            for model in (plain, ddp):
                for parameter in model.parameters():
                    parameter.grad = None
                model(rows).square().mean().backward()
            pairs = zip(plain.parameters(), averaged.parameters(), strict=True)
            assert all(torch.equal(one.grad, other.grad) for one, other in pairs), "gradients differ"
        wait_for_autograd(plain(rows).square().mean())
        say("passed", f"backend {dist.get_backend()}")


def race() -> None:
    """Rows on the GPU that need another dtype arrive whole."""
    count, features = (200 * 512, 3072) if IS_REAL else (20 * 16, 64)
    batch_size, width = (512, 256) if IS_REAL else (16, 32)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 255, (count, features), generator=generator, dtype=torch.uint8)
    targets = torch.randint(10, (count,), generator=generator)
    with cx.init():

        def trained(*data: Tensor) -> list[bytes]:
            return bits(train(make_model(width=width, features=features), *data, batch_size=batch_size).model)

        expected = trained(inputs, targets)
        on_device = inputs.to(DEVICE), targets.to(DEVICE)
        same = [trained(*on_device) == expected for _ in range(5 if IS_REAL else 1)]
        say("passed" if all(same) else "failed", f"{sum(same)} of {len(same)} fits have the bits of rows on the CPU")


class OwnDataset(Dataset[Any]):
    """Rows of which a loader knows nothing."""

    def __init__(self, *parts: Tensor) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(part[index] for part in self._parts)


class Stops(cx.callbacks.Callback):
    """Counts by line what stops the host, in the steps from FIRST to the last but one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begins to listen, and ends."""
        if batch in (FIRST, STEPS - 1):
            self._listen(batch == FIRST)

    def _listen(self, begins: bool) -> None:
        if IS_REAL:
            torch.cuda.set_sync_debug_mode("warn" if begins else "default")
            return
        from stand_in import fakegpu

        if begins:
            fakegpu.start_counting()
        else:
            fakegpu.stop_counting()
            told = {f"{place} ({kind})": count for (kind, place), count in fakegpu.stops.items() if "SYNC" in kind}
            self.lines.update(told)

    @contextmanager
    def received(self) -> Iterator[None]:
        """Within, PyTorch's warnings of synchronizing operations are counted by the package's line."""

        def hear(message: Any, *_: Any, **__: Any) -> None:
            if "synchronizing" in str(message):
                own = [each for each in traceback.extract_stack() if f"{os.sep}cyxtrain{os.sep}" in each.filename]
                place = f"{own[-1].filename.rpartition('cyxtrain' + os.sep)[2]}:{own[-1].lineno}" if own else "?"
                self.lines[place] += 1

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = hear
            yield


def stops() -> None:
    """The host does not wait for the device in the hot loop."""
    with cx.init():
        rows = make_rows(16 * STEPS)
        for what, data in {"arrays": rows, "DataLoader": (DataLoader(OwnDataset(*rows), batch_size=16),)}.items():
            counted = Stops()
            with counted.received():
                train(make_model(), *data, callbacks=[counted])
            per_step = sum(counted.lines.values()) / (STEPS - 1 - FIRST)
            lines = ", ".join(f"{line} {count}" for line, count in counted.lines.most_common(6))
            status = "passed" if per_step <= MOST_STOPS else "failed"
            say(status, f"{per_step:.2f} per step: {lines}" if lines else "0 per step", what=f"host stops: {what}")


def features() -> None:
    """What people ask of a GPU first."""
    with cx.init(), tempfile.TemporaryDirectory() as folder:
        rows = make_rows(320)
        attempt("bfloat16 parameters", lambda: _falls(train(make_model().bfloat16(), *_as(rows, torch.bfloat16))))
        for settings in ({"precision": "bf16"}, {"precision": "fp16"}):
            attempt(str(settings), lambda settings=settings: _falls(train(make_model(), *rows, **settings)))
        attempt("compile=True", lambda: _compiled(rows, compile=True))
        attempt('model.compile(mode="reduce-overhead")', lambda: _compiled(rows, mode="reduce-overhead"))
        attempt("load_checkpoint, then fit", lambda: _loaded(rows, Path(folder) / "some.ckpt"))
        attempt("torch.set_default_device", lambda: _with_default_device(rows))


def _as(rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return rows[0].to(dtype), rows[1]


def _falls(trainer: cx.DistributedTrainer) -> str:
    loss = trainer.history.train_losses[-1]
    assert 0 < loss < 2.6, f"the loss is {loss}"
    return f"loss {loss:.3f}"


def _compiled(rows: tuple[Tensor, Tensor], *, mode: str | None = None, **settings: Any) -> str:
    if not IS_REAL or importlib.util.find_spec("triton") is None:
        raise Skipped("PyTorch compiles for GPUs by Triton, which is not here")
    model = make_model()
    if mode:
        model.compile(mode=mode)
    return _falls(train(model, *rows, **settings))


def _loaded(rows: tuple[Tensor, Tensor], path: Path) -> str:
    train(make_model(), *rows).save_checkpoint(path)
    trainer = cx.DistributedTrainer(make_model(), "cross_entropy", "adamw", device=DEVICE)
    trainer.load_checkpoint(path)
    trainer.fit(*rows, epochs=1, batch_size=16, verbose=False)
    return _falls(trainer)


def _with_default_device(rows: tuple[Tensor, Tensor]) -> str:
    torch.set_default_device(DEVICE)
    try:
        return _falls(train(make_model(), *rows))
    finally:
        torch.set_default_device(None)


def _is_refusal(error: Exception) -> bool:
    """Returns whether NCCL takes no two ranks on one GPU."""
    return any(words in str(error) for words in ("uplicate GPU", "invalid usage", "Two ranks use one GPU"))


def two_ranks() -> None:
    """A fit of two ranks that share the GPU, over NCCL where it allows that: they hold the same parameters."""
    try:
        with cx.init():
            found = bits(train(make_model(), *make_rows(200)).model)
            digest = torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8).double().sum().reshape(1)
            most, least = digest.clone().to(DEVICE), digest.clone().to(DEVICE)
            cx.all_reduce(most, cx.ReduceOp.MAX)
            cx.all_reduce(least, cx.ReduceOp.MIN)
            assert float(most) == float(least), "ranks differ"
            if cx.is_master():
                say("passed", f"backend {dist.get_backend()}")
    except Exception as error:
        if not _is_refusal(error):
            raise
        if os.environ["RANK"] == "0":
            say("skipped", "this NCCL takes no two ranks on one GPU")


def failing_rank() -> None:
    """One rank raises in its third step: the other hears of it and ends, too, long before any timeout."""

    class Raises(cx.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and cx.get_rank() == 1:
                raise ValueError("on purpose")

    began = time.monotonic()
    try:
        with cx.init():
            train(make_model(), *make_rows(3200), callbacks=[Raises()])
    except Exception as error:
        took = time.monotonic() - began
        if _is_refusal(error):
            say("skipped", "this NCCL takes no two ranks on one GPU")
        else:
            say("passed" if took < 30 else "failed", f"{type(error).__name__} after {took:.1f} s")
    else:
        say("failed", "the fit went to its end")


if __name__ == "__main__":
    try:
        {each.__name__: each for each in (machine, reducer, race, stops, features, two_ranks, failing_rank)}[
            sys.argv[1]
        ]()
    except Exception as error:
        traceback.print_exc()
        say("failed", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}")
