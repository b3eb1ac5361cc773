"""What virtual ranks cost a user's program: it runs once for each number of them, for a few steps."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cyxtrain.callbacks.step_trial import NUM_STEPS, NUM_TIMED, StepCost
from cyxtrain.config.settings import require
from cyxtrain.doctor.terminal import duration, print_report, table
from cyxtrain.environment import process_env
from cyxtrain.errors import ConfigError, counted, reason_of

if TYPE_CHECKING:
    from rich.console import RenderableType

_NUM_COUNTS = 5
_MOST_TIMES = 1.1
_MAX_LINES = 15
_TITLES = ("virtual ranks", "samples per slice", "step", "times as long")


def measure_slices(command: Sequence[str], environment: Mapping[str, str], counts: Sequence[int] = ()) -> int:
    """Print what a step of a program takes without and with virtual ranks, and advise how many to use.

    The program runs once for each row of the table, and ends after 30 steps of its first `fit`. All runs have the same
    number of samples per step, in micro-batches that are not larger than the program's. They write no checkpoints.

    Args:
        command: The program; with a launcher before it, on several ranks.
        environment: Of the program.
        counts: Numbers of virtual ranks; none: five, each twice the one before, from the number of ranks on.

    Returns:
        The exit code: 0, or 1 if nothing was measured.

    Raises:
        ConfigError: The command cannot be started, or a launcher has started this process as one of several.
    """
    ranks = process_env.own_identity(environment).get("WORLD_SIZE", 1)
    require(
        ranks == 1,
        f"WORLD_SIZE={ranks} is set, so that each of {ranks} ranks would start the program. Start the launcher within: "
        "cyxtrain doctor -- cyxtrain launch -n 4 -- python train.py.",
    )
    print(f"the program runs once for each row of the table, {NUM_STEPS} steps each time\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="cyxtrain-doctor-") as folder:
        costs, problem = _measure(partial(_run, command, environment, Path(folder, "cost.json")), counts)
    parts: list[RenderableType] = []
    if costs:
        parts += report_of(costs)
    if problem:
        parts.append(problem)
    print_report(parts, is_labelled=False)
    return int(not costs)


def advise(times: Mapping[int, float]) -> int | None:
    """Return the largest number of virtual ranks whose step takes at most 10 % longer; None: there is none.

    `times`: how many times as long as without virtual ranks, by their number.
    """
    return max((count for count, factor in times.items() if factor <= _MOST_TIMES), default=None)


def report_of(costs: Sequence[StepCost]) -> list[RenderableType]:
    """Return a table of costs without and with virtual ranks, and advice; `costs` begin with one without."""
    first = costs[0]
    virtual = [cost for cost in costs if cost.virtual_ranks is not None]
    without = [cost.seconds for cost in costs if cost.virtual_ranks is None]
    fastest = min(without)
    rows = []
    for cost in costs:
        of_slice = -(-cost.samples // (cost.virtual_ranks or cost.ranks))
        name = str(cost.virtual_ranks or "none")
        rows.append((name, f"{of_slice:,}", duration(cost.seconds), f"{cost.seconds / fastest:.2f}"))
    found: list[RenderableType] = [
        f"{counted(first.samples, 'sample')} per step on {counted(first.ranks, 'rank')}; medians of {NUM_TIMED} steps:",
        table(_TITLES, rows, right=range(4)),
    ]
    slowest = max(without)
    if slowest > _MOST_TIMES * fastest:
        found.append(
            f"Without virtual ranks, one run took {slowest / fastest:.2f} times as long as the other: measure again "
            "while nothing else uses the machine."
        )
    if virtual[0].threads != first.threads:
        found.append(
            f"A rank has {counted(virtual[0].threads, 'thread')} with virtual ranks and {first.threads} without: "
            "num_threads sets it."
        )
    found.append(_advice({cost.virtual_ranks or 0: cost.seconds / fastest for cost in virtual}))
    return found


def _advice(times: Mapping[int, float]) -> str:
    chosen = advise(times)
    if chosen is None:
        cheapest = min(times, key=lambda count: times[count])
        begin = (
            f"No number takes at most 10 % longer. The cheapest is virtual_ranks={cheapest}: {times[cheapest]:.2f} "
            "times as long."
        )
        chosen = cheapest
    else:
        begin = f"Use virtual_ranks={chosen}: the largest that takes at most 10 % longer here."
    return (
        f"{begin} The run can then never use more than {counted(chosen, 'rank')}. On more ranks than here, each has "
        "fewer slices."
    )


def _measure(run: Callable[..., tuple[StepCost | None, str]], counts: Sequence[int]) -> tuple[list[StepCost], str]:
    """Return costs, the first and the last without virtual ranks, or []; and why some are missing, or ""."""
    without, problem = run()
    if without is not None and without.virtual_ranks is not None:
        without, problem = run(without.samples, None, without.accumulation_steps)
    if without is None:
        return [], problem
    samples = without.samples
    costs = [without]
    for count in sorted(counts) or _default_counts(without):
        # Micro-batches do not become larger: they may just fit into memory.
        micro_batches = -(-without.ranks * without.accumulation_steps // count)
        cost, problem = run(samples, count, micro_batches)
        if cost is None:
            problem = f"virtual_ranks={count} was not measured, with effective_batch_size={samples}. {problem}"
            break
        costs.append(cost)
    if len(costs) == 1:
        return [], problem
    # Two such runs show how far the times can be trusted.
    again, _ = run(samples, None, without.accumulation_steps)
    return [*costs, *filter(None, [again])], problem


def _default_counts(without: StepCost) -> list[int]:
    """Return numbers of virtual ranks, each twice the one before; a slice has at least one sample."""
    first = max(without.ranks, 2)
    counts = [first << power for power in range(_NUM_COUNTS)]
    return [count for count in counts if count <= max(without.samples, first)]


def _run(
    command: Sequence[str], environment: Mapping[str, str], file: Path, *asked: int | None
) -> tuple[StepCost | None, str]:
    """Run the program; return what it has measured, or None and why not. `asked`: the rest of a `Trial`."""
    file.unlink(missing_ok=True)
    trial = json.dumps([str(file), *asked])
    try:
        done = subprocess.run(
            command,
            env={**environment, process_env.TRIAL: trial},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"cannot start {command[0]!r}: {reason_of(error)}.") from error
    if file.exists():
        return StepCost(*json.loads(file.read_text("utf-8"))), ""
    lines = done.stdout.splitlines()[-_MAX_LINES:]
    ended = f"The program ended with exit code {done.returncode} before step {NUM_STEPS} of its fit:"
    return None, "\n".join([ended, *lines])
