"""What tells one prior from another, kept with runs and fits: words, and every number.

A fingerprint is a text that goes into a file. Its structure is compared as it is, its numbers up
to rounding: the same model may compute them on another machine, or in another precision.
"""

import base64
import dataclasses
import importlib
import itertools
import json
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import Distribution
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import Transform

ROUNDING = 1e-6
"""Numbers that differ by less, relative to their size, count as equal.

Entries of a matrix, or of a vector with negative numbers or zeros, may be what is left of larger
ones: for them, relative to the largest of their array."""

TRUNCATED = (
    dist.LeftTruncatedDistribution,
    dist.RightTruncatedDistribution,
    dist.TwoSidedTruncatedDistribution,
)

OWN = "numpyro.distributions"
"""The package whose classes name all that they are made of."""


def fingerprint(value: Any, draws: Callable[[], Any] | None = None) -> str:
    """A text with all numbers inside distributions, transforms, dictionaries and lists.

    `draws`: random numbers at fixed keys, taken where `value` has functions or classes of a user's
    own, which do not tell what they are made of.

    >>> wide, narrow = (dist.TruncatedNormal(0.0, s, low=0.0) for s in (2.0, 1.0))
    >>> agree(fingerprint(wide), fingerprint(narrow))
    False
    """
    found, versions = _Found(), {"numpyro": version("numpyro")}
    found.add(value)
    if found.opaque and draws is not None:
        with _in_float32(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that numbers of the user's are rounded
            found.add(jax.device_get(draws()))
        versions["jax"] = version("jax")
    flat = np.concatenate([np.zeros(0), *found.numbers])
    return json.dumps(
        versions
        | {
            "structure": found.words,
            "numbers": base64.b64encode(flat.astype("<f8").tobytes()).decode(),
        }
    )


def agree(held: str, given: str) -> bool | None:
    """Whether two fingerprints are of the same prior; None where nobody can tell.

    Other versions of NumPyro may build the same distribution from other parts, and other versions
    of JAX may draw other random numbers.
    """
    try:
        first, second = json.loads(held), json.loads(given)
        for name in ("numpyro", *({"jax"} & set(first) & set(second))):
            if first[name] != second[name]:
                return None
        if first["structure"] != second["structure"]:
            return False
        pairs = zip(_arrays(first), _arrays(second), strict=True)
        return all(_close(a, b) for a, b in pairs)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _arrays(found: dict[str, Any]) -> list[np.ndarray]:
    """The arrays of numbers, by the shapes that the structure names."""
    flat = np.frombuffer(base64.b64decode(found["numbers"]), "<f8")
    words = [word[1:] for word in found["structure"] if word.startswith("#")]
    shapes = [tuple(int(n) for n in word.split("x") if n) for word in words]
    ends = np.cumsum([0, *(np.prod(shape, dtype=int) for shape in shapes)])
    if ends[-1] != len(flat):
        raise ValueError("The numbers of a fingerprint are not those that it names.")
    parts = (flat[i:j] for i, j in itertools.pairwise(ends))
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    mixed = a.ndim > 1 or (a.ndim == 1 and not ((a > 0) & (b > 0)).all())
    finite = np.abs([a, b])[np.isfinite([a, b])]
    least = ROUNDING * finite.max(initial=0.0) if mixed else 0.0
    return np.allclose(a, b, rtol=ROUNDING, atol=least, equal_nan=True)


@dataclasses.dataclass
class _Found:
    """What a walk through a value has found; `opaque`: not all of it tells its numbers."""

    words: list[str] = dataclasses.field(default_factory=list)
    numbers: list[np.ndarray] = dataclasses.field(default_factory=list)
    opaque: bool = False

    def add(self, value: Any):
        if isinstance(value, Mapping):
            self.words.append("{" + str(len(value)))
            for name, part in value.items():
                self.words.append(f"{json.dumps(str(name))}:")
                self.add(part)
        elif isinstance(value, list | tuple):
            self.words.append(f"[{len(value)}")
            for part in value:
                self.add(part)
        elif isinstance(value, Distribution | Transform | Constraint):
            self.words.append(type(value).__name__)
            self.opaque |= not type(value).__module__.startswith(OWN)
            self.add(self._fields(value))
        elif value is None or isinstance(value, bool):
            self.words.append(str(value))
        elif isinstance(value, str):
            self.words.append(json.dumps(value))
        elif _no_array(value) and not jax.tree_util.all_leaves([value]):
            self.words.append(type(value).__name__)
            self.opaque = True
            self.add(jax.tree.leaves(value))
        else:
            self._add_array(value)

    def _fields(self, value: Any) -> Any:
        """All that a distribution, transform or constraint is made of."""
        if isinstance(value, Distribution):
            # NumPyro gathers names in a set: their order differs from process to process.
            cls = type(value)
            names = {*cls.gather_pytree_data_fields(), *cls.gather_pytree_aux_fields()}
            return {name: vars(value).get(name) for name in sorted(names - {"_validate_args"})}
        try:
            return value.tree_flatten()
        except (NotImplementedError, AttributeError):
            self.opaque = True
            return None

    def _add_array(self, value: Any):
        if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.empty((), object) if _no_array(value) else np.asarray(value)
        if jax.dtypes.issubdtype(array.dtype, np.complexfloating):
            array = np.stack([array.real, array.imag])
        if not (array.dtype == bool or jax.dtypes.issubdtype(array.dtype, np.number)):
            # A function, a sparse matrix, a network: its name says too little.
            self.opaque = True
            self.words.append(json.dumps(getattr(value, "__qualname__", type(value).__name__)))
            return
        self.words.append("#" + "x".join(map(str, array.shape)))
        self.numbers.append(array.astype(float).ravel())


def _in_float32() -> Any:
    """A context in which draws are the same, whatever the precision outside."""
    context: Any = getattr(jax, "enable_x64", None)
    if context is None:  # older versions of JAX
        context = importlib.import_module("jax.experimental").enable_x64
    return context(False)


def _no_array(value: Any) -> bool:
    return not isinstance(value, np.ndarray | np.generic | jax.Array | int | float | complex)


def describe(part: Distribution) -> str:
    """A distribution in a line, with the distributions and transforms that it is made of.

    >>> describe(dist.TruncatedNormal(0.0, 1.0, low=-1.0))
    'LeftTruncatedDistribution(Normal(loc=0, scale=1), low=-1)'
    """
    while isinstance(part, dist.Independent | dist.ExpandedDistribution):
        part = part.base_dist
    fields = {name: vars(part).get(name) for name in sorted(part.gather_pytree_data_fields())}
    numbers = {name: fields[name] for name in part.arg_constraints if name in fields}
    # A distribution with numbers of its own makes its inner ones from them.
    made = numbers and not isinstance(part, TRUNCATED)
    shown = [] if made else [text for value in fields.values() for text in _inside(value)]
    shown += [f"{name}={_number(value)}" for name, value in numbers.items()]
    return f"{type(part).__name__}({', '.join(shown)})"


def _inside(value: Any) -> list[str]:
    """Texts of the distributions and transforms in a field of a distribution."""
    if isinstance(value, list | tuple):
        return [text for part in value for text in _inside(part)]
    if isinstance(value, Distribution):
        return [describe(value)]
    if not isinstance(value, Transform):
        return []
    named = {name: v for name, v in vars(value).items() if not name.startswith("_")}
    inner = [text for part in named.values() for text in _inside(part)]
    numbers = {name: v for name, v in named.items() if isinstance(v, NUMERIC)}
    shown = [*inner, *(f"{name}={_number(v)}" for name, v in numbers.items())]
    return [f"{type(value).__name__}({', '.join(shown)})"]


NUMERIC = (int, float, np.ndarray, np.generic, jax.Array)


def describe_briefly(part: Distribution) -> str:
    """The line that version 0.1.0 put into files."""
    while isinstance(part, dist.Independent | dist.ExpandedDistribution):
        part = part.base_dist
    if isinstance(part, dist.MaskedDistribution | dist.TransformedDistribution):
        inner = describe_briefly(part.base_dist)
        return f"{type(part).__name__}({inner})"
    numbers = {n: getattr(part, n) for n in part.arg_constraints if hasattr(part, n)}
    shown = ", ".join(f"{name}={_number(value)}" for name, value in numbers.items())
    return f"{type(part).__name__}({shown})"


def _number(value) -> str:
    try:
        flat = np.asarray(value, dtype=float).ravel()
    except (TypeError, ValueError):  # a sparse matrix, say
        return type(value).__name__
    # Shortened for people; the sum keeps long vectors that differ apart.
    if flat.size > 4:
        return f"<{flat.size} numbers, sum {flat.sum():.6g}>"
    text = ", ".join(f"{v:.6g}" for v in flat)
    return text if flat.size == 1 else f"[{text}]"
