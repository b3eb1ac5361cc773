"""A rank without memory says which one it is and what to do, as the error that PyTorch or Python raised."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from fitting import make_model, make_rows, one_process, run_world
from refusals import ending
from torch import Tensor, nn

import cyxtrain as cx

pytestmark = pytest.mark.usefixtures("rank_server")
REMEDIES = r"smaller batch_size, with accumulation_steps.*bf16.*enable_gradient_checkpointing\(\)\. On.*--gpus"
IN_EVALUATION = r"smaller batch_size \(in fit, validation_batch_size; a DataLoader has its own\)\. On.*--gpus"


LIBRARIES = (
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error. Last error:\nCuda failure 2 'out of memory'",
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error. Last error:\nFailed to CUDA calloc async 4194304 bytes",
)


class Greedy(nn.Module):
    """A model that wants more than any machine has, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.fails_with = make_model(), ""

    def forward(self, rows: Tensor) -> Tensor:
        if self.fails_with == "cpu":
            torch.empty(2**60, dtype=torch.uint8)
        if self.fails_with == "python":
            raise MemoryError
        if self.fails_with in LIBRARIES:
            raise RuntimeError(self.fails_with)
        if self.fails_with == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 1 GiB.")
        return self.net(rows)


class FailsWhenItTrains(cx.callbacks.Callback):
    """The two rows that are tried before training fit into memory; a batch does not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.trainer.model.fails_with = self.how if cx.get_rank() == cx.get_world_size() - 1 else ""


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("cpu", RuntimeError, "can't allocate memory"),
        ("python", MemoryError, ""),
        ("cuda", torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 1 GiB."),
        *((text, RuntimeError, text) for text in LIBRARIES),
    ],
)
def test_it_names_the_rank_and_the_remedies_and_stays_what_it_is(how, kind, words):
    trainer = cx.DistributedTrainer(Greedy(), "cross_entropy", callbacks=[FailsWhenItTrains(how)])
    with one_process(), pytest.raises(kind, match=REMEDIES) as caught:
        trainer.fit(*make_rows(8), epochs=1, verbose=False)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("rank 0 is out of memory: ")
    assert words in str(caught.value)
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in str(caught.value)) == (how not in ("cpu", "python"))
    assert str(caught.value).count("is out of memory: ") == 1


def test_training_step_says_it_too():
    with one_process():
        amp = cx.DistributedAMPTrainer(Greedy(), loss_fn="cross_entropy")
        amp.model.fails_with = "python"
        with pytest.raises(MemoryError, match=REMEDIES):
            amp.training_step(make_rows(8))


@pytest.mark.parametrize("call", ["evaluate", "predict", "fit"])
def test_evaluation_and_prediction_name_what_helps_there(call):
    class Full(nn.Linear):
        is_full = call != "fit"

        def forward(self, rows: Tensor) -> Tensor:
            if self.is_full:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (see pytorch.org)")
            return super().forward(rows)

    def fill(logs: Any) -> None:
        trainer.model.is_full = True

    rows, targets = make_rows(8)
    trainer = cx.DistributedTrainer(Full(rows.shape[1], 3), "cross_entropy")
    filling = {"callbacks": [cx.callbacks.LambdaCallback(on_test_begin=fill)], "epochs": 1, "verbose": False}
    calls = {
        "evaluate": lambda: trainer.evaluate(rows, targets, batch_size=4),
        "predict": lambda: trainer.predict(rows, batch_size=4),
        "fit": lambda: trainer.fit(rows, targets, rows, targets, batch_size=4, **filling),
    }
    with one_process(), pytest.raises(torch.OutOfMemoryError, match=IN_EVALUATION) as caught:
        calls[call]()
    assert "GiB (see pytorch.org). PYTORCH_ALLOC_CONF" in str(caught.value)
    assert "accumulation_steps" not in str(caught.value)


def test_another_error_stays_as_it_is():
    class Wrong(Greedy):
        def forward(self, rows: Tensor) -> Tensor:
            if self.fails_with:
                raise RuntimeError("something else")
            return self.net(rows)

    trainer = cx.DistributedTrainer(Wrong(), "cross_entropy", callbacks=[FailsWhenItTrains("cpu")])
    with one_process(), pytest.raises(RuntimeError, match=r"^something else$"):
        trainer.fit(*make_rows(8), epochs=1, verbose=False)


def test_it_says_how_much_was_held(monkeypatch):
    monkeypatch.setattr("cyxtrain.environment.accelerator.in_use", lambda: torch.device("cuda", 1))
    module = types.SimpleNamespace(max_memory_reserved=lambda device: 71.25 * 2**30)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    trainer = cx.DistributedTrainer(Greedy(), "cross_entropy", callbacks=[FailsWhenItTrains("cuda")])
    with one_process(), pytest.raises(torch.OutOfMemoryError, match=r"PyTorch has held up to 71\.2 GiB of cuda:1\."):
        trainer.fit(*make_rows(8), epochs=1, verbose=False)


class TooLarge(nn.Linear):
    """Does not fit into the device."""

    def to(self, *args: Any, **keywords: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def test_a_model_that_does_not_fit_says_it_too():
    with one_process(), pytest.raises(torch.OutOfMemoryError, match=REMEDIES):
        cx.DistributedTrainer(TooLarge(4, 3), "cross_entropy").fit(*make_rows(8), epochs=1, verbose=False)


def fit_greedily() -> str:
    trainer = cx.DistributedTrainer(Greedy(), "cross_entropy", callbacks=[FailsWhenItTrains("cuda")])
    return ending(trainer.fit, *make_rows(8), epochs=1, verbose=False)


def test_the_other_ranks_hear_whose_memory_is_full():
    first, second = run_world(2, fit_greedily)
    assert second.startswith("OutOfMemoryError: rank 1 is out of memory: CUDA out of memory.")
    assert "rank 1 has failed: OutOfMemoryError: rank 1 is out of memory" in first
