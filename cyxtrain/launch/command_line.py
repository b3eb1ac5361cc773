"""What `cyxtrain` can be told. Each command imports what it needs: starting processes needs no PyTorch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import click
from click.shell_completion import CompletionItem, get_completion_class

from cyxtrain.errors import ConfigError, CyxtrainError
from cyxtrain.launch.starting import files_of, launch

_USAGE_ERROR = 2  # the exit code of a command line that cannot be understood
_COMPLETE = "_CYXTRAIN_COMPLETE"  # click's variable: with it, this is not a call but a question of a shell

_HELP = """\b
examples:
  cyxtrain fit configs/digits_mlp.yaml training.epochs=3
  cyxtrain launch -n 4 -- cyxtrain fit configs/digits_mlp.yaml
  cyxtrain launch -n 4 -- python train.py --lr 0.1
  cyxtrain evaluate checkpoints/best.ckpt
  cyxtrain launch -n 4 -- cyxtrain doctor

Errors are one line; `cyxtrain --traceback fit ...` shows where they come from. Names that the shell completes:
`eval "$(cyxtrain completion bash)"` (or zsh, fish) in its start file."""


def _show_version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:
        from cyxtrain.checkpoint.checkpoint_file import library_versions

        click.echo(", ".join(f"{name} {version}" for name, version in library_versions().items()))
        context.exit()


@click.group(epilog=_HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show it, and end."
)
@click.option("--traceback", is_flag=True, help="Show where an error comes from.")
@click.option("--local-rank", "--local_rank", type=int, hidden=True)
def cyxtrain(traceback: bool, local_rank: int | None) -> None:
    """Trains PyTorch models on as many processes as there are: exact, fast, honest."""
    del local_rank  # torch.distributed.launch gives it, and says the same in LOCAL_RANK
    if not traceback:
        sys.excepthook = _one_line
    if "" not in sys.path:
        sys.path.insert(0, "")  # "module:name" means those of the folder, as with python -m


cyxtrain.add_command(launch)


def _complete_overrides(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes sections, and the settings of those that have the same ones always."""
    from cyxtrain.config import DistributedTrainingConfig
    from cyxtrain.experiment.sections import SECTIONS

    names = [f"{section}." for section in SECTIONS]
    names += [f"training.{field.name}=" for field in dataclasses.fields(DistributedTrainingConfig)]
    return [CompletionItem(name) for name in names if name.startswith(incomplete) and name != incomplete]


@cyxtrain.command(
    short_help="Train the experiment of a YAML file.",
    epilog="""\b
examples:
  cyxtrain fit configs/digits_mlp.yaml
  cyxtrain fit configs/digits_cnn.yaml training.epochs=3 optimizer.lr=1e-3 'model.channels=[16, 32]'
  cyxtrain fit configs/digits_cnn.yaml training.num_processes=auto
  cyxtrain launch -n 4 -- cyxtrain fit configs/digits_cnn.yaml --resume auto
  torchrun --nproc-per-node 4 -m cyxtrain fit configs/digits_cnn.yaml
  srun cyxtrain fit configs/digits_cnn.yaml

The last lines are the measures of the test data, where there are some.""",
)
@click.argument("config", metavar="CONFIG", shell_complete=files_of)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_complete_overrides)
@click.option("--resume", metavar="auto|PATH", help="Go on from its newest checkpoint, or from one.")
@click.option("--print-config", is_flag=True, help="Show the settings with all bases and overrides, and end.")
def fit(config: str, overrides: tuple[str, ...], resume: str | None, print_config: bool) -> None:
    """Trains the experiment of a YAML file.

    KEY=VALUE overrides a setting, such as training.epochs=3; null, lists and numbers are YAML's. Under a launcher,
    torchrun or a scheduler all of its ranks train together; alone it is one process, or training.num_processes of them.
    """
    from cyxtrain.experiment import Config, Experiment
    from cyxtrain.launch.reporting import show_measures

    if print_config:
        click.echo(Config.from_file(config, overrides).to_yaml(), nl=False)
        return
    experiment = Experiment.from_file(config, overrides)
    experiment.fit(resume)
    show_measures(experiment)


@cyxtrain.command(
    short_help="Show the measures of a checkpoint.",
    epilog="""\b
examples:
  cyxtrain evaluate checkpoints/best.ckpt
  cyxtrain evaluate checkpoints
  cyxtrain launch -n 4 -- cyxtrain evaluate checkpoints/best.ckpt
  cyxtrain evaluate checkpoints/best.ckpt --config configs/digits_cnn.yaml data.path=other.npz""",
)
@click.argument("checkpoint", metavar="CHECKPOINT", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--config", metavar="FILE", help="The experiment; without it, the one that the checkpoint keeps.")
def evaluate(checkpoint: str, overrides: tuple[str, ...], config: str | None) -> None:
    """Shows the measures of the test data with a checkpoint: a file, or a folder of which the newest is taken."""
    from cyxtrain.experiment import Experiment
    from cyxtrain.launch.reporting import newest_of, show_measures

    path = newest_of(Path(checkpoint))
    if config is not None:
        experiment = Experiment.from_file(config, overrides)
    else:
        experiment = Experiment.from_checkpoint(path, overrides)
    if not experiment.data.test:
        raise ConfigError(f"{config or path}: its data have no test part to evaluate.")
    experiment.join()
    experiment.trainer.load_checkpoint(path)
    show_measures(experiment)


@cyxtrain.command(
    short_help="Say what works here, and between ranks.",
    epilog="""\b
examples:
  cyxtrain doctor
  cyxtrain launch -n 4 -- cyxtrain doctor
  cyxtrain launch --nnodes 2 --node-rank 0 --master-addr node0 -n 1 -- cyxtrain doctor
  srun cyxtrain doctor

Exit code: 0 where all is well, 1 where something is broken.""",
)
def doctor() -> int:
    """Shows versions, backends, GPUs, transports and ports; with several ranks every pair of them, one by one.

    Started as a training is, it tells which ranks do not come, which pairs do not reach each other and why, round
    trips, bandwidths and how far clocks are apart. It does not join: it works where joining does not.
    """
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
    """Measures all_reduce from 4 B to 16 MiB over the ring and, in turns, over PyTorch's Gloo: ten seconds."""
    from cyxtrain.config import DistributedConfig
    from cyxtrain.launch.bench import bench

    return bench(DistributedConfig.from_environment())


@cyxtrain.command(short_help="Let a shell complete names.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Prints what lets a shell complete commands, options and files: eval "$(cyxtrain completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cyxtrain, {}, "cyxtrain", _COMPLETE).source())


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a command line and returns its exit code.

    Args:
        arguments: Without the name of the program.
        environment: What processes that it starts begin with.
    """
    hook = sys.excepthook
    try:
        code = cyxtrain.main([*arguments], "cyxtrain", _COMPLETE, standalone_mode=False, obj=environment)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        name = "cyxtrain" if context is None else context.command_path
        print(f"{name}: {error.format_message().rstrip('.')} (see --help)", file=sys.stderr)
        return _USAGE_ERROR
    except click.Abort as error:  # what click makes of Ctrl-C, and of an EOFError of the user's
        raise error.__cause__ or error from None
    sys.excepthook = hook
    return code if isinstance(code, int) else 0


def _one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows an error that says for itself what is wrong, and where; others with their traceback."""
    if isinstance(error, CyxtrainError):
        print(f"{kind.__name__}: {error}", file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
