"""`cyxtrain launch`: from its words to ranks on this machine, one of several perhaps."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from cyxtrain.launch.elastic import torchrun
from cyxtrain.launch.first_process import run_as_first_process
from cyxtrain.launch.local import Start, run_ranks
from cyxtrain.launch.options import Options
from cyxtrain.workers.machine import ranks_by_cores

_PORT = "29500"

_HELP = """\b
examples:
  cyxtrain launch -n 4 -- python train.py --lr 0.1 --name "two words"
  cyxtrain launch 4 train.py
  cyxtrain launch -n 2 --restarts 3 --logs logs -- cyxtrain fit configs/digits_mlp.yaml
  cyxtrain launch --gpus 0,2 -- python train.py
  cyxtrain launch --nnodes 2 --node-rank 0 --master-addr node0 -n 4 -- python train.py
  cyxtrain launch --nnodes 1:4 --master-addr node0 -n 4 -- cyxtrain fit FILE --resume auto
  ./launch_distributed.sh 2 --config configs/digits_mlp.yaml
  ./launch_distributed.sh --num_gpus 4 --config configs/digits_mlp.yaml

Everything after the options (and the number) is the command; its options are its own. No shell reads it. A first word
that ends in .py gets Python before it; `cyxtrain` is this one. Without a number there is a rank per GPU; without
GPUs, per core, up to 8.

Each rank finds in its environment: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (on one
machine a free port, on Linux kept for them; one that is set wins), OMP_NUM_THREADS (its share of the cores; one that
is set wins), CYXTRAIN_SECRET (on one machine made for this run; one that is set wins) and PYTHONUNBUFFERED=1.

Several ranks: each line of output begins with its rank, and stdin is empty. One rank has the terminal to itself.
Ctrl-C, SIGTERM, SIGHUP and the first failure stop all ranks, with 5 seconds to end; a second Ctrl-C kills them.
SIGTERM or SIGINT to one rank is a stop too, not a failure: fit agrees on a step, and all ranks end there.

With --restarts N, all ranks are started again after a failure, up to N times, and fit goes on from the newest
checkpoint that this command has made; where it makes none, it begins anew. There is no restart after a stop, nor after
an error that would come again (ConfigError, a missing backend, NaN), as far as the launcher sees it: one rank that has
the terminal to itself is started again. On several machines give the same N to all: the ranks of one fail with those
of another, and all begin again.

exit code: 0, or that of the first rank that failed (128 + n: killed by signal n), or 128 + n where signal n
stopped the launcher or a rank, or 2 for a command line that cannot be used."""


def files_of(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Lets the shell complete names of files."""
    return [CompletionItem(incomplete, type="file")]


class NumberFirst(click.Command):
    """A command whose first word may be the number of ranks, as the launcher's has always been."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the words; a number that comes first is that of `-n`."""
        first = args[0] if args else ""
        return super().parse_args(ctx, ["-n", *args] if _looks_like_number(first) and first[0] != "-" else args)


@click.command(
    cls=NumberFirst,
    short_help="Start N ranks of a command.",
    epilog=_HELP,
    context_settings={
        "allow_interspersed_args": False,  # what follows the first word that is no option is the command's
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
)
@click.option("-n", "--num-ranks", "--nproc-per-node", "num_ranks", metavar="N", help="Ranks on this machine, or auto.")
@click.option("--gpus", "--num-gpus", metavar="N|LIST", help="One rank per GPU: so many, all, or such as 0,2.")
@click.option("--nnodes", "--num-nodes", metavar="N", help="Machines; MIN:MAX is torchrun's elastic start.")
@click.option("--node-rank", metavar="R", help="Which of them this is, from 0.")
@click.option("--master-addr", metavar="HOST", help="Name or address of machine 0.")
@click.option("--master-port", metavar="PORT", help="Port at which the ranks meet there.  [default: 29500]")
@click.option("--restarts", metavar="N", type=click.IntRange(min=0), default=0, help="Start all ranks again so often.")
@click.option("--logs", metavar="DIR", type=click.Path(path_type=Path), help="Write each rank's output there, too.")
@click.option(
    "--config",
    metavar="FILE",
    shell_complete=files_of,
    help="The command is `cyxtrain fit FILE`; words after it are its overrides.",
)
@click.argument("words", nargs=-1, metavar="[N] [--] COMMAND...", shell_complete=files_of)
@click.pass_obj
def launch(environment: Mapping[str, str], /, words: tuple[str, ...], **options: object) -> int:
    """Starts N processes of a command on this machine, which train together."""
    given = Options(**options)  # type: ignore[arg-type]
    return run_as_first_process(lambda: _launch(given, words, environment))


def _launch(given: Options, words: tuple[str, ...], environment: Mapping[str, str]) -> int:
    """Starts the ranks, and returns the exit code."""
    number, command = _split(words, given)
    own = replace(given, num_ranks=number).or_from(environment)
    num_ranks, more = _num_ranks(own, environment)
    if own.master_addr:
        # With NumPy, which ranks of one machine do not need here.
        from cyxtrain.config.world import problem_of_address, without_brackets

        problem = problem_of_address(own.master_addr)
        _require(not problem, f"--master-addr is {own.master_addr!r}: {problem}")
        own = replace(own, master_addr=without_brackets(own.master_addr))
    if own.nnodes is not None and ":" in own.nnodes:
        return torchrun(own, num_ranks, command, {**environment, **more})
    nnodes, node_rank = _nodes(own)
    master_addr = own.master_addr or (environment.get("MASTER_ADDR") if nnodes > 1 else "127.0.0.1")
    _require(
        bool(master_addr), f"with --nnodes {nnodes} every machine needs --master-addr, the name or address of machine 0"
    )
    assert master_addr is not None
    port = own.master_port or environment.get("MASTER_PORT") or (_PORT if nnodes > 1 else None)
    _require(
        port is None or (port.isascii() and port.isdecimal() and 0 < int(port) < 65536),
        f"--master-port must be a number from 1 to 65535, got {port!r}",
    )
    start = Start(command, num_ranks, nnodes, node_rank, master_addr, port, own.restarts, own.logs)
    try:
        start.begin_logs()
    except OSError as error:
        raise click.UsageError(f"--logs {own.logs}: {error.strerror}") from error
    try:
        return run_ranks(start, {**environment, **more})
    except OSError as error:
        hint = "; a script alone (train.py) gets Python before it" if command[0].startswith("python") else ""
        raise click.UsageError(f"cannot start {command[0]!r}: {error.strerror}{hint}") from error


def _require(right: bool, message: str) -> None:
    if not right:
        raise click.UsageError(message)


def _split(words: Sequence[str], own: Options) -> tuple[str | None, tuple[str, ...]]:
    """Returns (the number of ranks, the command); the number may be the first word."""
    number, command = own.num_ranks, tuple(words)
    if own.gpus is None and number is None and command and _looks_like_number(command[0]):
        number, command = command[0], command[1:]
    if own.config is not None:
        return number, (sys.executable, "-m", "cyxtrain", "fit", own.config, *command)
    _require(bool(command) and bool(command[0]), "no command to start: it comes after the options and the number")
    _require(
        not command[0].startswith("-"),
        f"after the number comes the command, got the option {command[0]!r}; the launcher's own come before the number",
    )
    if command[0].endswith(".py"):
        _require(Path(command[0]).is_file(), f"there is no file {command[0]!r}")
        return number, (sys.executable, *command)
    return number, (sys.executable, "-m", *command) if command[0] == "cyxtrain" else command


def _looks_like_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return word.isdigit()
    return True


def _num_ranks(own: Options, environment: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """Returns how many ranks this machine has, and what that adds to their environment."""
    word = own.num_ranks
    if own.gpus is not None:
        _require(word is None, "give -n or --gpus: there is one rank per GPU")
        return _on_gpus(own.gpus, environment)
    if word in (None, "auto", "gpu", "cpu"):
        gpus = 0 if word == "cpu" else _count_gpus(environment)
        _require(word != "gpu" or gpus > 0, "PyTorch sees no CUDA GPU on this machine")
        number = gpus or ranks_by_cores(environment)
        per = "GPU" if gpus else "core"
        click.echo(f"cyxtrain launch: {number} ranks, one per {per}; -n says how many", err=True)
        return number, _nccl(environment) if gpus else {}
    assert word is not None
    right = word.isascii() and word.isdecimal() and int(word) > 0
    _require(right, f"the number of ranks must be a whole number of at least 1, got {word!r}")
    return int(word), {}


def _on_gpus(word: str, environment: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """Returns how many ranks there are, one per GPU, and which GPUs they see."""
    visible = _count_gpus(environment)
    _require(visible > 0, f"--gpus {word}: PyTorch sees no CUDA GPU; -n N starts N ranks on what there is")
    if word == "all":
        return visible, _nccl(environment)
    numbers = word.split(",")
    right = all(number.isascii() and number.isdecimal() for number in numbers) and len(set(numbers)) == len(numbers)
    _require(right, f"--gpus must be a number of GPUs, all, or a list such as 0,2, got {word!r}")
    if len(numbers) == 1:
        _require(0 < int(word) <= visible, f"--gpus {word}: this machine has {visible}")
        return int(word), _nccl(environment)
    wrong = [number for number in numbers if int(number) >= visible]
    _require(not wrong, f"--gpus {word}: there is no GPU {', '.join(wrong)}; they count from 0 to {visible - 1}")
    seen = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [seen[int(number)] if int(number) < len(seen) and seen[0] else number for number in numbers]
    return len(numbers), {**_nccl(environment), "CUDA_VISIBLE_DEVICES": ",".join(names)}


def _nccl(environment: Mapping[str, str]) -> dict[str, str]:
    return {"DISTRIBUTED_BACKEND": environment.get("DISTRIBUTED_BACKEND") or "nccl"}


def _count_gpus(environment: Mapping[str, str]) -> int:
    """Returns how many GPUs a rank would see; PyTorch is asked only where there may be some."""
    if environment.get("CUDA_VISIBLE_DEVICES") == "" or not _may_have_gpus():
        return 0
    import torch

    return torch.cuda.device_count()


def _may_have_gpus() -> bool:
    return sys.platform == "win32" or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def _nodes(own: Options) -> tuple[int, int]:
    """Returns (how many machines there are, which of them this is)."""
    words = {"--nnodes": own.nnodes or "1", "--node-rank": own.node_rank or "0"}
    for name, word in words.items():
        _require(word.isascii() and word.isdecimal(), f"{name} must be a whole number, got {word!r}")
    nnodes, node_rank = map(int, words.values())
    _require(nnodes > 0, "--nnodes must be at least 1")
    _require(
        nnodes == 1 or own.node_rank is not None, f"with --nnodes {nnodes} every machine needs --node-rank, from 0"
    )
    _require(node_rank < nnodes, f"--node-rank {node_rank}: machines count from 0, and there are {nnodes}")
    return nnodes, node_rank
