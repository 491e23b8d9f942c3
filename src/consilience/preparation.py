"""From a model and its runs to what the training loop takes: checked, split, standardised."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.random import Generator

from consilience.approximators import Networks
from consilience.arrays import computed_in, finite_rows, largest, within_range
from consilience.augmentation import Spread
from consilience.compiling import compiled, on_device
from consilience.data import DataSpace, layout_of
from consilience.defaults import Plan
from consilience.fitted import Fit, Recipe
from consilience.flows import Coupling, Flow
from consilience.losses import Example, Objective
from consilience.model import Model
from consilience.simulations import Simulations
from consilience.spaces import ParameterSpace, to_vectors
from consilience.types import Data
from consilience.validity import Attempts, Validity, learn_validity

HIDDEN = ", which differs in numbers that these lines leave out"


def check_simulations(model: Model, simulations: Simulations):
    """Refuse runs that do not belong to the model, or cannot be learned from."""
    if not isinstance(model, Model) or not isinstance(simulations, Simulations):
        raise TypeError(
            "cs.fit takes a cs.Model and then its cs.Simulations, got "
            f"{type(model).__name__} and {type(simulations).__name__}."
        )
    if len(simulations) == 0:
        raise ValueError("There are no simulations to learn from: got 0 runs.")
    if model.prior.differs_from(simulations.prior, simulations.fingerprint):
        hidden = simulations.prior == model.prior.texts
        raise ValueError(
            f"The simulations were drawn from the prior {simulations.prior}, but that of the model "
            f"is {model.prior.texts}{HIDDEN * hidden}: pass the model that they were made with."
        )
    space = ParameterSpace(model.prior)
    theta = space.check(simulations.theta, "The theta of the simulations")
    leading = next(iter(theta.values())).shape[: -len(space.shapes[space.names[0]]) or None]
    if leading != (len(simulations),):
        raise ValueError(
            "The theta of the simulations must have one leading axis of "
            f"{len(simulations)} runs, got the leading axes {leading}."
        )
    if model.layout is not None:
        got = layout_of(simulations.blank, model.data)
        if got.shapes != model.layout.shapes:
            raise ValueError(
                f"The model's simulator gives x of shape {model.layout.show(model.layout.shapes)}, "
                f"but the simulations have {got.show(got.shapes)}."
            )
    # What is in a store was looked at when it came in.
    arrays = {**theta, **({} if simulations.unread else _named_data(simulations.x))}
    for name, array in arrays.items():
        if np.isfinite(array).all() and not finite_rows(array).all():
            raise ValueError(
                f"The simulations have values of {name} beyond {largest()}, the largest number of "
                f"{computed_in()}: use other units, in the prior and the simulator."
            )
    if simulations.invalid.any():
        raise ValueError(_about_invalid(simulations))
    inside = np.asarray(_contains(space, theta))
    if not inside.all():
        out = np.flatnonzero(~inside)
        raise ValueError(
            f"{len(out)} of {len(simulations)} simulations have parameters outside the prior's "
            f"support, the first at {out[:5].tolist()}."
        )


def _named_data(x: Data) -> dict[str, Any]:
    return dict(x) if isinstance(x, Mapping) else {"x": x}


def _about_invalid(simulations: Simulations) -> str:
    bad = np.flatnonzero(simulations.invalid)
    what = (
        f"{len(bad)} of {len(simulations)} simulations failed or have NaN or infinite values, "
        f"the first at {bad[:5].tolist()}."
    )
    if len(simulations.failures):
        what += f" {simulations.failures.summary()}\n"
    return (
        f"{what} Mend the simulator, or pass simulations.drop_invalid(): a fit of the rest takes "
        "into account how often runs fail at which parameters."
    )


@compiled
def _contains(space: ParameterSpace, theta):
    return jax.vmap(space.contains)(theta)


def split(
    n: int, share: float, rng: Generator, most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Runs to train on and runs to hold out, at random; of the latter at most so many."""
    if not 0 <= share < 1:
        raise ValueError(f"validation must be a share in [0, 1), got {share}.")
    order = rng.permutation(n)
    held = 0 if share == 0 else max(1, min(round(share * n), n if most is None else most))
    if held >= n:
        raise ValueError(f"{n} simulations leave none to train on: pass validation=0.")
    return order[held:], order[:held]


def build_networks(
    recipe: Recipe,
    parameters: ParameterSpace,
    data: DataSpace,
    rng: Generator,
    multipliers: Array | None = None,
) -> Networks:
    """New networks for parameters and data of these shapes."""
    for_summary, for_posterior, for_likelihood, for_prior = rng.spawn(4)
    dim, layout = parameters.dim, data.layout
    summary: Any = recipe.summary
    if not isinstance(summary, eqx.Module):
        summary = summary.build(for_summary, layout, dim)
    dtype = parameters.loc.dtype
    x = {name: jax.ShapeDtypeStruct(s, dtype) for name, s in layout.shapes.items()}
    out = jax.eval_shape(summary, x)
    if getattr(out, "ndim", None) != 1:
        raise ValueError(
            "A summary network must return a vector for one standardised dataset, got "
            f"{getattr(out, 'shape', type(out).__name__)}."
        )
    n_values, n_side = layout.unit_sizes

    def flow(spec: Coupling | None, rng: Generator, dim: int, condition: int):
        return None if spec is None else Flow(spec, rng, dim=dim, condition=condition)

    return Networks(
        summary=summary,
        posterior=flow(recipe.posterior, for_posterior, dim, out.shape[0]),
        likelihood=flow(recipe.likelihood, for_likelihood, n_values, dim + n_side),
        prior=flow(recipe.prior, for_prior, dim, 0),
        multipliers=multipliers,
    )


def to_examples(
    parameters: ParameterSpace, simulations: Simulations, index: np.ndarray | None = None
) -> Example:
    """All runs, or some, as training takes them."""
    u: Any = np.asarray(to_vectors(parameters, parameters.check(simulations.theta)))
    if index is not None:
        # Picked on the host, where nothing is compiled.
        u, simulations = u[index], simulations[index]
    return jax.device_put(Example(u, jax.tree.map(within_range, simulations.x)))


def build_objective(
    model: Model,
    parameters: ParameterSpace,
    data: DataSpace,
    plan: Plan,
    simulations: Simulations,
    unlabeled: Data | None,
    atoms: int | None = None,
    validity: Validity | None = None,
) -> Objective:
    """What training minimises, once the likelihood and the unlabelled data are seen to fit."""
    settings, layout = plan.self_consistency, data.layout
    observed = None
    if unlabeled is not None:
        if settings is None:
            raise ValueError(
                "Unlabelled data have no theta to learn from by maximum likelihood: they need "
                "self-consistency. Leave self_consistency as it is, or pass cs.SelfConsistency()."
            )
        arrays, _ = layout.check(unlabeled, "unlabeled")
        observed = layout.unnamed({name: jnp.asarray(a) for name, a in arrays.items()})
    if settings is None:
        # Without the model, a model written anew compiles nothing anew.
        return Objective(model if atoms else None, parameters, data, atoms=atoms)
    if plan.exact:
        check_likelihood(model, simulations)
    spread = data_spread(data, simulations.x, observed)
    return Objective(
        model, parameters, data, settings, plan.exact, spread, observed, atoms, validity
    )


def find_validity(
    parameters: ParameterSpace,
    attempts: Attempts | None,
    start: Fit | None,
    rng: Generator,
) -> Validity | None:
    """The probability of giving data, learned where runs were dropped, or that of a first fit."""
    if attempts is None:
        return None if start is None or start.likelihood is None else start.likelihood.validity
    u = to_vectors(parameters, parameters.check(attempts.theta))
    return learn_validity(np.asarray(u), attempts.valid, rng)


def data_spread(data: DataSpace, *sources: Data | None) -> Spread:
    """The scale of the data, and the range of every entry over all sources."""
    named = [data.layout.named(x) for x in sources if x is not None]
    low, high = {}, {}
    for name in data.layout.data_names:
        arrays = np.concatenate([np.asarray(x[name]) for x in named])
        # Rows of a set share their range, as they share their scale.
        axes = (0, 1) if data.scale[name].ndim < arrays.ndim - 1 else 0
        low[name] = on_device(arrays.min(axis=axes))
        high[name] = on_device(arrays.max(axis=axes))
    return Spread({name: data.spread(name) for name in low}, low, high)


def check_likelihood(model: Model, simulations: Simulations, n: int = 64):
    """Refuse a log-likelihood that fails on the runs, at their theta or at one another's."""
    few = simulations[: min(n, len(simulations))]
    for what, shift in (("its own theta", 0), ("the theta of another run", 1)):
        at = {name: np.roll(array, shift, axis=0) for name, array in few.theta.items()}
        values = np.asarray(_likelihoods(model, at, few.x))
        if values.shape != (len(few),):
            raise ValueError(
                "log_likelihood(theta, x) must return one number, got the shape "
                f"{values.shape[1:]}. For a function of one row, pass cs.PerRow(function)."
            )
        bad = np.flatnonzero(np.isnan(values) | (values == np.inf))
        if len(bad):
            i = int(bad[0])
            shown = {name: array[i].tolist() for name, array in at.items()}
            raise ValueError(
                f"log_likelihood(theta, x) is {values[i]} for run {i} at {what}, {shown}, and "
                f"not valid for {len(bad)} of {len(few)} runs. It must be finite, or minus "
                "infinity where theta is impossible."
            )
        if shift == 0 and np.all(values == -np.inf):
            raise ValueError(
                "log_likelihood(theta, x) is minus infinity for every run at its own theta: "
                "it calls impossible what the simulator does."
            )


@compiled
def _likelihoods(model: Model, theta, x):
    return jax.vmap(model.log_likelihood)(theta, x)
