"""`cyxtrain launch`: from the command line to ranks on this machine, possibly one of several."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from cyxtrain.environment import process_env
from cyxtrain.environment.regular_files import local_path
from cyxtrain.environment.schedulers import is_whole_number
from cyxtrain.environment.standard_streams import STDERR
from cyxtrain.errors import counted, exhausted, reason_of
from cyxtrain.launch.first_process import run_as_first_process
from cyxtrain.launch.local import Start, run_ranks
from cyxtrain.workers.machine import cores_per_rank, ranks_by_cores

_PORT = "29500"
_SECONDS = f"a number of seconds above 0 and up to {threading.TIMEOUT_MAX:,.0f}"

_HELP = """\b
examples:
  cyxtrain launch -n 4 -- python train.py --lr 0.1 --name "two words"
  cyxtrain launch 4 train.py
  cyxtrain launch -n 2 --restarts 3 --logs logs -- python train.py
  cyxtrain launch --gpus 0,2 -- python train.py
  cyxtrain launch --nnodes 2 --node-rank 0 --master-addr node0 4 train.py
  cyxtrain launch --nnodes 1:4 --master-addr node0 4 train.py
  ./launch_distributed.sh 2 --config configs/digits_mlp.yaml
  ./launch_distributed.sh --num_gpus 4 --config configs/digits_mlp.yaml

Everything after the options (and the number) is the command with its own options; no shell reads it. A command that
ends in .py runs with this Python; `cyxtrain` runs this installation. Without a number there is one rank per GPU, or
without GPUs one per core, at most 8.

Environment of each rank: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, PYTHONUNBUFFERED=1, and, unless
you set them: MASTER_PORT (on one machine a free port, reserved on Linux), OMP_NUM_THREADS (the rank's share of the
cores) and CYXTRAIN_SECRET (on one machine a random one for this run).

With several ranks each line of output starts with its rank, and stdin is empty; in a terminal, the progress bar of rank
0 stays below. A single rank uses the terminal itself. If a rank exits with code 0 without joining, the run ends.
Ctrl-C, SIGTERM and SIGHUP stop all ranks; they have --grace seconds to exit, 25 by default, and after the first failure
5. A second Ctrl-C kills them. SIGUSR1 is passed on to the ranks. Any of these signals to one rank is a stop, not a
failure: fit agrees on a step, and all ranks exit there.

With --restarts N the launcher restarts all ranks after a failure, up to N times, and fit resumes from the newest
checkpoint of this command, or starts from scratch if there is none. It does not restart after a stop, nor after an
error that would occur again (ConfigError, a missing backend, NaN) if it sees the error: a single rank, which uses the
terminal itself, is restarted. On several machines use the same N: if the ranks of one machine fail, all fail, and all
are restarted.

With --nnodes MIN:MAX torchrun's agents restart all ranks, after any failure, and when a machine joins or leaves. Then
fit resumes only if the program asks for it: with resume="auto", or `cyxtrain fit FILE --resume auto`.

exit code: 0, or the code of the first rank that failed (128 + n: killed by signal n), or 128 + n if signal n stopped
the launcher or a rank, or 2 for an invalid command line."""


@dataclass(frozen=True)
class Options:
    """Options of `cyxtrain launch`, as strings; those not given may come from Kubernetes (PET_...)."""

    num_ranks: str | None = None
    gpus: str | None = None
    nnodes: str | None = None
    node_rank: str | None = None
    master_addr: str | None = None
    master_port: str | None = None
    restarts: int = 0
    grace: float | None = None
    logs: Path | None = None
    config: str | None = None


def files_of(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete file names."""
    return [CompletionItem(incomplete, type="file")]


def _number(kind: click.IntRange | click.FloatRange, words: str) -> Callable[[Any], float]:
    """Return a type of options whose errors describe its numbers in words: click has "integer range" and "x>=1"."""

    def convert(value: Any) -> float:
        try:
            return kind.convert(value, None, None)
        except click.BadParameter:
            raise click.BadParameter(f"{value!r} is not {words}") from None

    return convert


COUNT = _number(click.IntRange(min=1), "a whole number of at least 1")


class NumberFirst(click.Command):
    """A command whose first argument may be the number of ranks."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; a leading number is the value of `-n`."""
        if args and _looks_like_number(args[0]) and not args[0].startswith("-"):
            args = ["-n", *args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from cyxtrain.config.other_names import meanings  # imports NumPy, with the package

            meant, remark = next(meanings(error.option_name, "option", []), ("", ""))
            if not meant:
                raise
            text = f"No such option {error.option_name!r}. Did you mean {meant}? {remark}"
            raise click.UsageError(text.rstrip(), ctx) from error


@click.command(
    cls=NumberFirst,
    short_help="Start N ranks of a command.",
    epilog=_HELP,
    context_settings={
        "allow_interspersed_args": False,  # options after the command are the command's
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
)
@click.option("-n", "--num-ranks", "--nproc-per-node", "num_ranks", metavar="N", help="Ranks on this machine, or auto.")
@click.option("--gpus", "--num-gpus", metavar="N|LIST", help="One rank per GPU: a number, all, or a list such as 0,2.")
@click.option("--nnodes", "--num-nodes", metavar="N", help="Number of machines; MIN:MAX: elastic, by torchrun.")
@click.option("--node-rank", metavar="R", help="Number of this machine, from 0.")
@click.option("--master-addr", metavar="HOST", help="Name or address of machine 0.")
@click.option("--master-port", metavar="PORT", help="Port of the rendezvous on machine 0.  [default: 29500]")
@click.option(
    "--restarts",
    metavar="N",
    type=_number(click.IntRange(min=0), "a whole number of at least 0"),
    default=0,
    help="Restart all ranks up to N times after a failure.",
)
@click.option(
    "--grace",
    metavar="SECONDS",
    type=_number(click.FloatRange(min=0, max=threading.TIMEOUT_MAX, min_open=True), _SECONDS),
    help="Seconds between a request to stop and the kill.  [default: CYXTRAIN_GRACE_SECONDS, or 25]",
)
@click.option("--logs", metavar="DIR", type=click.Path(path_type=Path), help="Also write each rank's output to a file.")
@click.option(
    "--config",
    metavar="FILE",
    shell_complete=files_of,
    help="Run `cyxtrain fit FILE`; arguments after it are its overrides.",
)
@click.argument("words", nargs=-1, metavar="[N] [--] COMMAND...", shell_complete=files_of)
@click.pass_obj
def launch(environment: Mapping[str, str], /, words: tuple[str, ...], **options: object) -> int:
    """Start N processes of a command on this machine that train together."""
    given = Options(**options)  # type: ignore[arg-type]
    if given.grace is not None:
        environment = {**environment, process_env.GRACE: f"{given.grace:g}"}
    return run_as_first_process(lambda: _launch(given, words, environment))


def _launch(given: Options, words: tuple[str, ...], environment: Mapping[str, str]) -> int:
    number, command = _split(words, given)
    options = _with_kubernetes(replace(given, num_ranks=number), environment)
    num_ranks, variables = _num_ranks(options, environment)
    environment = {**environment, **variables}
    if options.logs is not None:
        options = replace(options, logs=Path(local_path("--logs", options.logs)))
    if options.master_addr:
        options = replace(options, master_addr=_checked_address(options.master_addr))
    if options.nnodes is not None and ":" in options.nnodes:
        return _become_torchrun(options, num_ranks, command, environment)
    start = _start_of(options, num_ranks, command, environment)
    try:
        start.create_logs()
    except OSError as error:
        raise click.UsageError(f"--logs {options.logs}: {error.strerror}") from error
    try:
        return run_ranks(start, environment)
    except OSError as error:
        return _explain_no_start(error, start)


def _checked_address(address: str) -> str:
    from cyxtrain.config.distributed_config import problem_of_address, without_brackets  # imports NumPy

    problem = problem_of_address(address)
    _require(not problem, f"--master-addr is {address!r}: {problem}")
    return without_brackets(address)


def _start_of(options: Options, num_ranks: int, command: tuple[str, ...], environment: Mapping[str, str]) -> Start:
    """Return what to start on this machine, with the address and port at which all machines meet."""
    nnodes, node_rank = _nodes(options)
    address = options.master_addr or "127.0.0.1"
    port = options.master_port or environment.get("MASTER_PORT") or None
    if nnodes > 1:
        address = options.master_addr or environment.get("MASTER_ADDR") or ""
        port = port or _PORT
    _require(
        bool(address), f"with --nnodes {nnodes} every machine needs --master-addr, the name or address of machine 0"
    )
    is_valid = port is None or (is_whole_number(port) and 0 < int(port) < 65536)
    _require(is_valid, f"--master-port must be a number from 1 to 65535, got {port!r}")
    return Start(command, num_ranks, nnodes, node_rank, address, port, options.restarts, options.logs)


def _explain_no_start(error: OSError, start: Start) -> int:
    """Print why the ranks cannot start, and return the exit code; if it is the command, raise UsageError."""
    program = start.command[0]
    if error.filename == program:
        hint = ""
        if program.startswith("python"):
            hint = "; give the script alone (train.py) to use this Python"
        raise click.UsageError(f"cannot start {program!r}: {error.strerror}{hint}") from error
    cause = exhausted(error) or f"{reason_of(error)}; `ulimit -a` shows the limits of this shell"
    STDERR.write(f"cyxtrain launch: cannot start {counted(start.num_ranks, 'rank')}: {cause}\n")
    return 1


def _require(is_valid: bool, message: str) -> None:
    if not is_valid:
        raise click.UsageError(message)


def _looks_like_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return word.isdigit()
    return True


def _split(words: Sequence[str], options: Options) -> tuple[str | None, tuple[str, ...]]:
    """Return (number of ranks, command); the number may be the first word."""
    number = options.num_ranks
    command = tuple(words)
    if options.gpus is None and number is None and command and _looks_like_number(command[0]):
        number = command[0]
        command = command[1:]
    if options.config is not None:
        return number, (sys.executable, "-m", "cyxtrain", "fit", options.config, *command)
    return number, runnable(command)


def runnable(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command, with this Python if it is a script or `cyxtrain`; raise UsageError if there is none."""
    _require(bool(command) and bool(command[0]), "no command to start: put it after the options and the number")
    program = command[0]
    _require(
        not program.startswith("-"),
        f"expected a command after the number, got the option {program!r}; launcher options go before the number",
    )
    if program.endswith(".py"):
        _require(Path(program).is_file(), f"there is no file {program!r}")
        return (sys.executable, *command)
    if program == "cyxtrain":  # it may not be in PATH, as the package in this Python is
        return (sys.executable, "-m", *command)
    return command


def _with_kubernetes(options: Options, environment: Mapping[str, str]) -> Options:
    """Return options completed by the variables of a Kubernetes TrainJob; `--nnodes` replaces its own."""
    names = {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
    if options.gpus is None:
        names["num_ranks"] = "NPROC_PER_NODE"
    if options.nnodes is None:
        names |= {"nnodes": "NNODES", "node_rank": "NODE_RANK"}
    missing = [name for name in names if getattr(options, name) is None]
    found: dict[str, Any] = {name: environment.get(f"PET_{names[name]}") or None for name in missing}
    return replace(options, **found)


def _num_ranks(options: Options, environment: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """Return how many ranks this machine has, and variables to add to their environment."""
    word = options.num_ranks
    if options.gpus is not None:
        _require(word is None, "give -n or --gpus, not both: --gpus starts one rank per GPU")
        return _on_gpus(options.gpus, environment)
    if word is None or word in ("auto", "gpu", "cpu"):
        return _one_per_gpu_or_core(word, environment)
    is_valid = is_whole_number(word) and int(word) > 0
    _require(is_valid, f"the number of ranks must be a whole number of at least 1, got {word!r}")
    return int(word), {}


def _one_per_gpu_or_core(word: str | None, environment: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    gpus = 0 if word == "cpu" else _count_gpus(environment)
    _require(word != "gpu" or gpus > 0, "PyTorch sees no CUDA GPU on this machine")
    number = gpus or ranks_by_cores(environment)
    device = "GPU" if gpus else "core"
    STDERR.write(f"cyxtrain launch: {number} ranks, one per {device}; set it with -n\n")
    return number, _nccl(environment) if gpus else {}


def _on_gpus(word: str, environment: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """Return how many ranks there are, one per GPU, and the variables that select the GPUs."""
    visible = _count_gpus(environment)
    _require(visible > 0, f"--gpus {word}: PyTorch sees no CUDA GPU; use -n N to train on CPUs")
    if word == "all":
        return visible, _nccl(environment)
    numbers = word.split(",")
    is_valid = all(map(is_whole_number, numbers)) and len(set(numbers)) == len(numbers)
    _require(is_valid, f"--gpus must be a number of GPUs, all, or a list such as 0,2, got {word!r}")
    if len(numbers) == 1:
        _require(0 < int(word) <= visible, f"--gpus {word}: this machine has {visible}")
        return int(word), _nccl(environment)
    wrong = [number for number in numbers if int(number) >= visible]
    _require(not wrong, f"--gpus {word}: there is no GPU {', '.join(wrong)}; they count from 0 to {visible - 1}")
    # Numbers count the GPUs that this process sees, which CUDA_VISIBLE_DEVICES may name differently.
    seen = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = dict(enumerate(seen)) if seen[0] else {}
    chosen = [names.get(int(number), number) for number in numbers]
    return len(numbers), {**_nccl(environment), "CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def _nccl(environment: Mapping[str, str]) -> dict[str, str]:
    return {"DISTRIBUTED_BACKEND": environment.get("DISTRIBUTED_BACKEND") or "nccl"}


def _count_gpus(environment: Mapping[str, str]) -> int:
    """Return how many GPUs a rank would see; import PyTorch only if there may be some."""
    # Importing PyTorch takes seconds, which a launch on CPUs does not need.
    may_have_some = sys.platform == "win32" or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    if environment.get("CUDA_VISIBLE_DEVICES") == "" or not may_have_some:
        return 0
    import torch

    return torch.cuda.device_count()


def _nodes(options: Options) -> tuple[int, int]:
    """Return (number of machines, number of this one)."""
    words = {"--nnodes": options.nnodes or "1", "--node-rank": options.node_rank or "0"}
    for name, word in words.items():
        _require(is_whole_number(word), f"{name} must be a whole number, got {word!r}")
    nnodes = int(words["--nnodes"])
    node_rank = int(words["--node-rank"])
    _require(nnodes > 0, "--nnodes must be at least 1")
    _require(
        nnodes == 1 or options.node_rank is not None, f"with --nnodes {nnodes} every machine needs --node-rank, from 0"
    )
    _require(node_rank < nnodes, f"--node-rank {node_rank}: machines count from 0, and there are {nnodes}")
    return nnodes, node_rank


def _become_torchrun(
    options: Options, num_ranks: int, command: Sequence[str], environment: Mapping[str, str]
) -> NoReturn:
    """Replace this process with torchrun, which restarts all ranks when a machine joins or leaves."""
    low, _, high = str(options.nnodes).partition(":")
    if not (is_whole_number(low) and is_whole_number(high) and 0 < int(low) <= int(high)):
        raise click.UsageError(f"--nnodes must be a number, or MIN:MAX such as 1:4, got {options.nnodes!r}")
    if not options.master_addr:
        raise click.UsageError(
            f"with --nnodes {options.nnodes} every machine needs --master-addr, the host of the rendezvous"
        )
    arguments = [
        f"--nnodes={options.nnodes}",
        f"--nproc-per-node={num_ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={options.master_addr}:{options.master_port or 29400}",
        f"--rdzv-id={environment.get('CYXTRAIN_RUN') or 'cyxtrain'}",
        f"--max-restarts={options.restarts}",
    ]
    if options.logs is not None:
        arguments += [f"--log-dir={options.logs}", "--tee=3"]
    arguments.append("--no-python")
    variables = {
        # A new store for each round: the agents' store still has the keys of the previous round.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(cores_per_rank(num_ranks, environment)),
        **environment,
    }
    sys.stdout.flush()  # exec discards Python's buffers
    os.execve(sys.executable, [sys.executable, "-m", "torch.distributed.run", *arguments, *command], variables)
