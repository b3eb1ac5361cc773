"""Measure the tables of docs/ported.md: losses on 1 and 2 ranks, and the same programs in other libraries.

Run it after you change one of these programs (about half an hour on two cores):

    pip install accelerate lightning peft torchvision transformers
    python docs/generate_ported.py [losses] [libraries] [--only forecaster gan ...]

A table stands between the lines `<!-- measured: NAME -->` and `<!-- /measured -->`. Programs whose packages are not
installed keep their rows. `tests/docs/test_ported_page.py` counts the lines again.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.metadata
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "ported.md"
PORTED, SIDE = ROOT / "examples" / "ported", ROOT / "examples" / "side_by_side"
PROGRAMS = {
    "text classifier (transformer, padding)": SIDE / "text_cyxtrain.py",
    "forecaster (GRU, windows)": PORTED / "forecaster.py",
    "GAN (two optimizers)": SIDE / "gan_cyxtrain.py",
    "VAE (its own loss)": PORTED / "vae.py",
    "char-RNN (packed sequences)": PORTED / "char_rnn.py",
    "seq2seq (teacher forcing)": PORTED / "seq2seq.py",
    "frozen ResNet (torchvision)": PORTED / "frozen_resnet.py",
    "GPT-2 (transformers)": SIDE / "gpt2_cyxtrain.py",
    "LoRA (peft)": PORTED / "lora.py",
    "tabular (categories)": PORTED / "tabular.py",
}
LIBRARIES = {"cyxtrain": "Cyxtrain", "lightning": "Lightning", "accelerate": "Accelerate", "trainer": "HF Trainer"}
TASKS = {"text": "text classifier", "gpt2": "GPT-2", "gan": "GAN"}
PACKAGES = ("accelerate", "lightning", "peft", "torchvision", "transformers")
RANKS = (1, 2)
SECONDS = 600
OURS, TORCHRUN = ["-m", "cyxtrain.launch"], ["-m", "torch.distributed.run", "--nproc-per-node"]
ENDINGS = ("loss ", "clusters ")


def packages_of(path: Path) -> list[str]:
    """Return the optional packages that a program imports, directly or by the module of its task."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    first = {str(module).partition(".")[0] for module in modules}
    tasks = [path.with_name(f"{name}.py") for name in first if name.endswith("_task")]
    return sorted({*(first & {*PACKAGES}), *(name for task in tasks for name in packages_of(task))})


def can_run(path: Path) -> bool:
    """Return whether the packages of a program are installed."""
    return all(importlib.util.find_spec(name) for name in packages_of(path))


def versions(*paths: Path) -> str:
    """Return the date, and the versions of what programs need."""
    names = ["torch", *sorted({name for path in paths for name in packages_of(path)})]
    each = (f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in names)
    return f"{datetime.date.today().isoformat()}: {', '.join(each)}"


def code_lines(path: Path) -> int:
    """Count the lines of a program without imports, docstrings, comments and blank lines."""
    text = path.read_text(encoding="utf-8")
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in left_out for number, line in lines
    )


def run(words: list[str], ranks: int, launcher: list[str]) -> str:
    """Run a Python program on some ranks; return the line in which it says what it reached."""
    command = [sys.executable, *(launcher if ranks > 1 else []), *words]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    lines = [line.removeprefix("[rank 0] ").strip() for line in done.stdout.splitlines()]
    return next((line for line in reversed(lines) if line.startswith(ENDINGS)), "")


def record(program: str, file: str, dtype: str) -> None:
    """Run a program as a rank; rank 0 writes the history."""
    import torch

    import cyxtrain as cx

    torch.set_default_dtype(vars(torch)[dtype])
    sys.path.insert(0, str(Path(program).parent))
    with cx.init():
        history = runpy.run_path(program)["main"]()
        if cx.is_master():
            Path(file).write_text(json.dumps(history.history), encoding="utf-8")


def histories(path: Path, dtype: str) -> list[dict[str, list[float]]]:
    """Return a program's history on each number of ranks."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            file = Path(folder) / f"{ranks}.json"
            run([__file__, "--record", str(path), str(file), dtype], ranks, [*OURS, str(ranks)])
            found.append(json.loads(file.read_text(encoding="utf-8")))
    return found


def largest_difference(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """Return the largest difference of two histories, relative to the largest value of each row."""
    assert one.keys() == other.keys()
    pairs = [(max(map(abs, values)), zip(values, other[name], strict=True)) for name, values in one.items()]
    return max(abs(ours - theirs) / largest for largest, values in pairs if largest for ours, theirs in values)


def row_of_losses(title: str, path: Path) -> str:
    """Run one of PROGRAMS; return its row."""
    single, double = histories(path, "float32"), histories(path, "float64")
    name = next(iter(single[0]))  # "loss", or the first of several
    losses = [f"{history[name][-1]:.6f}" for history in single]
    largest = [largest_difference(one, two) for one, two in (single, double)]
    file = path.relative_to(ROOT).as_posix()
    cells = [title, f"`{file}`", *losses, *(f"{each:.0e}" for each in largest), versions(path)]
    return f"| {' | '.join(cells)} |"


def row_of_library(task: str, library: str) -> str:
    """Run a task with one of LIBRARIES; return its row."""
    path = SIDE / f"{task}_{library}.py"
    launcher = OURS if library == "cyxtrain" else TORCHRUN
    reached = [run([str(path)], ranks, [*launcher, str(ranks)]) for ranks in RANKS]
    file = path.relative_to(ROOT).as_posix()
    cells = [TASKS[task], LIBRARIES[library], f"`{file}`", str(code_lines(path)), *reached, versions(path)]
    return f"| {' | '.join(cells)} |"


def replace_row(name: str, file: Path, row: str) -> None:
    """Put a row in the place of the one of the same file in a table of the page, or at its end."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(f"<!-- measured: {name} -->")
    end = text.index("<!-- /measured -->", start)
    lines, named = text[start:end].splitlines(), f"`{file.relative_to(ROOT).as_posix()}`"
    places = [number for number, line in enumerate(lines) if named in line]
    if places:
        lines[places[0]] = row
    else:
        lines.insert(len(lines) - 1, row)
    PAGE.write_text(text[:start] + "\n".join(lines) + "\n" + text[end:], encoding="utf-8")


def main() -> None:
    """Run programs, and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help="losses, libraries; both by default")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of file names")
    parser.add_argument("--record", nargs=3, metavar=("PROGRAM", "FILE", "DTYPE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.record:
        record(*given.record)
        return
    tables, only = given.tables or ["losses", "libraries"], tuple(given.only) or ("",)
    for title, path in PROGRAMS.items():
        if "losses" in tables and path.name.startswith(only) and can_run(path):
            print(row := row_of_losses(title, path), flush=True)
            replace_row("losses", path, row)
    for task in TASKS:
        for library in LIBRARIES:
            path = SIDE / f"{task}_{library}.py"
            if "libraries" in tables and path.exists() and path.name.startswith(only) and can_run(path):
                print(row := row_of_library(task, library), flush=True)
                replace_row("libraries", path, row)


if __name__ == "__main__":
    main()
