"""What crosses the library's boundary: arrays and counts on their way in, warnings on theirs out.

Arrays become real numbers in this machine's byte order, or an error says what is wrong.
"""

import math
import operator
import sys
import warnings
from typing import Any

import numpy as np

from consilience.core.labels import label

ADVICE = {
    "c": "is complex: pass its real and imaginary parts as entries of their own",
    "U": "holds text: convert it to numbers",
    "S": "holds text: convert it to numbers",
    "M": "holds dates: pass numbers, such as seconds since the first of them",
    "m": "holds time spans: pass numbers, such as seconds",
    "O": "holds Python objects, or rows of different lengths: pass an array of numbers",
    "V": "has named fields, or a type that NumPy does not know: pass an array of numbers",
}
"""Why arrays of a kind (`numpy.dtype.kind`) are refused, and what to pass."""


def as_numbers(value: Any, what: str) -> np.ndarray:
    """An array of real numbers or booleans in native byte order; `what` names it in errors.

    >>> as_numbers(np.array([1.5, 2.0], ">f4"), "x").dtype
    dtype('float32')
    >>> as_numbers(["a"], "x")
    Traceback (most recent call last):
    TypeError: x must be real numbers, but it holds text: convert it to numbers.
    """
    return within_range(as_real(value, what))


def as_real(value: Any, what: str) -> np.ndarray:
    """As `as_numbers`, with integers of any size; needs no JAX, as in a worker process."""
    if np.ma.is_masked(value):
        raise ValueError(
            f"{what} has masked entries, and nothing says what they stand for: fill them in, drop "
            "those runs, or pass the mask as data of its own (cs.Set(mask=...) for rows)."
        )
    if str(getattr(value, "dtype", "")).startswith("key<"):
        raise TypeError(f"{what} must be real numbers, but it is a random key.")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{what} must be an array of numbers: {error}") from error
    if _is_short_float(array.dtype):
        array = array.astype(np.float32)
    if array.dtype.kind == "O" and array.ndim == 0:
        held = array.item()
        got = "nothing (None)" if held is None else f"one {type(held).__name__}"
        raise TypeError(f"{what} must be real numbers, got {got}.")
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{what} must be real numbers, but it {ADVICE[array.dtype.kind]}.")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _is_short_float(dtype: np.dtype) -> bool:
    """Whether it is a floating-point type of accelerators, such as bfloat16."""
    return dtype.type.__module__ == "ml_dtypes" and "float" in dtype.name


def within_range(array: np.ndarray) -> np.ndarray:
    """Integers that JAX would cut to 32 bits as floating-point numbers; the rest as it is.

    >>> within_range(np.array([2**31])), within_range(np.array([7])).dtype
    (array([2.14748365e+09]), dtype('int64'))
    """
    if array.dtype.kind in "iu" and array.size:
        import jax  # here: what worker processes import needs none

        held = np.iinfo(jax.dtypes.canonicalize_dtype(array.dtype))
        if array.min() < held.min or array.max() > held.max:
            return array.astype(np.float64)
    return array


def as_count(value: Any, what: str) -> int:
    """A whole number, or an error that says what came instead.

    >>> as_count(np.int64(3), "n")
    3
    """
    try:
        count = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        count = None
    if count is None:
        shown = repr(value) if np.ndim(value) == 0 else f"an array of shape {np.shape(value)}"
        raise TypeError(f"{what} must be a whole number, got {shown[:80]}.")
    return count


def computed_in() -> np.dtype:
    """The type that networks compute in: float32, or float64 under JAX's `jax_enable_x64`."""
    import jax  # here: what worker processes import needs none

    return np.dtype(jax.dtypes.canonicalize_dtype(float))


def finite_rows(*arrays: np.ndarray) -> np.ndarray:
    """Which entries of the leading axis are finite in all arrays, in the type of the networks.

    >>> finite_rows(np.zeros((3, 2)), np.array([1.0, np.nan, 1e300]))
    array([ True, False, False])
    """
    return np.all([_finite(array) for array in arrays], axis=0)


def _finite(array: np.ndarray) -> np.ndarray:
    rows = array.reshape(len(array), math.prod(array.shape[1:]))
    with np.errstate(over="ignore"):
        return np.isfinite(rows.astype(computed_in(), copy=False)).all(axis=1)


def largest() -> str:
    """The largest number that can be computed with, for messages."""
    return f"{np.finfo(computed_in()).max:.2g}"


COARSE = 0.02
"""Numbers this many spreads apart, or more, blur what is learned from them."""


def warn_if_coarse(values: np.ndarray, what: str, *, constant_too: bool = False):
    """Warn where floating-point numbers lie too far apart for values with a leading axis of runs.

    `constant_too`: warn of entries that are the same in all runs as well.
    """
    spread = np.asarray(values.astype(float).std(axis=0))
    typical = np.median(np.abs(values), axis=0).astype(computed_in())
    # What is left of rounding in 64 bits is no variation.
    constant = spread <= 1e-9 * typical
    coarse = (constant & constant_too) | (~constant & (np.spacing(typical) > COARSE * spread))
    if not coarse.any() or len(values) < 2:
        return
    worst = np.unravel_index(np.argmax(coarse), coarse.shape)
    where = label(what, worst)
    if constant[worst]:
        warn_caller(
            f"{where} is {float(values[0][worst]):.6g} in all {len(values)} runs, so that nothing "
            f"can be learned about it. Where it should vary by less than {computed_in()} resolves, "
            "subtract a constant, in the simulator too."
        )
        return
    warn_caller(
        f"{where} is about {float(values.mean(axis=0)[worst]):.6g} and varies by "
        f"{float(spread[worst]):.2g}, which {computed_in()} resolves in steps of "
        f"{float(np.spacing(typical)[worst]):.2g} only. Subtract a constant, in the simulator too, "
        'or call jax.config.update("jax_enable_x64", True) at the start.'
    )


OWN = ("consilience", "beartype", "jaxtyping", "equinox", "contextlib")
"""Packages between a user's line and a warning."""


def warn_caller(message: str):
    """Warn at the line of the user's code that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
