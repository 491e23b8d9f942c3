"""Proposals: the theta at which the identity is evaluated, for each of several datasets.

The identity holds at every theta, so any proposal has the right minimum. They differ in
what they cost and in where they make the posterior right first.
"""

import dataclasses
from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey
from consilience.identity.learned import Each, Posterior, twice
from consilience.model.priors import Prior
from consilience.networks.density import Context

Proposed = tuple[Float[Array, "n k d"], Each]
"""Parameters as free vectors, and their log density under the current posterior."""


@runtime_checkable
class Proposal(Protocol):
    """Theta at which the identity is evaluated.

    How to write your own: a hashable callable, such as a frozen dataclass, that proposes `n`
    theta for each of several datasets. It returns them as free vectors, of shape
    `(datasets, n, dim)`, with their log density under the current posterior, which keeps its
    gradient; theta themselves are constants to training. `posterior.flow.sample(key, contexts,
    (n,))` gives both at once for draws of the posterior, `posterior.flow.log_prob(u, contexts)`
    the density of any others, `prior.draw(key)` one draw of the prior, and
    `posterior.parameters.to_vector(theta)` its free vector.

    Draws of the posterior, spread by noise of a tenth of the prior's scale:

    >>> import consilience as cs
    >>> @dataclasses.dataclass(frozen=True)
    ... class Spread:
    ...     noise: float = 0.1
    ...     def __call__(self, key, n, posterior, contexts, prior):
    ...         k_draw, k_noise = jax.random.split(key)
    ...         u, _ = posterior.flow.sample(k_draw, contexts, (n,))
    ...         u = u + self.noise * jax.random.normal(k_noise, u.shape)
    ...         return u, posterior.flow.log_prob(u, contexts)
    >>> settings = cs.SelfConsistency(proposal=Spread())

    A class attribute `once_an_epoch = True` is optional: theta of all batches are then proposed
    when an epoch begins, as `EpochCopy` does.
    """

    def __call__(
        self, key: PRNGKey, n: int, posterior: Posterior, contexts: Context, prior: Prior
    ) -> Proposed: ...


@dataclasses.dataclass(frozen=True)
class CurrentPosterior:
    """Draws of the posterior as it is now: the paper's choice, and the default.

    They look where the posterior has its mass, and follow it as it moves.
    """

    def __call__(
        self, key: PRNGKey, n: int, posterior: Posterior, contexts: Context, prior: Prior
    ) -> Proposed:
        return posterior.flow.sample(key, contexts, (n,))


@dataclasses.dataclass(frozen=True)
class FromPrior:
    """Draws of the prior.

    They look everywhere, and so rarely where a narrow posterior is. Use them where the
    posterior must be right in its far tails, with many draws and few parameters.
    """

    def __call__(
        self, key: PRNGKey, n: int, posterior: Posterior, contexts: Context, prior: Prior
    ) -> Proposed:
        keys = jax.random.split(key, (len(jax.tree.leaves(contexts)[0]), n))
        u = twice(lambda k: posterior.parameters.to_vector(prior.draw(k))[0])(keys)
        return u, posterior.flow.log_prob(u, contexts)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Draws of the current posterior, and a `share` of the prior.

    Use it where posteriors have modes that the current one may not know yet.
    """

    share: float = 0.2

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise ValueError(f"The prior's share must be in [0, 1], got {self.share}.")

    def __call__(
        self, key: PRNGKey, n: int, posterior: Posterior, contexts: Context, prior: Prior
    ) -> Proposed:
        n_prior = round(self.share * n)
        k_prior, k_posterior = jax.random.split(key)
        wide = FromPrior()(k_prior, n_prior, posterior, contexts, prior)
        near = CurrentPosterior()(k_posterior, n - n_prior, posterior, contexts, prior)
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), near, wide)


@dataclasses.dataclass(frozen=True)
class EpochCopy:
    """Draws of the posterior as it was when the epoch began.

    All draws of an epoch are made at once, none in the inner loop: quicker, and hardly worse
    where an epoch is short beside the training.
    """

    once_an_epoch: ClassVar[bool] = True

    def __call__(
        self, key: PRNGKey, n: int, posterior: Posterior, contexts: Context, prior: Prior
    ) -> Proposed:
        return CurrentPosterior()(key, n, posterior, contexts, prior)
