"""Log-likelihoods that JAX cannot see: NumPy, SciPy, C libraries, Stan.

Training stops the gradient at theta, so the likelihood need not be differentiable. It runs on
the host, called once for all datasets and all values of theta of a batch.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from consilience.core.types import Data, Scalar

_failures: list[Exception] = []


@dataclasses.dataclass(frozen=True)
class OnHost:
    """A log-likelihood in plain Python: `(theta, x) -> number`.

    `batched`: the function takes `theta` and `x` with an equal leading axis and returns an
    array of as many numbers. One call then serves a whole batch: write it so if you can.

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
                _failures.append(error)
                raise

        return jax.pure_callback(call, result, theta, x, vmap_method="broadcast_all")

    def _all(self, arguments, axes, dtype) -> np.ndarray:
        """The log-likelihood along all leading axes of the arguments."""
        leaf, n_axes = jax.tree.leaves(arguments)[0], jax.tree.leaves(axes)[0]
        lead = leaf.shape[: leaf.ndim - n_axes]
        n = math.prod(lead)
        flat = jax.tree.map(lambda a: a.reshape(n, *a.shape[len(lead) :]), arguments)
        if self.batched:
            values = np.asarray(self.log_likelihood(*flat))
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
        return values.astype(dtype).reshape(lead)


@contextlib.contextmanager
def failures_as_raised() -> Iterator[None]:
    """Raise what went wrong on the host in place of what the compiled code made of it."""
    _failures.clear()
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not _failures:
            raise
        raise _failures[0] from error
    finally:
        _failures.clear()
