r"""How far the values of the identity are from one another: the criteria of self-consistency.

Each takes the values $v_k = \log p(\theta_k) + \log p(x \mid \theta_k) - \log q(\theta_k \mid x)$
of one dataset and returns a number that is zero if and only if they are equal.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from consilience.core.compiling import on_device
from consilience.core.types import Flat, Scalar
from consilience.identity.setting import Setting
from consilience.model.data import Set

Values = Float[Array, " k"]


@runtime_checkable
class Criterion(Protocol):
    """How far the K values of the identity at one dataset are from one another.

    How to write your own: a hashable callable, such as a frozen dataclass, of K numbers that
    returns one, zero if and only if they are equal. It is compiled, vectorised and differentiated.

    >>> import consilience as cs
    >>> @dataclasses.dataclass(frozen=True)
    ... class Absolute:
    ...     def __call__(self, values):
    ...         return jnp.mean(jnp.abs(values - jnp.median(values)))
    >>> settings = cs.SelfConsistency(criterion=Absolute())

    Two methods are optional. `resolved(setting)` returns the criterion with choices made for a
    `consilience.identity.setting.Setting`, as `Bounded` does. `build(samples)` returns an Equinox
    module that is called in its place, and whose arrays are trained with the networks, as those
    of `RelativeConstraint` are.
    """

    def __call__(self, values: Values) -> Scalar: ...


def trained(criterion: Criterion, samples: int) -> eqx.Module | None:
    """The module of a criterion with parameters of its own, for `samples` values; else None."""
    build = getattr(criterion, "build", None)
    return None if build is None else build(samples)


@dataclasses.dataclass(frozen=True)
class Variance:
    """The variance of the log evidence: the loss of the paper (equation 9).

    Use it to compare with the paper. One far draw, common in early training, can make it
    thousands and throw the networks off; `Bounded` has the same minimum and cannot.

    >>> float(Variance()(jnp.array([1.0, 3.0])))
    1.0
    """

    def __call__(self, values: Values) -> Scalar:
        return jnp.var(values)


@dataclasses.dataclass(frozen=True)
class Bounded:
    """The variance where values agree within `bound` nats, growing only linearly beyond.

    Deviations d from their centre count d² up to the bound b and b (2 |d| - b) above it
    (Huber's function), so that no draw, however far, pulls harder than one at the bound.
    The default: use it unless you compare with the paper.

    `importance`: 1 weights draws by the evidence at them, as importance sampling does. So the
    variance is that under the true posterior (equation 6 of the paper), and the learned one is
    drawn to where it lacks mass. 0 weights them alike: the variance under the learned
    posterior, which may become too narrow. Numbers between are shares of either. By default 1
    where the likelihood is exact and data are not a set, as where these are moved far (see
    `Bootstrap`), else 0. So it is with `atoms`: their loss does not say how much mass the
    posterior has elsewhere, and neither would draws of no weight.

    >>> values = jnp.array([0.0, 1.0, 2.0, 1000.0, 1.0])
    >>> float(Bounded(3.0)(values)) < 0.01 * float(Variance()(values))
    True
    """

    bound: float = 3.0
    importance: float | None = None

    def __post_init__(self):
        if not self.bound > 0:
            raise ValueError(f"The bound must be positive, got {self.bound}.")
        if self.importance is not None and not 0 <= self.importance <= 1:
            raise ValueError(f"importance must be in [0, 1], or None, got {self.importance}.")

    def resolved(self, setting: Setting) -> "Bounded":
        """With weights, if none were chosen."""
        if self.importance is not None:
            return self
        weighted = setting.exact and not setting.atomic and not isinstance(setting.kind, Set)
        return dataclasses.replace(self, importance=1.0 if weighted else 0.0)

    def __call__(self, values: Values) -> Scalar:
        # From the median to Huber's centre, where the bounded deviations sum to zero: then
        # a shift of all values alike, which changes nothing, has no gradient either.
        fixed, share = jax.lax.stop_gradient(values), self.importance or 0.0
        weights = jnp.full_like(fixed, (1 - share) / len(fixed))
        if share:
            weights += share * jax.nn.softmax(fixed)
        centre = jnp.median(fixed)
        for _ in range(CENTRE_STEPS):
            centre += jnp.sum(weights * jnp.clip(fixed - centre, *self._ends))
        d = values - centre
        near = jnp.clip(d, *self._ends)
        return jnp.sum(weights * near * (2 * d - near))

    @property
    def _ends(self) -> tuple[float, float]:
        return -self.bound, self.bound


CENTRE_STEPS = 3


@dataclasses.dataclass(frozen=True)
class RatioVariance:
    """Half the variance of the evidence itself, relative to its square (equation 6).

    The second-order expansion of the Kullback-Leibler divergence. An ablation: the largest
    of the K ratios dominates it, and its gradient is mostly noise. Prefer the logarithm.
    """

    def __call__(self, values: Values) -> Scalar:
        return 0.5 * jnp.var(jnp.exp(values - _log_mean(values)))


@dataclasses.dataclass(frozen=True)
class RelativeConstraint:
    """Equality of neighbouring ratios by Lagrange multipliers (equation 5).

    An ablation: a saddle point, not a minimum, so that training wanders. Prefer the variance.
    """

    def build(self, samples: int) -> "Multipliers":
        """Multipliers for `samples` values, all zero."""
        return Multipliers(on_device(np.zeros(samples - 1)))

    def __call__(self, values: Values) -> Scalar:
        """Zero: the constraint as it is before its multipliers are trained."""
        return self.build(len(values))(values)


class Multipliers(eqx.Module):
    """The sum of λₖ (rₖ - rₖ₊₁) over k, with ratios rₖ relative to the evidence.

    The multipliers are trained with the networks, uphill.
    """

    values: Flat

    def __call__(self, values: Values) -> Scalar:
        if len(values) != len(self.values) + 1:
            raise ValueError(
                "RelativeConstraint needs one multiplier for each pair of neighbouring values: "
                f"got {len(self.values)} for {len(values)} values."
            )
        ratio = jnp.exp(values - _log_mean(values))
        # The same number with the opposite gradient: the optimizer goes uphill in it.
        uphill = 2 * jax.lax.stop_gradient(self.values) - self.values
        return jnp.sum(uphill * (ratio[:-1] - ratio[1:]))


def _log_mean(values: Values) -> Scalar:
    """The log of the mean evidence, as a constant."""
    values = jax.lax.stop_gradient(values)
    return jax.nn.logsumexp(values) - jnp.log(values.shape[0])
