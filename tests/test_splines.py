"""Splines against a plain reference: searchsorted, gathers, and autodiff for everything."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from consilience.networks.spline import MAX_LOG_FACTOR, MIN_SHARE, n_raw, spline

BOUND = 3.0
N = 2000
"""All tests pass this many values: one shape, so one compilation for each kind of spline."""

every_kind = pytest.mark.parametrize(
    ("bins", "inverse"), [(bins, inverse) for bins in (1, 2, 5) for inverse in (False, True)]
)
both_ways = pytest.mark.parametrize("inverse", [False, True])


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def random_splines(bins, scale=1.5):
    """Values in and around the interval, and raw numbers that bend every spline."""
    rng = np.random.default_rng(bins)
    raw = scale * rng.standard_normal((n_raw(bins), N))
    return rng.uniform(-1.2, 1.2, N) * BOUND, raw


def compiled(function):
    """NumPy arrays in and out, so that what tests compute around it compiles nothing."""
    run = jax.jit(function, static_argnames="inverse")
    return lambda value, raw, *, inverse: jax.device_get(run(value, raw, inverse=inverse))


def _gradients(function, value, raw):
    """Outputs, then the gradients of either output by the value and by each raw number."""
    outputs, pull = jax.vjp(function, value, raw)
    one, zero = jnp.ones_like(value), jnp.zeros_like(value)
    return outputs, jax.vmap(pull)((jnp.stack([one, zero]), jnp.stack([zero, one])))


@compiled
def evaluate(value, raw, *, inverse):
    return _gradients(functools.partial(spline, bound=BOUND, inverse=inverse), value, raw)


@compiled
def evaluate_reference(value, raw, *, inverse):
    one = functools.partial(reference, inverse=inverse)
    return _gradients(jax.vmap(one, in_axes=(0, 1)), value, raw)


def reference(value, raw, *, inverse):
    point = functools.partial(reference_point, inverse=inverse)
    return point(value, raw), jnp.log(jax.grad(point)(value, raw))


def reference_point(value, raw, *, inverse):
    """The formula of the module's docstring for one value, or the root of its quadratic."""
    x, y, d = knots(raw)
    inside = jnp.abs(value) < BOUND
    v = jnp.where(inside, value, 0.0)
    k = jnp.searchsorted((y if inverse else x)[1:-1], v, side="right")
    w, h = x[k + 1] - x[k], y[k + 1] - y[k]
    s, bend = h / w, d[k + 1] + d[k] - 2 * h / w
    if inverse:
        rise = v - y[k]
        a, b, c = h * (s - d[k]) + rise * bend, h * d[k] - rise * bend, -s * rise
        result = x[k] + w * 2 * c / (-b - jnp.sqrt(b**2 - 4 * a * c))
    else:
        xi = (v - x[k]) / w
        top = h * (s * xi**2 + d[k] * xi * (1 - xi))
        result = y[k] + top / (s + bend * xi * (1 - xi))
    return jnp.where(inside, result, value)


def knots(raw):
    """The positions, heights and derivatives at the knots of one spline."""
    bins = (raw.shape[0] + 1) // 3

    def edges(logits):
        size = MIN_SHARE / bins + (1 - MIN_SHARE) * jax.nn.softmax(logits)
        return 2 * BOUND * jnp.concatenate([jnp.zeros(1), jnp.cumsum(size)]) - BOUND

    x, y = edges(raw[:bins]), edges(raw[bins : 2 * bins])
    s = jnp.diff(y) / jnp.diff(x)
    factor = jnp.exp(MAX_LOG_FACTOR * jnp.tanh(raw[2 * bins :] / MAX_LOG_FACTOR))
    inner = factor * 2 / (1 / s[:-1] + 1 / s[1:])
    return x, y, jnp.concatenate([jnp.ones(1), inner, jnp.ones(1)])


@compiled
def central_differences(value, raw, *, inverse):
    step = 1e-6

    def along(direction):
        move = lambda h: (value + h * direction[0], raw + h * direction[1:, None])  # noqa: E731
        up = spline(*move(step), bound=BOUND, inverse=inverse)
        down = spline(*move(-step), bound=BOUND, inverse=inverse)
        return (jnp.stack(up) - jnp.stack(down)) / (2 * step)

    parts = jax.lax.map(along, jnp.eye(1 + raw.shape[0]))
    return parts[0], parts[1:].swapaxes(0, 1)


@both_ways
def test_agrees_with_the_reference(inverse):
    """The values, the log derivatives, and the gradients of both."""
    value, raw = random_splines(5)
    got = evaluate(value, raw, inverse=inverse)
    expected = evaluate_reference(value, raw, inverse=inverse)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)


@every_kind
def test_derivative_agrees_with_central_differences(bins, inverse):
    value, raw = random_splines(bins)
    _, got = evaluate(value, raw, inverse=inverse)
    expected = central_differences(value, raw, inverse=inverse)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@every_kind
def test_log_det_is_the_log_of_the_derivative(bins, inverse):
    value, raw = random_splines(bins, scale=3.0)
    (_, log_det), (slope, _) = evaluate(value, raw, inverse=inverse)
    np.testing.assert_allclose(log_det, np.log(slope[0]), rtol=1e-9, atol=1e-9)
    # One bin has its ends and the derivatives there fixed: it can only be the identity.
    assert bins == 1 or np.std(log_det) > 1


@both_ways
def test_derivative_at_a_knot(inverse):
    """Two bins of zeros have their inner knot at zero, where values do fall."""
    value, raw = np.zeros(N), np.zeros((n_raw(2), N))
    (_, log_det), (slope, _) = evaluate(value, raw, inverse=inverse)
    np.testing.assert_allclose(log_det, 0.0, atol=1e-12)
    np.testing.assert_allclose(slope[0], 1.0, rtol=1e-12)


@pytest.mark.parametrize("bins", [1, 2, 5])
def test_inverse(bins):
    value, raw = random_splines(bins, scale=3.0)
    (there, log_det), _ = evaluate(value, raw, inverse=False)
    (back, log_det_back), _ = evaluate(there, raw, inverse=True)
    np.testing.assert_allclose(back, value, rtol=0, atol=1e-10)
    np.testing.assert_allclose(log_det_back, -log_det, rtol=0, atol=1e-7)
    assert bins == 1 or np.mean(np.abs(there - value)) > 0.5


@both_ways
def test_inverse_in_float32(inverse):
    value, raw = (array.astype(np.float32) for array in random_splines(5))
    (there, log_det), _ = evaluate(value, raw, inverse=inverse)
    (back, _), _ = evaluate(there, raw, inverse=not inverse)
    assert there.dtype == log_det.dtype == back.dtype == np.float32
    np.testing.assert_allclose(back, value, rtol=0, atol=1e-3)


@every_kind
def test_identity_at_zeros(bins, inverse):
    value = np.linspace(-2 * BOUND, 2 * BOUND, N)
    (result, log_det), _ = evaluate(value, np.zeros((n_raw(bins), N)), inverse=inverse)
    np.testing.assert_allclose(result, value, rtol=0, atol=1e-14)
    np.testing.assert_allclose(log_det, 0.0, atol=1e-14)


@every_kind
def test_identity_outside_the_bound(bins, inverse):
    _, raw = random_splines(bins, scale=3.0)
    ends = np.array([-1e30, -50.0, -BOUND, BOUND, np.nextafter(BOUND, 9.0), 50.0, 1e6, 1e30])
    value = np.tile(ends, N // ends.size)
    (result, log_det), (slope, by_raw) = evaluate(value, raw, inverse=inverse)
    np.testing.assert_array_equal(result, value)
    np.testing.assert_array_equal(log_det, 0.0)
    np.testing.assert_array_equal(slope, np.stack([np.ones(N), np.zeros(N)]))
    np.testing.assert_array_equal(by_raw, 0.0)


@every_kind
def test_value_and_derivative_continuous_at_the_bound(bins, inverse):
    _, raw = random_splines(bins)
    end = BOUND * np.tile(np.array([-1.0, 1.0]), N // 2)
    (result, log_det), _ = evaluate(end * (1 - 1e-10), raw, inverse=inverse)
    np.testing.assert_allclose(result, end, rtol=0, atol=1e-8)
    np.testing.assert_allclose(log_det, 0.0, atol=1e-6)


@every_kind
def test_monotone(bins, inverse):
    _, raw = random_splines(bins, scale=3.0)
    value = np.tile(np.linspace(-1.1 * BOUND, 1.1 * BOUND, 100), N // 100)
    raw = np.repeat(raw[:, : N // 100], 100, axis=1)
    (result, _), _ = evaluate(value, raw, inverse=inverse)
    assert np.min(np.diff(result.reshape(-1, 100), axis=1)) > 0


@both_ways
def test_monotone_in_float32(inverse):
    """Between neighbouring numbers too, where rounding could turn the order around."""
    _, raw = (array.astype(np.float32) for array in random_splines(5))
    start = np.linspace(-BOUND, BOUND, N // 50, dtype=np.float32)
    raw = np.repeat(raw[:, : N // 50], 50, axis=1)
    value = (start[:, None] + 1e-4 * np.arange(50, dtype=np.float32)).reshape(-1)
    (result, _), _ = evaluate(value, raw, inverse=inverse)
    assert np.min(np.diff(result.reshape(-1, 50), axis=1)) > -1e-6


@both_ways
def test_extreme_raw_numbers_stay_finite(inverse):
    rng = np.random.default_rng(0)
    raw = np.asarray(rng.choice([-1e4, 0.0, 1e4], (n_raw(5), N)), np.float32)
    value = np.asarray(rng.uniform(-1.2, 1.2, N) * BOUND, np.float32)
    for leaf in jax.tree.leaves(evaluate(value, raw, inverse=inverse)):
        assert np.isfinite(leaf).all()
