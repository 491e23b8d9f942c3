"""Networks that start at ridge regression: a linear model is there before the first step.

A flow first shifts and scales its values by an affine map of their condition. Set to the ridge
regression of the values on the condition, with the spread of its leave-one-out residuals as
scale, a new flow is the linear Gaussian model, and training starts from there.
"""

from typing import TypeVar

import equinox as eqx
import numpy as np
from jaxtyping import Float

from consilience.core.compiling import on_device
from consilience.networks.density import BatchedDensity
from consilience.networks.flow import MAX_LOG_SCALE, Flow

D = TypeVar("D", bound=BatchedDensity)

PENALTIES = np.logspace(-6, 4, 41)
"""Candidates for the penalty, relative to the number of runs, chosen for each value apart."""


def start_at_ridge(density: D, conditions: np.ndarray, values: np.ndarray) -> D:
    """A new flow with its frame at the ridge regression of `values` on `conditions`.

    Densities of another kind are returned as they are.
    """
    if not isinstance(density, Flow):
        return density
    weight, bias, spread = ridge(conditions, values)
    limit = 0.99 * MAX_LOG_SCALE
    log_scale = np.clip(np.log(np.maximum(spread, 1e-30)), -limit, limit)
    raw = MAX_LOG_SCALE * np.arctanh(log_scale / MAX_LOG_SCALE)
    full = np.concatenate([weight, np.zeros_like(weight)])
    return eqx.tree_at(
        lambda flow: (flow.frame.weight, flow.frame.bias),
        density,
        (on_device(full), on_device(np.concatenate([bias, raw]))),
    )


def ridge(
    x: Float[np.ndarray, "n p"], y: Float[np.ndarray, "n q"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights (q, p), biases and residual spread, penalties by leave-one-out errors."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    n = len(x)
    mean_x, mean_y = x.mean(axis=0), y.mean(axis=0)
    left, sizes, right = np.linalg.svd(x - mean_x, full_matrices=False)
    # Centred values have no part along a constant.
    there = sizes > 1e-10 * max(sizes.max(initial=0.0), 1e-300)
    left, sizes, right = left[:, there], sizes[there], right[there]
    target = left.T @ (y - mean_y)
    # The part of the values, and of each run, that no direction reaches.
    beyond = y - mean_y - left @ target
    outside = np.maximum(1 - 1 / n - np.sum(left**2, axis=1), 0.0)
    best = np.full(y.shape[1], np.inf)
    weight = np.zeros((y.shape[1], x.shape[1]))
    for penalty in PENALTIES * n:
        # What a penalty leaves of each direction, and not one minus the rest: with as many
        # conditions as runs both parts of the quotient below are tiny.
        left_over = penalty / (sizes**2 + penalty)
        residual = beyond + left @ (left_over[:, None] * target)
        free = np.maximum(outside + (left**2) @ left_over, 1e-10)
        errors = residual / free[:, None]
        loss = np.mean(errors**2, axis=0)
        better = loss < best
        best = np.where(better, loss, best)
        factor = sizes / (sizes**2 + penalty)
        found = ((right.T * factor) @ target).T
        weight = np.where(better[:, None], found, weight)
    return weight, mean_y - weight @ mean_x, np.sqrt(best)
