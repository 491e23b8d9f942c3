"""ARCHITECTURE.md and the pages of decisions: every file, function and command they name exists."""

import argparse
import ast
import re
import shlex
from pathlib import Path

import pytest

import consilience
from consilience.cli.main import _parser
from tests.test_layers import ORDER

PACKAGE = Path(consilience.__file__).parent
ROOT = Path(__file__).parent.parent
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
PAGES = [ARCHITECTURE, *DECISIONS]

FILE = re.compile(r"`([\w./-]+\.(?:py|css|js|yml|md)|[\w./-]+/)`")
"""A file or a folder between backquotes."""

NAMED = re.compile(r"((?:`[A-Za-z_][\w.]*`(?:,| and|, and)?\s+)+)in\s+`([\w/]+\.py)`")
"""One definition or several, then "in", then the file that has them."""

STEP = re.compile(r"^\d+\. .*(?:\n   .*)*", re.MULTILINE)

PARTS = ["Context", "Decision", "Figure", "Measure it again"]


def located(name: str) -> Path | None:
    """A file or a folder by its path in the package or in the repository."""
    return next((base / name for base in (PACKAGE, ROOT) if (base / name).exists()), None)


def definitions(body: list[ast.stmt], before: str = "") -> set[str]:
    """Functions, classes, methods, fields and constants by their dotted names."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(before + node.name)
        if isinstance(node, ast.ClassDef):
            found |= definitions(node.body, f"{before}{node.name}.")
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {before + target.id for target in targets if isinstance(target, ast.Name)}
    return found


def named(text: str) -> list[tuple[str, str]]:
    """The definitions that a text places in a file, each with the file."""
    return [
        (name, file)
        for names, file in NAMED.findall(text)
        for name in re.findall(r"[\w.]+", names)
        if name != "and"
    ]


def absent(text: str) -> list[str]:
    """The files and definitions that a text names and that do not exist."""
    lost = [name for name in FILE.findall(text) if located(name) is None]
    for name, file in named(text):
        path = located(file)
        if path is not None and name not in definitions(ast.parse(path.read_text()).body):
            lost.append(f"{name} in {file}")
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_functions_that_a_page_names_exist(page):
    assert absent(page.read_text()) == []


def test_what_does_not_exist_is_found():
    text = "`train`, `Nothing.at_all` and\n`_Best` in `training/loop.py`, `core/lost.py`, `gone/`"
    assert absent(text) == ["core/lost.py", "gone/", "Nothing.at_all in training/loop.py"]


def test_every_folder_and_no_other_is_listed_in_order():
    text = ARCHITECTURE.read_text()
    assert re.findall(r"^\| `(\w+)(?:/|\.py)` \|", text, re.MULTILINE) == list(ORDER)
    there = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    there |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert there == set(ORDER)


def test_both_ways_are_numbered_and_every_step_names_a_function():
    for way in ("one run", "one evaluation of the loss"):
        section = ARCHITECTURE.read_text().split(f"## The way of {way}\n")[1].split("\n## ")[0]
        steps = STEP.findall(section)
        assert [int(step.split(".")[0]) for step in steps] == list(range(1, len(steps) + 1))
        assert len(steps) > 5 and all(named(step) for step in steps)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_its_four_parts_and_commands_that_exist(page):
    text = page.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == PARTS
    context, decision, figure, measure = re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]
    assert all(part.strip() for part in (context, decision, figure))
    (block,) = re.findall(r"^```sh\n(.*?)^```$", measure, re.DOTALL | re.MULTILINE)
    for line in block.splitlines():
        check_command(shlex.split(line))


def check_command(words: list[str]):
    """That a command is a target, a test, a script with these options, or one of the library."""
    command, *rest = words
    if command == "make":
        (target,) = rest
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif command == ".venv/bin/consilience":
        assert isinstance(_parser().parse_args(rest), argparse.Namespace)
    elif rest[:2] == ["-m", "pytest"]:
        file, _, name = rest[-1].partition("::")
        assert name in {"", *definitions(ast.parse((ROOT / file).read_text()).body)}
    elif rest[0].startswith("benchmarks/"):
        script = (ROOT / rest[0]).read_text()
        for word in rest[1:]:
            assert f'"{word}"' in script or word.startswith("out/"), word
    else:
        assert words == ["mkdir", "-p", "out"] or rest[:3] == ["-X", "importtime", "-c"]


def test_decisions_are_numbered_and_all_listed():
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    index = (DECISIONS[0].parent / "index.md").read_text()
    titles = [page.read_text().splitlines()[0].removeprefix("# ") for page in DECISIONS]
    listed = re.findall(r"^- \[(.+)\]\((.+)\)$", index, re.MULTILINE)
    assert listed == [(title, page.name) for title, page in zip(titles, DECISIONS, strict=True)]
