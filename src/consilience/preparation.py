"""From a model and its runs to what the training loop takes: checked, split, standardised."""

from typing import Any

import equinox as eqx
import jax
import numpy as np

from consilience.approximators import Networks
from consilience.data import DataSpace, layout_of
from consilience.fitted import Recipe
from consilience.flows import Coupling
from consilience.losses import Example
from consilience.model import Model
from consilience.networks import generator
from consilience.simulations import Simulations
from consilience.spaces import ParameterSpace
from consilience.types import PRNGKey


def check_simulations(model: Model, simulations: Simulations):
    """Refuse runs that do not belong to the model, or cannot be learned from."""
    if len(simulations) == 0:
        raise ValueError("There are no simulations to learn from: got 0 runs.")
    space = ParameterSpace(model.prior)
    theta = space.check(simulations.theta, "The theta of the simulations")
    leading = next(iter(theta.values())).shape[: -len(space.shapes[space.names[0]]) or None]
    if leading != (len(simulations),):
        raise ValueError(
            "The theta of the simulations must have one leading axis of "
            f"{len(simulations)} runs, got the leading axes {leading}."
        )
    if model.layout is not None:
        got = layout_of(simulations.x, model.data)
        if got.shapes != model.layout.shapes:
            raise ValueError(
                f"The model's simulator gives x of shape {model.layout.show(model.layout.shapes)}, "
                f"but the simulations have {got.show(got.shapes)}."
            )
    bad = np.flatnonzero(simulations.invalid)
    if len(bad):
        raise ValueError(
            f"{len(bad)} of {len(simulations)} simulations have NaN or infinite values, the "
            f"first at {bad[:5].tolist()}. Mend the simulator, or pass "
            "simulations.drop_invalid(): a posterior trained on the rest stays right, but a "
            "learned likelihood lacks the factor p(valid | theta)."
        )
    inside = np.asarray(_contains(space, theta))
    if not inside.all():
        out = np.flatnonzero(~inside)
        raise ValueError(
            f"{len(out)} of {len(simulations)} simulations have parameters outside the prior's "
            f"support, the first at {out[:5].tolist()}."
        )


@eqx.filter_jit
def _contains(space: ParameterSpace, theta):
    return jax.vmap(space.contains)(theta)


def split(n: int, share: float, key: PRNGKey) -> tuple[np.ndarray, np.ndarray]:
    """Runs to train on and runs to hold out, at random."""
    if not 0 <= share < 1:
        raise ValueError(f"validation must be a share in [0, 1), got {share}.")
    order = np.asarray(jax.random.permutation(key, n))
    held = 0 if share == 0 else max(1, round(share * n))
    if held >= n:
        raise ValueError(f"{n} simulations leave none to train on: pass validation=0.")
    return order[held:], order[:held]


def default_batch(n: int) -> int:
    return max(1, min(32 if n < 4096 else 64, n // 4))


def default_epochs(n: int, batch_size: int) -> int:
    """About 2,000 steps, and at least 15 epochs: longer overfits what a budget can tell."""
    return max(15, round(2000 / (n // batch_size)))


def build_networks(
    recipe: Recipe, parameters: ParameterSpace, data: DataSpace, key: PRNGKey
) -> Networks:
    """New networks for parameters and data of these shapes."""
    k_summary, k_posterior, k_likelihood, k_prior = jax.random.split(key, 4)
    dim, layout = parameters.dim, data.layout
    summary: Any = recipe.summary
    if not isinstance(summary, eqx.Module):
        summary = summary.build(generator(k_summary), layout, dim)
    dtype = parameters.loc.dtype
    x = {name: jax.ShapeDtypeStruct(s, dtype) for name, s in layout.shapes.items()}
    out = jax.eval_shape(summary, x)
    if getattr(out, "ndim", None) != 1:
        raise ValueError(
            "A summary network must return a vector for one standardised dataset, got "
            f"{getattr(out, 'shape', type(out).__name__)}."
        )
    n_values, n_side = layout.unit_sizes

    def flow(spec: Coupling | None, key: PRNGKey, dim: int, condition: int):
        return None if spec is None else spec.build(key, dim=dim, condition=condition)

    return Networks(
        summary=summary,
        posterior=flow(recipe.posterior, k_posterior, dim, out.shape[0]),
        likelihood=flow(recipe.likelihood, k_likelihood, n_values, dim + n_side),
        prior=flow(recipe.prior, k_prior, dim, 0),
    )


def standardise(parameters: ParameterSpace, data: DataSpace, simulations: Simulations) -> Example:
    """All runs as the networks see them."""
    return _standardise(parameters, data, parameters.check(simulations.theta), simulations.x)


@eqx.filter_jit
def _standardise(parameters: ParameterSpace, data: DataSpace, theta, x) -> Example:
    each = lambda t, x: Example(parameters.to_vector(t)[0], data.standardise(x))  # noqa: E731
    return jax.vmap(each)(theta, x)


def take(examples: Example, index) -> Example:
    return jax.tree.map(lambda a: a[index], examples)
