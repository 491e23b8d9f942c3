"""The random generator that networks are built with where a file is loaded: a limit on memory."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

DRAWS = 10**7
"""How many values a network of the user's own may draw beside its weights, such as an order."""


class Room(np.random.Generator):
    """Zeros in place of random first weights, and an error once they exceed a number of values.

    Draws that weights are not made of, such as permutations, are real, and limited too.
    """

    def __init__(self, size: int):
        super().__init__(np.random.PCG64(0))
        self.left, self._draws = size, size + DRAWS

    def zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        # An empty matrix has a bias as long as its first axis.
        self.left -= math.prod(max(1, n) for n in shape)
        self._check()
        return np.zeros(shape)

    def _check(self):
        if min(self.left, self._draws) < 0:
            raise ValueError("the networks that it describes are larger than the file.")

    def standard_normal(self, size: Any = None, *_: Any, **__: Any) -> np.ndarray:  # type: ignore[override]
        return self.zeros(_shape(size))

    # Descriptions of the user's own may draw by these.

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> np.ndarray:  # type: ignore[override]
        return self.zeros(_shape(size, loc, scale))

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> np.ndarray:  # type: ignore[override]
        return self.zeros(_shape(size, low, high))

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:  # type: ignore[override]
        self._draw(_shape(size))
        return super().random(size, dtype, out)

    def integers(  # type: ignore[override]
        self,
        low: Any,
        high: Any = None,
        size: Any = None,
        dtype: Any = np.int64,
        endpoint: bool = False,
    ) -> Any:
        self._draw(_shape(size, low, high))
        return super().integers(low, high, size, dtype, endpoint)

    def choice(  # type: ignore[override]
        self,
        a: Any,
        size: Any = None,
        replace: bool = True,
        p: Any = None,
        axis: int = 0,
        shuffle: bool = True,
    ) -> Any:
        each = list(np.shape(a))
        del each[axis : axis + 1]
        self._draw((*_shape(size), *each))
        return super().choice(a, size, replace, p, axis, shuffle)

    def permutation(self, x: Any, axis: int = 0) -> Any:  # type: ignore[override]
        self._draw(np.shape(x) or (int(x),))
        return super().permutation(x, axis)

    def _draw(self, shape: tuple[int, ...]):
        self._draws -= math.prod(shape)
        self._check()

    def measure(self, build: Callable[[], Any]) -> Any:
        """A network of the user's own, of zeros, made once it is seen not to be too large."""
        try:
            shapes = eqx.filter_eval_shape(build)
        except jax.errors.JAXTypeError:
            return build()  # it looks at values, which have to be made
        of_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)  # noqa: E731
        self.left -= sum(leaf.size for leaf in jax.tree.leaves(shapes) if of_shape(leaf))
        self._check()
        zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if of_shape(leaf) else leaf  # noqa: E731
        return jax.tree.map(zeros, shapes)

    def spawn(self, n_children: int) -> list[np.random.Generator]:
        return [self] * n_children


def _shape(size: Any, *others: Any) -> tuple[int, ...]:
    """The shape of draws of a size or, where there is none, of what they depend on."""
    if size is None:
        return np.broadcast_shapes(*map(np.shape, others))
    return tuple(np.atleast_1d(size).tolist())
