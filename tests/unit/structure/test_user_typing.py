"""What a user's editor and mypy know of the trainer: signatures, settings, and calls that are right or wrong."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
from torch import nn

import cyxtrain as cx
from cyxtrain.config import DistributedTrainingConfig
from cyxtrain.training.inputs.arguments import Data, FitSettings, parse_fit

ROOT = Path(__file__).resolve().parents[3]
WIDER = {"verbose": bool | int | str, "x": Data, "group_by_length": typing.Any}
"""What `fit` takes, too: Keras's verbose=0, 1, 2 and "auto", x for X; and what orders the data."""

CALLS = """\
import numpy as np
import torch
from torch import nn
from collections.abc import Iterator
from torch.utils.data import DataLoader, TensorDataset
import cyxtrain as cx

def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield X, X

def pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).abs().sum(), len(target)

model = nn.Linear(2, 1)
trainer = cx.DistributedTrainer(model, "mse", "sgd")
X, y = torch.zeros(4, 2), np.zeros((4, 1))
config = cx.DistributedTrainingConfig(epochs=2)
loader = DataLoader(TensorDataset(X, X))
early = cx.callbacks.EarlyStopping("loss")
trainer.fit(X, y)
trainer.fit(X, y, config)
trainer.fit(X, y, config=config, epochs=3, precision="bf16", callbacks=[early], resume="auto")
trainer.fit(X, y, X, y, config)
trainer.fit(X, y, X, y, epochs=1, verbose=2)
trainer.fit(X, y, config, X_val=X, y_val=y)
trainer.fit(loader, config)
trainer.fit(loader, loader, config)
trainer.fit(lambda: iter([(X, X)]), epochs=1)
trainer.fit(batches, epochs=1)
trainer.fit(batches(), batches(), config)
trainer.fit([[0.0, 1.0]], [1.0], learning_rate_scaling="sqrt", float32_precision=None)
trainer.fit((X, y), {"a": y}, config=None)
trainer.fit({"image": X}, y, validation_data=(X, y), class_weight={0: 1.0})
trainer.fit(x=X, y=y, epochs=1)
loss, accuracy = trainer.evaluate(X, y, batch_size=2)
total: float = loss + accuracy
shown = "none" if accuracy is None else f"{accuracy:.1%}"
cx.DistributedTrainer(model, pair)
cx.DistributedTrainer(model, nn.functional.mse_loss)
cx.DistributedTrainer(model, lambda output, target: (output - target).abs().mean())
cx.DistributedTrainer(model, {"a": nn.MSELoss(), "b": "mse"}, torch.optim.SGD)
first: float = trainer.fit(X, y).train_losses[0]
trainer.predict(X, distributed=False)
trainer.predict(X, pad_value=0.0)
trainer.fit(X, y, epoch=3)  # E: Unexpected keyword argument "epoch" for "fit" of "DistributedTrainer"
trainer.fit(X, epochs="3")  # E: "epochs" to "fit" of "DistributedTrainer" has incompatible type "str"; expected "int"
trainer.fit(X, y, precision=16)  # E: type "Literal[16]"; expected "Literal['fp32', 'bf16', 'fp16']"
trainer.fit(X, y, on_nonfinite="ignore")  # E: expected "Literal['raise', 'skip']"
cx.DistributedTrainingConfig(precision="bf16-mixed")  # E: expected "Literal['fp32', 'bf16', 'fp16']"
trainer.fit(3, y)  # E: Argument 1 to "fit" of "DistributedTrainer" has incompatible type "int"
trainer.fit("data.csv")  # E: Argument 1 to "fit" of "DistributedTrainer" has incompatible type "str"
trainer.fit(X, y, cx.DDPConfig())  # E: Argument 3 to "fit" of "DistributedTrainer" has incompatible type "DDPConfig"
trainer.fit(X, y, callbacks=[print])  # E: expected "Callback"
cx.DistributedTrainer(model, nn.CrossEntropyLoss)  # E: has incompatible type "type[CrossEntropyLoss]"
trainer.evaluate(X, y).accuracy + 1  # E: Unsupported operand types for + ("None" and "int")
trainer.evaluate(X, y, batch_sise=2)  # E: Unexpected keyword argument "batch_sise"
trainer.evaluate(X, y, batch_size="2")  # E: has incompatible type "str"
trainer.predict(X, y)  # E: incompatible type
trainer.predict(X, pad_value="0")  # E: has incompatible type "str"
trainer.predict()  # E: Missing positional argument "X"
"""


@pytest.mark.nightly
@pytest.mark.timeout(300)  # without a cache
def test_mypy_knows_right_calls_from_wrong_ones(tmp_path):
    file = tmp_path / "calls.py"
    file.write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(file)]  # with the cache of the checkout
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    errors = {int(line): text for line, text in re.findall(r"calls\.py:(\d+): error: (.*)", found.stdout)}
    expected = {
        number: line.partition("# E: ")[2] for number, line in enumerate(CALLS.splitlines(), 1) if "# E: " in line
    }
    assert errors.keys() == expected.keys(), found.stdout + found.stderr
    for number, text in expected.items():
        assert text in errors[number]
    assert max(map(len, found.stdout.splitlines())) < 500
    assert len(found.stdout) < 500 * len(expected)


def test_typed_settings_are_those_of_the_config():
    typed, fields = typing.get_type_hints(FitSettings), typing.get_type_hints(DistributedTrainingConfig)
    assert typed == fields | WIDER


def test_typed_choices_are_those_that_the_config_accepts():
    found = {}
    for name, kind in typing.get_type_hints(DistributedTrainingConfig).items():
        literals = [each for each in (kind, *typing.get_args(kind)) if typing.get_origin(each) is typing.Literal]
        if literals:
            with pytest.raises(cx.ConfigError) as refused:
                DistributedTrainingConfig(**{name: "another"}).validate()
            accepted = ast.literal_eval(re.findall(r"one of (\(.*\)), got", str(refused.value))[0])
            found[name] = {*accepted} - {None} == {*typing.get_args(literals[0])}
    precisions = ["precision", "float32_precision"]
    names = [*precisions, "on_save_error", "on_nonfinite", "learning_rate_scaling", "scheduler_interval"]
    assert found == dict.fromkeys(names, True)


def test_typed_keywords_are_those_of_fit():
    fit = inspect.signature(cx.DistributedTrainer.fit).parameters
    assert [*fit][1:] == [*inspect.signature(parse_fit).parameters]


def test_a_trainer_shows_what_it_trains_in_one_line():
    trainer = cx.DistributedTrainer(nn.Linear(2, 1), nn.MSELoss(), "adam")
    shown = "DistributedTrainer(model=Linear, loss=MSELoss, optimizer=Adam, world=not joined yet)"
    assert repr(trainer) == shown
    several = cx.DistributedTrainer(nn.Linear(2, 1), {"a": "mse", "b": torch.nn.functional.l1_loss}, "sgd")
    assert "loss={a: mse, b: l1_loss}" in repr(several)
    assert "loss=the model's own" in repr(cx.DistributedTrainer(nn.Linear(2, 1)))
