"""Draws as xarray, with named parameters, and from there to ArviZ."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from consilience.core.types import Data
from consilience.identity.evidence import ESTIMATORS

INTERVAL = 1.959964
"""Standard errors either side of an estimate in a 95 % interval."""


def draws_to_dataset(
    draws: dict[str, np.ndarray],
    *,
    batched: bool,
    extra: dict[str, np.ndarray] | None = None,
    judged: dict[str, dict[str, np.ndarray]] | None = None,
) -> xr.Dataset:
    """Draws with the leading axes (observation, chain, draw) as a dataset.

    `extra`: a number for each observation, which becomes a coordinate. `judged`: a number
    for each observation and entry of each parameter; it becomes a coordinate named for both.
    """
    own = {n: [f"{n}_dim_{i}" for i in range(a.ndim - 3)] for n, a in draws.items()}
    dims = ["observation", "chain", "draw"]
    dataset = xr.Dataset({name: (dims + own[name], values) for name, values in draws.items()})
    dataset = dataset.assign_coords({str(dim): np.arange(n) for dim, n in dataset.sizes.items()})
    coordinates: dict[str, Any] = {
        name: (("observation",), values) for name, values in (extra or {}).items()
    }
    for what, values in (judged or {}).items():
        coordinates |= {f"{what}_{n}": (("observation", *own[n]), a) for n, a in values.items()}
    dataset = dataset.assign_coords(coordinates)
    return dataset if batched else dataset.isel(observation=0).drop_vars("observation")


def evidence_to_dataset(estimates, spread, weights, *, batched: bool) -> xr.Dataset:
    """Estimates of the log evidence by method, with their 95 % intervals."""
    estimates = {name: estimates[name] for name in ESTIMATORS}
    value = np.stack([part.log_evidence for part in estimates.values()], axis=1)
    error = np.stack([part.error for part in estimates.values()], axis=1)
    dims = ("observation", "estimator")
    dataset = xr.Dataset(
        {
            "log_evidence": (dims, value),
            "lower": (dims, value - INTERVAL * error),
            "upper": (dims, value + INTERVAL * error),
            "spread": ("observation", spread),
            "pareto_k": ("observation", weights.pareto_k),
            "ess": ("observation", weights.ess),
        },
        coords={"estimator": list(estimates), "observation": np.arange(len(value))},
    )
    return dataset if batched else dataset.isel(observation=0, drop=True)


def to_arviz(
    draws: xr.Dataset, *, observed: Data | None = None, predictions: Data | None = None
) -> Any:
    """Posterior draws as ArviZ takes them: InferenceData in ArviZ 0.x, a DataTree since 1.0.

    `observed`, `predictions`: one dataset, and data simulated at its posterior with a leading
    axis (`Check.x`, `Check.predictions`), as groups of their own.
    Needs ArviZ, which the library does not install by itself.
    """
    import arviz

    groups: dict[str, Any] = {"posterior": draws.transpose("chain", "draw", ...)}
    if predictions is not None:
        parts = _named(predictions).items()
        groups["posterior_predictive"] = _group({n: a[None] for n, a in parts}, "chain", "draw")
    if observed is not None:
        groups["observed_data"] = _group(_named(observed))
    # ArviZ 1 still answers to the old name, with a warning.
    if arviz.__version__.startswith("0."):
        return arviz.InferenceData(**groups)
    return xr.DataTree.from_dict(groups)


def _named(x: Data) -> dict[str, np.ndarray]:
    named = x if isinstance(x, Mapping) else {"x": x}
    return {str(name): np.asarray(array) for name, array in named.items()}


def _group(arrays: dict[str, np.ndarray], *lead: str) -> xr.Dataset:
    own = {n: [f"{n}_dim_{i}" for i in range(a.ndim - len(lead))] for n, a in arrays.items()}
    for name in arrays:
        if name in (*lead, *itertools.chain(*own.values())):
            raise ValueError(
                f"For ArviZ, data cannot be called {name!r}: a dimension has that name. Pass a "
                "dictionary with another."
            )
    return xr.Dataset({name: ((*lead, *own[name]), array) for name, array in arrays.items()})
