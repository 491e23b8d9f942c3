"""From the members of the chosen candidates to one posterior, and what it says out of fold."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from numpy.random import Generator
from scipy.special import logsumexp

from consilience.core.compiling import compiled, on_device
from consilience.core.types import PRNGKey
from consilience.identity.batches import Example
from consilience.identity.learned import Networks, Posterior
from consilience.model.data import DataSpace, Layout
from consilience.networks.ensemble import (
    Ensemble,
    EnsembleDensity,
    EnsembleSummary,
    EnsembleSummaryNetwork,
    Stacked,
    StackedDensity,
    StackedSummary,
    StackedSummaryNetwork,
    stack,
)
from consilience.networks.layers import random_key
from consilience.networks.recipe import Recipe
from consilience.posterior.out_of_fold import OutOfFold
from consilience.training.candidates import Candidate
from consilience.training.crossfit import Setup, Trained, in_blocks
from consilience.training.folds import Fold

DRAWS, MOST_DRAWN = 100, 2**22
"""Out-of-fold draws of each run, and the most values of them together."""


class Joined(NamedTuple):
    """The networks of several members as one, with their descriptions.

    `size`: the length of the summary.
    """

    summary: Any
    posterior: Any
    described: Recipe
    size: int


def join(
    setup: Setup,
    candidates: Sequence[Candidate],
    results: dict[tuple[int, int], Trained],
    weights: dict[int, float],
    members: Sequence[int],
) -> tuple[Networks, Recipe, DataSpace]:
    """The mixture of the chosen candidates, its description, and the data of its likelihood."""
    dim, layout = setup.parameters.dim, setup.data.layout
    parts = [
        _ensemble(candidates[c], [results[c, f].networks for f in members], dim, layout)
        for c in weights
    ]
    whole = parts[0]
    if len(parts) > 1:
        sizes = tuple(part.size for part in parts)
        log_weights = on_device(np.log(np.array(list(weights.values()))))
        described = [part.described for part in parts]
        whole = Joined(
            StackedSummaryNetwork(tuple(part.summary for part in parts)),
            StackedDensity(
                parts=tuple(part.posterior for part in parts),
                log_weights=log_weights,
                dim=dim,
                sizes=sizes,
            ),
            Recipe(
                Stacked(tuple(recipe.posterior for recipe in described), sizes),
                None,
                None,
                StackedSummary(tuple(recipe.summary for recipe in described)),
            ),
            sum(sizes),
        )
    chosen = _likelihood_of(candidates, results, weights)
    if chosen is None:
        networks = Networks(whole.summary, whole.posterior, None, None)
        return networks, whole.described, setup.data
    trained = [results[chosen, f].networks for f in members if (chosen, f) in results]
    likelihood, first = _mixed([n.likelihood for n in trained], candidates[chosen].likelihood)
    prior, second = _mixed([n.prior for n in trained], setup.prior)
    networks = Networks(whole.summary, whole.posterior, likelihood, prior)
    recipe = dataclasses.replace(whole.described, likelihood=first, prior=second)
    return networks, recipe, setup.of(candidates[chosen]).data


def _ensemble(candidate: Candidate, trained: list[Networks], dim: int, layout: Layout) -> Joined:
    """The members of one candidate."""
    spec, summary = candidate.posterior, candidate.summary_for(layout)
    first, n = trained[0], len(trained)
    x = {name: jax.ShapeDtypeStruct(s, float) for name, s in layout.shapes.items()}
    size = jax.eval_shape(first.summary, x).shape[0]
    if n == 1:
        return Joined(first.summary, first.posterior, Recipe(spec, None, None, summary), size)
    # A summary without weights is the same for all members.
    shared = not jax.tree.leaves(eqx.filter(first.summary, eqx.is_array))
    posterior = EnsembleDensity(
        stacked=stack([each.posterior for each in trained]), dim=dim, members=n, shared=shared
    )
    network: Any = first.summary
    if not shared:
        network = EnsembleSummaryNetwork(stack([each.summary for each in trained]))
        summary, size = EnsembleSummary(summary, n), n * size
    return Joined(network, posterior, Recipe(Ensemble(spec, n, shared), None, None, summary), size)


def _likelihood_of(
    candidates: Sequence[Candidate],
    results: dict[tuple[int, int], Trained],
    weights: dict[int, float],
) -> int | None:
    """The candidate whose learned likelihood and prior are kept, or None where none was learned.

    It is the heaviest one that has them; if the posterior needs none, the best that was tried.
    """
    having = [c for c in weights if candidates[c].likelihood is not None]
    if having:
        return max(having, key=lambda c: weights[c])
    tried = {c: one.likelihood_loss for (c, f), one in results.items() if f == 0}
    best = min(tried, key=lambda c: tried[c])
    return best if np.isfinite(tried[best]) else None


def _mixed(networks: list[Any], spec: Any) -> tuple[Any, Any]:
    """The members of a density that all see the same condition, and their description."""
    if spec is None or len(networks) == 1:
        return networks[0], spec
    n = len(networks)
    return EnsembleDensity(stack(networks), networks[0].dim, n, True), Ensemble(
        spec, n, shared=True
    )


def out_of_fold(
    setup: Setup,
    folds: Mapping[int, Fold],
    results: dict[tuple[int, int], Trained],
    weights: dict[int, float],
    rng: Generator,
) -> OutOfFold:
    """Densities and draws of every run by the members that have not seen it."""
    dim, total = setup.parameters.dim, sum(len(fold.held_out) for fold in folds.values())
    n = max(1, min(DRAWS, MOST_DRAWN // (dim * total)))
    share = np.array(list(weights.values()))
    parts = []
    for f, fold in folds.items():
        log_q = np.stack([results[c, f].log_q for c in weights], axis=1)
        drawn = []
        for c in weights:
            networks = results[c, f].networks
            posterior = Posterior(
                networks.summary, networks.posterior, setup.parameters, setup.data
            )

            def draw(block: Example, posterior: Posterior = posterior):
                # A key for each block: runs must not share their random numbers.
                return _drawn(posterior, block, random_key(rng, setup.key), n)

            drawn.append(in_blocks(setup, fold.held_out, draw))
        which = rng.choice(len(share), size=drawn[0].shape[:2], p=share)
        picked = np.take_along_axis(np.stack(drawn), which[None, ..., None], axis=0)[0]
        u = in_blocks(setup, fold.held_out, lambda block: block.u)
        density = logsumexp(log_q + np.log(share), axis=1)
        member = np.full(len(fold.held_out), f, np.int32)
        parts.append((fold.held_out.astype(np.int32), member, density, u, picked))
    run, member, density, u, draws = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(run)
    return OutOfFold(
        jax.device_put(run[order]),
        jax.device_put(member[order]),
        on_device(density[order]),
        on_device(u[order]),
        on_device(draws[order]),
    )


@compiled
def _drawn(posterior: Posterior, runs: Example, key: PRNGKey, n: int):
    return posterior.flow.sample(key, posterior.contexts(runs.x), (n,))[0]
