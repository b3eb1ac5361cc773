"""The pictures of the documents are valid, readable and match the code."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cyxtrain.data.sampler import DistributedSampler
from cyxtrain.ring.schedules import algorithms
from cyxtrain.training.step import training_step

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def parsed(name):
    return ElementTree.parse(ROOT / "docs" / "pictures" / name).getroot()


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_picture_is_drawn_and_named(path):
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    assert [child.tag for child in root[:2]] == [f"{SVG}title", f"{SVG}desc"]
    assert all((child.text or "").strip() for child in root[:2])
    # Screen readers read the title of an <img>.
    named = {child.get("id") for child in root[:2]}
    assert set(root.get("aria-labelledby", "").split()) == named
    assert path.stat().st_size < 15_000


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_picture_needs_nothing_else_and_has_colours_for_light_and_dark_pages(path):
    text = path.read_text(encoding="utf-8")
    # A browser does not load what an embedded picture links to.
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|<image|<script|<foreignObject", text)
    light, _, dark = text.partition("@media (prefers-color-scheme: dark)")
    for rule in re.findall(r"^\s*(?:[\w.]+, )*([\w.]+) \{[^}]*(?:fill|stroke): #", light, flags=re.MULTILINE):
        assert re.search(rf"{re.escape(rule)}\b[^{{}}]*\{{", dark), f"{rule} has no colour for dark mode"
    root = parsed(path.name)
    classes = {name for node in root.iter() for name in node.get("class", "").split()}
    ruled = set(re.findall(r"\.([a-z]\w*)", "".join(node.text for node in root.iter(f"{SVG}style"))))
    assert ruled <= classes, "a CSS rule without an element"


def drawn_steps():
    """Return the names in the picture of a step, from top to bottom."""
    texts = [node for node in parsed("step.svg").iter(f"{SVG}text") if node.get("class") == "step"]
    return [node.text for node in sorted(texts, key=lambda node: float(node.get("y")))]


def test_picture_of_a_step_has_the_order_of_the_code():
    shard, *names = drawn_steps()
    assert shard == "shard"  # before the step begins
    docstring = training_step.__doc__.replace("\n", " ")
    order = re.search(r"The order of a training step: (.*?)\.", docstring).group(1)
    assert "next loss scale" in order
    for clause in order.split("; "):
        assert any(re.search(rf"\b{re.escape(name)}", clause) for name in names), f"not in the picture: {clause}"
    place = 0
    for name in names:
        found = re.search(rf"(?<!\w){re.escape(name)}", order[place:])
        assert found, f"{name} is at another place in the docstring"
        place += found.end()


def test_picture_of_a_step_shards_as_the_sampler_does():
    rows = {}  # by height: (owner, number), from left to right
    drawn = [node for group in parsed("step.svg").findall(f"{SVG}g") if group.get("class") == "in" for node in group]
    for rectangle, number in itertools.pairwise(drawn):
        if rectangle.tag == f"{SVG}rect":
            rows.setdefault(float(rectangle.get("y")), []).append((rectangle.get("class"), int(number.text)))
    joined, dealt = (rows[height] for height in sorted(rows))
    assert [number for _, number in joined] == DistributedSampler(12, rank=0, world_size=1).get_indices()[:6]
    for rank in range(3):
        own = DistributedSampler(12, rank=rank, world_size=3).get_indices()[:2]
        for row in (joined, dealt):
            assert [number for owner, number in row if owner == f"rank{rank}"] == own


def passed_around(world_size):
    """Yield the contents of each rank's chunks, initially and after each step of an all_reduce, as letters of ranks."""
    spans = algorithms.even_spans(1, world_size)
    ranks = range(world_size)
    schedules = [
        [
            *algorithms.reduce_scatter(rank, world_size, spans),
            *algorithms.all_gather(rank, world_size, spans, tuple(ranks)),
        ]
        for rank in ranks
    ]
    now = [[letter] * world_size for letter in "abc"[:world_size]]
    yield now
    for steps in zip(*schedules, strict=True):
        before, now = now, [[*row] for row in now]
        for rank, own in enumerate(steps):
            first, _ = own.receive
            assert steps[own.receive_from].send == own.receive
            came = before[own.receive_from][first]
            now[rank][first] = (
                f"{came}+{before[rank][first]}" if own.on_receive is algorithms.OnReceive.COMBINE else came
            )
        yield now


def test_picture_of_the_ring_is_its_schedule():
    groups = {group.get("id"): group for group in parsed("ring.svg").iter(f"{SVG}g")}
    for number, state in enumerate(passed_around(3)):
        texts = groups.pop(f"after-{number}").findall(f"{SVG}text")
        cells = sorted(texts, key=lambda node: (float(node.get("y")), float(node.get("x"))))
        assert [node.text for node in cells] == [each for row in state for each in row]
    assert groups == {}


def test_picture_of_the_roads_names_files_that_exist():
    files = [node.text for node in parsed("roads.svg").iter(f"{SVG}text") if node.get("class") == "file"]
    assert len(files) > 10
    for name in " ".join(files).split():
        assert list((ROOT / "cyxtrain").rglob(name)), name
