"""The code reads aloud: one statement does one thing, and comments say why. Bounds that may only fall (comments: rise).

The figures of the field, for comparison: tuple assignments 0.1 to 0.8 per 1,000 lines, conditional expressions 2.4 to
9.3, lines with a comment 4 to 9.6 %.
"""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from radon.complexity import cc_visit_ast

from tests.structure import nodes, tree

PACKAGE = Path(__file__).resolve().parents[3] / "cyxtrain"
MOST_BRANCHES = 12


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The text of each module, by its path in the package."""
    return {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


def all_nodes(sources: dict[str, str]) -> Iterator[ast.AST]:
    """Yield the syntax nodes of all modules."""
    return (node for path in sources for node in nodes(PACKAGE / path))


def per_thousand_lines(count: int, sources: dict[str, str]) -> float:
    """Return a count for each 1,000 lines of the package."""
    return 1000 * count / sum(len(source.splitlines()) for source in sources.values())


def assigns_several_values(node: ast.AST) -> bool:
    """Return whether an assignment gives several names a value each, as in `a, b = 1, 2`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def test_a_statement_assigns_one_value(sources):
    assert per_thousand_lines(sum(map(assigns_several_values, all_nodes(sources))), sources) <= 0.2


def test_decisions_are_statements(sources):
    conditional = sum(isinstance(node, ast.IfExp) for node in all_nodes(sources))
    assert per_thousand_lines(conditional, sources) <= 10


def test_comments_say_why():
    comments = 0
    lines = 0
    for path in PACKAGE.rglob("*.py"):
        with path.open("rb") as file:
            comments += len(
                {token.start[0] for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT}
            )
        lines += len(path.read_bytes().splitlines())
    assert comments / lines >= 0.024


def test_no_function_has_too_many_branches(sources):
    """By radon's count, which has comprehensions, conditional expressions, `and` and `or` in it."""
    blocks = [(path, block) for path in sources for block in cc_visit_ast(tree(PACKAGE / path))]
    functions = [(path, each) for path, block in blocks for each in (block, *getattr(block, "methods", ()))]
    found = {
        f"{path}:{each.name}": each.complexity
        for path, each in functions
        if each.letter in "FM" and each.complexity > MOST_BRANCHES
    }
    assert found == {}
