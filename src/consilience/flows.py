r"""Conditional normalizing flows: coupling layers over a Student-t or Gaussian base.

A flow is an invertible map $z = f(v; c)$ of a value $v \in \mathbb{R}^d$ under a condition
$c$, and with it a density $\log q(v \mid c) = \log p(z) + \log |\det \partial f / \partial v|$.
The value is first brought into a frame of its own, shifted and scaled by numbers that depend
on $c$ alone: a posterior much narrower than its prior then still fills the splines' interval.
Each layer then scales and shifts (activation normalisation), mixes the coordinates (a fixed
permutation, or one times a learned rotation), and transforms each half of them by a spline
or an affine map whose numbers a small network computes from the other half and $c$.

All that sees only $c$ is `Flow.prepare`: computed once for a dataset, however many values
are evaluated under it.

`Coupling` is the description that a user writes and a file stores; `Flow` is the network
that it builds.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from consilience.networks import Linear, Mixing, generator
from consilience.splines import n_raw, spline
from consilience.types import Flat, PRNGKey, Scalar

FAR = 5.0
"""Conditioners see values up to here, in standard units."""

MAX_LOG_SCALE = 7.0
"""The bound on the log scale of a flow's frame: a factor of a thousand either way."""


@dataclasses.dataclass(frozen=True)
class Spline:
    """Monotone rational-quadratic splines on `[-bound, bound]`, the identity beyond."""

    bins: int = 8
    bound: float = 5.0

    @property
    def n_raw(self) -> int:
        return n_raw(self.bins)

    def __call__(self, value: Flat, raw: Float[Array, "p d"], *, inverse: bool):
        return spline(value, raw, bound=self.bound, inverse=inverse)


@dataclasses.dataclass(frozen=True)
class Affine:
    """A shift, and a scale between `exp(-limit)` and `exp(limit)`."""

    limit: float = 3.0

    @property
    def n_raw(self) -> int:
        return 2

    def __call__(self, value: Flat, raw: Float[Array, "p d"], *, inverse: bool):
        shift, log_scale = raw[0], self.limit * jnp.tanh(raw[1] / self.limit)
        if inverse:
            return (value - shift) * jnp.exp(-log_scale), -log_scale
        return value * jnp.exp(log_scale) + shift, log_scale


@dataclasses.dataclass(frozen=True)
class Coupling:
    """The description of a coupling flow.

    `transform`: `Spline()` (sharp, multimodal densities) or `Affine()` (fast, smooth).
    `layers`: each transforms both halves of the coordinates.
    `width`, `depth`: the hidden layers of the network in each coupling.
    `activation`: of the hidden layers, by its name in `jax.nn`; "identity" makes them linear.
    `df`: degrees of freedom of the Student-t base; infinity is the Gaussian.
    `rotate`: learn a rotation of the coordinates between layers beside the permutation.
    `spectral`: divide each hidden weight by its largest singular value.
    `dropout`: the share of hidden units dropped in training.
    `l2`: the penalty on squared weights, added to the training loss.

    >>> flow = Coupling(layers=2, width=16).build(jax.random.key(0), dim=2, condition=3)
    >>> context = flow.prepare(jnp.ones(3))
    >>> flow.log_prob(jnp.zeros(2), context).shape
    ()
    """

    transform: Spline | Affine = Spline()
    layers: int = 4
    width: int = 128
    depth: int = 2
    activation: str = "silu"
    df: float = math.inf
    rotate: bool = True
    spectral: bool = False
    dropout: float = 0.0
    l2: float = 1e-3

    def __post_init__(self):
        if self.layers < 1 or self.width < 1 or self.depth < 1:
            raise ValueError(
                "A flow needs at least one layer, one hidden layer and one unit; got "
                f"layers={self.layers}, depth={self.depth}, width={self.width}."
            )
        if not self.df > 0:
            raise ValueError(f"Degrees of freedom must be positive, got df={self.df}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"The dropout share must be in [0, 1), got {self.dropout}.")
        if not hasattr(jax.nn, self.activation):
            raise ValueError(f"jax.nn has no activation named {self.activation!r}.")

    def build(self, key: PRNGKey, *, dim: int, condition: int) -> "Flow":
        """The network for values of `dim` numbers under a condition of `condition`."""
        return Flow(self, generator(key), dim=dim, condition=condition)


class Conditioner(eqx.Module):
    """The numbers of one half's transform, from the other half and the condition."""

    from_condition: Linear
    from_value: Linear
    hidden: tuple[Linear, ...]
    out: Linear
    activation: Callable = eqx.field(static=True)
    dropout: float = eqx.field(static=True)

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
        self.activation = getattr(jax.nn, spec.activation)
        self.dropout = spec.dropout

    def __call__(self, value: Flat, context: Flat, key: PRNGKey | None) -> Flat:
        # Far values all look alike: growing without bound, they would undo float32's inverse.
        near = jnp.clip(value, -FAR, FAR)
        h = self.activation(self.from_value(near) + context)
        keep = None if key is None or self.dropout == 0 else self._keep(key, h.shape[0])
        for i, layer in enumerate((*self.hidden, self.out)):
            h = layer(h if keep is None else h * keep[i])
            h = h if i == len(self.hidden) else self.activation(h)
        return h

    def _keep(self, key: PRNGKey, width: int) -> Float[Array, "layers width"]:
        # Eight bits a unit: four times fewer random numbers than a uniform draw takes.
        level = max(1, round((1 - self.dropout) * 256))
        bits = jax.random.bits(key, (len(self.hidden) + 1, width), jnp.uint8)
        return jnp.where(bits.astype(int) < level, 256 / level, 0.0)


class Context(NamedTuple):
    """What a flow needs of a condition, to be shared by all values under it."""

    shift: Flat
    log_scale: Flat
    steps: Float[Array, "steps width"]


class Step(eqx.Module):
    """Normalise, mix, then transform the last half of the coordinates by the first."""

    log_scale: Flat
    shift: Flat
    conditioner: Conditioner
    transform: Spline | Affine = eqx.field(static=True)

    def __init__(self, spec: Coupling, rng: np.random.Generator, *, dim: int, condition: int):
        self.log_scale = self.shift = jnp.asarray(np.zeros(dim), float)
        self.conditioner = Conditioner(
            spec, rng, n_in=dim // 2, n_out=dim - dim // 2, condition=condition
        )
        self.transform = spec.transform

    def forward(self, value: Flat, matrix, context: Flat, key: PRNGKey | None):
        value = matrix @ (value * jnp.exp(self.log_scale) + self.shift)
        value, log_det = self._transform(value, context, key, inverse=False)
        return value, log_det + jnp.sum(self.log_scale)

    def inverse(self, value: Flat, matrix, context: Flat):
        value, log_det = self._transform(value, context, None, inverse=True)
        value = (matrix.T @ value - self.shift) * jnp.exp(-self.log_scale)
        return value, log_det - jnp.sum(self.log_scale)

    def _transform(self, value: Flat, context: Flat, key, *, inverse: bool):
        n = value.shape[0] // 2
        # Raw numbers of one kind lie together: the transform works on whole rows of them.
        raw = self.conditioner(value[:n], context, key).reshape(self.transform.n_raw, -1)
        changed, log_det = self.transform(value[n:], raw, inverse=inverse)
        return jnp.concatenate([value[:n], changed]), jnp.sum(log_det)


class Flow(eqx.Module):
    """A conditional density with exact log_prob and exact sampling, for one example.

    A layer is two steps, one for each half; the steps of all layers are stacked, and a
    scan runs through them: one of them is compiled, not all.
    """

    frame: Linear
    steps: Step
    mixing: Mixing
    spec: Coupling = eqx.field(static=True)
    dim: int = eqx.field(static=True)

    def __init__(self, spec: Coupling, rng: np.random.Generator, *, dim: int, condition: int):
        if dim < 1:
            raise ValueError(f"A flow needs at least one dimension, got {dim}.")
        steps = [Step(spec, rng, dim=dim, condition=condition) for _ in range(2 * spec.layers)]
        stack = lambda *parts: jnp.asarray(np.stack(parts))  # noqa: E731
        self.steps = jax.tree.map(stack, *steps)
        self.frame = Linear(condition, 2 * dim, rng, scale=0.0)
        self.mixing = Mixing(dim, spec.layers, rng, learn=spec.rotate)
        self.spec = spec
        self.dim = dim

    def prepare(self, condition: Flat) -> Context:
        """What the flow needs of a condition, to be shared by all values under it."""
        shift, raw = jnp.split(self.frame(condition), 2)
        each = lambda step: step.conditioner.from_condition(condition)  # noqa: E731
        log_scale = MAX_LOG_SCALE * jnp.tanh(raw / MAX_LOG_SCALE)
        return Context(shift, log_scale, eqx.filter_vmap(each)(self.steps))

    def log_prob(self, value: Flat, context: Context, key: PRNGKey | None = None) -> Scalar:
        """The log density of a value; with a key, dropout is on."""
        z, log_det = self.to_base(value, context, key)
        return base_log_prob(z, self.spec.df) + log_det

    def sample(self, key: PRNGKey, context: Context) -> tuple[Flat, Scalar]:
        """A draw and its log density."""
        z = base_sample(key, self.dim, self.spec.df)
        value, log_det = self.from_base(z, context)
        return value, base_log_prob(z, self.spec.df) - log_det

    def to_base(self, value: Flat, context: Context, key: PRNGKey | None = None):
        """The map to the base and its log-determinant."""
        keys = None if key is None else jax.random.split(key, 2 * self.spec.layers)
        run = lambda step, v, *rest: step.forward(v, *rest)  # noqa: E731
        value = (value - context.shift) * jnp.exp(-context.log_scale)
        value, log_det = self._scan(run, value, context, keys, reverse=False)
        return value, log_det - jnp.sum(context.log_scale)

    def from_base(self, z: Flat, context: Context):
        """The map from the base and its log-determinant."""
        run = lambda step, v, matrix, part, _: step.inverse(v, matrix, part)  # noqa: E731
        value, log_det = self._scan(run, z, context, None, reverse=True)
        value = value * jnp.exp(context.log_scale) + context.shift
        return value, log_det + jnp.sum(context.log_scale)

    def _scan(self, run, value, context, keys, *, reverse: bool):
        arrays, static = eqx.partition(self.steps, eqx.is_array)

        def body(carry, part):
            arrays, *rest = part
            value, total = carry
            value, log_det = run(eqx.combine(arrays, static), value, *rest)
            return (value, total + log_det), None

        parts = (arrays, self.mixing.matrices(), context.steps, keys)
        start = (value, jnp.zeros((), value.dtype))
        return jax.lax.scan(body, start, parts, reverse=reverse)[0]

    def penalty(self) -> Scalar:
        """The L2 penalty on the weights."""
        linears = jax.tree.leaves(
            (self.frame, self.steps), is_leaf=lambda node: isinstance(node, Linear)
        )
        weights = [node.weight for node in linears if isinstance(node, Linear)]
        squares = sum((jnp.sum(weight**2) for weight in weights), start=jnp.zeros(()))
        return self.spec.l2 * squares


def base_log_prob(z: Flat, df: float) -> Scalar:
    """The log density of the standard multivariate Student-t (Gaussian at infinity)."""
    d = z.shape[0]
    squares = jnp.sum(z**2)
    if math.isinf(df):
        return -0.5 * (squares + d * math.log(2 * math.pi))
    constant = math.lgamma((df + d) / 2) - math.lgamma(df / 2) - d / 2 * math.log(df * math.pi)
    return constant - (df + d) / 2 * jnp.log1p(squares / df)


def base_sample(key: PRNGKey, dim: int, df: float) -> Flat:
    r"""A draw of the standard multivariate Student-t (Gaussian at infinity).

    Given the squares $S_j$ of the first $j$ pairs of coordinates, the next pair is again
    Student-t, with $\nu + 2j$ degrees of freedom and a scale that $S_j$ sets, and the
    radius of a pair has a closed quantile function:
    $\nu + S_{j+1} = (\nu + S_j)\, U_j^{-2 / (\nu + 2j)}$. So no rejection is needed.
    """
    if math.isinf(df):
        return jax.random.normal(key, (dim,))
    pairs = (dim + 1) // 2
    k_radius, k_angle = jax.random.split(key)
    # On (0, 1]: the logarithm of zero would be an infinite draw.
    u = 1 - jax.random.uniform(k_radius, (pairs,))
    growth = -2 * jnp.log(u) / (df + 2 * jnp.arange(pairs))
    before = jnp.cumsum(growth) - growth
    radius = jnp.sqrt(df * jnp.exp(before) * jnp.expm1(growth))
    angle = 2 * jnp.pi * jax.random.uniform(k_angle, (pairs,))
    return jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=1).reshape(-1)[:dim]
