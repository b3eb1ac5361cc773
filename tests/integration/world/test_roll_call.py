"""Claims about calls that all ranks make together: rank 0 may evaluate, predict and save alone, and nothing hangs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from fitting import adam, make_model, make_rows
from markers import by_night
from rank_processes import (
    run_ranks,
    values,
)
from torch import nn

import cyxtrain as cx

pytestmark = [pytest.mark.usefixtures("rank_server")]


def make_trainer() -> cx.DistributedTrainer:
    model = make_model()
    return cx.DistributedTrainer(model, nn.CrossEntropyLoss(), adam(model))


def evaluate_on_rank_0(folder: str, then: str) -> list[Any]:
    cx.init()
    trainer = make_trainer()
    trainer.fit(*make_rows(20), epochs=1, verbose=False)
    together = list(trainer.evaluate(*make_rows(31)))
    predicted = trainer.predict(make_rows(31)[0])
    found: list[Any] = []
    if trainer.is_master():
        found.append(list(trainer.evaluate(*make_rows(31))) == together)
        found.append(torch.equal(trainer.predict(make_rows(31)[0]), predicted))
        trainer.save_checkpoint(f"{folder}/alone.ckpt")
    if then == "fit":
        trainer.fit(*make_rows(20), epochs=1, verbose=False)
    elif then == "barrier":
        cx.barrier()
    elif then == "evaluate":
        found.append(list(trainer.evaluate(*make_rows(31))) == together)
    elif then == "load":
        trainer.load_checkpoint(f"{folder}/alone.ckpt")
    cx.finalize()
    return found


@pytest.mark.parametrize("then", ["fit", by_night("finalize"), *map(by_night, ("barrier", "evaluate", "load"))])
def test_rank_0_evaluates_predicts_and_saves_while_the_others_wait_in(then, tmp_path):
    first, *others = values(run_ranks(3, evaluate_on_rank_0, str(tmp_path), then))
    assert first == [True] * (3 if then == "evaluate" else 2)
    assert others == [[True] * (then == "evaluate")] * 2
    assert (tmp_path / "alone.ckpt").exists()


@pytest.mark.nightly
def test_the_end_of_the_program_waits_for_rank_0_too(tmp_path):
    (tmp_path / "train.py").write_text(
        """
import torch
from torch import nn
import cyxtrain as cx

cx.init()
torch.manual_seed(1)
model = nn.Linear(4, 3)
trainer = cx.DistributedTrainer(model, nn.CrossEntropyLoss(), "sgd")
rows, targets = torch.randn(20, 4), torch.randint(3, (20,))
trainer.fit(rows, targets, epochs=1, verbose=False)
together = list(trainer.evaluate(rows, targets))
if trainer.is_master():
    print("the same" if list(trainer.evaluate(rows, targets)) == together else "another")
"""
    )
    command = [sys.executable, "-m", "cyxtrain.launch", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout) == (0, "[rank 0] the same\n"), done.stderr


def call_different_things(first: str, second: str) -> str:
    cx.init()
    trainer = make_trainer()
    calls = {
        "fit": lambda: trainer.fit(*make_rows(20), epochs=1, verbose=False),
        "evaluate": lambda: trainer.evaluate(*make_rows(20)),
        "predict": lambda: trainer.predict(make_rows(20)[0]),
        "load_checkpoint": lambda: trainer.load_checkpoint("none"),
        "barrier": cx.barrier,
        "finalize": cx.finalize,
    }
    try:
        calls[first if cx.get_rank() == 0 else second]()
    except cx.CollectiveMismatchError as error:
        return str(error)
    return "it went on"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("fit", "finalize"),
        ("barrier", "evaluate"),
        by_night("fit", "evaluate"),
        by_night("finalize", "predict"),
        by_night("load_checkpoint", "barrier"),
    ],
)
def test_what_cannot_work_is_an_error_on_every_rank_that_names_both_calls(first, second):
    found = values(run_ranks(2, call_different_things, first, second))
    assert found[0] == found[1]
    leaves = "leaves the world (its program, or the with block of init, has ended; or it calls finalize)"
    does = [leaves if call == "finalize" else f"calls {call}" for call in (first, second)]
    assert found[0].startswith(f"rank 0 {does[0]} and rank 1 {does[1]}: all ranks must make the same calls")
