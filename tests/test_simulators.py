"""Which simulators are taken for JAX functions, and what the others are told."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.experimental import io_callback

import consilience as cs

PRIOR = {"mu": dist.Normal(0.0, 1.0), "sigma": dist.HalfNormal(1.0)}
OFFSETS = np.arange(3.0)
SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)


def plain(key, t, scale=1.0, *, n=3):
    return t["mu"] + scale * t["sigma"] * jax.random.normal(key, (n,)) + OFFSETS[:n]


class Weighted(eqx.Module):
    weight: jax.Array

    def __call__(self, key, t):
        return self.weight * t["mu"] + jax.random.normal(key, (3,))


class Simulator:
    def __call__(self, key, t):
        return plain(key, t)

    def run(self, key, t):
        return plain(key, t)


def called_back(key, t):
    noise = io_callback(lambda: np.random.normal(size=3).astype(np.float32), SHAPE)
    return noise + jax.pure_callback(
        lambda mu: np.full(3, mu, np.float32), SHAPE, t["mu"], vmap_method="sequential"
    )


def scanned(key, t):
    step = lambda y, k: (y - 0.1 * y + jax.random.normal(k), y)  # noqa: E731
    return jax.lax.scan(step, t["mu"], jax.random.split(key, 3))[1]


BRANCHES = (lambda: jnp.zeros(3), lambda: jnp.ones(3))

LEGITIMATE = {
    "defaults and keyword-only arguments": plain,
    "functools.partial": functools.partial(plain, scale=2.0, n=2),
    "jax.jit": jax.jit(lambda key, t: plain(key, t)),
    "an Equinox module": Weighted(jnp.ones(3)),
    "a class with __call__": Simulator(),
    "a method": Simulator().run,
    "starred arguments": lambda *both: plain(*both),
    "callbacks": called_back,
    "a scan": scanned,
    "a branch": lambda key, t: jax.lax.cond(t["mu"] > 0, *BRANCHES),
    "debugging": lambda key, t: (jax.debug.print("{}", t["mu"]), plain(key, t))[1],
    "a random constant": functools.partial(
        lambda noise, key, t: t["mu"] + noise, np.random.default_rng(0).normal(size=3)
    ),
    "a distribution": lambda key, t: dist.Normal(t["mu"], 1.0).sample(key, (3,)),
}


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("simulator", LEGITIMATE.values(), ids=LEGITIMATE)
def test_simulators_in_jax_are_taken_as_they_are(simulator):
    model = cs.Model(PRIOR, simulator)
    assert model.layout.shapes["data"] in ((3,), (2,))


def assigned(key, t):
    x = np.zeros(3)
    x[0] = t["mu"]
    return x


IN_NUMPY = {
    "np.random.default_rng(key)": lambda key, t: np.random.default_rng(key).normal(t["mu"], 1, 3),
    "a NumPy Generator in place of the key": lambda rng, t: rng.normal(t["mu"], 1.0, 3),
    "np.sin of a parameter": lambda key, t: np.sin(t["mu"]) * OFFSETS,
    "np.array of parameters": lambda key, t: np.array([t["mu"], t["sigma"]]),
    "assignment to an array": assigned,
    "math.exp": lambda key, t: math.exp(t["mu"]) * OFFSETS,
    "float()": lambda key, t: float(t["mu"]) * OFFSETS,
    "if": lambda key, t: OFFSETS if t["mu"] > 0 else -OFFSETS,
    "range()": lambda key, t: jnp.zeros(len(range(t["mu"].astype(int)))),
    "an index": lambda key, t: [1.0, 2.0][t["mu"].astype(int)],
    "a boolean index": lambda key, t: jnp.ones(3)[jnp.ones(3) > t["mu"]],
    "a shape": lambda key, t: jnp.zeros(t["mu"].astype(int)),
    "swapped arguments": lambda t, key: t["mu"] + jax.random.normal(key, (3,)),
    "a text": lambda key, t: "one",
}


@pytest.mark.parametrize("simulator", IN_NUMPY.values(), ids=IN_NUMPY)
def test_numpy_code_in_a_jax_simulator_is_pointed_to_external(simulator):
    with pytest.raises(TypeError, match=r"The simulator (must|is called).* cs\.external\("):
        cs.Model(PRIOR, simulator)


@pytest.mark.parametrize(
    "simulator",
    [lambda rng, mu, sigma: None, lambda key: None, lambda: None, lambda key, t, *, n: None],
)
def test_a_simulator_of_other_arguments_is_shown_how_it_is_called(simulator):
    with pytest.raises(TypeError, match=r"called as simulator\(key, theta\), but it takes \("):
        cs.Model(PRIOR, simulator)


@pytest.mark.parametrize(
    "noise",
    [
        lambda: np.random.normal(size=3),
        lambda: np.random.normal(),
        lambda: np.random.randint(10**6),
        lambda: jax.lax.scan(lambda c, _: (c + np.random.normal(), c), 0.0, None, length=3)[1],
    ],
    ids=["an array", "a number", "a whole number", "inside of a scan"],
)
def test_random_numbers_of_numpy_in_a_jax_simulator_are_refused(noise):
    """They would be drawn once, when it is compiled, and be the same in all runs."""
    with pytest.raises(TypeError, match=r"not pure: it gives other numbers.* cs\.external\("):
        cs.Model(PRIOR, lambda key, t: t["mu"] + noise())


def test_an_error_of_the_simulators_own_is_left_as_it_is():
    def simulator(key, t):
        raise RuntimeError("no licence")

    with pytest.raises(RuntimeError, match="no licence"):
        cs.Model(PRIOR, simulator)
