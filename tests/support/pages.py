"""Pages of the documents and their code blocks. `page_runs.py` runs the blocks.

Markers on a page control what happens to a block:

- Blocks of `python` run from top to bottom in one namespace, in an empty folder, as a world of one. A page with the
  line `<!-- ranks: 2 -->` also runs on two ranks.
- A block of `python` or `yaml` whose first line is a comment with a file name (`# train.py`, `# digits.yaml`) is
  written to that file instead, before anything runs.
- bash runs the blocks of `sh` in that folder, in the nightly tests. After the line `<!-- hosts -->`, each line is the
  command of one host: all start at once, on this machine, with the hosts' names (node0, node1) replaced by its address.
- `text` after the line `<!-- prints -->` is the output of the block before it: these lines, in this order, possibly
  with others between them (`...` marks a gap, also at either end of a line). Decimals only have to agree roughly,
  samples per second and seconds not at all.
- A block after `<!-- not run: why -->` cannot run everywhere, and is only parsed. A block after
  `<!-- by night: why -->` is slow, and runs with the commands.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
IS_CHECKOUT = (ROOT / ".git").exists() and shutil.which("git") is not None
"""Whether git knows these files. It does not in an unpacked source distribution."""

_MARK = re.compile(r"<!-- (.*?) -->")
_FILE = re.compile(r"# ([\w./-]+\.[a-z]+)")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        line: Number of its first line, from 1.
        language: The word after the fence.
        text: Its contents.
        marks: The comments before it, such as "not run: why".
    """

    line: int
    language: str
    text: str
    marks: tuple[str, ...]

    @property
    def is_run(self) -> bool:
        return not any(mark.startswith("not run") for mark in self.marks)

    @property
    def is_slow(self) -> bool:
        return self.language == "sh" or any(mark.startswith("by night") for mark in self.marks)

    @property
    def file(self) -> str | None:
        """The file that it is written to, if its first line names one."""
        found = _FILE.fullmatch(self.text.partition("\n")[0].strip())
        return found[1] if found and self.language in ("python", "yaml") and self.is_run else None


@dataclasses.dataclass(frozen=True)
class Page:
    """A page and its blocks."""

    path: Path
    text: str
    blocks: tuple[Block, ...]

    @property
    def runs_on_two_ranks(self) -> bool:
        return "<!-- ranks: 2 -->" in self.text


def read_page(path: Path) -> Page:
    """Read a page."""
    text = path.read_text(encoding="utf-8")
    blocks: list[Block] = []
    marks: list[str] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        fence = re.fullmatch(r"( *)(`{3,})(.*)", line)
        if fence:
            indent, ticks, language = fence.groups()
            inside = [each.removeprefix(indent) for _, each in itertools.takewhile(ends_not(indent + ticks), lines)]
            blocks.append(Block(number + 1, language.strip(), "".join(f"{each}\n" for each in inside), tuple(marks)))
            marks = []
        elif line.strip():
            found = _MARK.fullmatch(line.strip())
            # The end marker of a generated table, or of README's output, does not belong to the next block.
            marks = [*marks, found[1]] if found and not found[1].startswith("/") else []
    return Page(path, text, tuple(blocks))


def ends_not(fence: str) -> Callable[[tuple[int, str]], bool]:
    """Return a function that says whether a line is still within a block."""
    return lambda line: line[1].rstrip() != fence


# --- links of pages -------------------------------------------------------------------------------------------------

_LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
_OWN_FILE = re.compile(
    r"https://github\.com/cyxtrain/cyxtrain/(?:(?:blob|tree)/main/)?"
    r"|https://raw\.githubusercontent\.com/cyxtrain/cyxtrain/(?:main/)?"
)


def links_to_files(path: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield (link, file, anchor) of each link of a page into the repository, relative or with the repository's URL.

    An URL of the repository with another branch or form is a link to a file that does not exist.
    """
    for inline, defined in _LINK.findall(without_code(path.read_text(encoding="utf-8"))):
        link = inline or defined
        name, _, anchor = link.partition("#")
        own = _OWN_FILE.match(name)
        if own:
            yield link, ROOT / name[own.end() :], anchor
        elif not name:
            yield link, path, anchor
        elif not re.match(r"https?:", name):
            yield link, path.parent / name, anchor


def broken_links(path: Path) -> list[str]:
    """Return the links of a page into the repository whose file or anchor does not exist."""
    return [link for link, file, anchor in links_to_files(path) if not _leads_somewhere(file, anchor)]


def _leads_somewhere(file: Path, anchor: str) -> bool:
    if not anchor:
        return file.exists()
    return file.is_file() and anchor in anchors(file)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", without_fences(path.read_text(encoding="utf-8")), flags=re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        anchor = words.strip().replace(" ", "-")
        numbered = (f"{anchor}-{number}" for number in itertools.count(1))
        found.add(next(each for each in itertools.chain([anchor], numbered) if each not in found))
    return found


def section(path: Path, heading: str) -> str:
    """Return the text under a heading of the second level, up to the next one."""
    text = without_fences(path.read_text(encoding="utf-8"))
    return f"{text}\n".partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def without_fences(text: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^( *`{3,}).*?^\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)


def without_code(text: str) -> str:
    """Return a page without its fenced blocks and its code in backticks."""
    return re.sub(r"`[^`\n]*`", "`code`", without_fences(text))


# --- output of pages ------------------------------------------------------------------------------------------------


def check_prints(page: Page, outputs: dict[int, str]) -> None:
    """Assert that the blocks that ran printed what the page shows.

    Args:
        page: With its blocks.
        outputs: The output of each block that ran, by its number.
    """
    for number, block in enumerate(page.blocks):
        if "prints" in block.marks and number - 1 in outputs:
            printed = iter(outputs[number - 1].splitlines())
            for line in filter(lambda text: text not in ("", "..."), map(str.strip, block.text.splitlines())):
                found = any(is_like(line, each) for each in printed)
                where = f"{page.path.name}:{block.line}"
                assert found, f"{where}: {line!r} is not printed here:\n{outputs[number - 1]}"


def is_like(expected: str, line: str) -> bool:
    """Return whether a line has the expected text, except for speeds, times and the last digits of decimals."""
    expected, line = (" ".join(_unclocked(text).split()) for text in (expected, line))
    expected = expected.removeprefix("... ").removesuffix(" ...")
    pattern = r"([\d.,e+-]+|nan|inf)".join(re.escape(part) for part in _NUMBER.split(expected))
    found = re.search(rf"(?<![\w.]){pattern}(?!\w)", line)
    return found is not None and all(map(_is_near, _NUMBER.findall(expected), found.groups()))


def _unclocked(text: str) -> str:
    return re.sub(r"[\d.,]+( samples/s| ms/step| s\b)", r"?\1", text)


def _is_near(expected: str, found: str) -> bool:
    """Return whether a number is the expected one; last digits of decimals depend on the processor."""
    if "." not in expected or not _NUMBER.fullmatch(found):
        return expected == found
    return math.isclose(float(expected.replace(",", "")), float(found.replace(",", "")), rel_tol=0.05, abs_tol=0.02)
