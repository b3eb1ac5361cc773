"""Sphinx settings. `sphinx-build -W docs docs/_build` builds the pages, and fails at any warning."""

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
    "description": "Keras's fit for any PyTorch module, on any number of processes",
    "fixed_sidebar": True,
    "page_width": "1100px",
}

# Use GitHub's anchors for headings, so that links between pages work in both places.
myst_heading_anchors = 3

# Show docstrings in the order of the code. Text in single backticks is code, and a link if it is a public name.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 100

_COLON = "\0"


def _before_napoleon(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Prepare a docstring for napoleon.

    Remove the list "Fields:" of settings, because each field has its own entry. Hide colons in fields, properties and
    after "Returns:", because napoleon would parse the text before them as a type. Keep the dot at the start of a name,
    which a link would drop.
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
    """Remove the fields of settings from the signature: each has an entry with its default below it."""
    return ("", None) if what == "class" and dataclasses.is_dataclass(found) else None


def _after_napoleon(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Restore the hidden colons."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def setup(app: Any) -> None:
    """Register the functions for docstrings; napoleon's priority is 500."""
    app.connect("autodoc-process-docstring", _before_napoleon, priority=100)
    app.connect("autodoc-process-docstring", _after_napoleon, priority=900)
    app.connect("autodoc-process-signature", _without_fields)
