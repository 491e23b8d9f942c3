r"""What training minimises.

Neural posterior estimation (NPE) and joint posterior and likelihood estimation (NPLE) are
maximum likelihood over the joint model of parameters and data (Schmitt et al. 2024,
arXiv:2310.04395, equations 2 and 3):
$$\mathcal{L}_\mathrm{NPE}(\phi) = \mathbb{E}_{p(\theta, x)}[-\log q_\phi(\theta \mid x)], \qquad
  \mathcal{L}_\mathrm{NPLE}(\phi, \eta) = \mathbb{E}_{p(\theta, x)}
  [-\log q_\phi(\theta \mid x) - \log q_\eta(x \mid \theta)].$$

A loss is a callable of the networks, one example, a key and the training progress in [0, 1];
it returns its named terms, and training minimises their sum. `parts` names groups of
networks that share no term: the best epoch of each is picked by its own terms.
"""

from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from consilience.approximators import Networks, likelihood_standard
from consilience.data import DataSpace
from consilience.types import Flat, PRNGKey, Scalar


class Example(NamedTuple):
    """One run as training sees it: standardised parameters and data."""

    u: Flat
    x: dict[str, Array]


class MaximumLikelihood(eqx.Module):
    """NPE; NPLE where a likelihood is learned too; and the prior where its density is."""

    data: DataSpace
    parts: ClassVar = {
        "posterior": ("summary", "posterior"),
        "likelihood": ("likelihood",),
        "prior": ("prior",),
    }

    def __call__(
        self, networks: Networks, example: Example, key: PRNGKey | None, progress: Scalar
    ) -> dict[str, Scalar]:
        keys = (None,) * 4 if key is None else jax.random.split(key, 4)
        flow = networks.posterior
        context = flow.prepare(networks.summary(example.x))
        terms = {"posterior": -flow.log_prob(example.u, context, keys[0])}
        if networks.likelihood is not None:
            x = self.data.dequantise(example.x, keys[1])
            terms["likelihood"] = -likelihood_standard(
                networks.likelihood, self.data.layout, example.u, x, keys[2]
            )
        if networks.prior is not None:
            empty = networks.prior.prepare(jnp.zeros(0))
            terms["prior"] = -networks.prior.log_prob(example.u, empty, keys[3])
        return terms
