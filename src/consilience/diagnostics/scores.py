"""How a fit scores on simulations that it has not seen."""

import jax
import numpy as np
import xarray as xr

from consilience.core.compiling import compiled
from consilience.core.types import Data, PRNGKey, Theta
from consilience.identity.learned import Likelihood
from consilience.posterior.fit import Fit
from consilience.simulation.simulations import Simulations

DATASETS_AT_ONCE = 256


def score(
    fit: Fit,
    simulations: Simulations,
    *,
    key: PRNGKey,
    n: int = 1000,
    log_evidence: np.ndarray | None = None,
) -> xr.Dataset:
    """The scores of a fit for every simulation, along `observation`; average them.

    `log_posterior`: the log density of the true parameters given their data.
    `log_likelihood`: the log density of the data given their parameters, where it was
    learned. `sharpness`: the width of the central 95 % of the identity's values over `n`
    posterior draws, where prior and likelihood are known or learned; zero is perfect.
    `evidence_error`: the estimated log evidence minus the true one, where you pass it.

    >>> import consilience as cs, numpyro.distributions as dist
    >>> model = cs.Model(dist.Normal(0, 1), lambda key, t: t + jax.random.normal(key, (3,)))
    >>> sims = cs.simulate(model, 128, key=jax.random.key(0))
    >>> small = cs.Coupling(layers=1, width=16)
    >>> fit = cs.fit(
    ...     model, sims, key=jax.random.key(1), posterior=small, self_consistency=False, epochs=2
    ... )
    >>> list(cs.score(fit, sims, key=jax.random.key(2)))
    ['log_posterior']
    """
    theta, x = simulations.theta, simulations.x
    one_each = {name: values[:, None] for name, values in theta.items()}
    found = {"log_posterior": fit.log_prob(one_each, x)[:, 0]}
    if fit.likelihood is not None:
        found["log_likelihood"] = np.asarray(_log_likelihood(fit.likelihood, theta, x))
    if fit.has_joint:
        evidence = fit.log_evidence(x, n, key=key)
        found["sharpness"] = evidence["spread"].values
        if log_evidence is not None:
            estimate = evidence["log_evidence"].sel(estimator="bridge").values
            if np.shape(log_evidence) != estimate.shape:
                raise ValueError(
                    f"log_evidence must hold one number for each of the {len(simulations)} "
                    f"simulations, got the shape {np.shape(log_evidence)}."
                )
            found["evidence_error"] = estimate - log_evidence
    elif log_evidence is not None:
        raise ValueError("The evidence needs prior and likelihood, known or learned.")
    return xr.Dataset({name: ("observation", values) for name, values in found.items()})


@compiled
def _log_likelihood(likelihood: Likelihood, theta: Theta, x: Data):
    each = lambda pair: likelihood.log_prob(*pair)  # noqa: E731
    return jax.lax.map(each, (theta, x), batch_size=DATASETS_AT_ONCE)
