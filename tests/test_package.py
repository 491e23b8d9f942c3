"""The package as an installed thing: importing it, its names, its version."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import consilience as cs

SOURCE = Path(cs.__file__)


def test_importing_is_quick_and_has_no_side_effects():
    script = """
import logging, os, sys, threading, time, warnings
handlers, filters, environment = list(logging.root.handlers), list(warnings.filters), {**os.environ}
import consilience
assert time.process_time() < 2, time.process_time()
assert not {"jax", "numpyro", "matplotlib", "xarray"} & set(sys.modules)
assert logging.root.handlers == handlers and warnings.filters == filters
assert {**os.environ} == environment and threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-I", "-c", script], check=True)


def test_using_it_starts_no_figure_and_no_device():
    script = """
import sys
import consilience as cs
for name in cs.__all__:
    getattr(cs, name)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert "matplotlib" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_is_where_editors_look_for_it():
    tree = ast.parse(SOURCE.read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == {name: f"consilience.{module}" for name, module in cs._HOME.items()}
    assert sorted(seen) == cs.__all__ and set(cs.__all__) <= set(dir(cs))
    for name in cs.__all__:
        assert getattr(cs, name).__name__ == name
    assert cs.metrics.mmd and cs.plots.pairs


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'consilience' has no attribute 'fitt'"):
        _ = cs.fitt


def test_the_version_has_one_source_and_types_are_shipped():
    assert cs.__version__ == importlib.metadata.version("consilience")
    assert (SOURCE.parent / "py.typed").exists()
