"""The descriptions of all networks of a fit."""

import dataclasses

import equinox as eqx

from consilience.networks.density import ConditionalDensity
from consilience.networks.summary import Summary


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The descriptions of the networks of a fit."""

    posterior: ConditionalDensity
    likelihood: ConditionalDensity | None
    prior: ConditionalDensity | None
    summary: Summary | eqx.Module
