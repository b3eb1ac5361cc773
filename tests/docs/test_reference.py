"""The reference has every public name, its tables are up to date, and docstrings are complete."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, section

import cyxtrain as cx

REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
MODULES = {
    "cyxtrain": cx,
    "cyxtrain.callbacks": cx.callbacks,
    "cyxtrain.datasets": cx.datasets,
    "cyxtrain.metrics": cx.metrics,
}
HEADINGS = [
    "Process group",
    "Collectives",
    "Data sharding",
    "Gradient averaging",
    "Training",
    "Checkpoints",
    "Errors",
]


def shown(module: str) -> list[str]:
    """Return the names of a module in the reference, in order."""
    parts = re.split(r"^\.\. currentmodule:: (\S+)$", REFERENCE, flags=re.MULTILINE)
    found = [text for name, text in zip(parts[1::2], parts[2::2], strict=True) if name == module]
    return re.findall(r"^\.\. (?:auto)?(?:class|function|exception):: (\w+)", "\n".join(found), flags=re.MULTILINE)


def functions() -> Iterator[tuple[Any, Any]]:
    """Yield (documented object, function) of every public function, constructor and method."""
    for module_name, module in MODULES.items():
        for name in shown(module_name):
            found = getattr(module, name)
            if inspect.isfunction(found):
                yield found, found
            elif found.__module__.startswith("cyxtrain") and not name.endswith("Error"):
                if "__init__" in vars(found) and not hasattr(found, "__dataclass_fields__"):
                    yield found, found.__init__
                for member, value in vars(found).items():
                    function = getattr(value, "__func__", getattr(value, "fget", value))
                    if not member.startswith("_") and inspect.isfunction(function):
                        yield function, function


def test_reference_has_every_public_name_in_order():
    assert shown("cyxtrain") == [name for name in cx.__all__ if name not in ("datasets", "callbacks", "metrics")]


def test_reference_has_every_callback_and_metric():
    assert sorted(shown("cyxtrain.callbacks")) == sorted(cx.callbacks.__all__)
    assert shown("cyxtrain.metrics") == cx.metrics.__all__


def test_reference_has_every_data_set():
    own = [name for name, value in vars(cx.datasets).items() if inspect.isfunction(value) and name[0] != "_"]
    assert shown("cyxtrain.datasets") == own


def test_reference_has_the_headings_of_the_public_list():
    assert re.findall(r"^## (.*)$", REFERENCE, flags=re.MULTILINE) == HEADINGS


def test_reference_shows_the_members_of_classes():
    # Built-in callbacks have only the hooks of Callback, and trackers the methods of Tracker: their members are shown.
    hooks = {name for name in dir(cx.callbacks.Callback) if not name.startswith("_")}
    for name in cx.callbacks.__all__:
        callback = getattr(cx.callbacks, name)
        shown = hooks
        if issubclass(callback, cx.callbacks.Tracker):
            shown = hooks | {"start", "log", "artifact", "finish"}
        assert {member for member in vars(callback) if not member.startswith("_")} <= shown, name
    for name in [name for name in cx.__all__ if inspect.isclass(getattr(cx, name))]:
        if name != "ReduceOp" and not name.endswith("Error"):
            assert re.search(rf"^\.\. autoclass:: {name}\n   :members:$", REFERENCE, flags=re.MULTILINE), name


def test_every_field_of_settings_has_a_docstring():
    for config in (cx.DistributedConfig, cx.DDPConfig, cx.DistributedTrainingConfig, cx.AMPConfig, cx.TrainingHistory):
        body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0].body
        for field, under in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                said = isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant)
                assert said, f"{config.__name__}.{field.target.id}"


def test_docstrings_name_every_argument():
    """Arguments are in "Args:" or in a sentence; those of hooks are documented in Callback."""
    for documented, function in functions():
        if function.__name__ in dir(cx.callbacks.Callback) and inspect.isfunction(documented):
            continue
        docstring = inspect.getdoc(documented) or ""
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in ("self", "cls") and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                listed = re.search(rf"^    \*{{0,2}}{name}: \S", docstring, flags=re.MULTILINE)
                assert listed or f"`{name}`" in docstring, f"{function.__qualname__}: {name} is not documented"


def test_docstrings_name_the_errors_that_are_raised():
    """Only errors that the function itself raises; functions that it calls may raise others."""
    for documented, function in functions():
        docstring = inspect.getdoc(documented) or ""
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                name = node.exc.func.id
                is_named = not name.endswith("Error") or name in docstring
                assert is_named, f"{function.__qualname__}: {name} is not documented"


# --- generated tables -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["reference", "launching"])
def test_generated_tables_are_up_to_date(generator, name):
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert "<!-- generated: environment -->" in page
    assert generator.updated(page) == page, "run: python docs/generate_reference.py"


def test_every_setting_is_in_a_table_with_its_meaning():
    for config in (cx.DistributedConfig, cx.DDPConfig, cx.DistributedTrainingConfig, cx.AMPConfig):
        table = REFERENCE.partition(f"<!-- generated: {config.__name__} -->")[2].partition("<!-- /generated -->")[0]
        rows = re.findall(r"^\| `(\w+)` \| `.+?` \| `.*?` \|.*?\| \S.* \|$", table, flags=re.MULTILINE)
        fields = [field.name for field in dataclasses.fields(config)]
        assert sorted(rows) == sorted(fields)
        assert rows == fields or config is cx.DistributedTrainingConfig


def test_reference_begins_with_ten_settings_of_fit(generator):
    first, *_ = generator.BY_NEED
    assert len(generator.BY_NEED[first]) == 10
    table = REFERENCE.partition(f"**{first}**")[2].partition("\n**")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(generator.BY_NEED[first])


def test_every_public_function_and_class_is_in_a_table(generator):
    grouped = {name for names in generator.GROUPS.values() for name in names}
    settings = {config.__name__ for config in generator.SETTINGS}
    others = {"BackendType", "ReduceOp", "datasets", "callbacks", "metrics", "DistributedTrainingHistory"}
    errors = {name for name in cx.__all__ if name.endswith("Error")}
    assert grouped | settings | others | errors == set(cx.__all__)


def test_every_environment_variable_that_the_package_reads_is_in_the_table(generator):
    source = (ROOT / "cyxtrain" / "environment" / "process_env.py").read_text(encoding="utf-8")
    ours = set(re.findall(r"\"((?:CYXTRAIN|DISTRIBUTED)_[A-Z_]+)\"", source)) - {"CYXTRAIN_WORKER"}
    listed = {name for name, *_ in generator.ENVIRONMENT}
    assert ours == {name for name in listed if name.startswith(("CYXTRAIN_", "DISTRIBUTED_"))}


# --- public names in docs/evidence.md ------------------------------------------------------------------------------

NAMES = re.findall(
    r"^\| `(\w+)` \| .+ \| `(tests/[\w/]+\.py)` \| (?:`(examples/[\w./]+)`|\[.*\]\((\w+\.md)\)) \|$",
    section(ROOT / "docs" / "evidence.md", "Public names"),
    flags=re.MULTILINE,
)


def uses(path: Path, name: str) -> bool:
    """Return whether a file uses a public name: as `cx.init`, `dist.init`, or imported; types also without a module."""
    text = path.read_text(encoding="utf-8")
    ways = [rf"\b(?:cx|dist)\.{name}\b", rf"\bcyxtrain(?:\.\w+)* import .*\b{name}\b", rf"\bcyxtrain\.{name}\b"]
    return any(re.search(way, text) for way in [*ways, *([rf"\b{name}\b"] if name[0].isupper() else [])])


def test_the_table_has_each_name_once_in_order():
    assert [name for name, *_ in NAMES] == cx.__all__


@pytest.mark.parametrize(("name", "test", "example", "page"), NAMES)
def test_the_table_names_a_test_and_an_example_that_use_it(name, test, example, page):
    assert uses(ROOT / test, name), f"{test} does not use {name}"
    path = ROOT / example if example else ROOT / "docs" / page
    assert uses(path, name), f"{path.name} does not use {name}"
