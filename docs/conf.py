"""Sphinx's settings. `sphinx-build -W docs docs/_build` builds the pages, and ends with an error at any warning."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import cyxtrain

project = "Cyxtrain"
author = project_copyright = "The Cyxtrain authors"
version = release = cyxtrain.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme_options = {
    "description": "Keras's fit for any PyTorch module, on as many processes as there are",
    "fixed_sidebar": True,
    "page_width": "1100px",
}

# Headings have the addresses that GitHub gives them, so that links between pages work in both places.
myst_heading_anchors = 3

# Docstrings are shown in the order of the code. What is in single backticks is code, and a link where it is public.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 100

_COLON = "\0"


def _before_napoleon(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Prepares a docstring.

    The list "Fields:" of settings goes, because each field is shown by itself. Napoleon takes what stands before a
    colon for a type, in fields, properties and after "Returns:": these colons are hidden from it. A name that begins
    with a dot would lose it as a link.
    """
    if what == "class" and dataclasses.is_dataclass(found) and "Fields:" in lines:
        del lines[lines.index("Fields:") :]
    hides = what in ("attribute", "property")
    for number, line in enumerate(lines):
        if re.fullmatch(r"[A-Z]\w+:", line):
            hides = line == "Returns:"
            continue
        text = re.sub(r"(?<![\w`)])`(\.\w[^`]*)`", r"``\1``", line)
        lines[number] = text.replace(":", _COLON) if hides else text


def _without_fields(app: Any, what: str, name: str, found: Any, options: Any, signature: str, returns: str) -> Any:
    """Leaves the fields of settings out of the signature: they are shown below it, each with its default."""
    return ("", None) if what == "class" and dataclasses.is_dataclass(found) else None


def _after_napoleon(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Shows the colons again."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def setup(app: Any) -> None:
    """Registers what is done with docstrings; napoleon's priority is 500."""
    app.connect("autodoc-process-docstring", _before_napoleon, priority=100)
    app.connect("autodoc-process-docstring", _after_napoleon, priority=900)
    app.connect("autodoc-process-signature", _without_fields)
