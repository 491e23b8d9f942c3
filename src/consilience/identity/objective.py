"""The objective: the weighted sum of the terms of the loss, and the batches that it is taken over.

Self-consistency is added to maximum likelihood with a weight that grows over training, at the
simulated data, at data augmented from them, and at unlabelled data.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from consilience.core.types import PRNGKey, Scalar
from consilience.identity.batches import (
    Batch,
    EpochKeys,
    Example,
    Pairs,
    StepKeys,
    make_batches,
)
from consilience.identity.consistency import SelfConsistency
from consilience.identity.learned import Networks
from consilience.identity.terms import (
    AtomicTerm,
    ConsistencyTerm,
    LikelihoodTerm,
    LossTerm,
    PosteriorTerm,
    PriorTerm,
    Problem,
    View,
    evaluate,
    own_key,
)
from consilience.model.data import DataSpace
from consilience.model.spaces import ParameterSpace
from consilience.networks.base import Numbers
from consilience.networks.density import BatchedDensity
from consilience.networks.validity import Validity


class Objective(eqx.Module):
    """The sum that training minimises, and the batches it is made of.

    `model`: prior and likelihood; None where maximum likelihood alone needs neither.
    `settings`: self-consistency, or None for maximum likelihood alone.
    `exact`: the identity takes the model's own log-likelihood, not the learned one.
    `unlabeled`: observed data without parameters, with a leading axis.
    `atoms`: M, where theta came from a proposal, not from the prior; else None.
    `validity`: the factor of the learned likelihood for runs that failed and were dropped.
    `more`: terms of the user's own.
    `emulator`: a likelihood that was learned before, and is not trained here.
    `pairs`: maximum likelihood over pairs that the emulator makes, beside the runs.
    """

    N_KEYS: ClassVar[int] = len(StepKeys._fields)
    """The number of random keys of a step."""

    model: Any
    parameters: ParameterSpace
    data: DataSpace
    settings: SelfConsistency | None = eqx.field(static=True, default=None)
    exact: bool = eqx.field(static=True, default=False)
    spread: Any = None
    unlabeled: Any = None
    atoms: int | None = eqx.field(static=True, default=None)
    validity: Validity | None = None
    more: tuple[LossTerm, ...] = ()
    emulator: BatchedDensity | None = None
    pairs: Pairs | None = eqx.field(static=True, default=None)

    @property
    def problem(self) -> Problem:
        return Problem(
            self.model, self.parameters, self.data, self.exact, self.validity, self.emulator
        )

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The densities whose best epochs are picked together: those that may share a term."""
        tied = (self.settings is not None and not self.exact) or bool(self.more)
        return (
            (("posterior", "likelihood", "prior"),)
            if tied
            else (("posterior",), ("likelihood",), ("prior",))
        )

    def batches(
        self,
        networks: Networks,
        runs: Example,
        order: Int[Array, "steps batch"],
        keys: Key[Array, " n"],
    ) -> Batch:
        """The batches of one epoch, along a leading axis of steps."""
        return make_batches(
            self.settings,
            self.problem.posterior(networks),
            None if self.model is None else self.model.prior,
            self.spread,
            runs,
            self.unlabeled,
            order,
            EpochKeys(*keys[: len(EpochKeys._fields)]),
            self.problem.likelihood(networks),
            self.pairs,
        )

    def maximum_likelihood(self, networks: Networks, runs: Example) -> dict[str, Numbers]:
        """The negative log densities of runs."""
        view = self._view(networks, Batch(runs), None, jnp.ones(()))
        return {term.name: term.each(view, None) for term in _labelled(networks)}

    def __call__(
        self, networks: Networks, batch: Batch, keys: Key[Array, " n"], progress: Scalar
    ) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """The weighted terms of a batch, and counts of what was left out."""
        named = StepKeys(*keys)
        view = self._view(networks, batch, named.dropout, progress)
        terms = {term.name: term(view, named.joint) for term in _labelled(networks)}
        if self.atoms is not None:
            terms["posterior"] = AtomicTerm(self.model.prior, self.atoms)(view, named.atoms)
        for term in self.more:
            terms[term.name] = term(view, own_key(named.atoms, term.name))
        if self.pairs is not None:
            cached, queries = view.evaluated.queries, batch.queries
            assert cached is not None and cached.own is not None
            assert queries is not None and queries.u is not None
            terms["posterior"] *= self.pairs.runs
            terms["emulated"] = -jnp.sum(self.problem.valid_share(queries.u) * cached.own)
        if self.settings is None:
            return terms, {}
        weight, labels = (schedule(progress) for schedule in self.settings.schedules)
        loss, trust, counts = self._consistency("queries").judge(view, named.queries)
        terms["consistency"] = weight * loss
        # What the limit takes from self-consistency goes back to maximum likelihood.
        terms["posterior"] *= labels + jnp.maximum(1.0 - labels, 0.0) * (1.0 - trust)
        if batch.unlabeled is not None:
            loss, _, more = self._consistency("unlabeled").judge(view, named.unlabeled)
            terms["unlabeled"] = weight * self.settings.unlabeled_weight * loss
            counts = jax.tree.map(jnp.add, counts, more)
        return terms, counts

    def _consistency(self, at: Any) -> ConsistencyTerm:
        assert self.settings is not None
        return ConsistencyTerm(self.settings, self.model.prior, at)

    def _view(
        self, networks: Networks, batch: Batch, key: PRNGKey | None, progress: Scalar
    ) -> View:
        jittered = self.settings is not None and self.settings.augmentation is not None
        augmented = jittered or self.pairs is not None
        posterior = self.problem.posterior(networks)
        evaluated = evaluate(posterior, batch, key, augmented=augmented)
        return View(self.problem, networks, batch, evaluated, progress)


def _labelled(networks: Networks) -> list[PosteriorTerm | LikelihoodTerm | PriorTerm]:
    """The terms of maximum likelihood: one for each learned density."""
    terms: list[PosteriorTerm | LikelihoodTerm | PriorTerm] = [PosteriorTerm()]
    if networks.likelihood is not None:
        terms.append(LikelihoodTerm())
    if networks.prior is not None:
        terms.append(PriorTerm())
    return terms
