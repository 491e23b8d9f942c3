"""One epoch of training as a compiled scan, and the held-out losses after it."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from consilience.core.compiling import compiled
from consilience.core.devices import split_leading
from consilience.identity.batches import Example, take
from consilience.identity.learned import Networks

ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())
"""The default optimizer, before its learning rate. One object, so that it compiles once."""

KEEP = 0.98
"""How much of the averaged weights each step keeps."""

VALIDATION_BLOCK = 256


class TrainingError(RuntimeError):
    """Training cannot continue: in too many steps the loss or its gradient was not finite."""


class State(NamedTuple):
    """What training carries from epoch to epoch."""

    networks: Networks
    opt_state: Any
    step: Any
    average: Any = None


def _pack(arrays, optimizer: optax.GradientTransformation | None):
    """Weights as the optimizer takes them, and the way back.

    Adam works on one long vector: it compiles and runs faster than on many arrays. An
    optimizer of the user's own may look at the arrays, so it gets them.
    """
    return ravel_pytree(arrays) if optimizer is None else (arrays, lambda tree: tree)


def _run_epoch(
    state: State, examples: Example, order, key, total, rate, *, loss, optimizer, schedule, mesh
):
    """One epoch. `state.average`: weights averaged over the last steps, or None for none."""
    # All keys at once: every call that makes random numbers takes long to compile.
    keys = jax.random.split(key, (len(order) + 1, loss.N_KEYS))
    batches, keys = loss.batches(state.networks, examples, order, keys[0]), keys[1:]
    arrays, static = eqx.partition(state.networks, eqx.is_inexact_array)
    params, unpack = _pack(arrays, optimizer)

    def batch_loss(params, batch, keys, progress):
        networks = eqx.combine(unpack(params), static)
        terms, info = loss(networks, batch, keys, progress)
        return sum(terms.values()) + networks.penalty(), (terms, info)

    # All rates at once, too: inside, XLA would compute a rate for every weight.
    progress = (state.step + jnp.arange(len(order))) / total
    rates = rate * jax.vmap(schedule)(progress)

    def step(carry, part):
        batch, keys, progress, rate = part
        batch = split_leading(batch, mesh)
        params, opt_state, average = carry
        (value, (terms, info)), gradient = jax.value_and_grad(batch_loss, has_aux=True)(
            params, batch, keys, progress
        )
        squares = sum(jnp.sum(part**2) for part in jax.tree.leaves(gradient))
        ok = jnp.isfinite(value) & jnp.isfinite(squares)
        updates, new_opt_state = (optimizer or ADAM).update(gradient, opt_state, params)
        if optimizer is None:
            updates = -rate * updates
        new = (optax.apply_updates(params, updates), new_opt_state)
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, (params, opt_state))
        if average is not None:
            average = KEEP * average + (1 - KEEP) * params
        return (params, opt_state, average), {"loss": value, **terms, **info, "ok": ok}

    average = (
        None
        if state.average is None
        else ravel_pytree(eqx.filter(state.average, eqx.is_inexact_array))[0]
    )
    start, parts = (params, state.opt_state, average), (batches, keys, progress, rates)
    (params, opt_state, average), info = jax.lax.scan(step, start, parts)
    networks = eqx.combine(unpack(params), static)
    average = None if average is None else eqx.combine(unpack(average), static)
    return State(networks, opt_state, state.step + len(order), average), info


long_epoch = compiled(_run_epoch)
short_epoch = compiled(_run_epoch, quick=True)


@compiled
def validate(networks: eqx.Module, held_out: Example, loss):
    """The mean held-out losses, in blocks; the last is filled up with runs that do not count."""
    n = len(held_out.u)
    blocks = -(-n // VALIDATION_BLOCK)
    size = -(-n // blocks)
    index = jnp.arange(blocks * size).reshape(blocks, size)

    def each(index):
        terms = loss.maximum_likelihood(networks, take(held_out, jnp.minimum(index, n - 1)))
        return jax.tree.map(lambda term: jnp.sum(jnp.where(index < n, term, 0.0)), terms)

    return jax.tree.map(lambda sums: jnp.sum(sums) / n, jax.lax.map(each, index))
