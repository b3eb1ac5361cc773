"""Compute the steps of a run again from a checkpoint on, and compare the bits."""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from cyxtrain.checkpoint.folder import CheckpointFolder, Found
from cyxtrain.config.settings import require
from cyxtrain.environment import process_env
from cyxtrain.errors import CheckpointError, ConfigError, reason_of
from cyxtrain.launch.bisect import HashFile, first_difference, read_hashes, report

_NOTHING_COMPARED = 2


def replay(run: str, step: int, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a training program from the checkpoint before a `step` to its end, and compare each logged step on the way.

    The program's `fit` loads that checkpoint, or starts from scratch if there is none. It writes no checkpoints, leaves
    out callbacks that only write, and ends the program after the step.

    Args:
        run: The folder of checkpoints of the run, or its file of hashes there.
        step: One that the run has logged.
        command: The program, as it was for the run; another number of ranks is possible with `virtual_ranks`.
        environment: Of the program.

    Returns:
        The exit code: 0 if all bits agree, 1 if some differ, 2 if the program ended before the step.

    Raises:
        CheckpointError: The run has no hashes.
        ConfigError: It has none of this step, or the command cannot be started.
    """
    logged = read_hashes(run)
    nearest = sorted(logged.steps, key=lambda each: abs(each - step))[:2]
    require(
        step in logged.steps,
        f"{logged.path} has no hashes of step {step:,}. Choose a step that the run has logged, such as "
        f"{' or '.join(f'{each:,}' for each in sorted(nearest))}.",
    )
    found = checkpoint_before(logged, step)
    checkpoint = ""
    begin = 0
    if found is not None:
        checkpoint = found.where
        begin = int(found.position["step"])
    of_run = HashFile(logged.path, {each: line for each, line in logged.steps.items() if begin < each <= step})
    with tempfile.TemporaryDirectory(prefix="cyxtrain-replay-") as folder:
        wanted = process_env.Replay(step, checkpoint, folder, math.gcd(*of_run.steps))
        try:
            code = subprocess.call(command, env={**environment, process_env.REPLAY: json.dumps(wanted)})
        except OSError as error:
            raise ConfigError(f"cannot start {command[0]!r}: {reason_of(error)}.") from error
        try:
            again = read_hashes(folder)
        except CheckpointError:
            again = HashFile(logged.path, {})
    if step not in again.steps:
        print(f"The program ended with exit code {code}, before the end of step {step:,}: nothing is compared.")
        return _NOTHING_COMPARED
    print(f"A  {of_run.describe()}\nB  the same, computed again from {checkpoint or 'scratch'}")
    return report(first_difference(of_run, again, before=begin or None), of_run, again)


def checkpoint_before(logged: HashFile, step: int) -> Found | None:
    """Return the newest intact checkpoint of a run, in the folder of its hashes, before the end of a step; or None."""
    about = logged.steps[step].about
    path = logged.path.parent.absolute()
    folders = (CheckpointFolder(path), CheckpointFolder(path, rank=0))
    intact = [found for folder in folders for found in folder.newest_first() if found.position]
    # A run that has continued another one, by `resume`, has the checkpoints of both.
    own = [found for found in intact if (found.origin, found.fits) == (about["origin"], about["fits"])]
    before = [found for found in own if found.position["step"] < step]
    return max(before, key=lambda each: (each.run.get("id") == about["run"], each.position["step"]), default=None)
