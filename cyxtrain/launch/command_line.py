"""The command `cyxtrain`. Each subcommand imports what it needs."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from cyxtrain.environment import uncaught
from cyxtrain.environment.regular_files import path_or_url, url_of
from cyxtrain.errors import CheckpointError, ConfigError, CyxtrainError
from cyxtrain.launch.starting import COUNT, files_of, launch, runnable

if TYPE_CHECKING:
    from cyxtrain.experiment import Experiment

_USAGE_ERROR = 2
# Click's variable: a shell sets it to ask for completions.
_COMPLETE = "_CYXTRAIN_COMPLETE"

_HELP = """\b
examples:
  cyxtrain fit configs/digits_mlp.yaml training.epochs=3
  cyxtrain launch -n 4 -- cyxtrain fit configs/digits_mlp.yaml
  cyxtrain launch -n 4 -- python train.py --lr 0.1
  cyxtrain evaluate checkpoints/best.ckpt
  cyxtrain launch -n 4 -- cyxtrain doctor

Errors are one line; `cyxtrain --traceback fit ...` also prints where they were raised. To let your shell complete
names, add `eval "$(cyxtrain completion bash)"` (or zsh, fish) to its start file."""


def _show_version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:
        from cyxtrain.checkpoint.checkpoint_file import library_versions

        click.echo(", ".join(f"{name} {version}" for name, version in library_versions().items()))
        context.exit()


@click.group(epilog=_HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Print versions and exit.",
)
@click.option("--traceback", is_flag=True, help="Print tracebacks of errors.")
@click.option("--local-rank", "--local_rank", type=int, hidden=True)
def cyxtrain(traceback: bool, local_rank: int | None) -> None:
    """Train PyTorch models on one or many processes with the same code."""
    del local_rank  # torch.distributed.launch passes it, and sets LOCAL_RANK too
    style = uncaught.FULL if traceback else uncaught.ONE_LINE
    uncaught.install(style)
    if "" not in sys.path:
        sys.path.insert(0, "")  # "module:name" finds modules of the current folder, as with python -m


cyxtrain.add_command(launch)


def _complete_overrides(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from cyxtrain.config import DistributedTrainingConfig
    from cyxtrain.experiment.by_name import SECTIONS

    names = [f"{section}." for section in SECTIONS]
    names += [f"training.{field.name}=" for field in dataclasses.fields(DistributedTrainingConfig)]
    return [CompletionItem(name) for name in names if name.startswith(incomplete) and name != incomplete]


@cyxtrain.command(
    short_help="Train the experiment of a YAML file.",
    epilog="""\b
examples:
  cyxtrain fit configs/digits_mlp.yaml
  cyxtrain fit configs/digits_cnn.yaml training.epochs=3 optimizer.lr=1e-3
  cyxtrain fit configs/digits_cnn.yaml 'model.channels=[16, 32]'
  cyxtrain fit configs/digits_cnn.yaml training.num_processes=auto
  cyxtrain launch -n 4 -- cyxtrain fit configs/digits_cnn.yaml --resume auto
  torchrun --nproc-per-node 4 -m cyxtrain fit configs/digits_cnn.yaml
  srun cyxtrain fit configs/digits_cnn.yaml

The last lines are the metrics of the test data, if there is any.""",
)
@click.argument("config", metavar="CONFIG", shell_complete=files_of)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_complete_overrides)
@click.option("--resume", metavar="auto|PATH", help="Resume from the newest checkpoint, or from this one.")
@click.option("--print-config", is_flag=True, help="Print the settings with all bases and overrides, and exit.")
def fit(config: str, overrides: tuple[str, ...], resume: str | None, print_config: bool) -> None:
    """Train the experiment of a YAML file.

    KEY=VALUE overrides a setting, such as training.epochs=3; write null, lists and numbers as in YAML. Under a
    launcher, torchrun or a scheduler all ranks train together; otherwise one process, or training.num_processes of
    them.
    """
    from cyxtrain.experiment import Config, Experiment

    if print_config:
        click.echo(Config.from_file(config, overrides).to_yaml(), nl=False)
        return
    experiment = Experiment.from_file(config, overrides)
    experiment.fit(resume)
    _evaluate(experiment)


@cyxtrain.command(
    short_help="Evaluate a checkpoint.",
    epilog="""\b
examples:
  cyxtrain evaluate checkpoints/best.ckpt
  cyxtrain evaluate checkpoints
  cyxtrain launch -n 4 -- cyxtrain evaluate checkpoints/best.ckpt
  cyxtrain evaluate best.ckpt --config digits.yaml data.path=other.npz""",
)
@click.argument("checkpoint", metavar="CHECKPOINT", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--config", metavar="FILE", help="The experiment; default: the one saved in the checkpoint.")
def evaluate(checkpoint: str, overrides: tuple[str, ...], config: str | None) -> None:
    """Print the metrics of the test data with a checkpoint: a file, the newest one of a folder, or a URL."""
    from cyxtrain.checkpoint.folder import SUFFIX, newest_in
    from cyxtrain.experiment import Experiment

    checkpoint = path_or_url("CHECKPOINT", checkpoint)
    is_folder_of_store = bool(url_of(checkpoint)) and not checkpoint.endswith(SUFFIX)
    if is_folder_of_store or Path(checkpoint).is_dir():
        found = newest_in(checkpoint)
        if found is None:
            raise CheckpointError(f"{checkpoint} has no intact checkpoint.")
        checkpoint = found.where
    if config is not None:
        experiment = Experiment.from_file(config, overrides)
    else:
        experiment = Experiment.from_checkpoint(checkpoint, overrides)
    if not experiment.data.test:
        raise ConfigError(f"{config or checkpoint}: its data has no test part to evaluate.")
    experiment.join()
    experiment.trainer.load_checkpoint(checkpoint)
    _evaluate(experiment)


def _evaluate(experiment: Experiment) -> None:
    """Evaluate the test data, if there is any; rank 0 prints the metrics, accuracy last."""
    from cyxtrain.world import runtime

    measured = experiment.evaluate()
    if measured is not None and runtime.current().is_first:
        for name, value in sorted(dict(measured).items(), key=lambda item: item[0] == "accuracy"):
            if not math.isnan(value):
                click.echo(f"test {name}: {value:.4f}")


@cyxtrain.command(
    short_help="Check this machine and the network between ranks, or measure virtual ranks.",
    epilog="""\b
examples:
  cyxtrain doctor
  cyxtrain launch -n 4 -- cyxtrain doctor
  cyxtrain launch --nnodes 2 --node-rank 0 --master-addr n0 1 cyxtrain doctor
  srun cyxtrain doctor
  cyxtrain doctor -- python train.py
  cyxtrain doctor --virtual-ranks 6 -- cyxtrain launch -n 3 -- train.py

Exit code: 0 if all is well, 1 if something is broken.""",
)
@click.option("--virtual-ranks", "counts", metavar="V", type=COUNT, multiple=True, help="To measure.")
@click.argument("words", nargs=-1, metavar="[-- COMMAND...]", shell_complete=files_of)
@click.pass_obj
def doctor(environment: Mapping[str, str], /, counts: tuple[int, ...], words: tuple[str, ...]) -> int:
    """Print versions, backends, GPUs, transports and ports; with several ranks, test every pair of them.

    Start it as you start a training: it names ranks that are missing and pairs that cannot reach each other and why,
    and measures round trips, bandwidth and clock skew. It does not join the ranks: it works when joining fails.

    With a COMMAND that calls fit, measure instead what virtual_ranks costs its model: the command runs once without and
    once for each of several numbers of virtual ranks, with as many samples per step, and ends after 30 steps of its
    first fit. No run writes checkpoints.
    """
    if words:
        from cyxtrain.doctor.slice_costs import measure_slices

        return measure_slices(runnable(words), environment, counts)
    if counts:
        raise click.UsageError("--virtual-ranks needs a program to measure: cyxtrain doctor -- python train.py")
    from cyxtrain.config import DistributedConfig
    from cyxtrain.doctor import examine

    return examine(DistributedConfig.from_environment())


@cyxtrain.command(
    short_help="Measure all_reduce over the ring and Gloo.",
    epilog="""\b
examples:
  cyxtrain launch -n 2 -- cyxtrain bench
  srun cyxtrain bench""",
)
def bench() -> int:
    """Measure all_reduce from 4 B to 16 MiB over the ring and PyTorch's Gloo in turns, for ten seconds."""
    from cyxtrain.config import DistributedConfig
    from cyxtrain.launch.bench import bench

    return bench(DistributedConfig.from_environment())


class Comparison(click.Command):
    """A command whose exit code 1 says that two runs differ: errors have 2, as in `cmp` and `diff`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Return the exit code; print an error."""
        try:
            return super().invoke(ctx)
        except CyxtrainError as error:
            sys.excepthook(type(error), error, error.__traceback__)
            return _USAGE_ERROR


@cyxtrain.command(
    cls=Comparison,
    short_help="Find where two runs differ first.",
    epilog="""\b
examples:
  cyxtrain bisect run-1 run-2
  cyxtrain bisect run-1/hashes-0c6a6c02.jsonl run-1/hashes-f31d88e7.jsonl

Exit code: 0 if all hashes are equal, 1 if some differ, 2 for a mistake.""",
)
@click.argument("first", metavar="A", shell_complete=files_of)
@click.argument("second", metavar="B", shell_complete=files_of)
def bisect(first: str, second: str) -> int:
    """Find the first step and tensor in which two runs differ, and what else differs: versions, processors, settings.

    A and B are folders of checkpoints of fits with log_hashes, or files of hashes in them. If a folder has several
    files, as of a run that was started twice, the newest counts; lines A and B of the output show which. With
    log_hashes=1 the step is exact, with 50 within 50 steps.
    """
    from cyxtrain.launch.bisect import bisect

    return bisect(first, second)


@cyxtrain.command(
    cls=Comparison,
    short_help="Compute steps of a run again, and compare their bits.",
    epilog="""\b
examples:
  cyxtrain replay run-1 --step 150 -- python train.py
  cyxtrain replay run-1 --step 150 -- cyxtrain launch -n 4 -- python train.py

The program must call fit as in the run, once. It ends after that step; it writes no checkpoints, and its callbacks that
only write, such as CSVLogger, are left out. Your own callbacks are called.

Exit code: 0 if all bits agree, 1 if some differ, 2 for a mistake, or if the program ends before that step.""",
)
@click.argument("run", metavar="RUN", shell_complete=files_of)
@click.option("--step", metavar="K", type=COUNT, required=True, help="One that the run has logged.")
@click.argument("words", nargs=-1, required=True, metavar="-- COMMAND...", shell_complete=files_of)
@click.pass_obj
def replay(environment: Mapping[str, str], /, run: str, step: int, words: tuple[str, ...]) -> int:
    """Compute a run again from the checkpoint before step K to step K, and compare the bits of each logged step.

    RUN is the folder of checkpoints of a fit with log_hashes, in which the newest file of hashes counts, or such a
    file. With virtual_ranks, the number of ranks may differ.
    """
    from cyxtrain.launch.replay import replay

    return replay(run, step, runnable(words), environment)


@cyxtrain.command(short_help="Set up completion in your shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands, options and files: eval "$(cyxtrain completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cyxtrain, {}, "cyxtrain", _COMPLETE).source())


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command line without the program's name; processes that it starts inherit `environment`."""
    hook = sys.excepthook
    try:
        code = cyxtrain.main([*arguments], "cyxtrain", _COMPLETE, standalone_mode=False, obj=environment)
    except click.ClickException as error:
        name = "cyxtrain"
        if isinstance(error, click.UsageError) and error.ctx is not None:
            name = error.ctx.command_path
        print(f"{name}: {error.format_message().rstrip('.')} (see --help)", file=sys.stderr)
        return _USAGE_ERROR
    except click.Abort as error:  # click raises it for Ctrl-C, and for an EOFError of the user's code
        raise error.__cause__ or error from None
    sys.excepthook = hook  # not after an error, which the installed hook prints
    return code if isinstance(code, int) else 0
