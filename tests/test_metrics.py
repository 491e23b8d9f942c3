"""Distances between samples: against plain loops, closed forms and scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from consilience.metrics import (
    BANDWIDTHS,
    _pairs,
    c2st,
    mmd,
    mmd_unbiased,
    mmd_with_floor,
    moment_errors,
    sliced_wasserstein,
)

KEY = jax.random.key(0)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def double_loop(x, y, widths) -> float:
    """The biased squared MMD, pair by pair, in double precision."""

    def kernel_mean(x, y):
        total = 0.0
        for p in x:
            for q in y:
                total += sum(np.exp(-np.sum((p - q) ** 2) / (2 * s)) for s in widths)
        return total / (len(x) * len(y))

    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return kernel_mean(x, x) + kernel_mean(y, y) - 2 * kernel_mean(x, y)


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 1e2, 1e4])
@pytest.mark.parametrize("dim", [1, 2, 10])
def test_mmd_equals_a_plain_double_loop(scale, dim):
    a, b = scale * normal(0, 2, 12, dim), scale * (0.5 + 1.2 * normal(1, 2, 15, dim))
    a = a.at[:, 3].set(a[:, 4])
    plain = [double_loop(x, y, BANDWIDTHS) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(mmd(a, b), plain, atol=1e-5)
    np.testing.assert_allclose(mmd(a[0], b[0]), plain[0], atol=1e-5)


def test_mmd_of_other_bandwidths_equals_a_plain_double_loop():
    a, b = normal(0, 20, 2), 1 + normal(1, 30, 2)
    np.testing.assert_allclose(
        mmd(a, b, bandwidths=(0.3, 4.0)), double_loop(a, b, (0.3, 4.0)), atol=1e-5
    )
    with pytest.raises(ValueError, match=r"must be positive, got \(1.0, -2.0\)"):
        mmd(a, b, bandwidths=(1.0, -2.0))


def test_mmd_of_draws_that_are_not_finite_is_not_a_number():
    a, b = normal(0, 4, 30, 2), normal(1, 4, 30, 2)
    a = a.at[1, 3, 0].set(jnp.nan).at[2, 0, 1].set(jnp.inf)
    assert np.isnan(mmd(a, b)).tolist() == [False, True, True, False]


def test_the_floor_is_the_score_of_the_reference_against_itself():
    reference, good, bad = normal(0, 3, 1000, 2), normal(1, 3, 500, 2), 1 + normal(1, 3, 500, 2)
    found, off = mmd_with_floor(good, reference), mmd_with_floor(bad, reference)
    np.testing.assert_array_equal(found.floor, mmd(reference[:, :500], reference[:, 500:]))
    np.testing.assert_array_equal(found.mmd, mmd(good, reference[:, :500]))
    assert np.all(found.mmd < 2 * found.floor)
    assert np.all(off.mmd > 5 * off.floor)
    with pytest.raises(ValueError, match="needs 1000 draws of the reference or more, got 999"):
        mmd_with_floor(good, reference[:, :999])


def test_unbiased_mmd_equals_a_plain_loop_and_is_zero_on_average():
    a, b = np.asarray(normal(0, 8, 2), np.float64), np.asarray(1 + normal(1, 9, 2), np.float64)
    both = np.concatenate([a, b])
    distances = [np.sum((p - q) ** 2) for i, p in enumerate(both) for q in both[:i]]
    k = lambda p, q: np.exp(-np.sum((p - q) ** 2) / (2 * np.median(distances)))  # noqa: E731
    among = lambda x: np.mean([k(p, q) for p in x for q in x if p is not q])  # noqa: E731
    rows = lambda x: list(x)  # noqa: E731
    plain = among(rows(a)) + among(rows(b)) - 2 * np.mean([k(p, q) for p in a for q in b])
    np.testing.assert_allclose(mmd_unbiased(jnp.asarray(a), jnp.asarray(b)), plain, atol=1e-5)
    scores = np.asarray(mmd_unbiased(normal(2, 300, 50, 2), normal(3, 300, 50, 2)))
    assert abs(scores.mean()) < 3 * scores.std() / 300**0.5
    assert scores.min() < 0


def test_sliced_wasserstein_of_gaussians_has_a_closed_form():
    """Of N(0, 1) and N(m, s^2): the root of m^2 + (s - 1)^2; projections share it in d = 2."""
    a, b = normal(0, 3, 5000, 1), normal(1, 3, 5000, 1)
    found = sliced_wasserstein(a, 2.0 + 1.5 * b, key=KEY, directions=3)
    assert found.shape == (3,)
    np.testing.assert_allclose(found, (2.0**2 + 0.5**2) ** 0.5, rtol=0.03)
    both = normal(2, 200, 2)
    shift = jnp.array([3.0, 4.0])
    found = sliced_wasserstein(both, both + shift, key=KEY, directions=5000)
    np.testing.assert_allclose(found, 5.0 / 2**0.5, rtol=0.02)
    with pytest.raises(ValueError, match="equally many draws a side, got 200 and 10"):
        sliced_wasserstein(both, both[:10], key=KEY)


def test_moment_errors_are_in_units_of_the_reference():
    reference = np.asarray(normal(0, 4, 500, 3)) * np.array([1.0, 10.0, 0.1]) + 5
    loc, sd = reference.mean(axis=1, keepdims=True), reference.std(axis=1, keepdims=True)
    draws = loc + 1.3 * (reference - loc) + 0.5 * sd
    found = moment_errors(jnp.asarray(draws), jnp.asarray(reference))
    np.testing.assert_allclose(found.mean, np.full((4, 3), 0.5), atol=1e-3)
    np.testing.assert_allclose(found.sd, np.full((4, 3), 0.3), atol=1e-3)


def test_c2st_tells_samples_apart_as_well_as_they_can_be():
    """For N(0, I) against N(m, I) the best accuracy is the normal distribution of |m| / 2."""
    a, b = normal(0, 2000, 2), normal(1, 2000, 2)
    shifts = (0.0, 1.0, 2.0)
    scores = c2st(jnp.stack([a] * 3), jnp.stack([b + jnp.array([s, 0.0]) for s in shifts]), key=KEY)
    np.testing.assert_allclose(scores, stats.norm.cdf(np.array(shifts) / 2), atol=0.03)
    with pytest.raises(ValueError, match="50 draws or more"):
        c2st(a[:20], b, key=KEY)


def ring(seed: int, n: int) -> jax.Array:
    """Points around a circle."""
    angle = 2 * jnp.pi * jax.random.uniform(jax.random.key(seed), (n,))
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1) + 0.3 * normal(seed + 1, n, 2)


N = 1500
PAIRS = {
    "equal": lambda: (normal(0, N, 2), normal(1, N, 2)),
    "too narrow": lambda: (normal(2, N, 3), 0.6 * normal(3, N, 3)),
    "ring": lambda: (ring(4, N), 0.8 * normal(6, N, 2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_c2st_agrees_with_scikit_learn(name):
    """The usual test: a cross-validated MLP on standardised draws."""
    from sklearn.model_selection import KFold, cross_val_score
    from sklearn.neural_network import MLPClassifier

    a, b = PAIRS[name]()
    x = np.concatenate([a, b])
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    y = np.repeat([0, 1], N)
    hidden = (10 * x.shape[1],) * 2
    other = MLPClassifier(hidden, max_iter=1000, random_state=1)
    folds = KFold(n_splits=5, shuffle=True, random_state=1)
    expected = cross_val_score(other, x, y, cv=folds, scoring="accuracy").mean()
    assert abs(float(c2st(a, b, key=jax.random.key(7))) - expected) < 0.02


def test_samples_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match=r"got \(10, 2\) and \(10, 3\)"):
        _pairs(normal(0, 10, 2), normal(0, 10, 3))
    with pytest.raises(ValueError, match=r"got \(4, 100, 2\) and \(5, 100, 2\)"):
        _pairs(normal(0, 4, 100, 2), normal(0, 5, 100, 2))
