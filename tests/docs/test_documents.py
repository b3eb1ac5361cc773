"""Names, commands, files and messages in the documents match the code; no file has a path of the author's machine."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess

import pytest
import yaml
from pages import DOCS, IS_CHECKOUT, ROOT, broken_links, read_page, without_code

import cyxtrain as cx

DOCUMENTS = [ROOT / "README.md", *DOCS]
README = DOCUMENTS[0].read_text(encoding="utf-8")
LINKED = [*sorted(ROOT.glob("*.md")), *DOCS, *sorted((ROOT / "examples").glob("*.md"))]
REPOSITORY = "https://github.com/cyxtrain/cyxtrain"
FOLDERS = (".ci", ".github", "benchmarks", "configs", "cyxtrain", "docs", "examples", "tests")


def blocks(language, document=DOCUMENTS[0]):
    """Return the fenced blocks of a document (by default README) in one language, in order."""
    return [block.text for block in read_page(document).blocks if block.language == language and block.is_run]


def blocks_of_all(language):
    """Return the blocks of all documents in one language as test parameters, named by page and line."""
    found = [(path, block) for path in DOCUMENTS for block in read_page(path).blocks if block.language == language]
    return [pytest.param(block.text, id=f"{path.name}:{block.line}") for path, block in found if block.is_run]


def project_files(*folders):
    """Yield (path, text) of every text file in some folders, or in the whole project."""
    paths = [path for folder in folders or FOLDERS for path in (ROOT / folder).rglob("*")]
    if not folders:
        paths += {*ROOT.iterdir()} - {ROOT / ".git"}  # in a worktree, a file with the path of the repository
    for path in sorted(paths):
        if (
            path.is_file()
            and not {"__pycache__", "_build"}.intersection(path.parts)
            and b"\0" not in (data := path.read_bytes())
        ):
            yield path.relative_to(ROOT), data.decode("utf-8", errors="replace")


def public_objects(tree):
    """Yield (name, owner) of the public objects that a program uses, such as `cx.init` and `trainer.fit`."""
    kinds = {"cx": cx, "trainer": cx.DistributedTrainer}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in kinds:
            yield node.attr, kinds[node.value.id]


def test_readme_begins_with_the_two_commands():
    commands = [block.strip() for block in blocks("sh")[:2]]
    assert commands == [
        "pip install . && ./launch_distributed.sh 2 python examples/train_digits.py",
        "pip install '.[test]' && pytest",
    ]


def test_continuous_integration_reads_the_commands_from_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "readme_block 1" in script
    assert "readme_block 2" in script
    assert "examples/train_digits.py" not in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="the script is for bash")
def test_continuous_integration_is_a_script_that_bash_understands():
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)


def test_workflow_on_github_runs_the_commands_of_readme():
    # YAML 1.1 parses the key "on" as true.
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    assert set(workflow[True]) == {"push", "pull_request", "schedule", "workflow_dispatch"}
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    tests = blocks("sh")[1].strip()
    by_version = "tests/compat/test_torch_versions.py"
    assert commands == {
        "linux": [".ci/run"],
        "others": [tests],
        "coverage": ["pip install '.[dev]'", *commands["coverage"][1:]],
        "nightly": ["pip install '.[nightly]' && python -m tests.night"],
        "versions": [f"{tests} -m nightly {by_version} -k ${{{{ matrix.torch }}}}"],
    }
    measured = " && ".join(commands["coverage"][1:])
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert measured.startswith(re.search(r"`(coverage run .+) && coverage report`", contributing)[1])
    assert all("timeout-minutes" in job for job in jobs.values())
    assert {"windows-latest", "macos-latest"} == set(jobs["others"]["strategy"]["matrix"]["os"])
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)


def test_workflow_of_a_release_builds_checks_and_imports_and_has_no_secrets():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert workflow[True]["push"] == {"tags": ["v*"]}
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    jobs = workflow["jobs"]
    commands = "\n".join(step["run"] for step in jobs["build"]["steps"] if "run" in step)
    for command in ("python -m build", "twine check --strict", "import cyxtrain"):
        assert command in commands
    # PyPI trusts the workflow, which publishes what was built and checked, and only of a tag.
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "build"
    assert jobs["announce"]["needs"] == "publish"
    assert jobs["publish"]["if"] == jobs["announce"]["if"] == "github.ref_type == 'tag'"


@pytest.mark.skipif(shutil.which("bash") is None, reason="the step is for bash")
@pytest.mark.parametrize(
    ("tag", "notes"), [("v0.2.0", "- Newer.\n"), ("v0.1.0", "- First.\n"), ("v0.3.0", None), ("v0.1", None)]
)
def test_release_needs_a_section_of_the_changelog(tag, notes, tmp_path):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    [step] = [each for each in workflow["jobs"]["build"]["steps"] if "changelog" in each.get("name", "")]
    changelog = "# Changelog\n\n## [0.2.0] - 2027-01-01\n- Newer.\n## [0.1.0] - 2026-01-01\n- First.\n"
    (tmp_path / "CHANGELOG.md").write_text(changelog, encoding="utf-8")
    command = ["bash", "-eo", "pipefail", "-c", step["run"]]
    found = subprocess.run(command, cwd=tmp_path, env={**os.environ, "GITHUB_REF_NAME": tag}, check=False)
    assert (found.returncode == 0) == (notes is not None)
    if notes is not None:
        assert (tmp_path / "notes.md").read_text(encoding="utf-8") == notes


def test_package_claims_the_systems_and_python_versions_that_continuous_integration_tests():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"]
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert [claimed[0], claimed[-1]] == jobs["linux"]["strategy"]["matrix"]["python"]
    assert f'requires-python = ">={claimed[0]}"' in text
    systems = re.findall(r'"Operating System :: (?:.+ :: )?(\w+)"', text)
    assert systems == ["MacOS", "Windows", "Linux"]
    assert {f"{system.lower()}-latest" for system in systems[:2]} == set(jobs["others"]["strategy"]["matrix"]["os"])


@pytest.mark.skipif(not IS_CHECKOUT, reason="only git knows which files are tracked")
def test_source_distribution_has_each_tracked_file_and_folder():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    commands = re.findall(r"^(?:include|graft) (.+)$", manifest, flags=re.MULTILINE)
    named = {name for names in commands for name in names.split()}
    by_setuptools = {"LICENSE", "MANIFEST.in", "README.md", "cyxtrain", "pyproject.toml"}
    assert {line.partition("/")[0] for line in tracked.splitlines()} - by_setuptools == named, "list it in MANIFEST.in"


def test_addresses_of_the_package_are_in_its_repository():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    urls = dict(re.findall(r'^(\w+) = "(https://.+)"$', text, flags=re.MULTILINE))
    repository = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["repository-code"]
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert urls["Source"] == repository
    for url in urls.values():
        assert url.startswith(repository)
        _, is_file, name = url.partition("/blob/main/")
        assert not is_file or (ROOT / name).is_file(), url


def test_checks_before_a_commit_are_those_of_continuous_integration():
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    entries = [hook["entry"] for hook in repository["hooks"]]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert entries[:3] == ["ruff check", "ruff format", "mypy"]
    assert all(entry in script for entry in entries[:3])


def public_names(owner):
    return (
        cx.__all__ if owner is cx else [*dir(owner), *re.findall(r"^    (\w+):", inspect.getdoc(owner), re.MULTILINE)]
    )


def test_programs_in_documents_use_public_names():
    for program in blocks_of_all("python"):
        tree = ast.parse(program.values[0])
        for name, owner in public_objects(tree):
            assert name in public_names(owner), f"{program.id}: {name!r} is not public in {owner.__name__}"
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("cyxtrain"):
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], program.id


@pytest.mark.parametrize("text", blocks_of_all("yaml"))
def test_settings_in_documents_make_an_experiment(text, tmp_path):
    (tmp_path / "experiment.yaml").write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "configs" / "base.yaml", tmp_path)
    if "model" in yaml.safe_load(text):  # otherwise it is a base file
        cx.Experiment.from_file(tmp_path / "experiment.yaml")


def test_first_program_in_readme_is_fifteen_lines():
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 15


def error_table():
    """Return (error, message) of each row in the tables of messages."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    rows = re.findall(r'^\| "([^"]+)"[^|]* \| `(\w+Error)` \|', text, flags=re.MULTILINE)
    return sorted({(error, message) for message, error in rows})


def test_errors_in_documents_are_those_that_exist():
    exist = {name for name in cx.__all__ if name.endswith("Error")} - {"CyxtrainError"}
    assert {error for error, _ in error_table()} == exist


def test_errors_in_documents_have_these_messages():
    # Long messages are split into several adjacent strings.
    package = "".join(re.sub(r'"\s+f?"', "", text) for _, text in project_files("cyxtrain"))
    assert [(error, words) for error, words in error_table() if words not in package] == []


def test_files_that_documents_name_exist():
    for document in (*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        text = document.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:benchmarks|cyxtrain|docs|examples|configs|tests|\.ci|\.github)/[\w./]*)`", text):
            assert (ROOT / name).exists(), f"{document.name} names {name}"


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_into_the_repository_lead_to_files_and_headings(path):
    assert broken_links(path) == []


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("[page](docs/ring.md)", False),
        ("[page](docs/rings.md)", True),
        ("[page](#the-top)", False),
        ("[page](#the-bottom)", True),
        (f"[page]({REPOSITORY}/blob/main/docs/ring.md#the-order-of-summation)", False),
        (f"[page]({REPOSITORY}/blob/main/docs/ring.md#no-such-heading)", True),
        (f"[page]({REPOSITORY}/blob/main/docs/rings.md)", True),
        (f"[page]({REPOSITORY}/blob/master/docs/ring.md)", True),
        (f"[page]: {REPOSITORY}/blob/main/docs/ring.md", False),
        (f"[page]: {REPOSITORY}/blob/main/docs/rings.md", True),
        ("![picture](https://raw.githubusercontent.com/cyxtrain/cyxtrain/main/docs/pictures/step.svg)", False),
        ("![picture](https://raw.githubusercontent.com/cyxtrain/cyxtrain/main/docs/pictures/steps.svg)", True),
        ("[elsewhere](https://pytorch.org/docs#anything)", False),
        ("`[page](docs/rings.md)`", False),
        ("```python\n[page](docs/rings.md)\n```", False),
    ],
)
def test_link_to_a_missing_file_or_heading_is_broken(link, is_broken, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# The top\n\n{link}\n", encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "ring.md").touch()
    assert bool(broken_links(page)) is is_broken


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_pages_that_the_registry_and_the_releases_show_have_no_relative_links(name):
    text = without_code((ROOT / name).read_text(encoding="utf-8"))
    assert re.findall(r"\]\((?!https://)[^)]*\)|^\[[^\]]+\]: (?!https://).*", text, flags=re.MULTILINE) == []


def test_each_reference_link_in_readme_is_defined_and_used():
    # A definition cannot interrupt a paragraph: without the empty line before them, these would be text.
    text, definitions = re.fullmatch(
        r"(.*\n\n)((?:\[[^\]]+\]: \S+\n)+)", without_code(README), flags=re.DOTALL
    ).groups()
    used = re.findall(r"(?:\[[^\]]+\])?\[([^\]]+)\](?![(\[])", text)
    assert {name.lower() for name in used} == set(re.findall(r"^\[([^\]]+)\]", definitions, flags=re.MULTILINE))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_names_in_documents_are_public(path):
    for name in re.findall(r"\bcx\.((?:callbacks\.|datasets\.|metrics\.)?\w+)", path.read_text(encoding="utf-8")):
        owner, _, last = name.rpartition(".")
        module = getattr(cx, owner) if owner else cx
        assert hasattr(module, last), f"{path.name}: there is no cx.{name}"


def test_the_contents_name_every_page():
    contents = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[.+\]\((\w+\.md)\): ", contents, flags=re.MULTILINE)
    assert sorted([*listed, "index.md"]) == [path.name for path in DOCS]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").iterdir()), ids=lambda path: path.name)
def test_settings_come_with_a_reason_on_each_line(path):
    for line in path.read_text(encoding="utf-8").splitlines():
        assert "#" in line or line.endswith(":"), f"{path.name}: no comment on {line!r}"


def test_examples_begin_with_what_they_show_and_how_to_run_them():
    for path in sorted((ROOT / "examples").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring, path.name
        assert path.relative_to(ROOT).as_posix() in docstring, path.name
        assert "Expect" in docstring, path.name


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    path_of_machine = re.compile(r"(?<![\w.$}])/(?:root|work|farm|opt)\b")
    found = [str(path) for path, text in project_files() if path_of_machine.search(text)]
    assert found == []


def test_package_unpickles_nothing():
    pickled = re.compile(r"(?<![\w.])(?:pickle|torch|marshal)\.loads?\b|allow_pickle=True|\bUnpickler\b")
    safe = re.compile(r"torch\.load\([^()]*weights_only=True")
    found = [str(path) for path, text in project_files("cyxtrain") if pickled.search(safe.sub("", text))]
    assert found == ["cyxtrain/notebook/sharing.py"]  # between a notebook and its authenticated workers
