"""Batches: the runs of each step of training, and the datasets at which the identity is evaluated.

These *query datasets* need no parameters: they are the simulated data, data augmented from them,
or observed data without labels. All batches of an epoch are made at once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from consilience.core.types import Data, PRNGKey
from consilience.identity.augmentation import Augmentation, Spread
from consilience.identity.consistency import Queries, SelfConsistency, propose
from consilience.identity.learned import Likelihood, Posterior, twice
from consilience.model.data import Layout
from consilience.model.priors import Prior


class Example(NamedTuple):
    """Runs: their parameters as networks see them, their data as the user does."""

    u: Float[Array, "*n d"]
    x: Data


class Batch(NamedTuple):
    """What one step sees.

    `runs`: `u`, their parameters as networks see them, and `x`, their data, along a leading axis.
    `queries`: the query datasets made from the runs, `x`, and `u` where they have parameters;
    None without self-consistency.
    `unlabeled`: the query datasets made from unlabelled data; None where there are none.
    """

    runs: Example
    queries: Queries | None = None
    unlabeled: Queries | None = None


class Pairs(NamedTuple):
    """Emulated pairs: how many `times` as many as runs, and the weight of the runs beside them."""

    times: int
    runs: float


class EpochKeys(NamedTuple):
    """The random keys of the batches of an epoch."""

    queries: PRNGKey
    unlabeled: PRNGKey


class StepKeys(NamedTuple):
    """The random keys of one step."""

    dropout: PRNGKey
    joint: PRNGKey
    queries: PRNGKey
    unlabeled: PRNGKey
    atoms: PRNGKey


def take(tree, index):
    """Some of the entries along the leading axis."""
    return jax.tree.map(lambda a: a[index], tree)


def query(
    settings: SelfConsistency,
    posterior: Posterior,
    prior: Prior,
    spread: Spread,
    data: Queries,
    key: PRNGKey,
) -> Queries:
    """Query datasets from `data`, with leading axes of steps and of a batch.

    Augmented where the settings say so, and with draws where the proposal makes them once an
    epoch.
    """
    k_augment, k_draws = jax.random.split(key)
    x, u = data.x, data.u
    if settings.augmentation is not None:
        x = _augmented(settings.augmentation, posterior.data.layout, x, k_augment, spread)
    if not getattr(settings.proposal, "once_an_epoch", False):
        return Queries(x, u)

    def draw(part):
        contexts = posterior.contexts(part[0])
        return propose(settings, posterior, contexts, prior, part[1], beside=u is not None)[0]

    keys = jax.random.split(k_draws, _shape(x)[0])
    return Queries(x, u, jax.lax.stop_gradient(jax.lax.map(draw, (x, keys))))


def emulated(
    prior: Prior, likelihood: Likelihood, runs: Example, times: int, key: PRNGKey
) -> Queries:
    """Parameters of the prior and data of the learned likelihood, `times` as many as runs.

    Side information and masks are those of the runs.
    """

    def one(key, x):
        k_theta, k_x = jax.random.split(key)
        theta = prior.draw(k_theta)
        u, _ = likelihood.parameters.to_vector(theta)
        return Queries(likelihood.sample(k_x, theta, x), u)

    x = jax.tree.map(lambda a: jnp.concatenate([a] * times, axis=1), runs.x)
    return jax.lax.stop_gradient(twice(one)(jax.random.split(key, _shape(x)), x))


def _augmented(augmentation: Augmentation, layout: Layout, x: Data, key: PRNGKey, spread: Spread):
    change = lambda x, k: augmentation(layout.named(x), k, layout, spread)  # noqa: E731
    keys = jax.random.split(key, _shape(x))
    return twice(lambda x, k: layout.unnamed(change(x, k)))(x, keys)


def _shape(x: Data) -> tuple[int, int]:
    steps, size = jax.tree.leaves(x)[0].shape[:2]
    return steps, size


def pick(unlabeled: Data, shape: tuple[int, int], key: PRNGKey) -> Data:
    """Random batches of unlabelled data, of at most `shape[1]` datasets for each of the steps."""
    m = len(jax.tree.leaves(unlabeled)[0])
    some = lambda k: jax.random.permutation(k, m)[: min(m, shape[1])]  # noqa: E731
    return take(unlabeled, jax.vmap(some)(jax.random.split(key, shape[0])))


def make_batches(
    settings: SelfConsistency | None,
    posterior: Posterior,
    prior: Prior | None,
    spread: Spread | None,
    runs: Example,
    unlabeled: Data | None,
    order: Int[Array, "steps batch"],
    keys: EpochKeys,
    likelihood: Likelihood | None = None,
    pairs: Pairs | None = None,
) -> Batch:
    """The batches of one epoch, along a leading axis of steps; `order` says which runs.

    `pairs`: with these, the query datasets are drawn from the learned `likelihood`.
    """
    runs = take(runs, order)
    if pairs is not None:
        assert prior is not None and likelihood is not None
        return Batch(runs, emulated(prior, likelihood, runs, pairs.times, keys.queries))
    if settings is None:
        return Batch(runs)
    assert prior is not None and spread is not None
    made = query(settings, posterior, prior, spread, Queries(runs.x, runs.u), keys.queries)
    if unlabeled is None:
        return Batch(runs, made)
    k_pick, k_query = jax.random.split(keys.unlabeled)
    steps, size = order.shape
    picked = pick(unlabeled, (steps, settings.unlabeled_batch or size), k_pick)
    return Batch(runs, made, query(settings, posterior, prior, spread, Queries(picked), k_query))
