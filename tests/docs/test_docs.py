"""Run the code blocks of `docs/` and README, and compare their output with the pages."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from markers import nightly_where
from page_runs import run_page
from pages import DOCS, ROOT, Page, check_prints, is_like, read_page
from rank_processes import run_processes, run_ranks, values

from cyxtrain.launch.command_line import cyxtrain

PAGES = [read_page(path) for path in (ROOT / "README.md", *DOCS)]
LANGUAGES = {"python", "yaml", "sh", "text", "{toctree}", "{eval-rst}"}
SECONDS = 60.0
FIT_PAGES = ("training.md", "steps.md", "losses.md", "optimizers.md", "loops.md", "speed.md")
BY_NIGHT = (*FIT_PAGES, "callbacks.md", "data.md", "recipes.md")
"""Pages whose programs take longest; test_front_door.py runs those of the recipes."""


def pages(*languages: str):
    """Parametrize over the pages with blocks of these languages that are run."""
    found = [page for page in PAGES if any(block.language in languages and block.is_run for block in page.blocks)]
    return pytest.mark.parametrize("page", found, ids=lambda page: page.path.name)


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of the blocks of a language on all pages."""
    for page in PAGES:
        for block in page.blocks:
            if block.language == language:
                yield f"{page.path.name}:{block.line}", block.text


def run_alone(page: Page, folder: Path, *, with_slow: bool, seconds: float) -> None:
    (folder / "page").mkdir()
    arguments = (str(page.path), str(folder / "page"), with_slow)
    [outputs] = values(run_processes(run_page, [{}], *arguments, seconds=seconds))
    check_prints(page, outputs)


@pytest.mark.usefixtures("rank_server")
@nightly_where(lambda page: page.path.name in BY_NIGHT)
@pages("python")
def test_programs_run_alone(page, tmp_path):
    run_alone(page, tmp_path, with_slow=False, seconds=SECONDS)


@nightly_where(lambda page: page.path.name != "collectives.md")
@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize("page", [page for page in PAGES if page.runs_on_two_ranks], ids=lambda page: page.path.name)
def test_programs_run_on_two_ranks(page, tmp_path):
    (tmp_path / "page").mkdir()
    values(run_ranks(2, run_page, str(page.path), str(tmp_path / "page"), False, seconds=SECONDS))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("bash") is None, reason="the commands are for bash")
@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.path.name != "README.md"], ids=lambda page: page.path.name
)
def test_programs_and_commands_run(page, tmp_path):
    run_alone(page, tmp_path, with_slow=True, seconds=550)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_marks_of_blocks_are_valid(page):
    marked = {"hosts": ("sh",), "prints": ("text",), "output": ("text",)}
    for before, block in zip((None, *page.blocks), page.blocks, strict=False):
        where = f"{page.path.name}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: {block.language!r} is not one of {LANGUAGES}"
        for mark in block.marks:
            right = mark.startswith(("not run: ", "by night: ", "ranks: ")) or block.language in marked.get(mark, ())
            assert right, f"{where}: unknown mark {mark!r}"
        if "prints" in block.marks:
            assert getattr(before, "language", "") in ("python", "sh"), f"{where}: no block before it prints this"
    files = [block.file for block in page.blocks if block.file]
    assert len(files) == len(set(files)), f"{page.path.name}: two blocks write one file"


def test_blocks_are_python():
    for place, text in blocks("python"):
        compile(text, place, "exec")


def test_blocks_are_yaml():
    for place, text in blocks("yaml"):
        assert yaml.safe_load(text), place


@pytest.mark.skipif(shutil.which("bash") is None, reason="the commands are for bash")
def test_blocks_are_commands_of_a_shell():
    text = "\n".join(text for _, text in blocks("sh"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=60)


def test_cyxtrain_understands_its_commands():
    """Every `cyxtrain ...`, also after `--`, has an existing command and valid options and arguments."""
    for line in (line for _, text in blocks("sh") for line in text.replace("\\\n", " ").splitlines()):
        words = shlex.split(line, comments=True)
        starts = [place for place, word in enumerate(words) if word == "cyxtrain"]
        for start in starts:
            arguments = words[start + 1 :]
            ends = [place for place, word in enumerate(arguments) if word in ("&&", "||", "|", ">", ";", "&")]
            check_command(cyxtrain, arguments[: min(ends, default=None)])


def check_command(command: click.Command, arguments: list[str]) -> None:
    """Parse a command with click, without running it."""
    if isinstance(command, click.Group):
        with click.Context(command, info_name=command.name) as context:
            context.resilient_parsing = True
            rest = command.make_parser(context).parse_args(args=arguments)[1] if arguments else []
        if not rest:
            return
        inner = command.get_command(context, rest[0])
        assert inner is not None, f"unknown command {rest[0]!r}"
        check_command(inner, rest[1:])
    elif "--help" not in arguments:
        with click.Context(command, info_name=command.name) as context:
            command.make_parser(context).parse_args(args=[*arguments])


@pytest.mark.parametrize(
    ("expected", "line", "is_alike"),
    [
        (
            "loss 0.8964  accuracy 0.7543  0.057 s, 1.3 ms/step, 25,345 samples/s",
            "[rank 0] loss 0.8971  accuracy 0.7550  12 s, 30.4 ms/step, 9,001 samples/s",
            True,
        ),
        ("loss 0.8964", "loss 0.7000", False),
        ("steps 45", "steps 46", False),
        ("2 ranks in 1.5 s", "2 ranks in 22.0 s", True),
        ("2 ranks", "it has 2 ranks and more", True),
        ("2 ranks", "it has 12 ranks and more", False),
        ("2 rank", "it has 2 ranks and more", False),
        ("test accuracy: 0.9667", "test accuracy: nan", False),
    ],
)
def test_output_may_differ_in_speeds_and_last_digits(expected, line, is_alike):
    assert is_like(expected, line) is is_alike
