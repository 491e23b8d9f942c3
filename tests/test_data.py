"""Data of every kind: shapes, scales, units."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import consilience as cs
from consilience.model.counts import root, root_slope, unroot
from consilience.model.data import data_space

RNG = np.random.default_rng(0)


def test_scales_are_pooled_over_the_rows_of_a_set_and_kept_apart_elsewhere():
    x = RNG.normal(3.0, 2.0, (400, 5, 2))
    x[:, 0] += 10
    pooled, apart = data_space(x, cs.Set()), data_space(x, cs.Series())
    assert pooled.loc["data"].shape == (2,)
    assert apart.loc["data"].shape == (5, 2)
    z = jax.vmap(apart.standardise)(x)["data"]
    np.testing.assert_allclose(z.mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(z.std(axis=0), 1.0, atol=1e-4)


def test_masked_rows_do_not_count():
    mask = np.arange(6) < 4
    y = np.where(mask[:, None], RNG.normal(2.0, 1.0, (300, 6, 1)), 1e6)
    x = {"y": y, "here": np.broadcast_to(mask, (300, 6))}
    space = data_space(x, cs.Set(mask="here"))
    np.testing.assert_allclose(space.loc["y"], 2.0, atol=0.1)
    units = space.layout.units(space.standardise({"y": y[0], "here": mask}))
    np.testing.assert_array_equal(units.mask, mask)


def test_a_constant_column_is_zero_not_nan():
    x = RNG.normal(size=(100, 3))
    x[:, 1] = 0.1
    z = jax.vmap(data_space(x, cs.Vector()).standardise)(x)["data"]
    assert np.all(np.isfinite(z))
    np.testing.assert_allclose(z[:, 1], 0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "units", "sizes"),
    [
        (cs.Set(side=("at",)), 4, (2, 3)),
        (cs.Set(side=("at",), independent=False), 1, (8, 12)),
        (cs.Series(side=("at",)), 1, (8, 12)),
        (cs.Vector(side=("at",)), 1, (8, 12)),
    ],
)
def test_units_of_each_kind(kind, units, sizes):
    x = {"y": RNG.normal(size=(50, 4, 2)), "at": RNG.normal(size=(50, 4, 3))}
    space = data_space(x, kind)
    one = space.layout.units(space.standardise({name: part[0] for name, part in x.items()}))
    assert one.values.shape == (units, sizes[0])
    assert one.side.shape == (units, sizes[1])
    assert space.layout.unit_sizes == sizes
    back = space.from_units(one.values, {"at": x["at"][0]})
    np.testing.assert_allclose(back["y"], x["y"][0], rtol=1e-4, atol=1e-5)


def test_side_information_without_rows_goes_with_every_row():
    x = {"y": RNG.normal(size=(50, 4)), "dose": RNG.normal(size=(50,))}
    space = data_space(x, cs.Set(side=("dose",)))
    features = space.layout.features(space.standardise({"y": x["y"][0], "dose": x["dose"][0]}))
    assert features.shape == (4, 2)
    np.testing.assert_allclose(features[:, 1], features[0, 1])


def test_counts_are_spread_over_their_unit():
    x = RNG.poisson(5.0, size=(200, 3))
    space = data_space(x, cs.Vector(counts=True))
    drawn = jax.vmap(lambda k: space.dequantise(x[0], k)["data"])(
        jax.random.split(jax.random.key(0), 500)
    )
    raw = unroot(np.asarray(drawn) * space.spread("data") + root(space.loc["data"]))
    assert np.all(np.abs(raw - x[0] - 0.5) < 0.5 + 1e-3)
    np.testing.assert_allclose(raw.mean(axis=0), x[0] + 0.5, atol=0.06)
    back = space.from_units(drawn[0].reshape(1, -1), {})
    np.testing.assert_array_equal(back, x[0])


def test_roots_of_counts_have_an_inverse_and_a_slope():
    y = jnp.array([-900.0, -1.5, -0.1, 0.0, 0.4, 1.0, 7.5, 1e5])
    np.testing.assert_allclose(unroot(root(y)), y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(root_slope(y), jax.vmap(jax.grad(root))(y), rtol=1e-5)


def test_the_noise_of_counts_is_alike_on_the_scale_of_roots():
    spread = [root(RNG.poisson(mean, 20_000) + 0.5).std() for mean in (3.0, 30.0, 3000.0)]
    np.testing.assert_allclose(spread, 0.5, rtol=0.1)


def test_the_scale_of_counts_is_that_of_their_density():
    x = RNG.poisson(5.0, size=(200, 3))
    space = data_space(x, cs.Vector(counts=True))
    slopes = jax.jacfwd(lambda y: space.dequantise(y, None)["data"])(x[0].astype(float))
    np.testing.assert_allclose(space.log_scale(x[0])[0], -np.log(np.diag(slopes)), atol=1e-5)


def test_several_arrays_make_one_vector():
    x = {"a": RNG.normal(size=(50, 2)), "b": RNG.normal(size=(50,))}
    space = data_space(x, None)
    assert space.layout.unit_sizes == (3, 0)


def test_default_kinds():
    assert data_space(np.zeros((5, 3)), None).layout.kind == cs.Vector()
    assert data_space(np.zeros((5, 9, 2)), None).layout.kind == cs.Series()


def test_observations_are_checked():
    layout = data_space(RNG.normal(size=(50, 4, 2)), cs.Set()).layout
    assert layout.check(np.zeros((4, 2)))[1] is False
    assert layout.check(np.zeros((7, 4, 2)))[1] is True
    with pytest.raises(ValueError, match=r"shape \(4, 2\).*got \(5, 2\)"):
        layout.check(np.zeros((5, 2)))
    with pytest.raises(ValueError, match="NaN or infinite values: it has no posterior"):
        layout.check(np.full((4, 2), np.nan))
    batch = np.zeros((7, 4, 2))
    batch[3] = np.inf
    with pytest.raises(ValueError, match=r"infinite values at \[3\] of the batch"):
        layout.check(batch)
    with pytest.raises(TypeError, match="must be an array, got dict"):
        layout.check({"data": np.zeros((4, 2))})


def test_observations_in_dictionaries_are_checked():
    x = {"y": RNG.normal(size=(50, 4)), "at": RNG.normal(size=(50, 4))}
    layout = data_space(x, cs.Set(side=("at",))).layout
    with pytest.raises(ValueError, match=r"must have \['y', 'at'\], got \['y'\]"):
        layout.check({"y": np.zeros(4)})
    with pytest.raises(TypeError, match="must be a dictionary"):
        layout.check(np.zeros(4))
    with pytest.raises(ValueError, match="equally long"):
        layout.check({"y": np.zeros((3, 4)), "at": np.zeros((2, 4))})


def test_log_scale_is_the_jacobian_of_standardising():
    x = RNG.normal(0.0, [1.0, 5.0], (200, 6, 2))
    space = data_space(x, cs.Set())
    expected = np.log(np.asarray(space.scale["data"]))
    np.testing.assert_allclose(space.log_scale(x[0]), np.broadcast_to(expected, (6, 2)), rtol=1e-6)
    assert jnp.all(jnp.isfinite(space.log_scale(x[0])))
