"""The types of theta and x: what a type checker and the checks at run time take and refuse."""

import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from beartype.door import is_bearable

from consilience.core.types import Data, Theta

NUMBERS = {
    "an array of NumPy": np.zeros(3),
    "a masked array": np.ma.masked_array([1.0, 2.0], [False, True]),
    "a number of NumPy": np.float32(1.0),
    "an array of JAX": jnp.zeros(3),
    "a float": 1.0,
    "an integer": 1,
    "a boolean": True,
    "a nested list": [[1.0, 2.0], [3.0, 4.0]],
    "a tuple": (1.0, 2.0),
    "an array of xarray": xr.DataArray([1.0, 2.0]),
}
OTHERS = {"text": "mu", "nothing": None, "a set": {1.0}, "a function": np.mean}


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_are_taken_alone_as_data_and_in_dictionaries_as_both(what):
    value = NUMBERS[what]
    assert is_bearable(value, Data) and not is_bearable(value, Theta)
    for named in ({"a": value}, types.MappingProxyType({"a": value})):
        assert is_bearable(named, Data) and is_bearable(named, Theta)


@pytest.mark.parametrize("what", OTHERS)
def test_other_values_are_refused(what):
    for value in (OTHERS[what], {"a": OTHERS[what]}):
        assert not is_bearable(value, Data) and not is_bearable(value, Theta)


def test_values_inside_compiled_functions_are_taken():
    seen = []

    def look(theta, x):
        seen.append((is_bearable(theta, Theta), is_bearable(x, Data), is_bearable(x, Theta)))
        return x

    jax.jit(look)({"mu": 1.0}, jnp.zeros(2))
    jax.vmap(look)({"mu": jnp.zeros(2)}, jnp.zeros(2))
    jax.eval_shape(look, {"mu": 1.0}, jnp.zeros(5))
    assert seen == [(True, True, False)] * 3


CODE = """
import jax
import numpy as np
from consilience.core.types import Data, Theta

def of_theta(theta: Theta) -> int: return 0
def of_x(x: Data) -> int: return 0

def calls(theta: Theta, x: Data, array: np.ndarray, traced: jax.Array) -> None:
    arrays: dict[str, np.ndarray] = {"mu": array}
    of_theta(theta), of_theta(arrays), of_theta({"mu": 1.0, "sigma": [1.0]})
    of_x(x), of_x(array), of_x(traced), of_x(1.0), of_x([1.0, 2.0]), of_x(arrays)
    theta["mu"] + 1
    of_x(theta)  # refused
    of_theta(x)  # refused
    of_theta(array)  # refused
    of_theta(traced)  # refused
    of_theta([1.0])  # refused
    of_x("mu")  # refused
    of_x(None)  # refused
    of_theta("mu")  # refused
"""


@pytest.mark.slow
def test_a_type_checker_tells_theta_from_x(tmp_path):
    file = tmp_path / "calls.py"
    file.write_text(CODE)
    config = Path(__file__).parent.parent / "pyproject.toml"
    words = ["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), "--no-pretty"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words, "--hide-error-context", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    told = {line.split(":")[1] for line in done.stdout.splitlines() if ": error: " in line}
    lines = enumerate(CODE.splitlines(), 1)
    assert told == {str(number) for number, line in lines if "# refused" in line}, done.stdout
