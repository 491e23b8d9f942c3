r"""Comparing models by their evidence: $p(M \mid x) \propto p(x \mid M)\, p(M)$."""

from collections.abc import Mapping

import jax
import numpy as np
import xarray as xr

from consilience.core.types import Data, PRNGKey
from consilience.identity.evidence import ESTIMATORS, Estimator
from consilience.posterior.fit import Fit


def compare(
    fits: Mapping[str, Fit],
    x: Data,
    n: int = 1000,
    *,
    key: PRNGKey,
    weights: Mapping[str, float] | None = None,
    method: Estimator = "bridge",
) -> xr.Dataset:
    """How probable each of several models is, given one dataset or each of a batch.

    `weights`: the models' prior probabilities, in any unit; equal if not given.
    `method`: the estimate of the evidence, as `Fit.log_evidence` names it.

    Returns `probability` of each `model`; `log_bayes_factor` of `model` against `versus`;
    `log_evidence` with its 95 % interval from `lower` to `upper`; and `pareto_k`: do not
    trust what rests on a model where it is above 0.7.
    """
    if not isinstance(fits, Mapping) or len(fits) < 2:
        raise ValueError("Pass two or more fits to compare, as a dictionary of named ones.")
    names = list(fits)
    prior = dict.fromkeys(names, 1.0) if weights is None else dict(weights)
    if set(prior) != set(names) or not all(w > 0 for w in prior.values()):
        raise ValueError(f"weights must give a positive number for each of {names}, got {prior}.")
    if method not in ESTIMATORS:
        raise ValueError(f"method must be one of {list(ESTIMATORS)}, got {method!r}.")
    keys = jax.random.split(key, len(names))
    parts = [
        fit.log_evidence(x, n, key=k).drop_vars("spread")
        for fit, k in zip(fits.values(), keys, strict=True)
    ]
    result = xr.concat(parts, xr.Variable("model", names)).sel({"estimator": method}, drop=True)
    value = result["log_evidence"]
    log_prior = xr.DataArray(np.log([prior[name] for name in names]), dims="model")
    score = value + log_prior
    share = xr.ufuncs.exp(score - score.max("model"))
    result["probability"] = share / share.sum("model")
    result["log_bayes_factor"] = value - value.rename(model="versus")
    return result.transpose(..., "model", "versus")
