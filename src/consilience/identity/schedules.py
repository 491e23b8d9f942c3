"""Schedules: training progress in [0, 1] to a factor.

They see progress, not steps, so that another number of epochs triggers no recompilation.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from consilience.core.types import Scalar


@runtime_checkable
class Schedule(Protocol):
    """Training progress in [0, 1] to a factor of a loss, or of the learning rate.

    How to write your own: a hashable callable of one JAX number, such as a function or a frozen
    dataclass. It is compiled, so branch with `jnp.where`.

    >>> import consilience as cs
    >>> @dataclasses.dataclass(frozen=True)
    ... class Square:
    ...     def __call__(self, progress):
    ...         return progress**2
    >>> settings = cs.SelfConsistency(weight=Square())
    """

    def __call__(self, progress: Scalar) -> Scalar: ...


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same factor throughout."""

    value: float = 1.0

    def __call__(self, progress: Scalar) -> Scalar:
        return jnp.full_like(progress, self.value)


@dataclasses.dataclass(frozen=True)
class Step:
    """`before` until training has come to `at`, `after` from then on.

    >>> [float(Step(0.5)(jnp.array(p))) for p in (0.0, 0.49, 0.5, 1.0)]
    [0.0, 0.0, 1.0, 1.0]
    """

    at: float
    before: float = 0.0
    after: float = 1.0

    def __call__(self, progress: Scalar) -> Scalar:
        return jnp.where(progress < self.at, self.before, self.after)


@dataclasses.dataclass(frozen=True)
class _Between:
    """From `before` at `start` to `after` at `stop`."""

    start: float
    stop: float
    before: float = 0.0
    after: float = 1.0

    def __post_init__(self):
        if not self.start < self.stop:
            raise ValueError(
                f"{type(self).__name__} needs start < stop, got "
                f"start={self.start} and stop={self.stop}."
            )

    def _way(self, progress: Scalar) -> Scalar:
        """How far training has come from `start` to `stop`, from 0 to 1."""
        return jnp.clip((progress - self.start) / (self.stop - self.start), 0.0, 1.0)

    def _at(self, way: Scalar) -> Scalar:
        return self.before + (self.after - self.before) * way


@dataclasses.dataclass(frozen=True)
class Ramp(_Between):
    """In a straight line from `before` at `start` to `after` at `stop`.

    >>> [round(float(Ramp(0.2, 0.6)(jnp.array(p))), 3) for p in (0.0, 0.3, 1.0)]
    [0.0, 0.25, 1.0]
    """

    def __call__(self, progress: Scalar) -> Scalar:
        return self._at(self._way(progress))


@dataclasses.dataclass(frozen=True)
class Smooth(_Between):
    """As `Ramp`, along half a cosine: no corner at either end.

    >>> [round(float(Smooth(0.2, 0.6)(jnp.array(p))), 3) for p in (0.0, 0.3, 1.0)]
    [0.0, 0.146, 1.0]
    """

    def __call__(self, progress: Scalar) -> Scalar:
        return self._at(0.5 * (1 - jnp.cos(jnp.pi * self._way(progress))))


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


def check_weight(schedule: Schedule, what: str):
    """Refuse a schedule that is negative or not finite anywhere in training."""
    values = np.asarray(jax.vmap(schedule)(jnp.linspace(0.0, 1.0, 201)))
    if not np.all(values >= 0) or not np.all(np.isfinite(values)):
        worst = values[np.argmin(np.where(np.isnan(values), -np.inf, values))]
        raise ValueError(
            f"The weight of {what} must not be negative at any time of training, but "
            f"{schedule} gives {worst:.3g}."
        )
