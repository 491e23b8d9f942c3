"""Every flow runs through the same laws, with weights that bend the map."""

import dataclasses
import functools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy import stats

from consilience.networks.base import base_log_prob, base_sample
from consilience.networks.coupling import _condition
from consilience.networks.density import Dropout
from consilience.networks.flow import Coupling, Flow
from consilience.networks.transforms import Affine, Spline

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = {"layers": 2, "width": 16}


class Case(NamedTuple):
    spec: Coupling
    dim: int
    condition: int


CASES = {
    "spline-1-t3": Case(Coupling(Spline(8), df=3.0, depth=1, **SMALL), 1, 3),
    "spline-2": Case(Coupling(Spline(4), depth=1, **SMALL), 2, 3),
    "spline-2-t3-permuted-free": Case(Coupling(Spline(2), df=3.0, rotate=False, **SMALL), 2, 0),
    "spline-5-t100-permuted": Case(Coupling(Spline(2), df=100.0, rotate=False, **SMALL), 5, 3),
    "spline-2-curved": Case(Coupling(Spline(4), depth=1, frame=2, **SMALL), 2, 3),
    "spline-160": Case(Coupling(Spline(2), depth=1, **SMALL), 160, 3),
    "affine-1-t100-free": Case(Coupling(Affine(), df=100.0, **SMALL), 1, 0),
    "affine-2": Case(Coupling(Affine(), **SMALL), 2, 3),
    "affine-5-t3-spectral": Case(Coupling(Affine(), df=3.0, spectral=True, depth=1, **SMALL), 5, 3),
    "affine-160-permuted-free": Case(Coupling(Affine(), rotate=False, **SMALL), 160, 0),
}


def flows(*, dims):
    return pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.dim in dims])


def bend(flow: Flow, scale: float = 0.2) -> Flow:
    """Noise on all weights, for a map far from the identity that a fit could arrive at."""
    rng = np.random.default_rng(1)

    def noisy(leaf):
        fan_in = leaf.shape[-1] if leaf.ndim == 3 else 1
        noise = scale / math.sqrt(max(1, fan_in)) * rng.standard_normal(leaf.shape)
        return jnp.asarray(np.asarray(leaf) + noise, leaf.dtype)

    arrays, static = eqx.partition(flow, eqx.is_inexact_array)
    return eqx.combine(jax.tree.map(noisy, arrays), static)


def bent_flow(name):
    """A bent flow and a condition for it, in the precision that is on."""
    spec, dim, condition = CASES[name]
    return bend(spec.build(jax.random.key(0), dim=dim, condition=condition)), jnp.ones(condition)


def batch(name, *, reach=None):
    """Values on the scale of the base, or up to `reach`; of one shape for each flow."""
    rng, dim = np.random.default_rng(2), CASES[name].dim
    shape = (4096 if dim <= 5 else 256, dim)
    base = 1.5 * rng.standard_normal(shape)
    return jnp.asarray(base if reach is None else rng.uniform(-reach, reach, shape), float)


def compiled(function):
    """With NumPy arrays out, so that what tests compute of them compiles nothing."""
    run = eqx.filter_jit(function)
    return lambda *args: jax.device_get(run(*args))


def to_base(flow, values, condition):
    # One compilation serves two laws: the small flows in float64 also give a jacobian.
    if values.dtype == jnp.float64 and flow.dim <= 5:
        return to_base_and_jacobian(flow, values, condition)[0]
    return to_base_only(flow, values, condition)


@compiled
def to_base_only(flow, values, condition):
    return jax.vmap(flow.to_base, in_axes=(0, None))(values, flow.prepare(condition))


@compiled
def to_base_and_jacobian(flow, values, condition):
    context = flow.prepare(condition)

    def run(value):
        z, log_det = flow.to_base(value, context)
        return z, (z, log_det)

    jacobian, outputs = jax.vmap(jax.jacrev(run, has_aux=True))(values)
    return outputs, jacobian


@compiled
def from_base(flow, z, condition):
    return jax.vmap(flow.from_base, in_axes=(0, None))(z, flow.prepare(condition))


@compiled
def log_prob(flow, values, condition):
    return jax.vmap(flow.log_prob, in_axes=(0, None))(values, flow.prepare(condition))


@compiled
def sample(flow, keys, condition):
    return jax.vmap(flow.sample, in_axes=(0, None))(keys, flow.prepare(condition))


@functools.cache
def draws(name):
    """Draws of a bent flow and their log densities."""
    with jax.enable_x64(True):
        flow, condition = bent_flow(name)
        return sample(flow, jax.random.split(jax.random.key(3), 16384), condition)


class Grid(NamedTuple):
    """Probabilities of even cells in `u`, for values `3 sinh(u)`: fine inside, and far."""

    edges: np.ndarray
    mass: np.ndarray

    def place(self, values):
        return np.arcsinh(np.asarray(values) / 3)


@functools.cache
def integrate(name) -> Grid:
    """The probability of each cell, by the midpoint rule."""
    dim = CASES[name].dim
    edges = np.linspace(-5, 5, 1 + (2**14 if dim == 1 else 2**9))
    u = (edges[1:] + edges[:-1]) / 2
    points = np.stack(np.meshgrid(*[3 * np.sinh(u)] * dim, indexing="ij"), axis=-1)
    with jax.enable_x64(True):
        flow, condition = bent_flow(name)
        chunks = points.reshape(-1, 4096, dim)
        log_q = np.stack([log_prob(flow, jnp.asarray(chunk), condition) for chunk in chunks])
    sizes = 3 * np.cosh(u) * (edges[1] - edges[0])
    volume = functools.reduce(np.multiply.outer, [sizes] * dim)
    return Grid(edges, np.exp(log_q).reshape(volume.shape) * volume)


@flows(dims=[1, 2, 5, 160])
def test_the_flows_are_bent(name):
    """No law below holds for want of trying: maps are not linear, and conditions matter."""
    flow, condition = bent_flow(name)
    values = batch(name)
    z, _ = to_base(flow, values, condition)
    assert np.mean(np.abs(z - values)) > 0.3
    design = np.c_[values, np.ones(len(values))]
    off_the_line = np.std(z - design @ np.linalg.lstsq(design, z)[0]) / np.std(z)
    if isinstance(flow.spec.transform, Spline):
        assert off_the_line > 0.1
    elif flow.dim > 1:
        assert off_the_line > 0.05
    if condition.size:
        assert np.mean(np.abs(z - to_base(flow, values, -condition)[0])) > 0.4


@pytest.mark.parametrize("reach", [None, 50.0], ids=["near", "far"])
@pytest.mark.parametrize(("x64", "tolerance"), [(True, 1e-6), (False, 1e-3)], ids=["f64", "f32"])
@flows(dims=[1, 2, 5, 160])
def test_inverse(name, x64, tolerance, reach):
    with jax.enable_x64(x64):
        flow, condition = bent_flow(name)
        start = batch(name, reach=reach)
        for first, second in [(to_base, from_base), (from_base, to_base)]:
            middle, log_det = first(flow, start, condition)
            back, log_det_back = second(flow, middle, condition)
            np.testing.assert_allclose(back, start, rtol=0, atol=tolerance)
            np.testing.assert_allclose(log_det_back, -log_det, rtol=tolerance, atol=tolerance)


@flows(dims=[1, 2, 5])
def test_log_det_against_autodiff(name):
    with jax.enable_x64(True):
        flow, condition = bent_flow(name)
        (_, log_det), jacobian = to_base_and_jacobian(flow, batch(name), condition)
        expected = np.linalg.slogdet(jacobian).logabsdet
        np.testing.assert_allclose(log_det, expected, rtol=0, atol=1e-9)


@flows(dims=[1, 2])
def test_log_density_of_a_draw(name):
    with jax.enable_x64(True):
        flow, condition = bent_flow(name)
        values, log_q = (array[:4096] for array in draws(name))
        np.testing.assert_allclose(log_q, log_prob(flow, values, condition), rtol=0, atol=1e-7)


@flows(dims=[1, 2])
def test_density_integrates_to_one(name):
    assert abs(integrate(name).mass.sum() - 1) < 1e-3


@flows(dims=[1])
def test_samples_match_the_density_in_1d(name):
    grid, (values, _) = integrate(name), draws(name)
    cdf = np.concatenate([[0.0], np.cumsum(grid.mass)])
    test = stats.kstest(grid.place(values[:, 0]), lambda u: np.interp(u, grid.edges, cdf))
    assert test.pvalue > 1e-3


@flows(dims=[2])
def test_samples_match_the_density_in_2d(name):
    grid, (values, _) = integrate(name), draws(name)
    expected = grid.mass.reshape(128, 4, 128, 4).sum(axis=(1, 3)) * len(values)
    counts, *_ = np.histogram2d(*grid.place(values).T, bins=[grid.edges[::4]] * 2)
    often = expected > 10
    assert often.sum() > 50
    pool = lambda cells: np.append(cells[often], len(values) - cells[often].sum())  # noqa: E731
    assert stats.chisquare(pool(counts), pool(expected)).pvalue > 1e-3


def base_draws(dim, df, n=10_000):
    keys = jax.random.split(jax.random.key(4), n)
    return compiled(jax.vmap(lambda key: base_sample(key, (dim,), df)))(keys)


@pytest.mark.parametrize(
    ("dim", "df"), [(3, math.inf), *[(dim, df) for dim in (1, 2, 3, 5) for df in (3.0, 100.0)]]
)
def test_base_draws_are_student_t(dim, df):
    """Each coordinate, an oblique projection and the radius have their distributions."""
    z = base_draws(dim, df)
    assert z.shape == (10_000, dim)
    marginal = stats.norm() if math.isinf(df) else stats.t(df)
    oblique = np.arange(1, dim + 1) * (-1.0) ** np.arange(dim)
    for projection in (*z.T, z @ oblique / np.linalg.norm(oblique)):
        assert stats.kstest(projection, marginal.cdf).pvalue > 1e-3
    squares = np.sum(z**2, axis=1)
    radius = stats.chi2(dim, scale=1 / dim) if math.isinf(df) else stats.f(dim, df)
    assert stats.kstest(squares / dim, radius.cdf).pvalue > 1e-3


def test_base_draws_approach_the_gaussian():
    z = base_draws(3, 1e6)
    for coordinate in z.T:
        assert stats.kstest(coordinate, stats.norm.cdf).pvalue > 1e-3
    assert stats.kstest(np.sum(z**2, axis=1), stats.chi2(3).cdf).pvalue > 1e-3


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 160])
def test_base_log_prob_against_scipy(dim):
    z = 3 * np.random.default_rng(dim).standard_normal((100, dim))
    with jax.enable_x64(True):
        run = lambda df: jax.vmap(lambda row: base_log_prob(row, df))(jnp.asarray(z))  # noqa: E731
        for df in (0.5, 3.0, 100.0):
            expected = stats.multivariate_t(np.zeros(dim), np.eye(dim), df=df).logpdf(z)
            np.testing.assert_allclose(run(df), expected, rtol=1e-10)
        gaussian = stats.multivariate_normal(np.zeros(dim), np.eye(dim)).logpdf(z)
        np.testing.assert_allclose(run(math.inf), gaussian, rtol=1e-10)
        np.testing.assert_allclose(run(1e8), gaussian, rtol=1e-4)


@pytest.mark.parametrize("dim", [2, 5])
def test_one_layer_transforms_every_coordinate(dim):
    """Cut off from the other half, each coordinate moves one output, and not in a line."""
    spec = Coupling(Spline(2), layers=1, width=4, depth=1, rotate=False)
    flow = bend(spec.build(jax.random.key(0), dim=dim, condition=0))
    where = lambda f: f.steps.conditioner.from_value.weight  # noqa: E731
    flow = eqx.tree_at(where, flow, replace_fn=jnp.zeros_like)
    values = np.linspace(-2, 2, 9)[:, None, None] * np.eye(dim)
    z, _ = to_base_only(flow, values.reshape(-1, dim), jnp.zeros(0))
    z = z.reshape(values.shape)
    moved = np.max(np.abs(z - z[:1]), axis=0) > 1e-3
    assert np.all(np.sum(moved, axis=0) == 1) and np.all(np.sum(moved, axis=1) == 1)
    bent = np.max(np.abs(np.diff(z, n=2, axis=0)), axis=(0, 2))
    assert np.min(bent) > 1e-3


def dropout_flow(share):
    spec = Coupling(Affine(), dropout=share, **SMALL)
    return bend(spec.build(jax.random.key(0), dim=2, condition=3))


@compiled
def log_prob_of_one(flow, key):
    return flow.log_prob(
        jnp.array([0.5, -1.0]), flow.prepare(jnp.ones(3)), key if key is None else Dropout(key)
    )


def test_dropout_needs_a_key():
    flow, plain = dropout_flow(0.5), dropout_flow(0.0)
    expected = log_prob_of_one(plain, None)
    assert log_prob_of_one(flow, None) == expected
    dropped = [log_prob_of_one(flow, jax.random.key(i)) for i in (1, 2, 2)]
    assert abs(dropped[0] - expected) > 1e-3
    assert abs(dropped[0] - dropped[1]) > 1e-3
    assert dropped[1] == dropped[2]


@pytest.mark.parametrize("share", [1e-3, 0.3])
def test_dropout_keeps_the_mean(share):
    spec = Coupling(Affine(), dropout=share, depth=1, **SMALL)
    flow = bend(spec.build(jax.random.key(0), dim=2, condition=3))
    first = jax.tree.map(lambda leaf: leaf[0], flow._weights())
    kept = flow._kept(jax.random.key(1), 10_000)[0]
    value, context = jnp.ones((1, 10_000)), jnp.ones((16, 10_000))
    raw = np.asarray(_condition(flow._kind, first, context, value, kept)[0], float)[:, 0]
    plain = np.asarray(_condition(flow._kind, first, context, value, None)[0])[:, 0]
    error = np.mean(raw - plain, axis=1)
    assert np.all(np.abs(error) < 4 * np.std(raw, axis=1) / 100 + 1e-5)


def test_dropout_of_the_first_values_only():
    flow = dropout_flow(0.5)
    values, context = jnp.ones((6, 2)), flow.prepare(jnp.ones(3))
    plain = flow.log_prob(values, context)
    some = flow.log_prob(values, context, Dropout(jax.random.key(1), first=4))
    np.testing.assert_allclose(some[4:], plain[4:], rtol=1e-6)
    assert len(np.unique(np.asarray(some[:4]))) == 4


DERIVED = ["spline-1-t3", "spline-5-t100-permuted", "affine-5-t3-spectral"]


@pytest.mark.parametrize("name", [*DERIVED, "dropout"])
def test_derivatives_in_weights_values_and_conditions_agree_with_differences(name):
    """Written out by hand: against nothing but the log density itself, in float64."""
    with jax.enable_x64(True):
        if name == "dropout":
            spec = Coupling(Spline(3), layers=1, width=4, dropout=0.3)
            flow, key = bend(spec.build(jax.random.key(0), dim=3, condition=2)), jax.random.key(1)
        else:
            spec, dim, condition = CASES[name]
            spec = dataclasses.replace(spec, layers=1, width=4)
            flow = bend(spec.build(jax.random.key(0), dim=dim, condition=condition))
            key = None
        rng = np.random.default_rng(3)
        condition = flow.frame.weight.shape[1]
        values = jnp.asarray(rng.standard_normal((2, 3, flow.dim)))
        conditions = jnp.asarray(rng.standard_normal((2, condition)))
        arrays, static = eqx.partition(flow, eqx.is_inexact_array)

        def log_prob(arrays, values, conditions):
            flow = eqx.combine(arrays, static)
            return flow.log_prob(
                values, jax.vmap(flow.prepare)(conditions), key if key is None else Dropout(key)
            )

        check_grads(jax.jit(log_prob), (arrays, values, conditions), 1, ["rev"], rtol=1e-5)


@pytest.mark.parametrize("name", DERIVED)
def test_a_draw_has_the_density_and_the_derivative_of_a_fixed_value(name):
    with jax.enable_x64(True):
        flow, _ = bent_flow(name)
        rng = np.random.default_rng(4)
        z = jnp.asarray(rng.standard_normal((3, 4, flow.dim)))
        conditions = jnp.asarray(rng.standard_normal((3, CASES[name].condition)))
        weights = jnp.asarray(rng.standard_normal((3, 4)))
        values = flow.from_base(z, jax.vmap(flow.prepare)(conditions))[0]

        def drawn(flow, conditions):
            found, log_q = flow.draw(z, jax.vmap(flow.prepare)(conditions))
            return jnp.sum(weights * log_q), (found, log_q)

        def fixed(flow, conditions):
            log_q = flow.log_prob(values, jax.vmap(flow.prepare)(conditions))
            return jnp.sum(weights * log_q), (values, log_q)

        def run(function):
            both = lambda args: function(*args)  # noqa: E731
            return eqx.filter_jit(eqx.filter_value_and_grad(both, has_aux=True))((flow, conditions))

        for found, expected in zip(*map(jax.tree.leaves, (run(drawn), run(fixed))), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)


def test_many_values_under_many_conditions_are_those_one_by_one():
    flow, _ = bent_flow("spline-2")
    rng = np.random.default_rng(5)
    conditions = jnp.asarray(rng.standard_normal((2, 3, 3)), float)
    values = jnp.asarray(rng.standard_normal((2, 3, 4, 2)), float)
    contexts = jax.vmap(jax.vmap(flow.prepare))(conditions)
    every = flow.log_prob(values, contexts)
    assert every.shape == (2, 3, 4)
    for i, j, k in [(0, 0, 0), (0, 2, 1), (1, 0, 3), (1, 2, 2)]:
        one = flow.log_prob(values[i, j, k], flow.prepare(conditions[i, j]))
        np.testing.assert_allclose(every[i, j, k], one, rtol=1e-5)
    with pytest.raises(ValueError, match=r"must begin with these axes"):
        flow.log_prob(values[0], contexts)


def test_dropout_of_nearly_all_units():
    assert np.isfinite(log_prob_of_one(dropout_flow(0.999), jax.random.key(1)))


@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_penalty(l2):
    spec = Coupling(Spline(2), layers=1, width=3, depth=2, l2=l2)
    flow = bend(spec.build(jax.random.key(0), dim=2, condition=2))
    part = flow.steps.conditioner
    layers = (flow.frame, part.from_condition, part.from_value, *part.hidden, part.out)
    shapes = [layer.weight.shape for layer in layers]
    assert shapes == [(4, 2), (2, 3, 2), (2, 3, 1), (2, 3, 3), (2, 5, 3)]
    expected = l2 * sum(np.sum(np.square(layer.weight)) for layer in layers)
    np.testing.assert_allclose(flow.penalty(), expected, rtol=1e-6)


@pytest.mark.parametrize("width", [16, 128])
def test_spectral_weights_have_unit_norm(width):
    spec = Coupling(Affine(), layers=10, width=width, depth=2, spectral=True)
    conditioner = bend(spec.build(jax.random.key(0), dim=4, condition=3)).steps.conditioner

    @eqx.filter_vmap
    def effective_weight(layer):
        basis = jnp.eye(layer.weight.shape[1])
        return (jax.vmap(layer)(basis) - layer.bias).T

    for layer in (conditioner.from_value, conditioner.from_condition, *conditioner.hidden):
        top = np.linalg.svd(effective_weight(layer), compute_uv=False)[:, 0]
        np.testing.assert_allclose(top, 1.0, rtol=0, atol=0.01)
    assert not conditioner.out.spectral


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 0}, "at least one layer.* got layers=0"),
        ({"width": 0}, "at least one layer.* width=0"),
        ({"depth": 0}, "at least one layer.* depth=0"),
        ({"df": 0.0}, "must be positive, got df=0"),
        ({"df": -1.0}, "must be positive, got df=-1"),
        ({"df": math.nan}, "must be positive, got df=nan"),
        ({"dropout": 1.0}, r"must be in \[0, 1\), got 1"),
        ({"dropout": -0.1}, r"must be in \[0, 1\), got -0.1"),
        ({"activation": "swisch"}, "no activation named 'swisch'"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Coupling(**settings)


def test_no_dimension_is_refused():
    with pytest.raises(ValueError, match="at least one dimension, got 0"):
        Coupling().build(jax.random.key(0), dim=0, condition=1)


def products_over(jaxpr, size):
    """The output shapes of all matrix products that contract over an axis of a size."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((left, _), _) = equation.params["dimension_numbers"]
            if any(equation.invars[0].aval.shape[axis] == size for axis in left):
                yield equation.outvars[0].aval.shape
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from products_over(getattr(inner, "jaxpr", inner), size)


def _is_jaxpr(node):
    return hasattr(getattr(node, "jaxpr", node), "eqns")


def test_a_condition_is_prepared_once():
    condition, n_values = 7, 11
    flow = Coupling(**SMALL).build(jax.random.key(0), dim=4, condition=condition)

    def shared(values, c):
        return jax.vmap(flow.log_prob, in_axes=(0, None))(values, flow.prepare(c))

    def repeated(values, c):
        return jax.vmap(lambda value, c: flow.log_prob(value, flow.prepare(c)))(values, c)

    values = jnp.zeros((n_values, 4))
    once = list(products_over(jax.make_jaxpr(shared)(values, jnp.zeros(condition)), condition))
    each = jnp.zeros((n_values, condition))
    many = list(products_over(jax.make_jaxpr(repeated)(values, each), condition))
    assert once
    assert not any(n_values in shape for shape in once)
    assert any(n_values in shape for shape in many)


def test_other_weights_compile_nothing():
    traces = []

    @eqx.filter_jit
    def run(flow, value, condition):
        traces.append(1)
        return flow.log_prob(value, flow.prepare(condition))

    spec = Coupling(Affine(), **SMALL)
    results = [
        run(spec.build(jax.random.key(i), dim=3, condition=2), jnp.ones(3), jnp.ones(2))
        for i in range(3)
    ]
    assert len(traces) == 1
    assert len({float(result) for result in results}) == 3
