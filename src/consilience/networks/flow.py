r"""Conditional normalizing flows: coupling layers over a Student-t or Gaussian base.

A flow is an invertible map $z = f(v; c)$ of a value $v \in \mathbb{R}^d$ under a condition
$c$, and with it a density $\log q(v \mid c) = \log p(z) + \log |\det \partial f / \partial v|$.
The value is first shifted and scaled by a conditional affine map, which depends
on $c$ alone: a posterior much narrower than its prior then still fills the splines' interval.
Each layer then scales and shifts (activation normalisation), mixes the coordinates (a fixed
permutation, or one times a learned rotation), and transforms each half of them by a spline
or an affine map whose raw parameters a small network computes from the other half and $c$.

All that sees only $c$ is `Flow.prepare`: computed once for a dataset, however many values
are evaluated under it.

`Coupling` is the description that a user writes and a file stores; `Flow` is the network
that it builds.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from consilience.core.compiling import on_device
from consilience.core.types import Flat, PRNGKey, Scalar
from consilience.networks.base import Numbers, Vectors, base_log_prob, base_sample
from consilience.networks.coupling import (
    LayerWeights,
    StepKind,
    StepWeights,
    replay,
    run_forward,
    run_inverse,
)
from consilience.networks.density import BatchedDensity, Dropout
from consilience.networks.layers import Linear, Mixing, activation, generator
from consilience.networks.transforms import CouplingTransform, Spline

MAX_LOG_SCALE = 7.0
"""The bound on the log scale of a flow's frame: a factor of a thousand either way."""


@dataclasses.dataclass(frozen=True)
class Coupling:
    """The description of a coupling flow.

    `transform`: `Spline()` (sharp, multimodal densities), `Affine()` (fast, smooth), or a
    `CouplingTransform` of your own.
    `layers`: each transforms both halves of the coordinates.
    `width`, `depth`: the hidden layers of the network in each coupling.
    `activation`: of the hidden layers, by its name in `jax.nn`; "identity" makes them linear.
    `df`: degrees of freedom of the Student-t base; infinity is the Gaussian.
    `frame`: the hidden layers of a network that shifts and scales all values by the condition
    before any layer does; 0 does so by a linear map. For data that are a curve plus noise.
    `rotate`: learn a rotation of the coordinates between layers beside the permutation.
    `spectral`: divide each hidden weight by its largest singular value.
    `dropout`: the share of hidden units dropped in training.
    `l2`: the penalty on squared weights, added to the training loss.

    >>> flow = Coupling(layers=2, width=16).build(jax.random.key(0), dim=2, condition=3)
    >>> context = flow.prepare(jnp.ones(3))
    >>> flow.log_prob(jnp.zeros(2), context).shape
    ()
    """

    transform: CouplingTransform = Spline()
    layers: int = 4
    width: int = 128
    depth: int = 2
    activation: str = "silu"
    df: float = math.inf
    frame: int = 0
    rotate: bool = True
    spectral: bool = False
    dropout: float = 0.0
    l2: float = 1e-3

    def __post_init__(self):
        if isinstance(self.transform, type) or not isinstance(self.transform, CouplingTransform):
            raise TypeError(
                "The transform is an object with n_raw and __call__(value, raw, *, inverse), such "
                f"as cs.Spline(), got {self.transform!r}."
            )
        if self.layers < 1 or self.width < 1 or self.depth < 1 or self.frame < 0:
            raise ValueError(
                "A flow needs at least one layer, one hidden layer and one unit; got layers="
                f"{self.layers}, depth={self.depth}, width={self.width}, frame={self.frame}."
            )
        if not self.df > 0:
            raise ValueError(f"Degrees of freedom must be positive, got df={self.df}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"The dropout share must be in [0, 1), got {self.dropout}.")
        if not hasattr(jax.nn, self.activation):
            raise ValueError(f"jax.nn has no activation named {self.activation!r}.")

    def build(self, key: PRNGKey | np.random.Generator, *, dim: int, condition: int) -> "Flow":
        """The network for values of length `dim` under conditions of length `condition`."""
        rng = key if isinstance(key, np.random.Generator) else generator(key)
        return Flow(self, rng, dim=dim, condition=condition)


class Conditioner(eqx.Module):
    """The network of one step: the raw parameters of one half's transform, from the rest."""

    from_condition: Linear
    from_value: Linear
    hidden: tuple[Linear, ...]
    out: Linear

    def __init__(
        self,
        spec: Coupling,
        rng: np.random.Generator,
        *,
        n_in: int,
        n_out: int,
        condition: int,
    ):
        n, spectral = spec.width, spec.spectral
        fan_in = n_in + condition
        self.from_condition = Linear(condition, n, rng, fan_in=fan_in, spectral=spectral)
        self.from_value = Linear(n_in, n, rng, fan_in=fan_in, spectral=spectral)
        self.hidden = tuple(Linear(n, n, rng, spectral=spectral) for _ in range(spec.depth - 1))
        # Small, so that a new flow is close to the identity.
        self.out = Linear(n, spec.transform.n_raw * n_out, rng, scale=0.1)


class CouplingStep(eqx.Module):
    """Normalise, mix, then transform the last half of the coordinates by the first."""

    log_scale: Flat
    shift: Flat
    conditioner: Conditioner

    def __init__(self, spec: Coupling, rng: np.random.Generator, *, dim: int, condition: int):
        self.log_scale = self.shift = on_device(np.zeros(dim))
        self.conditioner = Conditioner(
            spec, rng, n_in=dim // 2, n_out=dim - dim // 2, condition=condition
        )

    def weights(self, matrix: Float[Array, "d d"]) -> StepWeights:
        net = self.conditioner
        layers = tuple(LayerWeights(layer.matrix(), layer.bias) for layer in (*net.hidden, net.out))
        return StepWeights(self.log_scale, self.shift, matrix, net.from_value.matrix(), layers)

    def context(self, condition: Flat) -> Flat:
        return self.conditioner.from_condition(condition) + self.conditioner.from_value.bias


class FlowContext(NamedTuple):
    """What a flow needs of a condition, to be shared by all values under it."""

    shift: Float[Array, "*conditions d"]
    log_scale: Float[Array, "*conditions d"]
    steps: Float[Array, "*conditions steps width"]


class Flow(BatchedDensity):
    """A conditional density with exact log_prob and exact sampling.

    A context has no leading axis, or those of several conditions; values have the same ones
    and any more behind them, for several values under each condition. Many values at once
    are much faster than one at a time under `jax.vmap`, and so are their derivatives.

    A layer is two steps, one for each half; the steps of all layers are stacked, and a
    scan runs through them: one of them is compiled, not all.
    """

    frame: Linear
    curve: tuple[Linear, ...]
    steps: CouplingStep
    mixing: Mixing
    spec: Coupling = eqx.field(static=True)
    dim: int = eqx.field(static=True)

    def __init__(self, spec: Coupling, rng: np.random.Generator, *, dim: int, condition: int):
        if dim < 1:
            raise ValueError(f"A flow needs at least one dimension, got {dim}.")
        steps = [
            CouplingStep(spec, rng, dim=dim, condition=condition) for _ in range(2 * spec.layers)
        ]
        stack = lambda *parts: on_device(np.stack(parts))  # noqa: E731
        self.steps = jax.tree.map(stack, *steps)
        self.frame = Linear(condition, 2 * dim, rng, scale=0.0)
        self.mixing = Mixing(dim, spec.layers, rng, learn=spec.rotate)
        self.curve = _curve(spec, rng, n_in=condition, n_out=2 * dim) if spec.frame else ()
        self.spec = spec
        self.dim = dim

    def prepare(self, condition: Flat) -> FlowContext:
        """What the flow needs of one condition, to be shared by all values under it."""
        framed, hidden = self.frame(condition), condition
        if self.curve:
            *layers, out = self.curve
            for layer in layers:
                hidden = activation(self.spec.activation)(layer(hidden))
            framed = framed + out(hidden)
        shift, raw = jnp.split(framed, 2)
        log_scale = MAX_LOG_SCALE * jnp.tanh(raw / MAX_LOG_SCALE)
        steps = eqx.filter_vmap(lambda step: step.context(condition))(self.steps)
        return FlowContext(shift, log_scale, steps)

    def log_prob(
        self, value: Vectors, context: FlowContext, dropout: Dropout | None = None
    ) -> Numbers:
        """The log densities of values, with dropout where it is given."""
        z, log_det = self.to_base(value, context, dropout)
        return base_log_prob(z, self.spec.df) + log_det

    @property
    def dropout(self) -> float:
        """The share of hidden units dropped in training."""
        return self.spec.dropout

    def noise(self, key: PRNGKey, shape: tuple[int, ...]) -> Vectors:
        """Points of the base, of this shape."""
        return base_sample(key, (*shape, self.dim), self.spec.df)

    def sample(
        self, key: PRNGKey, context: FlowContext, shape: tuple[int, ...] = ()
    ) -> tuple[Vectors, Numbers]:
        """Draws of this shape under each condition, and their log densities, as `draw`."""
        return self.draw(self.noise(key, (*context.shift.shape[:-1], *shape)), context)

    def starts(self, key: PRNGKey, context: FlowContext, n: int) -> tuple[Vectors, Numbers]:
        """Points of the base, where Markov chains run, and their log densities there."""
        z = self.noise(key, (*context.shift.shape[:-1], n))
        return z, base_log_prob(z, self.spec.df)

    def values(self, z: Vectors, context: FlowContext) -> Vectors:
        """The values of points in the base; can be differentiated."""
        return self.from_base(z, context)[0]

    def draw(self, z: Vectors, context: FlowContext) -> tuple[Vectors, Numbers]:
        """The values of points in the base, and their log densities.

        To differentiation the values are constants, and the log densities are those at
        these values.
        """
        kind, weights, columns = self._kind, self._weights(), _Columns(context, z)
        base = columns.spread(z)
        frozen = jax.lax.stop_gradient((weights, columns.steps, base))
        framed, log_det, records = run_inverse(kind, *frozen, record=True)
        value = _out_of_frame(columns.gather(framed), context)
        value = jax.lax.stop_gradient(value)
        again = columns.spread(_into_frame(value, context))
        seen = jax.lax.stop_gradient((base, -log_det))
        z_again, log_det = replay(kind, weights, columns.steps, again, None, seen, records)
        z, log_det = columns.gather(z_again), columns.gather(log_det)
        return value, base_log_prob(z, self.spec.df) + _less_frame(log_det, context)

    def to_base(
        self, value: Vectors, context: FlowContext, dropout: Dropout | None = None
    ) -> tuple[Vectors, Numbers]:
        """The map to the base and its log-determinant, with dropout as in `log_prob`."""
        kind, weights, columns = self._kind, self._weights(), _Columns(context, value)
        framed = columns.spread(_into_frame(value, context))
        kept = None
        if dropout is not None and self.spec.dropout > 0:
            n = framed.shape[1]
            kept = self._kept(dropout.key, n if dropout.first is None else dropout.first)
            kept = jnp.pad(kept, [(0, 0)] * 3 + [(0, n - kept.shape[3])], constant_values=1.0)
        frozen = jax.lax.stop_gradient((weights, columns.steps, framed, kept))
        *seen, records = run_forward(kind, *frozen)
        z, log_det = replay(kind, weights, columns.steps, framed, kept, tuple(seen), records)
        return columns.gather(z), _less_frame(columns.gather(log_det), context)

    def from_base(self, z: Vectors, context: FlowContext) -> tuple[Vectors, Numbers]:
        """The map from the base and its log-determinant."""
        columns = _Columns(context, z)
        value, log_det, _ = run_inverse(
            self._kind, self._weights(), columns.steps, columns.spread(z), record=False
        )
        value = _out_of_frame(columns.gather(value), context)
        return value, -_less_frame(-columns.gather(log_det), context)

    @property
    def _kind(self) -> StepKind:
        return StepKind(self.spec.transform, activation(self.spec.activation))

    def _weights(self) -> StepWeights:
        return eqx.filter_vmap(CouplingStep.weights)(self.steps, self.mixing.matrices())

    def _kept(self, key: PRNGKey, n: int) -> Float[Array, "steps layers width n"]:
        # Eight bits a unit: four times fewer random numbers than a uniform draw takes.
        level = max(1, round((1 - self.spec.dropout) * 256))
        shape = (2 * self.spec.layers, self.spec.depth, self.spec.width, n)
        bits = jax.random.bits(key, shape, jnp.uint8)
        return jnp.where(bits.astype(int) < level, 256 / level, 0.0)

    def penalty(self) -> Scalar:
        """The L2 penalty on the weights."""
        linears = jax.tree.leaves(
            (self.frame, self.curve, self.steps), is_leaf=lambda node: isinstance(node, Linear)
        )
        weights = [node.weight for node in linears if isinstance(node, Linear)]
        squares = sum((jnp.sum(weight**2) for weight in weights), start=jnp.zeros(()))
        return self.spec.l2 * squares


def _curve(
    spec: Coupling, rng: np.random.Generator, *, n_in: int, n_out: int
) -> tuple[Linear, ...]:
    sizes = [n_in, *[spec.width] * spec.frame]
    hidden = [Linear(a, b, rng) for a, b in itertools.pairwise(sizes)]
    return (*hidden, Linear(spec.width, n_out, rng, scale=0.0))


class _Columns:
    """Between arrays with features behind, and the columns that steps work on."""

    def __init__(self, context: FlowContext, value: Vectors):
        lead = context.shift.shape[:-1]
        if value.shape[: len(lead)] != lead:
            raise ValueError(
                f"Values under conditions of the shape {lead} must begin with these axes, got "
                f"{value.shape}."
            )
        self.lead = value.shape[:-1]
        each = math.prod(self.lead[len(lead) :])
        steps = context.steps.reshape(math.prod(lead), *context.steps.shape[len(lead) :])
        # In full for every value: to broadcast inside the steps costs more.
        self.steps = jnp.repeat(jnp.moveaxis(steps, 0, -1), each, axis=-1)

    def spread(self, value: Vectors) -> Float[Array, "d n"]:
        return value.reshape(-1, value.shape[-1]).T

    def gather(self, columns: Float[Array, "*d n"]) -> Array:
        return columns.T.reshape(*self.lead, *columns.shape[:-1])


def _like(part: Float[Array, "*conditions d"], value: Vectors) -> Array:
    more = value.ndim - part.ndim
    return part.reshape(*part.shape[:-1], *(1,) * more, part.shape[-1])


def _into_frame(value: Vectors, context: FlowContext) -> Vectors:
    return (value - _like(context.shift, value)) * jnp.exp(-_like(context.log_scale, value))


def _out_of_frame(value: Vectors, context: FlowContext) -> Vectors:
    return value * jnp.exp(_like(context.log_scale, value)) + _like(context.shift, value)


def _less_frame(log_det: Numbers, context: FlowContext) -> Numbers:
    scale = jnp.sum(context.log_scale, axis=-1)
    return log_det - scale.reshape(*scale.shape, *(1,) * (log_det.ndim - scale.ndim))
