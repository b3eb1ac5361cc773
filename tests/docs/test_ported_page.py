"""The tables of docs/ported.md name all programs, with the lines that they have."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = runpy.run_path(str(ROOT / "docs" / "generate_ported.py"))
PAGE = GENERATOR["PAGE"].read_text(encoding="utf-8")


def rows(name: str) -> list[list[str]]:
    """Return the cells of a table."""
    table = PAGE.partition(f"<!-- measured: {name} -->")[2].partition("<!-- /measured -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "`" in line]


def test_the_table_of_losses_has_every_program_and_differences_that_are_rounding():
    found = rows("losses")
    assert {row[1].strip("`") for row in found} == {
        path.relative_to(ROOT).as_posix() for path in GENERATOR["PROGRAMS"].values()
    }
    assert len(found) == len(GENERATOR["PROGRAMS"]) == 10
    for row in found:
        assert all(float(loss) > 0 for loss in row[2:4]), row
        assert float(row[5]) <= 1e-4, row  # in float64, it is rounding
        assert re.match(r"\d{4}-\d\d-\d\d: torch \d", row[6]), row


def test_the_lines_of_programs_in_other_libraries_are_counted_from_their_files():
    found = {row[2].strip("`"): int(row[3]) for row in rows("libraries")}
    programs = [path for path in GENERATOR["SIDE"].glob("*.py") if not path.stem.endswith("_task")]
    assert found == {path.relative_to(ROOT).as_posix(): GENERATOR["code_lines"](path) for path in programs}


def test_a_line_of_code_is_none_of_imports_docstrings_comments_and_blank_lines(tmp_path):
    program = tmp_path / "program.py"
    head = '"""A\n\nB."""\nfrom os import (\n    path,\n)\n\n# why\n'
    body = 'def f():\n    """C."""\n    return (\n        1\n    )\n'
    program.write_text(head + body, encoding="utf-8")
    assert GENERATOR["code_lines"](program) == 4
