"""What a command says last."""

from __future__ import annotations

import math
from pathlib import Path

import click

from cyxtrain.checkpoint.folder import CheckpointFolder
from cyxtrain.errors import CheckpointError
from cyxtrain.experiment import Experiment
from cyxtrain.world import runtime


def show_measures(experiment: Experiment) -> None:
    """Evaluates the test data, where there are some, and shows each measure on rank 0, accuracy last.

    All ranks call it.
    """
    measured = experiment.evaluate()
    if measured is None or not runtime.is_master():
        return
    shown = {name: value for name, value in dict(measured).items() if not math.isnan(value)}
    for name in sorted(shown, key=lambda name: name == "accuracy"):
        click.echo(f"test {name}: {shown[name]:.4f}")


def newest_of(path: Path) -> Path:
    """Returns a checkpoint: the file that was named, or the newest one of a folder.

    Raises:
        CheckpointError: The folder has none.
    """
    if not path.is_dir():
        return path
    found = [each.path for each in CheckpointFolder(path).newest_first() if each.position]
    if not found:
        raise CheckpointError(f"{path} has no intact checkpoint.")
    return found[0]
