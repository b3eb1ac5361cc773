"""What a new user meets first: each recipe runs, and the tasks that they look up are where front_door_tasks.md says."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from page_runs import run_program
from pages import ROOT, broken_links, check_prints, read_page
from rank_processes import run_ranks, values

TASKS = Path(__file__).with_name("front_door_tasks.md")
RECIPES = read_page(ROOT / "docs" / "recipes.md")
PROGRAMS = {block.file: number for number, block in enumerate(RECIPES.blocks) if block.file}
PRESENT = ("cyxtrain", "numpy", "torch")
"""Packages that are always installed."""


def missing_packages(program: str) -> list[str]:
    """Return the packages that a program imports and that are not installed."""
    nodes = list(ast.walk(ast.parse(program)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    tops = sorted({name.partition(".")[0] for name in names} - set(PRESENT))
    return [name for name in tops if importlib.util.find_spec(name) is None]


@pytest.mark.nightly
@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recipe_prints_what_the_page_shows_on_any_number_of_ranks(name, num_ranks, tmp_path):
    number = PROGRAMS[name]
    program = RECIPES.blocks[number].text
    missing = missing_packages(program)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    (tmp_path / name).write_text(program, encoding="utf-8")
    first, *others = values(run_ranks(num_ranks, run_program, name, str(tmp_path), seconds=100))
    check_prints(RECIPES, {number: first})
    assert not any(others)


def test_each_recipe_is_a_program_with_its_output_and_in_the_table():
    assert len(PROGRAMS) == 12
    for name, number in PROGRAMS.items():
        assert "prints" in RECIPES.blocks[number + 1].marks, name
        assert RECIPES.blocks[number + 1].text.strip(), name
    headings = re.findall(r"^## (.+)$", RECIPES.text, flags=re.MULTILINE)
    listed = re.findall(r"^\| \[(.+)\]\(#", RECIPES.text, flags=re.MULTILINE)
    assert listed == headings


def test_twelve_tasks_lead_to_a_page_and_a_heading():
    text = TASKS.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+\?.*) \| \[.+\]\(\.\./\.\./.+\.md#[\w-]+\) \|$", text, flags=re.MULTILINE)
    assert len(set(rows)) == 12
    assert broken_links(TASKS) == []


def test_readme_is_two_screens():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    above_links = text.partition("\n[repository]: ")[0]
    assert len(above_links.splitlines()) <= 110
    groups = re.findall(r"^- \*\*.+\*\*: (.+?)$", re.sub(r"\n  ", " ", text), flags=re.MULTILINE)
    counts = [len(re.findall(r"\[", group)) for group in groups]
    assert len(counts) == 3
    assert max(counts) <= 7
