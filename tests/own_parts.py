"""Parts as a user writes them, one or more of each kind."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm


class MixtureNetwork(eqx.Module):
    """A mixture of Gaussians, its parameters by a network of Equinox from the condition."""

    network: eqx.nn.MLP
    dim: int
    l2: float

    def _parts(self, condition):
        raw = self.network(condition).reshape(-1, 1 + 2 * self.dim)
        weight, loc, log_sd = jnp.split(raw, [1, 1 + self.dim], axis=1)
        return jax.nn.log_softmax(weight[:, 0]), loc, jnp.tanh(log_sd)

    def log_prob(self, value, condition):
        log_weight, loc, log_sd = self._parts(condition)
        each = jnp.sum(norm.logpdf(value, loc, jnp.exp(log_sd)), axis=1)
        return jax.nn.logsumexp(log_weight + each)

    def sample(self, key, condition):
        log_weight, loc, log_sd = self._parts(condition)
        k_which, k_noise = jax.random.split(key)
        which = jax.random.categorical(k_which, log_weight)
        return loc[which] + jnp.exp(log_sd[which]) * jax.random.normal(k_noise, (self.dim,))

    def penalty(self):
        weights = [layer.weight for layer in self.network.layers]
        return self.l2 * sum(jnp.sum(weight**2) for weight in weights)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The description of a `MixtureNetwork`."""

    components: int = 2
    width: int = 8
    l2: float = 1e-4

    def build(self, rng, *, dim, condition):
        key = jax.random.key(int(rng.integers(2**31)))
        n_out = self.components * (1 + 2 * dim)
        # A prior has no condition.
        network = eqx.nn.MLP(condition, n_out, self.width, 1, jax.nn.tanh, key=key)
        return MixtureNetwork(network, dim, self.l2)


@dataclasses.dataclass(frozen=True)
class Sinh:
    """A transform with lighter or heavier tails: sinh(b arcsinh(v + a))."""

    strength: float = 0.5
    n_raw = 2

    def __call__(self, value, raw, *, inverse):
        shift, log_scale = raw[0], self.strength * jnp.tanh(raw[1])
        if inverse:
            inner = jnp.arcsinh(value) * jnp.exp(-log_scale)
            slope = _log_cosh(inner) - log_scale - jnp.log1p(value**2) / 2
            return jnp.sinh(inner) - shift, slope
        inner = jnp.arcsinh(value + shift) * jnp.exp(log_scale)
        slope = _log_cosh(inner) + log_scale - jnp.log1p((value + shift) ** 2) / 2
        return jnp.sinh(inner), slope


def _log_cosh(value):
    return jnp.logaddexp(value, -value) - jnp.log(2.0)


class Extremes(eqx.Module):
    """A summary network without a description."""

    weight: jax.Array

    def __call__(self, x):
        (values,) = x.values()
        return self.weight * jnp.stack([values.min(), values.max(), values.mean()])


class SumsNetwork(eqx.Module):
    """Sums of features of rows."""

    weight: jax.Array
    features: functools.partial
    mask: functools.partial

    def __call__(self, x):
        return self.mask(x) @ jnp.tanh(self.features(x) @ self.weight)


@dataclasses.dataclass(frozen=True)
class Sums:
    """The description of a `SumsNetwork`."""

    size: int = 4

    def build(self, rng, layout, dim):
        weight = jnp.asarray(rng.standard_normal((layout.n_features, self.size)), float)
        return SumsNetwork(
            weight, functools.partial(layout.features), functools.partial(layout.mask)
        )


@dataclasses.dataclass(frozen=True)
class Activated:
    """A description that a file cannot hold: one of its fields is a function."""

    function: object = jnp.tanh

    def build(self, rng, *, dim, condition):
        return Mixture(1, 4).build(rng, dim=dim, condition=condition)


def zeros_like(module):
    """An instance of a module that knows nothing of another's weights."""
    return jax.tree.map(lambda leaf: np.zeros_like(leaf) if eqx.is_array(leaf) else leaf, module)
