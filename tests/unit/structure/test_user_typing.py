"""What a user's editor and mypy know of the trainer: signatures, settings, and calls that are right or wrong."""

from __future__ import annotations

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
from cyxtrain.training.inputs.arguments import parse_fit
from cyxtrain.training.inputs.fit_keywords import FitKeywords, FitSettings

ROOT = Path(__file__).resolve().parents[3]
WIDER = {"verbose": bool | int | str}
"""Settings of which `fit` takes more than the config holds: Keras's 0, 1, 2 and "auto"."""

CALLS = """\
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import cyxtrain as cx

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
trainer.fit({"image": X}, y, validation_data=(X, y), class_weight={0: 1.0})
trainer.fit(x=X, y=y, epochs=1)
loss, accuracy = trainer.evaluate(X, y, batch_size=2)
first: float = trainer.fit(X, y).train_losses[0]
trainer.predict(X, distributed=False)
trainer.predict(X, pad_value=0.0)
trainer.fit(X, y, epoch=3)  # E: No overload variant
trainer.fit(X, y, epochs="3")  # E: No overload variant
trainer.fit(X, y, precision=16)  # E: No overload variant
trainer.fit(3, y)  # E: No overload variant
trainer.fit(X, y, callbacks=[print])  # E: expected "Callback"
trainer.fit(X, y, X, y, X)  # E: No overload variant
trainer.evaluate(X, y, batch_sise=2)  # E: Unexpected keyword argument "batch_sise"
trainer.evaluate(X, y, batch_size="2")  # E: has incompatible type "str"
trainer.predict(X, y)  # E: incompatible type
trainer.predict(X, pad_value="0")  # E: has incompatible type "str"
trainer.predict()  # E: Missing positional argument "X"
"""


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


def test_typed_settings_are_those_of_the_config():
    typed, fields = typing.get_type_hints(FitSettings), typing.get_type_hints(DistributedTrainingConfig)
    assert typed == fields | WIDER


def test_typed_keywords_are_those_of_fit():
    fit = inspect.signature(cx.DistributedTrainer.fit).parameters
    assert [*fit][1:] == [*inspect.signature(parse_fit).parameters]
    keywords = {name for name, each in fit.items() if each.kind is each.KEYWORD_ONLY}
    assert keywords == typing.get_type_hints(FitKeywords).keys() - typing.get_type_hints(FitSettings).keys()


def test_a_trainer_shows_what_it_trains_in_one_line():
    trainer = cx.DistributedTrainer(nn.Linear(2, 1), nn.MSELoss(), "adam")
    shown = "DistributedTrainer(model=Linear, loss=MSELoss, optimizer=Adam, world=not joined yet)"
    assert repr(trainer) == shown
    several = cx.DistributedTrainer(nn.Linear(2, 1), {"a": "mse", "b": torch.nn.functional.l1_loss}, "sgd")
    assert "loss={a: mse, b: l1_loss}" in repr(several)
    assert "loss=the model's own" in repr(cx.DistributedTrainer(nn.Linear(2, 1)))
