"""The conjugate Gaussian with its exact posterior, or a wrong one, in the network's place.

The layers of the flow are the identity and its frame is set by hand.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from scipy import stats

import consilience as cs
from consilience.identity.learned import Networks
from consilience.model.data import data_space
from consilience.model.spaces import parameter_space
from consilience.networks.flow import MAX_LOG_SCALE
from consilience.posterior.fit import assemble
from tests.conftest import ROWS, TINY

DIM = 2


class Sum(eqx.Module):
    """The sum of the standardised rows: sufficient here."""

    def __call__(self, x):
        return x["data"].sum(axis=0)


def with_prior_mean(mean: float) -> cs.Model:
    """As `conjugate_model`, with another prior mean."""
    return cs.Model(
        prior=dist.Normal(mean, 1.0).expand([DIM]).to_event(1),
        simulator=lambda key, theta: theta + jax.random.normal(key, (ROWS, DIM)),
        log_likelihood=cs.PerRow(lambda theta, row: jnp.sum(dist.Normal(theta, 1.0).log_prob(row))),
    )


def exact_mean(x, prior_mean: float = 0.0):
    return (x.sum(axis=-2) + prior_mean) / (ROWS + 1)


def exact_sd() -> float:
    return (ROWS + 1) ** -0.5


def exact_log_evidence(x, prior_mean: float = 0.0) -> np.ndarray:
    """Rows share their theta: a constant covariance beside their own variance."""
    covariance = np.eye(ROWS) + np.ones((ROWS, ROWS))
    columns = np.swapaxes(np.asarray(x, float), -1, -2)
    together = stats.multivariate_normal(np.full(ROWS, prior_mean), covariance)
    return together.logpdf(columns).sum(axis=-1)


def gaussian_fit(
    model: cs.Model, sims: cs.Simulations, *, prior_mean=0.0, shift=0.0, widen=1.0, rough=False
) -> cs.Fit:
    """The exact posterior as a fit; its mean shifted, and its standard deviation widened.

    `rough`: leave the layers as they are built, close to the identity.
    """
    parameters, data = parameter_space(model.prior, sims.theta), data_space(sims.x, model.data)
    flow = TINY.build(jax.random.key(0), dim=DIM, condition=DIM)
    # u = (theta - loc) / scale and s = sum((x - m) / c): the posterior of u is linear in s.
    n = ROWS + 1
    scale, (c, m) = parameters.scale, (data.scale["data"], data.loc["data"])
    mean_weight = jnp.diag(c / n / scale)
    mean_bias = ((ROWS * m + prior_mean) / n + shift - parameters.loc) / scale
    log_sd = jnp.log(widen * n**-0.5 / scale)
    raw = MAX_LOG_SCALE * jnp.arctanh(log_sd / MAX_LOG_SCALE)
    out = lambda f: f.steps.conditioner.out  # noqa: E731
    factor = 1.0 if rough else 0.0
    flow = eqx.tree_at(
        lambda f: (f.frame.weight, f.frame.bias, out(f).weight, out(f).bias),
        flow,
        (
            jnp.concatenate([mean_weight, jnp.zeros((DIM, DIM))]),
            jnp.concatenate([mean_bias, raw]),
            factor * out(flow).weight,
            factor * out(flow).bias,
        ),
    )
    networks = Networks(Sum(), flow, None, None)
    recipe = cs.Recipe(TINY, None, None, Sum())
    history = cs.History({"loss": np.zeros(1)}, {"posterior": 1}, "finished", 0.0, len(sims))
    return assemble(model, parameters, data, networks, recipe, history)
