r"""Markov chains for one observation, where the amortized posterior is not good enough.

NUTS runs in the base space of the learned flow: with $\theta = T(z)$ it sees
$$\log \pi(z) = \log p(T(z)) + \log p(x \mid T(z)) + \log |\det T'(z)|,$$
which is the flow's simple base density wherever the learned posterior is right (Hoffman et
al. 2019, arXiv:1903.03704). Chains start at amortized draws, chosen by their importance
weights, so they need a short warm-up and few steps a draw. For a density without a base,
$T$ is the identity: chains run in the space of standardised, unconstrained parameters.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from consilience.core.arrays import warn_caller
from consilience.core.compiling import compiled
from consilience.core.types import Flat, PRNGKey, Scalar, Theta
from consilience.identity.evidence import Joint
from consilience.identity.learned import Posterior

CHAINS, WARMUP = 4, 200
FEWEST = 4
"""Draws of a chain, below which chains cannot be compared."""

STARTS = 256
"""Amortized draws among which the chains' first points are chosen."""


class Chains(NamedTuple):
    """Draws (chain, draw, ...), their R-hat and effective sizes, and what they cost."""

    theta: Theta
    r_hat: Theta
    ess: Theta
    gradients: Scalar
    divergences: Scalar


@compiled
def run_nuts(posterior: Posterior, joint: Joint, x: Any, n: int, key: PRNGKey) -> Chains:
    """Chains of `n` draws each for one dataset. Gradients of the warm-up are counted too."""
    import blackjax

    context = posterior.context(x)
    space, flow = posterior.parameters, posterior.flow

    def log_density(z: Flat) -> Scalar:
        u, log_det = flow.from_base(z, context)
        theta, log_det_u = space.from_vector_with_log_det(u)
        value = joint.log_prob(theta, x) - log_det_u + log_det
        return jnp.where(jnp.isnan(value), -jnp.inf, value)

    def to_theta(z: Flat) -> Theta:
        return space.from_vector(flow.from_base(z, context)[0])

    k_start, k_pick, k_warm, k_run = jax.random.split(key, 4)
    starts, log_q = flow.starts(k_start, context, STARTS)
    log_weights = jax.vmap(log_density)(starts) - log_q
    first = starts[jax.random.categorical(k_pick, log_weights, shape=(CHAINS,))]

    def chain(z: Flat, k_warm: PRNGKey, k_run: PRNGKey):
        adaptation = blackjax.window_adaptation(blackjax.nuts, log_density)
        (state, settings), warm = adaptation.run(k_warm, z, num_steps=WARMUP)
        kernel = blackjax.nuts(log_density, **settings)

        def step(state, k):
            state, info = kernel.step(k, state)
            return state, (state.position, info.num_integration_steps, info.is_divergent)

        _, (zs, steps, divergent) = jax.lax.scan(step, state, jax.random.split(k_run, n))
        gradients = jnp.sum(steps) + jnp.sum(warm.info.num_integration_steps)
        return zs, gradients, jnp.sum(divergent)

    keys = (jax.random.split(k_warm, CHAINS), jax.random.split(k_run, CHAINS))
    zs, gradients, divergences = jax.vmap(chain)(first, *keys)
    theta = jax.vmap(jax.vmap(to_theta))(zs)
    return Chains(
        theta,
        jax.tree.map(blackjax.diagnostics.rhat, theta),
        jax.tree.map(blackjax.diagnostics.ess_bulk, theta),
        jnp.sum(gradients),
        jnp.sum(divergences),
    )


def nuts_for_each(posterior: Posterior, joint: Joint, xs: list[Any], n: int, key: PRNGKey):
    """The chains of several datasets, one after another, with a leading axis."""
    if n < FEWEST:
        raise ValueError(
            f'method="nuts" runs {CHAINS} chains, which take {FEWEST} draws each to be compared: '
            f"ask for {CHAINS * FEWEST} draws or more."
        )
    parts = [
        jax.device_get(run_nuts(posterior, joint, x, n, jax.random.fold_in(key, i)))
        for i, x in enumerate(xs)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)


CONVERGED = 1.05
"""Chains whose R-hat is above this have not converged."""
DIVERGENT = 0.01
"""Above this share of divergent steps, chains may miss a part of the posterior."""


def warn_of_chains(chains: Chains):
    """Warn where chains of any dataset have not converged, with the numbers."""
    n = len(chains.divergences)
    # The largest of all entries of a parameter, for each dataset. NaN: chains that do not move,
    # or have too few draws.
    r_hat = {
        name: np.nan_to_num(values.reshape(n, -1), nan=np.inf).max(axis=1)
        for name, values in chains.r_hat.items()
    }
    name = max(r_hat, key=lambda name: r_hat[name].max())
    worst, divergent = r_hat[name].max(), int(chains.divergences.max())
    steps = math.prod(next(iter(chains.theta.values())).shape[1:3])
    found = []
    if worst > CONVERGED:
        said = f"{worst:.4g}" if np.isfinite(worst) else "not a number"
        found.append(f"R-hat of {name} is {said}, and should be below {CONVERGED}")
    if divergent > DIVERGENT * steps:
        found.append(f"{divergent} of {steps} steps diverged")
    if not found:
        return
    bad = np.max([values > CONVERGED for values in r_hat.values()], axis=0)
    bad |= chains.divergences > DIVERGENT * steps
    where = f" for {bad.sum()} of {n} observations" if n > 1 else ""
    warn_caller(
        f"The chains have not converged{where}: {'; '.join(found)}. Their draws may miss parts of "
        'the posterior. Draw more with a larger n, compare with method="corrected", or train '
        "longer, so that chains start from a better posterior."
    )
