"""Write the generated tables of docs/*.md: every setting, environment variable, function, class and error.

Run it after you change a setting, a public signature or the first line of a public docstring:

    python docs/generate_reference.py

A table stands between the lines `<!-- generated: NAME -->` and `<!-- /generated -->`. `tests/docs/test_reference.py`
fails if a table is out of date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import cyxtrain as cx

DOCS = Path(__file__).resolve().parent
SETTINGS = (cx.DistributedConfig, cx.DDPConfig, cx.DistributedTrainingConfig, cx.AMPConfig)
UNITS = {
    r"_ms$": "milliseconds",
    r"_mb$": "MiB",
    r"_seconds$": "seconds",
    r"_minutes$": "minutes",
    r"batch_size$": "samples",
    r"epochs$|^validation_freq$": "epochs",
    r"n_batches$|^validation_steps$": "batches",
    r"^accumulation_steps$": "micro-batches",
    r"n_steps$|^max_steps$|^warmup_steps$|^steps_per_epoch$|^dynamic_history_size$|^fast_dev_run$": "steps",
    r"^log_hashes$": "steps",
    r"^num_processes$|^world_size$": "processes",
    r"^num_threads$": "threads",
    r"^virtual_ranks$": "ranks",
    r"^keep_last$": "checkpoints",
    r"^validation_split$": "fraction",
}
"""Units by the name of a setting; the others have none."""

BY_NEED: dict[str, Sequence[str]] = {
    "Ten settings to start with": (
        *("epochs", "effective_batch_size", "batch_size", "validation_split", "keep_best", "load_best"),
        *("checkpoint_every_n_epochs", "warmup_steps", "clip_norm", "precision"),
    ),
    "Length of a fit": ("max_steps", "max_time_seconds", "steps_per_epoch", "fast_dev_run", "num_processes"),
    "Samples": ("shuffle", "seed", "drop_last", "sharded_data", "readers", "virtual_ranks"),
    "Validation": (
        *("validation_freq", "validate_every_n_steps", "validate_every_n_minutes", "validation_batch_size"),
        *("validation_steps", "validation_stratify"),
    ),
    "Checkpoints": (
        *("checkpoint_dir", "checkpoint_every_n_steps", "checkpoint_every_n_minutes", "keep_last", "on_save_error"),
        "save_on_master_only",
    ),
    "Gradients and learning rate": (
        *("accumulation_steps", "clip_value", "clip_adaptive", "learning_rate_scaling", "scheduler_interval"),
        *("on_nonfinite", "check_replicas_every_n_steps"),
    ),
    "Speed": (
        *("compile", "float32_precision", "channels_last", "fused_optimizer", "amp", "sync_batchnorm", "num_threads"),
        "profile",
    ),
}
"""The settings of `fit` by what you need them for; those that are not listed follow under "Output and others"."""

ENVIRONMENT = (
    ("RANK", "integer", "0", "", "This process's number among all, from 0. Set it together with `WORLD_SIZE`."),
    ("WORLD_SIZE", "integer", "1", "processes", "The number of processes on all machines."),
    (
        "LOCAL_RANK",
        "integer",
        "`RANK`",
        "",
        "This process's number among those on its machine, from 0, and the index of its GPU.",
    ),
    ("MASTER_ADDR", "text", "127.0.0.1", "", "Host name or address of rank 0; IPv6 with or without brackets."),
    ("MASTER_PORT", "integer", "29500", "", "TCP port on which rank 0 listens."),
    (
        "DISTRIBUTED_BACKEND",
        "`cpu`, `nccl`, `gloo`",
        "chosen by the ranks",
        "",
        "The backend of the collectives. `cpu` is the ring. By default, the ranks use "
        "[NCCL or the ring](launching.md#on-gpus).",
    ),
    ("DISTRIBUTED_TIMEOUT_MS", "integer", "30000", "milliseconds", "How long ranks wait for each other to join."),
    (
        "CYXTRAIN_SECRET",
        "text",
        "none; the launcher creates one",
        "",
        "The secret that a process must know to join. Set the same text on every rank.",
    ),
    (
        "CYXTRAIN_TRANSPORT",
        "`auto`, `unix`, `tcp`",
        "`auto`",
        "",
        "The transport between ranks on one machine: Unix sockets with shared memory, or TCP. `auto` takes the first "
        "that works.",
    ),
    (
        "CYXTRAIN_COMMUNICATION",
        "`auto`, `thread`, `inline`",
        "`auto`",
        "",
        "Where collectives with `async_op=True` run: in a background thread, or in the caller's. `auto` uses a thread "
        "if there are several machines or free cores.",
    ),
    ("CYXTRAIN_CHECKSUMS", "0, 1", "0", "", "1: every frame carries a checksum. Set the same value on every rank."),
    (
        "CYXTRAIN_HEARTBEAT_TIMEOUT_MS",
        "integer, at least 100",
        "30000",
        "milliseconds",
        "Silence after which a rank on another machine is declared dead.",
    ),
    (
        "CYXTRAIN_GRACE_SECONDS",
        "number above 0",
        "25",
        "seconds",
        "How long a [stop](resuming.md#stopping) may take before what is left is killed; `--grace` of the launcher.",
    ),
    (
        "CYXTRAIN_RUN",
        "text",
        "set by the launcher",
        "",
        "The name of the run: after a restart, `fit` continues from its checkpoints.",
    ),
    (
        "CYXTRAIN_ATTEMPT",
        "integer",
        "set by the launcher",
        "restarts",
        "How often the launcher has restarted all ranks.",
    ),
    (
        "CYXTRAIN_TRACEBACK",
        "`short`, `full`",
        "`short`",
        "",
        "`full`: print all frames of an error that is otherwise [printed in short](faults.md#what-an-error-prints).",
    ),
    (
        "CYXTRAIN_EXITED",
        "path",
        "set by the launcher",
        "",
        "File in which the launcher notes the ranks of this machine that have exited with code 0.",
    ),
    (
        "CYXTRAIN_PORT",
        "two integers",
        "set by the launcher",
        "",
        "`MASTER_PORT`, and the port that the launcher holds for rank 0 in its place until rank 0 listens.",
    ),
    (
        "CYXTRAIN_STAGING_DIR",
        "path",
        "`~/.cache/cyxtrain/staging`",
        "",
        "Folder in which files wait until they are [uploaded to a store](resuming.md#checkpoints-in-a-store). A disk "
        "is better than a folder in memory: what waits there survives a restart.",
    ),
    (
        "CYXTRAIN_BAR_COLUMNS",
        "integer",
        "set by the launcher",
        "characters",
        "How long a progress bar the launcher shows for rank 0 in its terminal; 0: none.",
    ),
    (
        "CYXTRAIN_REPLAY",
        "JSON",
        "set by `cyxtrain replay`",
        "",
        "The last step to compute again, the checkpoint to begin from, a folder for hashes, and steps between hashes.",
    ),
    (
        "CYXTRAIN_TRIAL",
        "JSON",
        "set by `cyxtrain doctor`",
        "",
        "A file for the time of a step, and the settings to measure it with.",
    ),
    (
        "OMP_NUM_THREADS",
        "integer",
        "a share of the cores",
        "threads",
        "Threads of each rank, read by PyTorch. The launcher sets it.",
    ),
)
"""Name, type, default, unit and meaning of each environment variable."""

GROUPS: dict[str, Sequence[str]] = {
    "joining": (
        *("init", "finalize", "init_process_group", "destroy_process_group", "is_initialized", "get_rank"),
        *("get_world_size", "get_local_rank", "is_master"),
    ),
    "collectives": (
        *("all_reduce", "broadcast", "all_gather", "all_gather_with_grad", "reduce_scatter", "scatter", "gather"),
        *("reduce", "barrier", "send", "recv"),
    ),
    "sampling": ("DistributedSampler", "DistributedBatchIterator"),
    "averaging": ("DistributedDataParallel",),
    "trainers": (
        "DistributedTrainer",
        "DistributedAMPTrainer",
        "count_steps",
        "open_predictions",
        "create_default_amp_config",
    ),
    "history": ("TrainingHistory",),
    "experiments": ("Config", "Experiment", "register_model", "get_model", "list_models"),
    "weights": ("save_weights", "load_weights"),
}
"""The public functions and classes of each table; of classes also the public methods."""
HIDDEN = re.compile(r":exclude-members: ((?:\w+,?\s*)+)")
"""Methods that the page leaves out of the documentation."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(head), ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def field_docstrings(config: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, in one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, under in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(under.value.value).split())
    return found


def fit_settings() -> str:
    """Return a table for each group of the settings of `fit`, those to start with first."""
    listed = {name for names in BY_NEED.values() for name in names}
    rest = [field.name for field in dataclasses.fields(cx.DistributedTrainingConfig) if field.name not in listed]
    groups = {**BY_NEED, "Output and others": rest}
    tables = (f"**{title}**\n\n{settings_table(cx.DistributedTrainingConfig, groups[title])}" for title in groups)
    return "\n\n".join(tables)


def settings_table(config: type, names: Sequence[str] | None = None) -> str:
    """Return the table of a class of settings (or of some fields, by name): type, default, unit and meaning of each."""
    meanings = field_docstrings(config)
    fields = {field.name: field for field in dataclasses.fields(config)}
    rows = []
    for field in (fields[name] for name in names or fields):
        unit = next((unit for pattern, unit in UNITS.items() if re.search(pattern, field.name)), "")
        rows.append((f"`{field.name}`", f"`{field.type}`", f"`{field.default!r}`", unit, meanings[field.name]))
    return table(("setting", "type", "default", "unit", "meaning"), rows)


def environment_table() -> str:
    """Return the table of environment variables."""
    rows = [(f"`{name}`", *cells) for name, *cells in ENVIRONMENT]
    return table(("variable", "type", "default", "unit", "meaning"), rows)


def summary(documented: Any) -> str:
    """Return the first sentence or paragraph of a docstring, whichever is shorter."""
    paragraph = " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s(?=[A-Z])", paragraph)[0].rstrip(":")


def call_of(name: str, function: Callable[..., Any]) -> str:
    """Return how a function is called: its parameters and their defaults, without types."""
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
        if each.name not in ("self", "cls")
    ]
    text = str(inspect.Signature(parameters))
    return f"`{name}{re.sub(r'<(?:class )?[^<>]*>', '...', text)}`"


def members(owner: type, hidden: Sequence[str]) -> list[tuple[str, str]]:
    """Return call and summary of a class and of each public method and property of it."""
    rows = [(call_of(owner.__name__, owner), summary(owner))]
    inner = ("cyxtrain.training", "cyxtrain.metrics")
    bases = [base for base in owner.__mro__ if base is owner or base.__module__.startswith(inner)]
    own = {**vars(owner), **{name: getattr(owner, name) for base in bases for name in vars(base)}}
    for name, value in own.items():
        function = getattr(value, "__func__", value)
        if name.startswith("_") or name in hidden:
            continue
        if inspect.isfunction(function):
            rows.append((call_of(f".{name}", function), summary(function)))
        elif isinstance(value, property):
            rows.append((f"`.{name}`", summary(value)))
    return rows


def group_table(names: Sequence[str], page: str) -> str:
    """Return the table of some public functions and classes."""
    found = re.search(HIDDEN, page)
    hidden = re.findall(r"\w+", found[1]) if found else []
    rows: list[tuple[str, str]] = []
    for name in names:
        public = getattr(cx, name)
        is_documented = inspect.isclass(public) and not dataclasses.is_dataclass(public)
        rows += members(public, hidden) if is_documented else [(call_of(name, public), summary(public))]
    return table(("call", "what it does"), rows)


def callbacks_table() -> str:
    """Return the table of callbacks."""
    return classes_table(cx.callbacks, "callback")


def metrics_table() -> str:
    """Return the table of classes of metrics."""
    return classes_table(cx.metrics, "metric")


def classes_table(module: Any, what: str) -> str:
    """Return the table of a module's public classes."""
    classes = [getattr(module, name) for name in module.__all__ if name != "Logs"]
    rows = [(call_of(each.__name__, each), summary(each)) for each in classes if inspect.isclass(each)]
    return table((what, "what it does"), sorted(rows))


def errors_table() -> str:
    """Return the table of errors."""
    names = [name for name in cx.__all__ if name.endswith("Error")]
    return table(("error", "meaning"), ((f"`{name}`", summary(getattr(cx, name))) for name in names))


def generate(name: str, page: str) -> str:
    """Return the table with a name; `page` is the text of the page that it stands in."""
    configs = {each.__name__: each for each in SETTINGS}
    if name == "DistributedTrainingConfig":
        return fit_settings()
    if name in configs:
        return settings_table(configs[name])
    if name in GROUPS:
        return group_table(GROUPS[name], page)
    tables = {"environment": environment_table, "callbacks": callbacks_table, "metrics": metrics_table}
    return {**tables, "errors": errors_table}[name]()


def updated(page: str) -> str:
    """Return a page in which every generated table is up to date."""
    return re.sub(
        r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- /generated -->)",
        lambda found: f"{found[1]}{found[2]}\n{generate(found[1], page)}\n\n",
        page,
        flags=re.DOTALL,
    )


def main() -> None:
    """Update all pages."""
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        if updated(page) != page:
            path.write_text(updated(page), encoding="utf-8")
            print(f"updated {path.name}")


if __name__ == "__main__":
    main()
