"""Random keys on their way in: a call without one shows how it is written."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def keyed(call: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Refuse calls of a function without a random key, by an error that shows how to call it."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if "key" not in kwargs:
                raise TypeError(
                    f"There is no random key: it is passed by its name, in {call}, such as "
                    "key=jax.random.key(0)."
                )
            if not _is_key(kwargs["key"]):
                got = type(kwargs["key"]).__name__
                shape = getattr(kwargs["key"], "shape", None)
                raise TypeError(
                    f"key must be one random key, such as jax.random.key(0), in {call}; got "
                    f"{got}{'' if shape is None else f' of shape {shape}'}."
                )
            return function(*args, **kwargs)

        return checked

    return decorate


def _is_key(value: Any) -> bool:
    """Whether a value is one random key of JAX, of the new kind or the old."""
    if not isinstance(value, jax.Array | np.ndarray):
        return False
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value.shape == ()
    return value.dtype == np.uint32 and value.shape in ((2,), (4,))
