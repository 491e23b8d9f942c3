"""Log-likelihoods that JAX cannot see: NumPy, SciPy, C libraries, Stan.

Training stops the gradient at theta, so the likelihood need not be differentiable. It runs on
the host, called once for all datasets and all values of theta of a batch.

Compiled code keeps only the text of an exception, and may make the call in a thread of its own.
So each failure gets a number, which is in that text; calls of the library that wait for compiled
code, in any thread, note the failures that occur meanwhile, and find their own by its number.
"""

import contextlib
import dataclasses
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from consilience.core.arrays import as_numbers
from consilience.core.types import Data, Scalar


class HostError(RuntimeError):
    """A log-likelihood outside JAX has failed; its own exception is the cause."""


class _Failures:
    """The failures of log-likelihoods, by number, for each call that waits for compiled code."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: list[dict[int, Exception]] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[dict[int, Exception]]:
        """The failures that occur in here, in any thread."""
        found: dict[int, Exception] = {}
        with self._lock:
            self._waiting.append(found)
        try:
            yield found
        finally:
            with self._lock:
                # By identity: empty dictionaries are equal.
                self._waiting = [one for one in self._waiting if one is not found]

    def add(self, error: Exception) -> HostError:
        """Note a failure; what is to be raised in its place."""
        with self._lock:
            number = next(self._numbers)
            for found in self._waiting:
                found[number] = error
        return HostError(f"{type(error).__name__}: {error} [host failure {number}]")


NUMBER = re.compile(r"\[host failure (\d+)\]")

_failures = _Failures()
"""One for the process, since callbacks run in threads that know nothing of the call they serve."""

RETURNED = "What log_likelihood(theta, x) returns"


@dataclasses.dataclass(frozen=True)
class OnHost:
    """A log-likelihood in plain Python: `(theta, x) -> number`.

    `batched`: the function takes `theta` and `x` with the same leading axis and returns an array
    with one value per entry of that axis. A single call then evaluates a whole batch:
    prefer this form if you can.

    >>> from scipy import stats
    >>> OnHost(lambda theta, x: stats.norm.logpdf(x, theta, 1.0).sum())  # doctest: +ELLIPSIS
    OnHost(...)
    """

    log_likelihood: Callable[[Any, Any], Any]
    batched: bool = False

    def __call__(self, theta: Any, x: Data) -> Scalar:
        """One log-likelihood; vectorised, it still makes one call."""
        axes = jax.tree.map(jnp.ndim, (theta, x))
        result = jax.ShapeDtypeStruct((), jnp.zeros(()).dtype)

        def call(theta, x):
            try:
                return self._all(jax.tree.map(np.asarray, (theta, x)), axes, result.dtype)
            except Exception as error:
                raise _failures.add(error) from error

        return jax.pure_callback(call, result, theta, x, vmap_method="broadcast_all")

    def _all(self, arguments, axes, dtype) -> np.ndarray:
        """The log-likelihood along all leading axes of the arguments."""
        leaf, n_axes = jax.tree.leaves(arguments)[0], jax.tree.leaves(axes)[0]
        lead = leaf.shape[: leaf.ndim - n_axes]
        n = math.prod(lead)
        flat = jax.tree.map(lambda a: a.reshape(n, *a.shape[len(lead) :]), arguments)
        if self.batched:
            values = as_numbers(self.log_likelihood(*flat), RETURNED)
            if values.shape != (n,):
                raise ValueError(
                    f"A batched log_likelihood got {n} values of theta and of x: it must return "
                    f"{n} numbers, got the shape {values.shape}."
                )
        else:
            one = lambda i: jax.tree.map(lambda a: a[i], flat)  # noqa: E731
            parts = [np.asarray(self.log_likelihood(*one(i))) for i in range(n)]
            odd = next((part.shape for part in parts if part.shape != ()), None)
            if odd is not None:
                raise ValueError(
                    f"log_likelihood(theta, x) must return one number, got the shape {odd}. "
                    "Sum over the data; if it takes many theta at once, pass batched=True."
                )
            values = np.array(parts)
            if values.dtype.kind != "f":
                values = np.array([as_numbers(part, RETURNED) for part in parts])
        return values.astype(dtype).reshape(lead)


@contextlib.contextmanager
def failures_as_raised() -> Iterator[None]:
    """Re-raise the original exception from the host callback."""
    with _failures.noted() as found:
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError, HostError) as error:
            own = [found[int(n)] for n in NUMBER.findall(str(error)) if int(n) in found]
            if not own:
                raise
            raise own[0] from error
