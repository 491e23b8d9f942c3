"""Simulations that do not belong to a model, or cannot be learned from, are refused."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from consilience.core.arrays import computed_in, finite_rows, largest
from consilience.core.compiling import compiled
from consilience.core.types import Data
from consilience.model.data import layout_of
from consilience.model.model import Model
from consilience.model.spaces import ParameterSpace
from consilience.simulation.simulations import Simulations


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
        hidden = model.prior.hidden(simulations.prior)
        raise ValueError(
            f"The simulations were drawn from the prior {simulations.prior}, but that of the model "
            f"is {model.prior.texts}{hidden}: pass the model that they were made with."
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
        f"{what} Fix the simulator, or pass simulations.drop_invalid(): a fit of the rest takes "
        "into account how often runs fail at which parameters."
    )


@compiled
def _contains(space: ParameterSpace, theta):
    return jax.vmap(space.contains)(theta)
