"""Draws as xarray, with named parameters, and from there to ArviZ."""

from typing import Any

import numpy as np
import xarray as xr


def draws_to_dataset(draws: dict[str, np.ndarray], *, batched: bool) -> xr.Dataset:
    """Draws with the leading axes (observation, draw) as a dataset with a chain of its own."""
    variables = {}
    for name, values in draws.items():
        own = [f"{name}_dim_{i}" for i in range(values.ndim - 2)]
        dims = ["observation", "chain", "draw", *own]
        array = xr.DataArray(values[:, None], dims=dims)
        variables[name] = array if batched else array[0]
    dataset = xr.Dataset(variables)
    return dataset.assign_coords({str(dim): np.arange(n) for dim, n in dataset.sizes.items()})


def to_arviz(draws: xr.Dataset) -> Any:
    """Posterior draws as ArviZ takes them: InferenceData in ArviZ 0.x, a DataTree since 1.0.

    Needs ArviZ, which the library does not install by itself.
    """
    import arviz

    dataset = draws.transpose("chain", "draw", ...)
    if hasattr(arviz, "InferenceData"):
        return arviz.InferenceData(posterior=dataset)
    return xr.DataTree.from_dict({"posterior": dataset})
