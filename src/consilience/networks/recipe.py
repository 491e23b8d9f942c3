"""The descriptions of all networks of a fit."""

import dataclasses

import equinox as eqx

from consilience.networks.flow import Coupling
from consilience.networks.summary import Summary


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The descriptions of the networks of a fit."""

    posterior: Coupling
    likelihood: Coupling | None
    prior: Coupling | None
    summary: Summary | eqx.Module
