"""Rules for the text of the package: short files and functions, and things that no module may do."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import cyxtrain
from tests.structure import dotted_name, nodes

PACKAGE = Path(cyxtrain.__file__).parent
READERS_OF_THE_ENVIRONMENT = {
    "environment/process_env.py",
    "__main__.py",  # passes it on to the ranks that it starts
    "launch/__main__.py",
}


@functools.cache
def files() -> list[tuple[str, list[ast.AST], str]]:
    """Return every file of the package: its path in it, the nodes of its tree and its text."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(path.relative_to(PACKAGE).as_posix(), nodes(path), path.read_text("utf-8")) for path in paths]


def functions(tree: list[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in tree if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_every_tensor_that_is_made_says_on_which_device():
    """Else it would be on the one that a user has given to torch.set_default_device."""
    makers = {"tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "rand", "randn", "randint", "randperm"}
    makers |= {"eye", "asarray", "as_tensor", "scalar_tensor", "sparse_coo_tensor", "sparse_compressed_tensor"}
    makers = {f"torch.{name}" for name in makers}
    silent = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, tree, _ in files()
        for node in tree
        if isinstance(node, ast.Call) and dotted_name(node.func) in makers
        if "device" not in {each.arg for each in node.keywords}
    ]
    assert silent == []


def test_environment_is_read_in_one_place():
    readers = {
        path
        for path, tree, _ in files()
        for node in tree
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os")
    }
    assert readers == READERS_OF_THE_ENVIRONMENT


def test_the_ranks_are_an_argument_above_the_world():
    """A rank or a number of ranks that is looked up, or kept apart from its world, would be wrong in the next one."""
    asked = {
        f"{module}.{name}" for module in ("dist", "runtime") for name in ("get_rank", "get_world_size", "is_master")
    }
    found = [
        f"{path}:{node.lineno}"
        for path, tree, _ in files()
        if not path.startswith(("world/", "ring/"))
        for node in tree
        if (isinstance(node, ast.Call) and dotted_name(node.func) in asked)
        or (isinstance(node, ast.Name) and node.id == "RingProcessGroup")
    ]
    assert found == []


def test_files_have_at_most_600_lines():
    assert {path: lines for path, _, text in files() if (lines := len(text.splitlines())) > 600} == {}


def test_functions_have_at_most_40_lines_besides_their_docstring():
    long = {}
    for path, tree, _ in files():
        for function in functions(tree):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if ast.get_docstring(function) is not None:
                docstring = function.body[0]
                lines -= (docstring.end_lineno or 0) - docstring.lineno + 1
            if lines > 40:
                long[f"{path}:{function.name}"] = lines
    assert long == {}


def test_nothing_is_unpickled():
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
    for path, tree, _ in files():
        if path == "notebook/sharing.py":  # a notebook and its workers, over a channel where both prove who they are
            continue
        loads = [node for node in tree if isinstance(node, ast.Attribute) and dotted_name(node) == "torch.load"]
        calls = [node for node in tree if isinstance(node, ast.Call) and node.func in loads]
        safe = [call for call in calls if "weights_only=True" in map(ast.unparse, call.keywords)]
        assert len(safe) == len(loads), path
        for node in tree:
            if isinstance(node, ast.Import):
                assert not forbidden & {alias.name.split(".")[0] for alias in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert str(node.module).split(".")[0] not in forbidden, path
            if isinstance(node, ast.Attribute):
                # PyTorch's collectives on objects pickle them.
                assert not node.attr.endswith(("_object", "_object_list")), path


def test_nobody_asks_whether_an_object_has_an_attribute():
    asking = [path for path, tree, _ in files() for node in tree if isinstance(node, ast.Name) and node.id == "hasattr"]
    assert asking == []


def test_functions_are_annotated():
    everyone = [(path, function) for path, tree, _ in files() for function in functions(tree)]
    bare = [f"{path}:{function.name}" for path, function in everyone if function.returns is None]
    assert len(bare) <= 0.03 * len(everyone), bare
