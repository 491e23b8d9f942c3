"""Summaries of sets do not see order or padding; the others see every number."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from consilience.model.data import Series, Set, Vector, make_layout
from consilience.networks.summary import (
    KERNEL,
    Convolutions,
    DeepSet,
    Dense,
    Identity,
    SetTransformer,
    default_summary,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

SETS = {
    "mean": DeepSet(out=5, width=16),
    "max": DeepSet(out=5, width=16, pooling=("max",)),
    "mean-and-max": DeepSet(out=5, width=16, pooling=("mean", "max")),
    "transformer": SetTransformer(out=5, width=16, heads=2, inducing=4, blocks=1),
}
every_set = pytest.mark.parametrize("name", SETS)

ROWS, THERE = 7, 4
MASKED = make_layout({"y": (ROWS, 2), "there": (ROWS,)}, Set(mask="there"), bare=False)


def compiled(function):
    """With NumPy arrays out, so that what tests compute of them compiles nothing."""
    run = eqx.filter_jit(function)
    return lambda *args: jax.device_get(run(*args))


@compiled
def summarise(network, x):
    return jax.vmap(network)(x)


def build(spec, layout, dim=3):
    return spec.build(np.random.default_rng(0), layout, dim)


def bare(shape, kind):
    return make_layout({"data": shape}, kind, bare=True)


def padded_sets(n=8):
    """Datasets of four rows padded to seven, the padding in the same places in each."""
    rng = np.random.default_rng(1)
    mask = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    y = rng.standard_normal((n, ROWS, 2))
    return {"y": y, "there": np.tile(mask, (n, 1))}


@every_set
def test_row_order_changes_nothing(name):
    network, x = build(SETS[name], MASKED), padded_sets()
    orders = np.stack([np.random.default_rng(i).permutation(ROWS) for i in range(8)])
    shuffled = {
        "y": np.take_along_axis(x["y"], orders[:, :, None], axis=1),
        "there": np.take_along_axis(x["there"], orders, axis=1),
    }
    summary = summarise(network, x)
    assert summary.shape == (8, 5)
    np.testing.assert_allclose(summarise(network, shuffled), summary, rtol=1e-5, atol=1e-5)
    # Not because it says nothing: rows, and which of them are there, both matter.
    assert np.min(np.std(summary, axis=0)) > 0.01
    mixed = summarise(network, x | {"y": shuffled["y"]})
    assert np.max(np.abs(mixed - summary)) > 0.01


@every_set
def test_padding_changes_nothing(name):
    network, x = build(SETS[name], MASKED), padded_sets()
    garbage = np.where(x["there"][:, :, None] > 0, x["y"], 1e3 * x["y"][::-1] + 500.0)
    summary = summarise(network, x)
    np.testing.assert_array_equal(summarise(network, x | {"y": garbage}), summary)


@every_set
def test_padded_and_unpadded_sets_agree(name):
    """The same weights on four rows alone; the count, relative to all rows, is put right."""
    network, x = build(SETS[name], MASKED), padded_sets()
    alone = build(SETS[name], bare((THERE, 2), Set()))
    where = lambda net: net.head.layers[0].bias  # noqa: E731
    count = np.log1p(THERE) - np.log1p(ROWS)
    alone = eqx.tree_at(where, alone, where(alone) + count * alone.head.layers[0].weight[:, -1])
    rows = {"data": x["y"][:, x["there"][0] > 0]}
    np.testing.assert_allclose(summarise(alone, rows), summarise(network, x), rtol=1e-5, atol=1e-5)


@every_set
def test_the_number_of_rows_is_seen(name):
    """A set of equal rows pools to the same numbers, however many there are."""
    network, x = build(SETS[name], MASKED), padded_sets()
    equal = np.repeat(x["y"][:, :1], ROWS, axis=1)
    few, many = (
        summarise(network, {"y": equal, "there": there})
        for there in (x["there"], np.ones_like(x["there"]))
    )
    assert np.min(np.max(np.abs(few - many), axis=1)) > 0.01


@every_set
def test_an_empty_set_is_finite(name):
    network, x = build(SETS[name], MASKED), padded_sets()
    summary = summarise(network, x | {"there": np.zeros_like(x["there"])})
    assert np.isfinite(summary).all()


@every_set
def test_padding_of_an_empty_set_changes_nothing(name):
    network, x = build(SETS[name], MASKED), padded_sets()
    summary = summarise(network, x | {"there": np.zeros_like(x["there"])})
    np.testing.assert_allclose(summary, summary[:1].repeat(8, axis=0), rtol=1e-5, atol=1e-5)


@every_set
def test_gradients_of_sets_are_finite(name):
    """With and without rows, and among equal rows, where the maximum has ties."""
    network, x = build(SETS[name], MASKED), padded_sets()
    y, there = x["y"][0], x["there"][0]

    @compiled
    @eqx.filter_grad
    def gradient(network_and_y, there):
        network, y = network_and_y
        return jnp.sum(network({"y": y, "there": there}) ** 2)

    for rows, mask in [(np.ones_like(y), there), (y, np.zeros_like(there)), (y, there)]:
        by_network, by_y = gradient((network, rows), mask)
        for leaf in jax.tree.leaves((by_network, by_y)):
            assert np.isfinite(leaf).all()
    assert np.any(by_network.head.layers[0].weight != 0)
    assert np.any(by_y[there == 1] != 0) and np.all(by_y[there == 0] == 0)


def test_side_information_goes_with_its_row():
    layout = make_layout({"y": (4, 2), "t": (4,), "n": ()}, Set(side=("t", "n")), bare=False)
    assert (layout.rows, layout.n_features) == (4, 4)
    network = build(DeepSet(out=5, width=16), layout)
    order = np.array([2, 0, 3, 1])
    y, t = np.random.default_rng(0).standard_normal((4, 2)), np.arange(4.0)
    batch = {
        "y": np.stack([y, y[order], y[order], y]),
        "t": np.stack([t, t[order], t, t]),
        "n": np.array([0.0, 0.0, 0.0, 1.0]),
    }
    summary = summarise(network, batch)
    np.testing.assert_allclose(summary[1], summary[0], rtol=1e-5, atol=1e-5)
    assert np.max(np.abs(summary[2] - summary[0])) > 0.01
    assert np.max(np.abs(summary[3] - summary[0])) > 0.01


@compiled
def summary_and_gradient(network, x):
    """The summary of one array, and the gradient of its sum."""
    summary, pull = jax.vjp(lambda x: network({"data": x}), x)
    return summary, pull(jnp.ones_like(summary))[0]


def plain_convolutions(network, x):
    """One step of time after the other, as the definition has it."""
    h = np.asarray(x)
    for block in network.blocks:
        weight = np.asarray(block.weight).reshape(-1, KERNEL, h.shape[1])
        padded = np.pad(h, ((KERNEL // 2, KERNEL // 2), (0, 0)))
        steps = [
            np.einsum("oic,ic->o", weight, padded[t : t + KERNEL]) + np.asarray(block.bias)
            for t in range(0, h.shape[0], 2)
        ]
        h = np.asarray(jax.nn.silu(np.stack(steps)))
    return network.head(jnp.asarray(h.reshape(-1)))


@pytest.mark.parametrize(("length", "blocks"), [(3, 0), (9, 1), (10, 1), (160, 5)])
def test_convolutions(length, blocks):
    network = build(Convolutions(out=4, width=8), bare((length, 2), Series()))
    assert len(network.blocks) == blocks
    x = jax.random.normal(jax.random.key(0), (length, 2))
    summary, by_x = summary_and_gradient(network, x)
    assert summary.shape == (4,)
    np.testing.assert_allclose(summary, plain_convolutions(network, x), rtol=1e-4, atol=1e-5)
    assert np.all(np.isfinite(by_x) & (by_x != 0))


def test_convolutions_of_numbers_without_channels():
    network = build(Convolutions(out=4, width=8), bare((20,), Series()))
    assert jax.eval_shape(network, {"data": jnp.arange(20.0)}).shape == (4,)


def test_dense():
    network = build(Dense(out=4, width=8), bare((3, 5), Vector()))
    x = jax.random.normal(jax.random.key(0), (3, 5))
    summary, by_x = summary_and_gradient(network, x)
    assert summary.shape == (4,)
    flat = x.reshape(-1)
    expected = network.skip(flat) + network.layers(flat)
    np.testing.assert_allclose(summary, expected, rtol=1e-5, atol=1e-6)
    assert np.all(np.isfinite(by_x) & (by_x != 0))


def test_identity_is_data_and_side_information():
    shapes = {"y": (2, 2), "t": (3,), "z": ()}
    network = build(Identity(), make_layout(shapes, Vector(side=("t",)), bare=False))
    x = {"y": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "t": jnp.array([6.0, 7, 8]), "z": jnp.array(5.0)}
    np.testing.assert_array_equal(network(x), jnp.arange(1.0, 9.0))


@pytest.mark.parametrize("spec", [Dense(), Convolutions(), DeepSet(), SetTransformer()], ids=repr)
@pytest.mark.parametrize("dim", [1, 6])
def test_default_length_of_a_summary(spec, dim):
    kind = Set() if isinstance(spec, DeepSet | SetTransformer) else Series()
    network = build(spec, bare((9, 2), kind), dim)
    shape = jax.eval_shape(network, {"data": jnp.zeros((9, 2))}).shape
    assert shape == (2 * dim + 4,)


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((10, 2), Set(), DeepSet()),
        ((1, 1), Set(), DeepSet()),
        ((9, 2), Series(), Convolutions()),
        ((8, 2), Series(), Identity()),
        ((8, 5), Series(), Dense()),
        ((32,), Vector(), Identity()),
        ((33,), Vector(), Dense()),
        ((), Vector(), Identity()),
        ((9, 2), None, Convolutions()),
        ((9,), None, Identity()),
    ],
)
def test_default_summary(shape, kind, expected):
    assert default_summary(bare(shape, kind)) == expected


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("pooling", [(), ("median",), ("mean", "median")])
def test_bad_pooling_is_refused(pooling):
    with pytest.raises(ValueError, match="pooling must be"):
        DeepSet(pooling=pooling)
