"""The order of the package's folders: a module imports only from its own folder and those above."""

import ast
import graphlib
from pathlib import Path
from typing import NamedTuple

import pytest

import consilience

PACKAGE = Path(consilience.__file__).parent

ORDER = (
    *("core", "model", "simulation", "networks", "identity", "posterior", "training", "plots"),
    *("diagnostics", "report", "metrics", "tasks", "experiments", "cli"),
)
"""Folders, and the modules beside them, from the top of the package to its end."""

UPWARD = {
    ("posterior/fit.py", "consilience.diagnostics.check"): "Fit.check",
    ("posterior/fit.py", "consilience.report.report"): "Fit.report",
}
"""Imports against the order: methods of a fit, which import what they need when called."""


class Import(NamedTuple):
    file: str
    module: str
    line: int
    lazy: bool
    """Whether it runs, or is read by a type checker, when the module is imported or later."""

    @property
    def folders(self) -> tuple[str, str]:
        return _folder(self.file), self.module.split(".")[1]


def _folder(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def imports_of(source: str, file: str, modules: set[str]) -> list[Import]:
    """The imports of this package in a module, `if TYPE_CHECKING` and functions included."""
    tree = ast.parse(source)
    later = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("consilience"):
            # `from consilience.model import data` names a module, or something in one.
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else str(node.module) for name in full]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.startswith("consilience.")]
        else:
            continue
        assert not isinstance(node, ast.ImportFrom) or node.level == 0
        found += [Import(file, name, node.lineno, node in later) for name in names]
    return found


def _sources() -> dict[str, str]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {
        file.relative_to(PACKAGE).as_posix(): file.read_text()
        for file in files
        if file != PACKAGE / "__init__.py"
    }


def _dotted(file: str) -> str:
    return "consilience." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _all_imports(sources: dict[str, str]) -> list[Import]:
    modules = {_dotted(file) for file in sources}
    return [one for file, text in sources.items() for one in imports_of(text, file, modules)]


def against_order(imports: list[Import]) -> list[Import]:
    """Imports from a folder further down that `UPWARD` does not name."""
    rank = {folder: i for i, folder in enumerate(ORDER)}
    return [
        one
        for one in imports
        if rank[one.folders[1]] > rank[one.folders[0]] and (one.file, one.module) not in UPWARD
    ]


def test_folders_import_only_from_folders_above_them():
    found = against_order(_all_imports(_sources()))
    assert not found, "\n".join(f"{one.file}:{one.line} imports {one.module}" for one in found)


def test_every_folder_has_its_place_in_the_order():
    assert {_folder(file) for file in _sources()} == set(ORDER)


def test_exceptions_are_still_needed_and_run_only_when_called():
    upward = {(one.file, one.module): one for one in _all_imports(_sources())}
    for exception in UPWARD:
        assert upward[exception].lazy


def test_modules_have_no_import_cycles():
    graph: dict[str, set[str]] = {}
    for one in _all_imports(_sources()):
        if not one.lazy:
            graph.setdefault(_dotted(one.file), set()).add(one.module)
    # Raises CycleError, which names the cycle.
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) > 50


@pytest.mark.parametrize(
    "line",
    [
        "from consilience.cli.main import main",
        "import consilience.training.train",
        "def late():\n    from consilience.posterior.fit import Fit",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from consilience import plots",
    ],
)
def test_an_upward_import_is_found(line):
    sources = _sources()
    sources["core/types.py"] += f"\n{line}\n"
    (found,) = against_order(_all_imports(sources))
    assert found.file == "core/types.py" and found.folders[1] in line


def test_init_files_of_folders_hold_one_paragraph_and_no_code():
    for file, text in _sources().items():
        if file.endswith("__init__.py"):
            (only,) = ast.parse(text).body
            assert isinstance(only, ast.Expr) and len(ast.get_docstring(ast.parse(text))) > 60
