"""A fit: the learned densities of a model, and how they are used."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import equinox as eqx
import jax
import numpy as np
import xarray as xr
from jax.sharding import Mesh

from consilience.core.arrays import as_count
from consilience.core.compiling import compiled
from consilience.core.devices import Devices, along_second, make_mesh, replicate
from consilience.core.html import notebook
from consilience.core.keys import keyed
from consilience.core.provenance import Origin
from consilience.core.types import Data, PRNGKey, Theta
from consilience.identity.evidence import (
    Joint,
    estimate_all,
    make_joint,
    terms_at,
)
from consilience.identity.learned import LearnedPrior, Likelihood, Networks, Posterior, twice
from consilience.model.data import DataSpace
from consilience.model.host import OnHost, failures_as_raised
from consilience.model.model import Model
from consilience.model.run import Spec
from consilience.model.spaces import ParameterSpace
from consilience.networks.recipe import Recipe
from consilience.networks.validity import Validity
from consilience.posterior.blocks import in_blocks
from consilience.posterior.datasets import draws_to_dataset, evidence_to_dataset
from consilience.posterior.history import History
from consilience.posterior.methods import FEWEST, OVERSAMPLE, Method, chosen, correct
from consilience.posterior.out_of_fold import OutOfFold
from consilience.simulation.limits import check_draws
from consilience.simulation.simulations import Simulations

if TYPE_CHECKING:
    from consilience.diagnostics.check import Check


class Fit(eqx.Module):
    """The posterior of a model for any dataset, and the likelihood if it was learned.

    `history`: how training went, with the table of the recipes that competed.
    `out_of_fold`: where they did, the log density and draws of each run by a network that has not
    seen it; else None.
    """

    model: Model
    posterior: Posterior
    likelihood: Likelihood | None
    prior: LearnedPrior | None
    recipe: Recipe = eqx.field(static=True)
    history: History = eqx.field(static=True)
    origin: Origin | None = eqx.field(static=True, default=None)
    out_of_fold: OutOfFold | None = None

    @keyed("fit.sample(x, n, key=key)")
    def sample(
        self,
        x: Data,
        n: SupportsIndex = 1000,
        *,
        key: PRNGKey,
        corrected: bool = False,
        method: Method | None = None,
        devices: Devices | None = None,
    ) -> xr.Dataset:
        """Posterior draws for one dataset, or for each of a batch with a leading axis.

        `method`: "amortized", the default, draws of the learned posterior; or one of two that
        need prior and likelihood, exact or learned:
        "corrected": resampled by importance, with Pareto-smoothed weights, from four times as
        many draws. The coordinates `pareto_k` (trust it below 0.7) and `ess`, the effective
        number of those draws, say how well it went. `corrected=True` is another way to ask
        for it.
        "nuts": four Markov chains started at amortized draws, with `n` draws together;
        coordinates hold the R-hat and effective size of every parameter (`r_hat_mu`,
        `ess_mu`), and the gradients and divergences they took. Chains that have not converged
        raise a `UserWarning` with these numbers.

        `devices`: JAX devices to split the draws among, as in `devices=jax.devices()`; chains
        run on one.

        Returns a variable for each parameter, with the dimensions `chain`, `draw` and its
        own; for a batch, behind `observation`.
        """
        n = as_count(n, "n, the number of draws in fit.sample(x, n, key=key),")
        if n < 1:
            raise ValueError(f"The number of draws must be at least one, got {n}.")
        method = chosen(method, corrected)
        if method == "nuts":
            return self._chains(x, n, key)
        if method == "amortized":
            (draws, _), batched = self._draw(x, n, key, None, devices)
            return draws_to_dataset(_one_chain(draws), batched=batched)
        k_draw, k_pick = jax.random.split(key)
        n_draws = max(OVERSAMPLE * n, FEWEST)
        (draws, terms), batched = self._draw(x, n_draws, k_draw, self.joint, devices)
        draws, extra = correct(draws, terms, n, k_pick)
        return draws_to_dataset(_one_chain(draws), batched=batched, extra=extra)

    def _chains(self, x: Data, n: int, key: PRNGKey) -> xr.Dataset:
        from consilience.posterior.mcmc import CHAINS, nuts_for_each, warn_of_chains

        if isinstance(self.model.likelihood, OnHost):
            raise ValueError(
                "NUTS needs the gradient of the log-likelihood, which a function on the host "
                'does not have: use method="corrected", or write it in JAX.'
            )
        layout = self.posterior.data.layout
        arrays, batched = layout.check(x)
        check_draws((m := len(arrays[layout.names[0]])) * n, self.posterior.parameters.dim)
        every = [layout.unnamed({name: a[i] for name, a in arrays.items()}) for i in range(m)]
        chains = nuts_for_each(self.posterior, self.joint, every, math.ceil(n / CHAINS), key)
        warn_of_chains(chains)
        return draws_to_dataset(
            chains.theta,
            batched=batched,
            extra={"gradients": chains.gradients, "divergences": chains.divergences},
            judged={"r_hat": chains.r_hat, "ess": chains.ess},
        )

    @keyed("fit.check(x, key=key)")
    def check(
        self,
        x: Data,
        *,
        key: PRNGKey,
        simulations: Simulations | None = None,
        n: int = 500,
        draws: int = 1000,
        predictive: int = 200,
        statistics: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> "Check":
        """How far to trust the posterior of an observation, or of each of a batch.

        Asks whether the observation is typical of `n` new simulations, or of `simulations`
        that the fit has not seen; how far the identity's values over `draws` posterior
        draws agree, and whether importance weights can correct them; and whether `predictive`
        datasets simulated at the posterior (0: none) look like the observation, by
        `statistics`, named functions of one dataset, or by plain ones of every channel.

        The `verdict` is "use as is", "use the corrected draws", "do not use: run MCMC", or,
        where the posterior is right but its predictions are not, "do not use: revise the
        model". Simulations cost `n + predictive` runs of the model's simulator.
        """
        from consilience.diagnostics.check import check

        return check(
            self,
            x,
            key=key,
            simulations=simulations,
            n=n,
            draws=draws,
            predictive=predictive,
            statistics=statistics,
        )

    @keyed("fit.report(path, x, key=key)")
    def report(
        self,
        path: str | Path,
        x: Data | None = None,
        *,
        key: PRNGKey,
        simulations: Simulations | None = None,
        n: int = 500,
        predictive: int = 200,
        statistics: Mapping[str, Callable[[Any], Any]] | None = None,
        title: str | None = None,
        progress: bool = True,
    ) -> Path:
        """Write one HTML page on the fit and, where given, on an observation; its path comes back.

        The page has all that it shows in itself: a file to send, to read offline or to print.
        Calibration and recovery ask `simulations` that the fit has not seen, or `n` new ones;
        an observation gets its posterior, the log evidence and the verdict of `check`, with
        `predictive` and `statistics` as there. What cannot be made says why in its place.
        """
        from consilience.report.report import report

        return report(
            self,
            path,
            x,
            key=key,
            simulations=simulations,
            n=n,
            predictive=predictive,
            statistics=statistics,
            title=title,
            progress=progress,
        )

    @keyed("fit.log_evidence(x, n, key=key)")
    def log_evidence(self, x: Data, n: SupportsIndex = 1000, *, key: PRNGKey) -> xr.Dataset:
        """The log evidence of one dataset, or of each of a batch, from `n` posterior draws.

        `log_evidence`, with the 95 % interval from `lower` to `upper`, by three methods:
        `mean`, the average of the identity, a lower bound; `importance`, the log of the mean
        ratio; `bridge`, the bridge to the true posterior, the one to take.
        `spread`: the width of the central 95 % of the identity's values, zero for a right
        posterior. `pareto_k`, `ess`: trust the estimates where k is below 0.7.
        """
        n = as_count(n, "n, the number of draws in fit.log_evidence(x, n, key=key),")
        if n < 50:
            raise ValueError(f"An estimate of the evidence needs 50 draws or more, got {n}.")
        (_, terms), batched = self._draw(x, n, key, self.joint)
        estimates, width, weights = jax.device_get(estimate_all(terms))
        return evidence_to_dataset(estimates, width, weights, batched=batched)

    @property
    def networks(self) -> Networks:
        """All that was trained."""
        return Networks(
            self.posterior.summary,
            self.posterior.flow,
            None if self.likelihood is None else self.likelihood.flow,
            None if self.prior is None else self.prior.flow,
        )

    @property
    def has_joint(self) -> bool:
        """Whether prior and likelihood are there, exact or learned."""
        prior = self.model.prior.density is not None or self.prior is not None
        return prior and (self.model.likelihood is not None or self.likelihood is not None)

    @property
    def joint(self) -> Joint:
        """Prior and likelihood: the model's own where it has them, else the learned ones."""
        return make_joint(self.model, self.prior, self.likelihood)

    @failures_as_raised()
    def _draw(
        self, x: Data, n: int, key: PRNGKey, joint: Joint | None, devices: Devices | None = None
    ):
        """Draws, and the terms of the identity if there is a joint; and whether x is a batch."""
        layout = self.posterior.data.layout
        arrays, batched = layout.check(x)
        m = len(arrays[layout.names[0]])
        check_draws(m * n, self.posterior.parameters.dim)
        mesh = make_mesh(devices)
        posterior, joint = replicate((self.posterior, joint), mesh)

        def block(i, j):
            part = layout.unnamed({name: array[i] for name, array in arrays.items()})
            return _draw(posterior, joint, key, part, i, j[0], len(j), mesh)

        return in_blocks(m, n, block, 1 if mesh is None else mesh.size), batched

    def log_prob(self, theta: Theta | xr.Dataset | np.ndarray, x: Data) -> np.ndarray:
        """The log posterior density at named parameters.

        For one dataset, arrays of `theta` may have any leading axes, and the result has
        them. For a batch of datasets their first axis is the batch's. Draws of `sample`
        are accepted as they are. Outside the prior's support: minus infinity.
        """
        layout, space = self.posterior.data.layout, self.posterior.parameters
        arrays, batched = layout.check(x)
        m = len(arrays[layout.names[0]])
        if isinstance(theta, xr.Dataset):
            theta = {str(name): array.values for name, array in theta.data_vars.items()}
        named = space.check(theta)
        first = space.names[0]
        lead = named[first].shape[: named[first].ndim - len(space.shapes[first])]
        if batched and lead[:1] != (m,):
            raise ValueError(
                f"x is a batch of {m} datasets, so the arrays of theta must have {m} as their "
                f"first axis, got the leading axes {lead}."
            )
        n = math.prod(lead[1:] if batched else lead)
        flat = {name: a.reshape(m, n, *space.shapes[name]) for name, a in named.items()}

        def block(i, j):
            part = {name: array[i] for name, array in arrays.items()}
            values = {name: a[np.ix_(i, np.minimum(j, n - 1))] for name, a in flat.items()}
            return _log_prob(self.posterior, values, layout.unnamed(part))

        if n == 0:
            return np.empty(lead, space.loc.dtype)
        return in_blocks(m, n, block).reshape(lead)

    def save(self, path: str | Path) -> Path:
        """Write the fit to a file that `cs.load` reads, whole or not at all.

        Where that fails, with `cs.SaveError`, an older file is as it was, and so is the fit.
        """
        from consilience.posterior.storage import save

        return save(self, path)

    def __repr__(self) -> str:
        learned = " and ".join(self.history.best_epochs)
        trained = repr(self.history).removeprefix("History: ")
        return f"Fit: {learned} of {', '.join(self.posterior.parameters.names)}\n  {trained}"

    def _repr_html_(self) -> str:
        return notebook(self)


def _one_chain(draws: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: values[:, None] for name, values in draws.items()}


@compiled
def _draw(
    posterior: Posterior,
    joint: Joint | None,
    key: PRNGKey,
    x: Any,
    numbers,
    start,
    n: int,
    mesh: Mesh | None,
):
    flow, space = posterior.flow, posterior.parameters

    def noise(number):
        # A dataset's draws do not depend on the rest of the batch.
        key_here = jax.random.fold_in(jax.random.fold_in(key, number), start)
        return flow.noise(key_here, (n,))

    def draw(posterior, joint, z, x):
        contexts = posterior.contexts(x)
        if joint is None:
            return twice(space.from_vector)(posterior.flow.values(z, contexts)), None
        u, log_q = posterior.flow.draw(z, contexts)
        return twice(space.from_vector)(u), terms_at(joint, posterior, u, log_q, x)

    return along_second(draw, mesh)(posterior, joint, jax.vmap(noise)(numbers), x)


@compiled
def _log_prob(posterior: Posterior, theta: Theta, x: Any):
    return posterior.log_probs(theta, x)


def assemble(
    model: Model,
    parameters: ParameterSpace,
    data: DataSpace,
    networks: Networks,
    recipe: Recipe,
    history: History,
    validity: Validity | None = None,
    origin: Origin | None = None,
    out_of_fold: OutOfFold | None = None,
) -> Fit:
    """Trained networks and their spaces as a `Fit`."""
    flow, prior = networks.likelihood, networks.prior
    if model.external is not None and model.spec is None:
        # As the runs have shown it: the user's own model stays as it is.
        model = model.with_spec(Spec.floats(data.layout.shapes, data.layout.bare))
    likelihood = None if flow is None else Likelihood(flow, parameters, data, validity)
    return Fit(
        model=model,
        posterior=Posterior(networks.summary, networks.posterior, parameters, data),
        likelihood=likelihood,
        prior=None if prior is None else LearnedPrior(prior, parameters),
        recipe=recipe,
        history=history,
        origin=origin,
        out_of_fold=out_of_fold,
    )
