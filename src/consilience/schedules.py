"""Schedules: training progress in [0, 1] to a factor.

They see progress, not steps: another number of epochs compiles nothing anew.
"""

import dataclasses

import jax.numpy as jnp

from consilience.types import Scalar


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same factor throughout."""

    value: float = 1.0

    def __call__(self, progress: Scalar) -> Scalar:
        return jnp.full_like(progress, self.value)


@dataclasses.dataclass(frozen=True)
class Cosine:
    """From `start` to `end` along half a cosine.

    >>> [round(float(Cosine()(jnp.array(p))), 3) for p in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """

    start: float = 1.0
    end: float = 0.0

    def __call__(self, progress: Scalar) -> Scalar:
        return self.end + (self.start - self.end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


Schedule = Constant | Cosine
