"""What tells one prior from another, kept with runs and fits: every number of a distribution.

A fingerprint is a text that goes into a file. Its structure is compared as it is, its numbers up
to rounding: the same model may compute them on another machine.
"""

import base64
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
from numpyro.distributions import Distribution
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import Transform

ROUNDING = 1e-4
"""Numbers that differ by less, relative to their size, count as equal."""

WRAPPED = (Distribution, Transform, Constraint)


def fingerprint(value: Any) -> str:
    """A text with all numbers inside distributions, transforms, dictionaries and lists.

    >>> import numpyro.distributions as dist
    >>> wide, narrow = (dist.TruncatedNormal(0.0, s, low=0.0) for s in (2.0, 1.0))
    >>> agree(fingerprint(wide), fingerprint(narrow))
    False
    """
    words: list[str] = []
    numbers: list[np.ndarray] = []
    _walk(value, words, numbers)
    flat = np.concatenate([np.zeros(0), *numbers])
    return json.dumps(
        {
            "numpyro": version("numpyro"),
            "structure": " ".join(words),
            "numbers": base64.b64encode(flat.astype("<f8").tobytes()).decode(),
        }
    )


def agree(held: str, given: str) -> bool | None:
    """Whether two fingerprints are of the same prior; None where nobody can tell.

    Other versions of NumPyro may build the same distribution from other parts.
    """
    try:
        first, second = json.loads(held), json.loads(given)
        if first["numpyro"] != second["numpyro"]:
            return None
        a, b = _numbers(first), _numbers(second)
        return (
            first["structure"] == second["structure"]
            and len(a) == len(b)
            and np.allclose(a, b, rtol=ROUNDING, atol=0.0, equal_nan=True)
        )
    except (ValueError, KeyError, TypeError):
        return None


def _numbers(found: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(found["numbers"]), "<f8")


def _fields(value: Any) -> Any:
    """All that a distribution, transform or constraint is made of."""
    if not isinstance(value, Distribution):
        return value.tree_flatten()
    # NumPyro gathers names in a set: their order differs from process to process.
    cls = type(value)
    names = {*cls.gather_pytree_data_fields(), *cls.gather_pytree_aux_fields()}
    return {name: vars(value).get(name) for name in sorted(names - {"_validate_args"})}


def _walk(value: Any, words: list[str], numbers: list[np.ndarray]):
    if isinstance(value, Mapping):
        for name, part in value.items():
            words.append(f"{name}:")
            _walk(part, words, numbers)
    elif isinstance(value, list | tuple):
        words.append(f"[{len(value)}]")
        for part in value:
            _walk(part, words, numbers)
    elif isinstance(value, WRAPPED):
        words.append(type(value).__name__)
        _walk(_fields(value), words, numbers)
    elif value is None or isinstance(value, str | bool):
        words.append(str(value))
    elif isinstance(value, Callable):  # type: ignore[arg-type]
        words.append(getattr(value, "__qualname__", type(value).__name__))
    else:
        array = np.asarray(value)
        words.append(str(array.shape))
        numbers.append(array.astype(float).ravel() if array.dtype.kind in "biuf" else np.zeros(0))
