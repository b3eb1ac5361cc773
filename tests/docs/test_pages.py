"""Files, functions, messages, formats and limits on the pages match the code."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import struct
from pathlib import Path

import pytest
import torch
from pages import section

from cyxtrain.ring import executor
from cyxtrain.ring.monitoring import heartbeat, monitor, wait_graph
from cyxtrain.ring.rendezvous import accept
from cyxtrain.ring.schedules import algorithms, selector, summation
from cyxtrain.ring.schedules.kernels import Reduction
from cyxtrain.ring.wire import frames, link
from cyxtrain.ring.wire.frames import Control, Kind, Operation, dtype_code, expected_header, header

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence.md"
PAGES = ("how_it_works", "ring", "exactness", "faults")
FOLDERS = (ROOT, ROOT / "cyxtrain", ROOT / "docs")


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def prose(name):
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page(name), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_exist(name):
    named = re.findall(r"`([\w/]+(?:/|\.(?:py|md|svg)))`", prose(name)) + re.findall(r"!\[.*?\]\((.*?)\)", page(name))
    assert named
    places = [*FOLDERS, *(path for path in (ROOT / "cyxtrain").rglob("*") if path.is_dir())]
    missing = [each for each in named if not any((place / each).exists() for place in places)]
    assert missing == []


def test_each_feature_names_a_test_and_what_happens_on_resume_in_a_notebook_and_in_yaml():
    lines = section(EVIDENCE, "Features").splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        assert len(row) == 5, row
        assert all(cell.strip() for cell in row), row
        tests = re.findall(r"`(tests/[\w/.]+)::(\w+)`", row[-1])
        assert tests, row
        for file, name in tests:
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)


def test_a_page_names_every_part_of_the_ring_that_a_frame_meets():
    for name in (
        "link.py",
        "frames.py",
        "algorithms.py",
        "selector.py",
        "rendezvous/handshake.py",
        "monitoring/monitor.py",
    ):
        assert f"`{name}`" in page("ring")


WHERE_TO_LOOK = page("how_it_works").partition("## Where to look")[2]


def test_functions_to_look_for_are_in_the_files_of_their_row():
    rows = re.findall(r"^\| .+\? \| (.*`cyxtrain/.+) \| (.+) \|$", WHERE_TO_LOOK, flags=re.MULTILINE)
    assert len(rows) > 10
    for files, names in rows:
        modules = [
            importlib.import_module(path.replace("/", ".").removesuffix(".py"))
            for path in re.findall(r"`([\w/]+\.py)`", files)
        ]
        for name in re.findall(r"`([\w.]+)`", names):
            first, *rest = name.split(".")
            owner = next((vars(module)[first] for module in modules if first in vars(module)), None)
            assert owner is not None, f"{name} is not in {files}"
            functools.reduce(getattr, rest, owner)


def source_with_joined_strings():
    """Return the source of the package, with adjacent strings joined."""
    sources = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "cyxtrain").rglob("*.py")))
    return "".join(re.sub(r"[\"']\s+f?[\"']", "", source) for source in sources)


def test_messages_on_the_page_of_faults_are_in_the_package():
    package = source_with_joined_strings()
    tables = "".join(line + "\n" for line in prose("faults").splitlines() if line.startswith("| "))
    quoted = set(re.findall(r'"([^"]+)"', re.sub(r"`[^`]*`", "", tables)))
    assert len(quoted) > 40
    assert {words for words in quoted if words not in package} == set()


def fields_of_header():
    """Return (first byte, end, field, type) of each row in the table of a data frame's header."""
    table = page("ring").partition("A data frame")[2].partition("```")[0]
    rows = re.findall(r"^\| (\d+)(?:-(\d+))? \| (\w+) \| (.+?) \|", table, flags=re.MULTILINE)
    return [(int(first), int(last or first) + 1, field, kind) for first, last, field, kind in rows]


def test_the_table_of_a_header_covers_every_byte_with_its_type():
    fields = fields_of_header()
    sizes = {"2 bytes": 2, "u8": 1, "u32": 4, "i64": 8, "u64": 8, "6 x u64": 48}
    assert [first for first, *_ in fields] == [0, *(end for _, end, *_ in fields)][:-1]
    assert fields[-1][1] == frames.HEADER_BYTES
    assert all(end - first == sizes[kind] for first, end, _, kind in fields)
    known = next(end for _, end, field, _ in fields if field == "payload")
    assert known == frames.EXPECTED_BYTES
    assert f"first {known} bytes" in page("ring")
    assert f"header of {frames.HEADER_BYTES} bytes" in page("ring")
    assert f"| of the {fields[-1][0]} bytes before;" in page("ring")
    assert f"| 2 | version | u8 | of the protocol: {frames.PROTOCOL_VERSION} |" in page("ring")


PLAIN = Operation(Kind.ALL_REDUCE, 1, Reduction.SUM, dtype_code(torch.float32), (2, 3), 0, 0)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("generation", PLAIN._replace(generation=7)),
        ("operation", PLAIN._replace(kind=Kind.BROADCAST)),
        ("reduction", PLAIN._replace(reduction=Reduction.MAX)),
        ("dtype", PLAIN._replace(dtype=dtype_code(torch.int64))),
        ("root", PLAIN._replace(root=5)),
        ("shape", PLAIN._replace(shape=(2, 4))),
        ("sequence", PLAIN._replace(sequence=9)),
    ],
)
def test_each_field_of_a_header_is_where_the_table_says(field, changed):
    plain, other = (
        header(expected_header(each.identity(), 0), memoryview(b""), checksums=None) for each in (PLAIN, changed)
    )
    first, end = next((first, end) for first, end, name, _ in fields_of_header() if name == field)
    different = [number for number in range(len(plain)) if plain[number] != other[number]]
    assert different
    assert first <= min(different) <= max(different) < end


def test_numbers_of_operations_reductions_and_kinds_are_those_of_the_code():
    text = page("ring")
    for kinds, lowers in ((Kind, True), (Reduction, False), (Control, True)):
        names = [f"{each.value} {each.name.lower() if lowers or not each else each.name}" for each in kinds]
        assert ", ".join(names) in text, names


def test_the_table_of_a_control_frame_covers_its_header():
    table = page("ring").partition("A control frame")[2].partition("## ")[0]
    rows = re.findall(r"^\| (\d+)(?:-(\d+))? \|", table, flags=re.MULTILINE)
    assert [int(first) for first, _ in rows] == [0, *(int(last or first) + 1 for first, last in rows)][:-1]
    assert int(rows[-1][1]) + 1 == frames.CONTROL_HEADER_BYTES == struct.calcsize(">2sBBI8s8s")
    assert f"| 2 | version | u8 | {frames.PROTOCOL_VERSION} |" in table


KIB = 1024


@pytest.mark.parametrize(
    ("words", "ours", "theirs"),
    [
        ("up to 16 KiB, up to 8 ranks", (16 * KIB, 8), (selector.SHORT_BYTES, algorithms.FEW_RANKS)),
        ("Up to 256 KiB it is a tree", 256 * KIB, summation.FEW_BYTES),
        ("of more than 16 KiB are *staged*", 16 * KIB, selector.SHORT_BYTES),
        ("a window of 2 MiB in shared memory", 2048 * KIB, selector.WINDOW_BYTES),
        ("in segments of 1 MiB", 1024 * KIB, selector.SEGMENT_BYTES),
        ("one of 256 at a time", 256, accept._MAX_STRANGERS),
        ("suspended for 4 s, or gone for 0.5 s", (4, 0.5), (heartbeat.STOPPED_SECONDS, heartbeat.GONE_SECONDS)),
        ("every half second", 0.5, monitor._LONGEST_BEAT_SECONDS),
        ("acknowledged for 4.5 s", 4500, link._CONTROL_OPTIONS["TCP_USER_TIMEOUT"]),
        ("waited for half a second", 0.5, executor._LONG_SECONDS),
        ("After 30 s a rank that waits", 30, wait_graph.WARN_SECONDS),
    ],
)
def test_limits_on_the_page_of_the_ring_are_those_of_the_code(words, ours, theirs):
    assert words in " ".join(page("ring").split()), words
    assert ours == theirs


KERAS = section(EVIDENCE, "Tests of Keras")
KERAS_ROWS = re.findall(r"^\| `(test_\w+)` \| (.+) \|$", KERAS, flags=re.MULTILINE)


def test_each_test_of_keras_has_an_answer_and_the_tests_that_show_it():
    assert len(KERAS_ROWS) > 140
    for name, answer in KERAS_ROWS:
        assert re.match(r"yes[:,] |not applicable: |refused: ", answer), (name, answer)
        tests = re.findall(r"`(tests/[\w/.]+)::(\w+)`", answer)
        assert tests or not answer.startswith("yes"), name
        for file, test in tests:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"^(def {test}\(|{test} = )", text, flags=re.MULTILINE), (name, file, test)
    counts = [sum(answer.startswith(kind) for _, answer in KERAS_ROWS) for kind in ("yes", "not app", "refused")]
    assert [len(KERAS_ROWS), *counts] == [
        int(number) for number in re.findall(r"\b\d+\b", KERAS.partition("Of ")[2])[:4]
    ]


def test_the_tests_of_keras_are_those_of_its_package():
    found = importlib.util.find_spec("keras")
    if found is None or importlib.metadata.version("keras") not in KERAS:
        pytest.skip("this version of Keras is not installed")
    folder = Path(found.origin).parent / "src"
    files = [folder / "trainers" / "trainer_test.py", *sorted((folder / "callbacks").glob("*_test.py"))]
    in_class = re.compile(r"^    def (test_\w+)\(", flags=re.MULTILINE)
    names = [name for path in files for name in in_class.findall(path.read_text(encoding="utf-8"))]
    assert [name for name, _ in KERAS_ROWS] == [name for name in names if name != "test_step"]
