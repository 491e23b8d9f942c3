r"""The steps of a coupling flow for many values at once, with their derivative written out.

Self-consistency draws parameters and then asks for the density at the draws. The way from
the base to a draw passes the same points as the way back, so what it computes is recorded,
and the density with its derivative is had from the record: one pass less for every draw,
and less than autodiff would store.

Arrays have their features on the leading axis, as the splines and the products want them:
values are `(d, n)`, and what each step computes from their conditions is `(steps, width, n)`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from consilience.networks import transforms
from consilience.networks.transforms import CouplingTransform

FAR = 5.0
"""Conditioners see values up to here, in standard units."""

Values = Float[Array, "d n"]


class StepKind(NamedTuple):
    """What is fixed when a flow is built: the transform, and the hidden layers' activation."""

    transform: CouplingTransform
    activation: Callable


class LayerWeights(NamedTuple):
    weight: Float[Array, "*steps out in"]
    bias: Float[Array, "*steps out"]


class StepWeights(NamedTuple):
    """The weights of one step, or, along a leading axis, of all."""

    log_scale: Float[Array, "*steps d"]
    shift: Float[Array, "*steps d"]
    matrix: Float[Array, "*steps d d"]
    first: Float[Array, "*steps width half"]
    layers: tuple[LayerWeights, ...]


class Record(NamedTuple):
    """What the derivative of one step needs of it.

    The value before and after mixing, the hidden layers before their activation, and what
    the transform keeps.
    """

    before: Values
    mixed: Values
    hidden: tuple[Float[Array, "width n"], ...]
    transform: Any


def run_forward(kind: StepKind, weights: StepWeights, context, value: Values, kept=None):
    """The map to the base, its log-determinant, and the record of all steps.

    `kept`: the share of each hidden unit that dropout keeps, `(steps, layers, width, n)`.
    """

    def body(carry, part):
        value, total = carry
        w, context, kept = part
        mixed = w.matrix @ (value * jnp.exp(w.log_scale)[:, None] + w.shift[:, None])
        n = mixed.shape[0] // 2
        raw, hidden = _condition(kind, w, context, mixed[:n], kept)
        changed, log_det, saved = transforms.record(kind.transform, mixed[n:], raw, inverse=False)
        after = jnp.concatenate([mixed[:n], changed])
        total += jnp.sum(log_det, axis=0) + jnp.sum(w.log_scale)
        return (after, total), Record(value, mixed, hidden, saved)

    start = (value, jnp.zeros(value.shape[1], value.dtype))
    (z, total), records = jax.lax.scan(body, start, (weights, context, kept))
    return z, total, records


def run_inverse(kind: StepKind, weights: StepWeights, context, z: Values, *, record: bool):
    """The map from the base, its log-determinant, and the record of the way back.

    Without a record it can be differentiated.
    """

    def body(carry, part):
        value, total = carry
        w, context = part
        n = value.shape[0] // 2
        raw, hidden = _condition(kind, w, context, value[:n], None)
        if record:
            changed, log_det, saved = transforms.record(
                kind.transform, value[n:], raw, inverse=True
            )
        else:
            changed, log_det = kind.transform(value[n:], raw, inverse=True)
        mixed = jnp.concatenate([value[:n], changed])
        before = (w.matrix.T @ mixed - w.shift[:, None]) * jnp.exp(-w.log_scale)[:, None]
        total += jnp.sum(log_det, axis=0) - jnp.sum(w.log_scale)
        return (before, total), Record(before, mixed, hidden, saved) if record else None

    start = (z, jnp.zeros(z.shape[1], z.dtype))
    (value, total), records = jax.lax.scan(body, start, (weights, context), reverse=True)
    return value, total, records


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def replay(
    kind: StepKind, weights: StepWeights, context, value: Values, kept, seen, records: Record
):
    """The map to the base and its log-determinant, `seen` before: only their derivative is new."""
    return seen


def _replay_fwd(kind, weights, context, value, kept, seen, records):
    return seen, (weights, kept, records)


def _replay_bwd(kind, saved, grad):
    weights, kept, records = saved
    grad_z, grad_log_det = grad

    def body(grad_value, part):
        grad_value, *grads = _step_bwd(kind, *part, grad_value, grad_log_det)
        return grad_value, grads

    parts = (weights, kept, records)
    grad_value, (grad_weights, grad_context) = jax.lax.scan(body, grad_z, parts, reverse=True)
    return grad_weights, grad_context, grad_value, None, None, None


replay.defvjp(_replay_fwd, _replay_bwd)


def _near(value):
    # Far values all look alike: growing without bound, they would undo float32's inverse.
    return jnp.clip(value, -FAR, FAR)


def _condition(kind: StepKind, w: StepWeights, context, value, kept):
    """The raw parameters of the transform, and the hidden layers before their activation."""
    hidden = w.first @ _near(value) + context
    every = []
    for i, layer in enumerate(w.layers):
        every.append(hidden)
        h = kind.activation(hidden)
        h = h if kept is None else h * kept[i]
        hidden = layer.weight @ h + layer.bias[:, None]
    # Raw parameters of one kind lie together: the transform works on whole rows of them.
    return hidden.reshape(kind.transform.n_raw, -1, value.shape[1]), tuple(every)


def _step_bwd(kind: StepKind, w: StepWeights, kept, record: Record, grad, grad_log_det):
    """The derivative of one step, for the value, the weights and the context."""
    n = record.mixed.shape[0] // 2
    each_log_det = jnp.broadcast_to(grad_log_det, grad[n:].shape)
    grad_changed, grad_raw = transforms.pull(
        kind.transform, record.mixed[n:], record.transform, grad[n:], each_log_det
    )
    delta = grad_raw.reshape(-1, grad.shape[1])
    # A product, not a sum: XLA would compute all that leads to it a second time.
    ones = jnp.ones(grad.shape[1], grad.dtype)
    layers = []
    for i, layer in reversed(list(enumerate(w.layers))):
        h, pull = jax.vjp(kind.activation, record.hidden[i])
        h = h if kept is None else h * kept[i]
        layers.append(LayerWeights(delta @ h.T, delta @ ones))
        delta = layer.weight.T @ delta
        (delta,) = pull(delta if kept is None else delta * kept[i])
    half = record.mixed[:n]
    inside = jnp.abs(half) < FAR
    grad_half = grad[:n] + jnp.where(inside, w.first.T @ delta, 0.0)
    grad_mixed = jnp.concatenate([grad_half, grad_changed])
    scale = jnp.exp(w.log_scale)[:, None]
    scaled = record.before * scale
    grad_scaled = w.matrix.T @ grad_mixed
    grads = StepWeights(
        log_scale=jnp.sum(grad_scaled * scaled, axis=1) + jnp.sum(grad_log_det),
        shift=jnp.sum(grad_scaled, axis=1),
        matrix=grad_mixed @ (scaled + w.shift[:, None]).T,
        first=delta @ _near(half).T,
        layers=tuple(reversed(layers)),
    )
    return grad_scaled * scale, grads, delta
