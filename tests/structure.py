"""Measure the structure of a checkout: `python tests/structure.py [CHECKOUT ...]` prints a column for each.

Counts come from the source text; frames come from a fit on one rank, and a backward on two over TCP.
"""

from __future__ import annotations

import ast
import functools
import gc
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = "cyxtrain"


@functools.cache
def modules(root: Path) -> dict[str, Path]:
    """Return the file of every module of the package, by its dotted name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(path: Path) -> ast.Module:
    """Return a file's syntax tree. Parsed once: the rules are many."""
    gc.disable()  # a tree is many objects that stay, and each collection would search all that there are
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(tree(path)))


def last_name(node: ast.AST) -> str:
    """Return the last part of a name such as `torch.nn.Linear`; "" for what is not one."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted_name(node: ast.AST) -> str:
    """Return a name such as `torch.nn.Linear` as a whole; "" for what is not one."""
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return last_name(node)


@functools.cache
def imports(root: Path) -> dict[str, set[str]]:
    """Return which modules of the package each of them imports, in functions and for types too."""
    known = modules(root)
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        graph[name] = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names if alias.name in known}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[name] |= {each if each in known else str(node.module) for each in full}
        graph[name].discard(name)
    return graph


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one node (Tarjan 1972), largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found, key=lambda component: (-len(component), component))


def state_objects(root: Path) -> list[str]:
    """Return the classes of which a fit's state is made: public dataclasses of training, and its pair of sources.

    One that is a field of another, or its base, is a part of it and not counted.
    """
    found: dict[str, ast.ClassDef] = {}
    for name, path in modules(root).items():
        if name.startswith(f"{PACKAGE}.training.") or name == f"{PACKAGE}.data.sources.source":
            for node in tree(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    made = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
                    if any(each.startswith("dataclass") for each in made) or node.name == "TrainingData":
                        found[node.name] = node
    parts = set()
    for node in found.values():
        fields = [ast.unparse(each.annotation) for each in node.body if isinstance(each, ast.AnnAssign)]
        words = {word for text in [*fields, *map(ast.unparse, node.bases)] for word in re.findall(r"\w+", text)}
        parts |= words & found.keys()
    return sorted(found.keys() - parts)


def files_per_folder(root: Path) -> Counter[str]:
    """Return how many Python files each folder of the package holds."""
    return Counter(path.parent.relative_to(root).as_posix() for path in modules(root).values())


def repeated_basenames(root: Path) -> dict[str, list[str]]:
    """Return the file names that stand more than once in the package, with their places."""
    places: dict[str, list[str]] = {}
    for path in modules(root).values():
        if path.stem not in ("__init__", "__main__"):
            places.setdefault(path.stem, []).append(path.relative_to(root).as_posix())
    return {name: found for name, found in places.items() if len(found) > 1}


def lines(root: Path, folder: str) -> int:
    """Return how many lines the Python files below a folder have."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (root / folder).rglob("*.py"))


# Runs in the checkout that is measured. Prints the stack of our frames at optimizer.step, and at the first write of a
# gradient to a socket: in the thread that computes, and in the one that sends, where another one does.
_FRAMES = """
import json, os, sys, threading
import torch
import cyxtrain as cx

def own(frame):
    found = []
    while frame is not None:
        name = frame.f_code.co_filename
        if os.sep + "cyxtrain" + os.sep in name:
            found.append((name.split(os.sep + "cyxtrain" + os.sep)[-1], frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]

class Watched(torch.optim.SGD):
    stack = None
    def step(self, closure=None):
        if Watched.stack is None:
            Watched.stack = own(sys._getframe(1))
        return super().step(closure)

deepest, backward, submitted = [], [False], []
def watch(frame, event, argument):
    if event == "c_call" and getattr(argument, "__name__", "") in ("send", "sendmsg", "send_bytes"):
        stack = own(frame)
        if stack and stack[-1][0].startswith("ring") and backward[0] and "fit" not in {name for _, name in stack[-1:]}:
            deepest.append(stack)

cx.init()
X, Y = torch.randn(64, 256), torch.randn(64, 256)
model = torch.nn.Linear(256, 256)
trainer = cx.DistributedTrainer(model, torch.nn.MSELoss(), Watched(model.parameters(), 0.1))
kind = sys.argv[1]
if kind == "step":
    trainer.fit(X, Y, epochs=1, batch_size=32, verbose=False)
    print("FRAMES", json.dumps(Watched.stack))
else:
    ddp = cx.DistributedDataParallel(model)
    for _ in range(3):
        ddp(X).sum().backward()
    sys.setprofile(watch)
    threading.setprofile_all_threads(watch) if hasattr(threading, "setprofile_all_threads") else None
    backward[0] = True
    ddp(X).sum().backward()
    backward[0] = False
    sys.setprofile(None)
    if cx.get_rank() == 0:
        print("FRAMES", json.dumps(max(deepest, key=len, default=[])))
cx.finalize()
"""


def frames(root: Path, kind: str) -> list[tuple[str, str]]:
    """Return our (file, function) frames from a user's `fit` to `optimizer.step`, or from backward to the socket.

    Args:
        root: The checkout.
        kind: "step" or "socket".
    """
    variables = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _FRAMES, kind]
    if kind == "socket":
        variables |= {"CYXTRAIN_TRANSPORT": "tcp", "CYXTRAIN_COMMUNICATION": "inline"}
        command = [sys.executable, "-m", "cyxtrain", "launch", "-n", "2", "--", *command]
    output = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=120, check=True)
    line = next(line for line in output.stdout.splitlines() if "FRAMES" in line)
    return [(file, function) for file, function in json.loads(line.partition("FRAMES")[2])]


def measures(root: Path) -> dict[str, str]:
    """Return every measure of a checkout, as people read it."""
    graph = imports(root)
    widest, width = files_per_folder(root).most_common(1)[0]
    found = cycles(graph)
    step, socket = frames(root, "step"), frames(root, "socket")
    return {
        "package: files": str(len(graph)),
        "package: lines": f"{lines(root, PACKAGE):,}",
        "tests: lines": f"{lines(root, 'tests'):,}",
        "widest folder": f"{widest}: {width}",
        "import cycles": f"{len(found)}: {', '.join(str(len(each)) for each in found)}",
        "basenames that stand twice": str(len(repeated_basenames(root))),
        "state objects of a fit": str(len(state_objects(root))),
        "fit to optimizer.step": f"{len(step)} frames, {len({file for file, _ in step})} files",
        "backward to the socket": f"{len(socket)} frames, {len({file for file, _ in socket})} files",
    }


def main() -> None:
    roots = [Path(each).resolve() for each in sys.argv[1:]] or [Path(__file__).resolve().parent.parent]
    columns = [measures(root) for root in roots]
    for name in columns[0]:
        print(f"{name:28}" + "".join(f"  {column[name]:32}" for column in columns))


if __name__ == "__main__":
    main()
