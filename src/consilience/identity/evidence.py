r"""The identity, once:
$$\log p(x) = \log p(\theta) + \log p(x \mid \theta) - \log p(\theta \mid x)
  \quad \text{for every } \theta.$$

Each factor is exact or learned. The loss takes the spread of the right side over several
theta, the evidence estimates its mean, importance weights its values.
"""

from typing import Literal, NamedTuple, TypeAlias, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from consilience.core.compiling import compiled
from consilience.core.types import Data, Scalar, Theta
from consilience.identity.learned import Each, LearnedPrior, Likelihood, Posterior, only, twice
from consilience.model.model import Model
from consilience.model.priors import Prior


class Joint(eqx.Module):
    """Prior and likelihood of a model, each exact or learned."""

    prior: Prior | LearnedPrior
    likelihood: Model | Likelihood

    def log_probs(self, theta: Theta, x: Data) -> Each:
        """At several sets of parameters for each of several datasets."""
        prior, likelihood = self.prior, self.likelihood
        log_prior = twice(prior.log_prob) if isinstance(prior, Prior) else prior.log_probs
        if isinstance(likelihood, Likelihood):
            return log_prior(theta) + likelihood.log_probs(theta, x)
        each = jax.vmap(likelihood.log_likelihood, in_axes=(0, None))
        return log_prior(theta) + jax.vmap(each)(theta, x)

    def log_prob(self, theta: Theta, x: Data) -> Scalar:
        """At one set of parameters and one dataset."""
        return only(self.log_probs, theta, x)


def make_joint(
    model: Model,
    prior: LearnedPrior | None,
    likelihood: Likelihood | None,
    *,
    exact: bool | None = None,
) -> Joint:
    """The model's own prior and likelihood where it has them, else the learned ones.

    `exact`: take the model's likelihood, or the learned one, in place of that choice.
    """
    exact = model.likelihood is not None if exact is None else exact
    p_theta = model.prior if model.prior.density is not None else prior
    p_x = model if exact else likelihood
    if p_theta is None:
        raise ValueError(
            "Bayes' theorem needs the prior's density, but this prior can only be sampled and "
            "none was learned: pass prior=cs.Coupling() to cs.fit."
        )
    if p_x is None or (exact and model.likelihood is None):
        raise ValueError(
            "Bayes' theorem needs a likelihood, but the model has none and none was learned: "
            "pass likelihood=True to cs.fit, or log_likelihood to cs.Model."
        )
    return Joint(p_theta, p_x)


class Terms(NamedTuple):
    """Both sides of Bayes' theorem at several theta, for one dataset or for each of several."""

    log_joint: Float[Array, "*n k"]
    log_posterior: Float[Array, "*n k"]

    @property
    def log_evidence(self) -> Float[Array, "*n k"]:
        """The identity: equal numbers, if all factors are right."""
        return self.log_joint - self.log_posterior


def terms_at(
    joint: Joint, posterior: Posterior, u: Float[Array, "n k d"], log_q: Each, x: Data
) -> Terms:
    """The terms of the identity at several theta for each of several datasets.

    Theta are free vectors, and `log_q` their density, of which the flow knows already.
    """
    theta, log_det = twice(posterior.parameters.from_vector_with_log_det)(u)
    return Terms(joint.log_probs(theta, x), log_q + log_det)


class Estimate(NamedTuple):
    """A log evidence and its standard error, for one dataset."""

    log_evidence: Scalar
    error: Scalar


def mean_estimate(terms: Terms) -> Estimate:
    r"""The plain average of the identity over posterior draws.

    $\mathbb{E}_q[\log p(\theta, x) / q(\theta \mid x)] = \log p(x) - \mathrm{KL}(q \Vert p)$: a
    lower bound, tight for a right posterior; its error is that of the average alone. Where
    draws are impossible, the bound is minus infinity, and there is no doubt of that.
    """
    values = terms.log_evidence
    mean, error = jnp.mean(values), jnp.std(values) / jnp.sqrt(values.shape[0])
    return Estimate(mean, jnp.where(mean == -jnp.inf, 0.0, error))


def importance_estimate(terms: Terms) -> Estimate:
    r"""The log of the average ratio: $p(x) = \mathbb{E}_q[p(\theta, x) / q(\theta \mid x)]$.

    Right for any posterior that covers the true one; its error says too little where the
    weights have heavy tails, which Pareto k-hat shows.
    """
    values = terms.log_evidence
    n = values.shape[0]
    value = jax.nn.logsumexp(values) - jnp.log(n)
    return Estimate(value, jnp.std(jnp.exp(values - value)) / jnp.sqrt(n))


def bridge_estimate(terms: Terms, log_weights: Float[Array, " k"]) -> Estimate:
    r"""The bridge between the learned posterior and the true one (Meng and Wong 1996).

    $p(x) = \mathbb{E}_q[h\, p(\theta, x)] / \mathbb{E}_p[h\, q(\theta \mid x)]$ with the optimal
    $h \propto 1 / (p(\theta, x) / p(x) + q(\theta \mid x))$. The first half of the draws stand for
    the learned posterior; the second half, with their smoothed importance weights, for the
    true one. Both ratios are bounded, so heavy tails do little harm.
    """
    half = terms.log_joint.shape[0] // 2
    ratios = terms.log_evidence
    first, second = ratios[:half], ratios[half:]
    log_w = jax.nn.log_softmax(log_weights[half:])
    share = jnp.exp(-jax.nn.logsumexp(2 * log_w))  # effective draws of the true posterior
    log_share = jnp.log(share / (share + half))
    log_rest = jnp.log(half / (share + half))

    def parts(value):
        # The logs of h p / p(x) at the first half and of h q at the second.
        upper = (first - value) - jnp.logaddexp(log_share + first - value, log_rest)
        lower = -jnp.logaddexp(log_share + second - value, log_rest)
        return upper, lower

    def update(_, value):
        upper, lower = parts(value)
        top = jax.nn.logsumexp(upper) - jnp.log(half)
        return value + top - jax.nn.logsumexp(lower + log_w)

    start = jax.nn.logsumexp(ratios) - jnp.log(ratios.shape[0])
    value = jax.lax.fori_loop(0, BRIDGE_STEPS, update, start)
    upper, lower = parts(value)
    spread_upper = _relative_variance(upper, jnp.full(half, -jnp.log(half))) / half
    spread_lower = _relative_variance(lower, log_w) / share
    return Estimate(value, jnp.sqrt(spread_upper + spread_lower))


BRIDGE_STEPS = 100


def _relative_variance(log_values: Float[Array, " k"], log_w: Float[Array, " k"]) -> Scalar:
    """The variance over the squared mean, of exponentials under normalised weights."""
    log_mean = jax.nn.logsumexp(log_values + log_w)
    return jnp.sum(jnp.exp(log_w) * (jnp.exp(log_values - log_mean) - 1) ** 2)


def spread(terms: Terms) -> Scalar:
    """The width of the central 95 % of the identity's values: the paper's sharpness."""
    # The nearest values, not a blend: with minus infinity among them, that is not a number.
    ends = jnp.array([0.025, 0.975])
    low, high = jnp.quantile(terms.log_evidence, ends, method="nearest")
    return high - low


class Weights(NamedTuple):
    """Normalised importance weights of posterior draws, smoothed, and how far to trust them."""

    log_weights: Float[Array, " k"]
    pareto_k: Scalar
    ess: Scalar


EVEN = 0.99
"""Above this share of effective draws, before smoothing, k is at most zero.

Such weights have a standard deviation below 0.1 of their mean, so they move no posterior mean by
more than 0.1 of its standard deviation (Cauchy-Schwarz). Between Gaussians their k is below 0.13
in any dimension; a larger one is that of a tail too small to matter, or the first sign of a part
of the posterior that no draw has reached, which weights cannot correct."""


def importance_weights(terms: Terms) -> Weights:
    """Pareto-smoothed importance weights (Vehtari et al. 2024, arXiv:1507.02646)."""
    from blackjax.diagnostics import psis_weights

    values = terms.log_evidence
    n = values.shape[0]
    possible = jnp.isfinite(values)
    values = jnp.where(possible, values, -jnp.inf)
    log_w, k = psis_weights(values)
    none = ~jnp.any(possible)
    ess = jnp.where(none, 0.0, _effective(log_w))
    # The shape of a tail does not depend on its size. Before smoothing: that may take a single
    # draw with most of the weight for an outlier, and hide it.
    even = _effective(jax.nn.log_softmax(values)) > EVEN * n
    k = jnp.where(even, jnp.minimum(jnp.nan_to_num(k, nan=0.0), 0.0), k)
    # With too few tail draws to fit a Pareto distribution, k is set to infinity.
    k = jnp.where(jnp.isnan(k), jnp.inf, k)
    return Weights(jnp.where(none, -jnp.log(n), log_w), k, ess)


def _effective(log_weights: Float[Array, " k"]) -> Scalar:
    """The effective number of draws with normalised weights."""
    return jnp.exp(-jax.nn.logsumexp(2 * log_weights))


Estimator: TypeAlias = Literal["mean", "importance", "bridge"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


@compiled
def estimate_all(terms: Terms):
    """Every estimate, the spread and the weights, for datasets along a leading axis."""

    def one(terms: Terms):
        weights = importance_weights(terms)
        estimates = {
            "mean": mean_estimate(terms),
            "importance": importance_estimate(terms),
            "bridge": bridge_estimate(terms, weights.log_weights),
        }
        return estimates, spread(terms), weights

    return jax.vmap(one)(terms)


@compiled
def weigh_all(terms: Terms):
    """The weights alone, for datasets along a leading axis."""
    return jax.vmap(importance_weights)(terms)


def resample(
    log_weights: np.ndarray, n: int, rng: np.random.Generator
) -> Int[np.ndarray, "datasets n"]:
    """Which draws to take, `n` for each dataset, in proportion to their weights."""
    cumulative = np.cumsum(np.exp(log_weights.astype(np.float64)), axis=1)
    # One even comb instead of n dice: a draw of weight w comes up n w times, give or take one.
    comb = (np.arange(n) + rng.uniform(size=(len(log_weights), 1))) / n
    picked = [
        np.searchsorted(row, level * row[-1]) for row, level in zip(cumulative, comb, strict=True)
    ]
    return rng.permuted(np.minimum(picked, log_weights.shape[1] - 1), axis=1)
