r"""A likelihood that is learned first, alone, and then emulates the simulator.

With $q(x \mid \theta)$ learned from the runs, pairs $\theta \sim p(\theta)$,
$x \sim q(x \mid \theta)$ are as many as one likes. A posterior that is trained on them by maximum
likelihood tends to the posterior of the learned likelihood, $p(\theta) q(x \mid \theta) / q(x)$,
and cannot overfit the runs. `LikelihoodLoss` trains the likelihood; the posterior's loss is
an `Objective` with this likelihood as its emulator.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from consilience.core.types import Scalar
from consilience.identity.batches import Batch, Example, StepKeys, take
from consilience.identity.terms import Evaluated, LikelihoodTerm, PriorTerm, Problem, View
from consilience.model.data import DataSpace
from consilience.model.spaces import ParameterSpace
from consilience.networks.base import Numbers
from consilience.networks.density import BatchedDensity


class Emulator(eqx.Module):
    """The densities that are learned without the posterior."""

    likelihood: BatchedDensity
    prior: BatchedDensity | None

    def penalty(self) -> Scalar:
        more = jnp.zeros(()) if self.prior is None else self.prior.penalty()
        return self.likelihood.penalty() + more


class LikelihoodLoss(eqx.Module):
    """Maximum likelihood of the learned likelihood, and of a learned prior where there is one."""

    N_KEYS: ClassVar[int] = len(StepKeys._fields)

    parameters: ParameterSpace
    data: DataSpace

    def batches(
        self,
        networks: Emulator,
        runs: Example,
        order: Int[Array, "steps batch"],
        keys: Key[Array, " n"],
    ) -> Batch:
        """The runs of each step of an epoch, along a leading axis."""
        return Batch(take(runs, order))

    def maximum_likelihood(self, networks: Emulator, runs: Example) -> dict[str, Numbers]:
        """The negative log densities of runs."""
        view = self._view(networks, Batch(runs), jnp.ones(()))
        return {term.name: term.each(view, None) for term in _terms(networks)}

    def __call__(
        self, networks: Emulator, batch: Batch, keys: Key[Array, " n"], progress: Scalar
    ) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        view = self._view(networks, batch, progress)
        joint = StepKeys(*keys).joint
        return {term.name: term(view, joint) for term in _terms(networks)}, {}

    def _view(self, networks: Any, batch: Batch, progress: Scalar) -> View:
        # These terms do not look at what the posterior says.
        nothing = Evaluated(jnp.zeros(len(jax.tree.leaves(batch.runs.u)[0])))
        return View(Problem(None, self.parameters, self.data), networks, batch, nothing, progress)


def _terms(networks: Emulator) -> list[LikelihoodTerm | PriorTerm]:
    return [LikelihoodTerm(), *([] if networks.prior is None else [PriorTerm()])]
