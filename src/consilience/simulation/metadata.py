"""Whose runs a store holds: what its description says, and what must agree when it goes on."""

import json
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from consilience.core.provenance import key_name
from consilience.core.types import PRNGKey
from consilience.model.priors import Prior
from consilience.simulation.lock import StoreError

COMPARED = ("key", "parameters", "simulator")
"""What must be the same; priors are compared by their numbers, programs by a run of theirs."""


def describe_campaign(prior: Prior, simulator: str, program: str, key: PRNGKey) -> dict[str, Any]:
    """What goes into the description of a store; `program`: see `programs.py`."""
    return {
        "version": version("consilience"),
        "key": list(key_name(key)),
        "prior": prior.texts,
        "fingerprint": prior.fingerprint,
        "parameters": prior.shapes,
        "simulator": simulator,
        "program": program,
    }


def check_campaign(path: str, held: dict[str, Any], about: dict[str, Any], prior: Prior | None):
    """Refuse to go on with the runs of another campaign. Older stores say less of themselves."""
    for name in COMPARED:
        if name in about and json.loads(json.dumps(about[name])) != held.get(name):
            raise _other(path, name, held.get(name), about[name])
    if prior is None:
        return
    _check_precision(path, held, prior)
    if prior.differs_from(held["prior"], held.get("fingerprint")):
        if held["prior"] == prior.texts:
            raise other_draws(path)
        raise _other(path, "prior", held["prior"], prior.texts)


def _other(path: str, name: str, held: Any, given: Any) -> StoreError:
    return StoreError(
        f"{path} holds runs of another campaign. Its {name}: {held}; the {name} given: "
        f"{given}. Pass the model and key that it was made with, or another store."
    )


def other_draws(path: str) -> StoreError:
    """What to say of priors that differ in numbers which their texts do not show."""
    return StoreError(
        f"{path} holds runs at other parameters than this prior draws with this key: pass the "
        "model that it was made with, or another store."
    )


def _check_precision(path: str, held: dict[str, Any], prior: Prior):
    """Random draws of 64 bits are others than those of 32."""
    drawn = jax.eval_shape(prior.draw, jax.random.key(0))
    for name, _, dtype in held["theta"]:
        if name in drawn:
            check_type(path, f"{name!r}", np.dtype(dtype), drawn[name].dtype)


def check_type(path: str, what: str, held: np.dtype, given: np.dtype):
    """Refuse arrays of another type than those that a store holds."""
    if held.newbyteorder("=") != given:
        setting = held.itemsize == 8
        raise StoreError(
            f"{path} holds {what} in {held.name}, but it is {np.dtype(given).name} now: random "
            "draws are not the same. Where jax_enable_x64 makes the difference, call "
            f'jax.config.update("jax_enable_x64", {setting}) first; or pass another store.'
        )
