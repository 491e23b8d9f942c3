"""The training of one member of an ensemble: on its runs, stopped by those that it does not see.

There is no fixed number of steps. Once the held-out loss of the averaged weights no longer falls,
training goes back to the best weights and on with a smaller learning rate, and ends after
`DROPS` such drops.
"""

import threading
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from numpy.random import Generator

from consilience.core.compiling import on_device
from consilience.core.devices import replicate, to_one_device
from consilience.core.types import PRNGKey
from consilience.identity.batches import Example
from consilience.identity.schedules import Constant
from consilience.networks.layers import random_key
from consilience.training.batches import Streamed, Whole
from consilience.training.epochs import ADAM, State, long_epoch, validate

FEWEST = 10
"""Epochs without a better held-out loss before the learning rate drops, at the least."""
SHARE = 0.4
"""Likewise, relative to the epochs that it took to find the best."""
DROPS, FACTOR = 2, 0.25
"""How often the learning rate drops, and to what share of it."""


class Limits(NamedTuple):
    """How a member is trained: the initial learning rate, and the most steps.

    `judged`: the densities whose held-out loss counts.
    """

    rate: float
    steps: int
    judged: tuple[str, ...]


class Member(NamedTuple):
    """A trained member: the best networks, their held-out loss, and the course of training."""

    networks: Any
    loss: float
    best_epoch: int
    record: list[dict[str, float]]
    seconds: float
    finished: bool = True


def train_member(
    networks: Any,
    loss: Any,
    source: Whole | Streamed,
    held_out: Example,
    limits: Limits,
    *,
    key: PRNGKey,
    rng: Generator,
    mesh: Mesh | None = None,
    stop: threading.Event | None = None,
) -> Member:
    """Train networks until their held-out loss no longer falls; the best are returned.

    `stop`: set from outside, ends training after the current epoch.
    """
    begun = time.perf_counter()
    networks, held_out, loss = replicate((networks, held_out, loss), mesh)
    size = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(networks, eqx.is_inexact_array)))
    # Arrays, so that another value does not trigger recompilation.
    total, rate = on_device(limits.steps), limits.rate
    state = State(networks, ADAM.init(on_device(np.zeros(size))), np.zeros((), np.int32), networks)
    best, best_loss, best_epoch, waited_from, drops = networks, np.inf, 0, 0, 0
    record: list[dict[str, float]] = []
    for epoch in range(1, 1 + max(1, limits.steps // source.steps)):
        parts = []
        for examples, order in source.epoch(rng):
            state, info = long_epoch(
                state,
                examples,
                order,
                random_key(rng, key),
                total,
                on_device(rate),
                loss=loss,
                optimizer=None,
                schedule=Constant(),
                mesh=mesh,
            )
            parts.append(jax.device_get(info))
        scores = validate(state.average, held_out, loss)
        found = sum(float(scores[name]) for name in limits.judged)
        record.append(_row(parts, found))
        if found < best_loss:
            best, best_loss, best_epoch = state.average, found, epoch
        if stop is not None and stop.is_set():
            break
        if epoch - max(best_epoch, waited_from) > max(FEWEST, SHARE * best_epoch):
            if drops == DROPS:
                break
            drops, rate, waited_from = drops + 1, FACTOR * rate, epoch
            fresh = ADAM.init(on_device(np.zeros(size)))
            state = State(best, replicate(fresh, mesh), state.step, best)
    best = to_one_device(best, mesh)
    finished = stop is None or not stop.is_set()
    return Member(best, best_loss, best_epoch, record, time.perf_counter() - begun, finished)


def _row(parts: list[dict[str, np.ndarray]], held_out: float) -> dict[str, float]:
    """Mean losses over the finite steps of an epoch."""
    info = jax.tree.map(lambda *values: np.concatenate(values), *parts)
    ok = info.pop("ok")
    info.pop("invalid", None)
    means = {name: float(values[ok].mean()) for name, values in info.items()} if ok.any() else {}
    return {**means, "skipped": float((~ok).sum()), "validation": held_out}
