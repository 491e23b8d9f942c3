r"""Whether a run gives data at all: $\log p(\mathrm{valid} \mid \theta)$, learned from all runs.

Where runs fail and are dropped, a learned likelihood is $p(x \mid \theta, \mathrm{valid})$.
Bayes' theorem for an observation, which is itself a valid run, then reads
$$p(\theta \mid x) \propto
  p(\theta) \, p(\mathrm{valid} \mid \theta) \, p(x \mid \theta, \mathrm{valid}).$$
The middle factor comes from a small ensemble of classifiers. Each is trained on four fifths of
the runs and stopped where it predicts the rest best; what they say of runs that they have not
seen then sets a common slope and shift of the logits (Platt scaling), so that probabilities
are right on average.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from consilience.core.compiling import compiled, on_device
from consilience.core.types import Flat, Scalar
from consilience.networks.layers import MLP

FOLDS, WIDTH = 5, 32
STEPS, BLOCKS, BATCH, RATE = 600, 30, 1024, 5e-3
NEWTON_STEPS, SLOPE_SD = 20, 0.5


class Validity(eqx.Module):
    """The log probability that a run gives data, for one standardised parameter vector."""

    members: MLP
    slope: Scalar
    shift: Scalar

    def __init__(self, dim: int, rng: np.random.Generator):
        built = [MLP((dim, WIDTH, WIDTH, 1), rng) for _ in range(FOLDS)]
        self.members = jax.tree.map(lambda *leaves: on_device(np.stack(leaves)), *built)
        self.slope, self.shift = on_device(1.0), on_device(0.0)

    def log_prob(self, u: Flat) -> Scalar:
        logits = eqx.filter_vmap(lambda member: member(u)[0])(self.members)
        return jax.nn.log_sigmoid(self.slope * jnp.mean(logits) + self.shift)


def learn_validity(
    u: Float[np.ndarray, "n d"], valid: Bool[np.ndarray, " n"], rng: np.random.Generator
) -> Validity:
    """From standardised parameters of all runs, and which gave data."""
    n, dim = u.shape
    share = (valid.sum() + 0.5) / (n + 1)
    start = Validity(dim, rng)
    # At first every member says what is known without theta.
    last = lambda v: (v.members.layers[-1].weight, v.members.layers[-1].bias)  # noqa: E731
    blank = (jnp.zeros_like(last(start)[0]), jnp.full_like(last(start)[1], _logit(share)))
    start = eqx.tree_at(last, start, blank)
    fold = rng.permutation(np.arange(n) % FOLDS)
    batches = rng.integers(n, size=(BLOCKS, STEPS // BLOCKS, min(n, BATCH)))
    members, logits = _train(start.members, on_device(u), valid, fold, batches)
    slope, shift = _scaling(np.asarray(logits, float), valid)
    return eqx.tree_at(
        lambda v: (v.members, v.slope, v.shift),
        start,
        (members, on_device(slope), on_device(shift)),
    )


def _logit(share: float) -> float:
    return float(np.log(share) - np.log1p(-share))


@functools.partial(compiled, quick=True)
def _train(members: MLP, u: Array, valid: Any, fold: Any, batches: Any):
    """The members at their best, and what each says of the runs that it has not seen."""
    schedule = optax.cosine_decay_schedule(RATE, STEPS)
    optimizer = optax.adamw(schedule, weight_decay=1e-2)
    sign = jnp.where(valid, 1.0, -1.0)

    def losses(member: MLP, index) -> tuple[Array, Array]:
        logits = jax.vmap(member)(u[index])[:, 0]
        return jax.nn.softplus(-sign[index] * logits), logits

    def one(member: MLP, number):
        arrays, static = eqx.partition(member, eqx.is_inexact_array)
        build = lambda arrays: eqx.combine(arrays, static)  # noqa: E731

        def step(carry, index):
            arrays, state = carry
            mine = (fold[index] != number).astype(u.dtype)
            loss = lambda a: jnp.sum(losses(build(a), index)[0] * mine) / mine.sum()  # noqa: E731
            updates, state = optimizer.update(jax.grad(loss)(arrays), state, arrays)
            return (optax.apply_updates(arrays, updates), state), None

        def block(carry, indices):
            inner, best, lowest = carry
            inner, _ = jax.lax.scan(step, inner, indices)
            loss = held_out(inner[0])
            better = loss < lowest
            best = jax.tree.map(lambda a, b: jnp.where(better, a, b), inner[0], best)
            return (inner, best, jnp.minimum(loss, lowest)), None

        def held_out(arrays):
            return jnp.mean(losses(build(arrays), every)[0] * (fold == number))

        every = jnp.arange(len(u))
        start = ((arrays, optimizer.init(arrays)), arrays, held_out(arrays))
        (_, best, _), _ = jax.lax.scan(block, start, batches)
        return build(best), losses(build(best), every)[1]

    best, logits = eqx.filter_vmap(one)(members, jnp.arange(FOLDS))
    return best, logits[fold, jnp.arange(len(u))]


def _scaling(logits: np.ndarray, valid: np.ndarray) -> tuple[float, float]:
    """Slope and shift that make the logits fit best; the slope is drawn towards one."""
    slope, shift = 1.0, 0.0
    for _ in range(NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(slope * logits + shift, -30, 30)))
        pull = np.array([(slope - 1) / SLOPE_SD**2, 0.0])
        features = np.stack([logits, np.ones_like(logits)])
        gradient = features @ (p - valid) + pull
        hessian = (features * p * (1 - p)) @ features.T + np.diag([SLOPE_SD**-2, 1e-6])
        slope, shift = np.array([slope, shift]) - np.linalg.solve(hessian, gradient)
    return float(slope), float(shift)
