"""The structure of the package: which module may import which, and how large a folder and the whole may become.

What is listed here as known breaks a rule today. The lists only shrink: a test fails as well where something listed no
longer breaks its rule.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from tests.structure import (
    PACKAGE,
    cycles,
    files_per_folder,
    imports,
    last_name,
    lines,
    modules,
    nodes,
    repeated_basenames,
    state_objects,
    tree,
)

ROOT = Path(__file__).resolve().parents[3]
LINE_BUDGET = 57_110
"""Lines of the package. A new capability pays for itself, or raises this with a line in CHANGELOG.md."""
MOST_FILES = 14

LAYERS = [
    "errors",
    "environment",
    "config",
    "ring",
    "tensors",
    "world",
    "workers models",
    "data parallel",
    "checkpoint",
    "optim metrics progress",
    "callbacks",
    "training",
    "notebook",
    "datasets",
    "experiment",
    "doctor",
    "launch",
    "__main__",
    "distributed",  # the public names
    "",  # the package's own __init__: the same names
]
"""Imports point up in this list; what stands in one line does not import each other."""

INSIDE = {
    "ring": [
        "schedules collective_thread mean_weight",
        "wire",
        "shared_memory",
        "rendezvous",
        "monitoring",
        "messages",
        "executor",
        "engine",
        "group",
        "work sparse",
        "gradient_buffer",
        "process_group",
        "legacy_backend registered_backend",
        "backend",
    ],
    "data": ["rng sampler", "order sharding", "batches", "feed", "sources"],
    "parallel": [
        "layout finite consistency exchange synchronization",
        "partial_sums gathering step_report",
        "bucket",
        "compression sparse_gradients sync_flags",
        "reducer",
        "wrapper",
    ],
    "checkpoint": [
        "remote_files",
        "format files",
        "checkpoint_file",
        "validation weights_files",
        "weights transport folder",
        "writer uploader background_file live_marker",
    ],
    "training": [
        "trained",
        "state",
        "model",
        "inputs",
        "outside_fit",
        "step",
        "stopping checkpoint_manager resume evaluation header delegation",
        "fit_loop on_batch",
        "trainer amp_trainer",
    ],
}
"""The same inside of folders: by subfolder or file."""

KNOWN_CYCLES: list[list[str]] = []
KNOWN_UPWARD: set[tuple[str, str]] = set()
KNOWN_INSIDE_OF_RING: set[tuple[str, str]] = set()
COMPUTING = ("import_module", "__import__", "run_path", "run_module")
COMPUTED_IMPORTS = {
    "cyxtrain.experiment.by_name",  # a user's "module:name"
}


def heights(layers: list[str]) -> dict[str, int]:
    return {name: height for height, names in enumerate(layers) for name in names.split() or [""]}


def part_of(module: str, folder: str) -> str:
    """Return the subfolder or file of a folder to which a module belongs."""
    return module.removeprefix(folder).strip(".").split(".")[0]


def upward(folder: str, layers: list[str]) -> set[tuple[str, str]]:
    """Return the imports inside of a folder that point to a layer above, or to a neighbour of the same layer."""
    height = heights(layers)
    found = set()
    for module, others in imports(ROOT).items():
        if module != folder and not module.startswith(f"{folder}."):
            continue
        for other in others:
            if other != folder and not other.startswith(f"{folder}."):
                continue
            own, its = part_of(module, folder), part_of(other, folder)
            if own != its and own and height[its] >= height[own]:
                found.add((module.removeprefix(f"{PACKAGE}."), other.removeprefix(f"{PACKAGE}.")))
    return found


def test_no_modules_import_each_other_in_a_cycle():
    assert cycles(imports(ROOT)) == KNOWN_CYCLES


def test_every_module_has_a_layer():
    assert {part_of(module, PACKAGE) for module in modules(ROOT)} == set(heights(LAYERS))
    for folder, layers in INSIDE.items():
        found = {part_of(module, f"{PACKAGE}.{folder}") for module in modules(ROOT) if f".{folder}." in module}
        assert found == set(heights(layers)), folder


def test_imports_point_down():
    found = upward(PACKAGE, LAYERS)
    for folder, layers in INSIDE.items():
        found |= upward(f"{PACKAGE}.{folder}", layers)
    assert found == KNOWN_UPWARD


def test_only_the_ring_imports_its_inside():
    found = {
        (module.removeprefix(f"{PACKAGE}."), other.removeprefix(f"{PACKAGE}."))
        for module, others in imports(ROOT).items()
        for other in others
        if other.startswith(f"{PACKAGE}.ring.") and not f"{module}.".startswith(f"{PACKAGE}.ring.")
    }
    assert found == KNOWN_INSIDE_OF_RING


def test_the_ring_exports_only_what_others_import():
    from cyxtrain import ring

    found = {"register"}  # cyxtrain's __init__ calls it
    for name, path in modules(ROOT).items():
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module == "cyxtrain.ring":
                found.update(alias.name for alias in node.names if not f"{name}.".startswith("cyxtrain.ring."))
    assert found == set(ring.__all__)


def test_only_one_module_assigns_the_training_state():
    """Each field of the training state and of its position is assigned by a method in one module."""
    from cyxtrain.training.state import Position, TrainingState

    fields = {field.name for kind in (Position, TrainingState) for field in dataclasses.fields(kind)}
    found = []
    for name, path in modules(ROOT).items():
        if name == "cyxtrain.training.state":
            continue
        for node in nodes(path):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for each in (part for target in targets for part in getattr(target, "elts", [target])):
                if isinstance(each, ast.Attribute) and each.attr in fields:
                    owner = last_name(each.value).strip("_")
                    if owner in ("state", "position"):
                        found.append((name, ast.unparse(each)))
            if isinstance(node, ast.Call) and node.args and last_name(node.func) in ("setattr", "vars"):
                assert last_name(node.args[0]).strip("_") != "position", name
    assert found == []


def test_a_fit_has_three_state_objects():
    """What was asked for, what was checked, what is trained."""
    assert state_objects(ROOT) == ["FitArguments", "FitPlan", "TrainingState"]


def test_what_was_checked_is_frozen():
    from cyxtrain.training.inputs.checked_data import CheckedData
    from cyxtrain.training.inputs.plan import FitPlan

    for kind in (FitPlan, CheckedData):
        with pytest.raises(dataclasses.FrozenInstanceError):
            kind.__new__(kind).config = None


def test_only_training_reads_private_names_of_a_trainer():
    found = []
    for name, path in modules(ROOT).items():
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                owner = last_name(node.value).strip("_")
                if owner == "trainer" and not name.startswith(f"{PACKAGE}.training."):
                    found.append((name, ast.unparse(node)))
    assert found == []


def test_no_folder_is_crowded():
    assert {folder: count for folder, count in files_per_folder(ROOT).items() if count > MOST_FILES} == {}


def test_a_file_name_stands_once():
    assert repeated_basenames(ROOT) == {}


def test_every_folder_says_what_is_inside():
    for name, path in modules(ROOT).items():
        if path.name == "__init__.py":
            assert (ast.get_docstring(tree(path)) or "").split("\n")[0].endswith("."), name


def test_no_module_is_imported_by_a_computed_name():
    """A guard is not met by hiding an import from it."""
    for name, path in modules(ROOT).items():
        for node in nodes(path):
            is_call = isinstance(node, ast.Call) and last_name(node.func).endswith(COMPUTING)
            runs_file = isinstance(node, ast.Constant) and "runpy" in str(node.value)  # a program for another process
            if is_call or runs_file:
                assert name in COMPUTED_IMPORTS, ast.unparse(node)


def test_the_package_stays_within_its_budget():
    assert lines(ROOT, PACKAGE) <= LINE_BUDGET


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": ["b"], "b": ["c"], "c": []}, []),
        ({"a": ["b"], "b": ["a"]}, [["a", "b"]]),
        ({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": ["a"]}, [["a", "b", "c", "d"]]),
        ({"a": ["b"], "b": ["a"], "c": ["d"], "d": ["e"], "e": ["c"]}, [["c", "d", "e"], ["a", "b"]]),
    ],
)
def test_cycles_are_found(graph, found):
    assert cycles(graph) == found
