"""Training: the loop, its errors, its promises about compilation and keys."""

import dataclasses
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest

import consilience as cs
from consilience.core import compiling
from consilience.identity.learned import Networks
from consilience.training import loop as training
from consilience.training.loop import _Best
from tests.conftest import LONG_OPTIONS, TINY, quick

SGD = optax.sgd(1e-2)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def weights(fit):
    return jax.tree.leaves(eqx.filter(fit.posterior.flow, eqx.is_array))


def test_training_lowers_the_loss(named_model, named_sims):
    fit = quick(named_model, named_sims, epochs=15)
    losses = fit.history.terms["posterior"]
    assert losses[-1] < losses[0] - 0.5
    assert fit.history.stopped == "finished"
    assert len(losses) == 15


def test_the_same_key_gives_the_same_weights(named_model, named_sims):
    first, second = quick(named_model, named_sims), quick(named_model, named_sims)
    for a, b in zip(weights(first), weights(second), strict=True):
        np.testing.assert_array_equal(a, b)
    other = quick(named_model, named_sims, key=jax.random.key(2))
    assert not np.array_equal(weights(first)[0], weights(other)[0])


def test_other_data_epochs_rates_and_keys_compile_nothing_at_all(named_model, named_sims):
    compiled = []

    def listen(event, seconds, **details):
        if "backend_compile" in event:
            compiled.append(details)

    more = cs.simulate(named_model, 256, key=jax.random.key(9))
    quick(named_model, named_sims)
    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda a: a + 1)(0)
    assert compiled, "compilation must be seen at all"
    compiled.clear()
    quick(named_model, more, epochs=3, learning_rate=3e-4, key=jax.random.key(5))
    assert compiled == []


def test_any_optax_optimizer_is_taken(named_model, named_sims):
    fit = quick(named_model, named_sims, optimizer=optax.sgd(1e-2), epochs=5)
    losses = fit.history.terms["posterior"]
    assert losses[-1] < losses[0]


def test_early_stopping_keeps_the_best_epoch(named_model, named_sims):
    fit = quick(named_model, named_sims, learning_rate=5e-2, epochs=200, patience=5)
    history = fit.history
    assert history.stopped == "early"
    assert len(history.terms["loss"]) == history.best_epochs["posterior"] + 5
    assert np.argmin(history.terms["validation"]) + 1 == history.best_epochs["posterior"]


def arrays(network):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(network, eqx.is_array))]


def same(first, second):
    pairs = zip(arrays(first), arrays(second), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


SCORES = {"posterior": [3.0, 1.0, 2.0, 2.5], "likelihood": [4.0, 3.5, 3.0, 5.0]}


def scored_fit(model, sims, monkeypatch, **settings):
    """A fit whose held-out losses are `SCORES`, and its networks after each epoch."""
    seen = []

    def validate(networks, held_out, loss):
        seen.append(networks)
        return {name: values[len(seen) - 1] for name, values in SCORES.items()}

    monkeypatch.setattr(training, "validate", validate)
    settings = {"validation": 0.1, "epochs": 4, "likelihood": TINY, **settings}
    return quick(model, sims, **settings), seen


def test_each_density_keeps_its_own_best_epoch(named_model, named_sims, monkeypatch):
    fit, seen = scored_fit(named_model, named_sims, monkeypatch)
    assert fit.history.best_epochs == {"posterior": 2, "likelihood": 3}
    np.testing.assert_array_equal(fit.history.terms["validation"], [7.0, 4.5, 5.0, 7.5])
    kept = [
        (name, i)
        for name in SCORES
        for i in range(4)
        if same(getattr(fit.networks, name), getattr(seen[i], name))
    ]
    assert kept == [("posterior", 1), ("likelihood", 2)]
    # The summary network is the posterior's.
    assert [i for i in range(4) if same(fit.networks.summary, seen[i].summary)] == [1]


def test_densities_that_share_a_term_keep_one_epoch(named_model, named_sims, monkeypatch):
    fit, seen = scored_fit(named_model, named_sims, monkeypatch, self_consistency=True)
    assert fit.history.best_epochs == {"posterior": 2, "likelihood": 2}
    for name in ("summary", *SCORES):
        assert [
            i for i in range(4) if same(getattr(fit.networks, name), getattr(seen[i], name))
        ] == [1]


def test_patience_counts_from_the_last_density_that_got_better(
    named_model, named_sims, monkeypatch
):
    fit, _ = scored_fit(named_model, named_sims, monkeypatch, patience=1)
    assert fit.history.stopped == "early"
    assert len(fit.history.terms["loss"]) == 4


def numbered(epoch: int, prior: bool = True) -> Networks:
    """Networks of which each is its name and an epoch."""
    parts = {name: np.full(1, epoch) for name in ("summary", "posterior", "likelihood", "prior")}
    made = {name: eqx.nn.Lambda(lambda x, part=part: part) for name, part in parts.items()}
    return Networks(**{**made, "prior": made["prior"] if prior else None})


def epoch_of(network) -> int:
    return int(network.fn(None)[0])


@pytest.mark.usefixtures("unchecked")
def test_the_best_networks_of_several_groups():
    best = _Best(numbered(0), (("posterior",), ("likelihood", "prior")))
    rows = [(3.0, 1.0, 1.0), (2.0, 2.0, 1.0), (2.5, 0.5, 1.2), (2.0, 0.1, 1.6)]
    for epoch, row in enumerate(rows, 1):
        scores = dict(zip(("posterior", "likelihood", "prior"), row, strict=True))
        best.update(numbered(epoch), scores, epoch)
    assert best.epochs == {"posterior": 2, "likelihood": 3, "prior": 3}
    found = {name: epoch_of(getattr(best.networks, name)) for name in (*best.epochs, "summary")}
    assert found == {**best.epochs, "summary": 2}


@pytest.mark.usefixtures("unchecked")
def test_a_group_has_the_densities_that_are_there_and_without_scores_the_last_epoch():
    best = _Best(numbered(0, prior=False), (("posterior", "likelihood"), ("prior",)))
    assert best.groups == [("posterior", "likelihood")]
    for epoch in (1, 2, 3):
        best.update(numbered(epoch, prior=False), None, epoch)
    assert best.epochs == {"posterior": 3, "likelihood": 3} and best.networks.prior is None
    assert epoch_of(best.networks.summary) == epoch_of(best.networks.likelihood) == 3


@pytest.mark.usefixtures("unchecked")
def test_scores_that_are_not_numbers_are_never_the_best():
    best = _Best(numbered(0, prior=False), (("posterior",), ("likelihood",)))
    best.update(numbered(1, prior=False), {"posterior": 5.0, "likelihood": np.nan}, 1)
    best.update(numbered(2, prior=False), {"posterior": np.nan, "likelihood": 4.0}, 2)
    assert best.epochs == {"posterior": 1, "likelihood": 2}


def test_without_validation_the_last_epoch_counts(named_model, named_sims):
    fit = quick(named_model, named_sims[:230], validation=0.0)
    assert fit.history.best_epochs == {"posterior": 2}
    assert "validation" not in fit.history.terms


def test_short_and_long_fits_learn_the_same(named_model, named_sims, monkeypatch):
    short = quick(named_model, named_sims)
    monkeypatch.setattr(training, "SHORT", 0)
    monkeypatch.setattr(compiling, "CPU_OPTIONS", LONG_OPTIONS)
    monkeypatch.setattr(compiling, "_options", compiling._options.__wrapped__)
    monkeypatch.setattr(compiling, "_jitted", compiling._jitted.__wrapped__)
    long = quick(named_model, named_sims)
    np.testing.assert_allclose(
        long.history.terms["loss"], short.history.terms["loss"], rtol=1e-3, atol=1e-4
    )


def test_ctrl_c_returns_the_best_so_far(named_model, named_sims, monkeypatch):
    original, calls = training.short_epoch, []

    def interrupted(*args, **settings):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **settings)

    monkeypatch.setattr(training, "short_epoch", interrupted)
    # A process started in the background ignores Ctrl-C: have it heeded here in any case.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fit = quick(named_model, named_sims, epochs=50)
    finally:
        signal.signal(signal.SIGINT, before)
    assert fit.history.stopped == "interrupted"
    assert len(fit.history.terms["loss"]) == 2
    assert np.isfinite(fit.log_prob({"mu": 0.0, "sigma": 1.0}, np.zeros((10, 1))))


@dataclasses.dataclass(frozen=True)
class Poison:
    """A term that is NaN for batches with a run whose first parameter is above a level."""

    level: float
    name: str = "poison"

    def __call__(self, view, key):
        return jnp.where(jnp.any(view.batch.runs.u[:, 0] > self.level), jnp.nan, 0.0)


def test_steps_that_are_not_finite_are_skipped_and_many_are_an_error(named_model, named_sims):
    def poisoned_fit(level):
        terms = [Poison(level)]
        return quick(named_model, named_sims, epochs=3, validation=0.0, batch_size=8, terms=terms)

    fit = poisoned_fit(2.2)
    assert np.all(fit.history.terms["skipped"] > 0)
    assert all(np.all(np.isfinite(leaf)) for leaf in weights(fit))
    assert np.all(np.isfinite(fit.history.terms["loss"]))
    with pytest.raises(cs.TrainingError, match=r"32 of the 32 steps of epoch 1, first at step 1\b"):
        poisoned_fit(0.0)


def test_a_prior_can_be_learned_with_the_posterior():
    def draw(key):
        a = jax.random.normal(key)
        return {"a": a, "b": jnp.exp(0.3 * a) + 0.1 * jax.random.normal(jax.random.fold_in(key, 1))}

    model = cs.Model(cs.ImplicitPrior(draw), lambda key, t: t["a"] + jax.random.normal(key, (3,)))
    flow = cs.Coupling(transform=cs.Spline(bins=4), layers=2, width=32)
    sims = cs.simulate(model, 1524, key=jax.random.key(0))
    fit = quick(model, sims[:1024], prior=flow, epochs=30)
    new = sims[1024:].theta
    # The density of (a, b): a standard normal, and b a narrow normal around exp(0.3 a).
    exact = dist.Normal(0, 1).log_prob(new["a"]) + dist.Normal(
        np.exp(0.3 * new["a"]), 0.1
    ).log_prob(new["b"])
    learned = jax.jit(jax.vmap(fit.prior.log_prob))(new)
    assert abs(float(jnp.mean(learned - exact))) < 0.15
    draws = jax.jit(jax.vmap(fit.prior.sample))(jax.random.split(jax.random.key(3), 4000))
    np.testing.assert_allclose(np.std(draws["a"]), 1.0, atol=0.1)
    np.testing.assert_allclose(np.corrcoef(draws["a"], draws["b"])[0, 1], 0.95, atol=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 300}, r"between 1 and the 230 training simulations.*got 300"),
        ({"batch_size": 0}, "got 0"),
        ({"batch_size": 0, "epochs": None}, "got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"validation": 1.0}, r"share in \[0, 1\), got 1.0"),
        ({"validation": 0.0, "patience": 3}, "patience needs held-out simulations"),
        ({"patience": 0}, "patience must be at least 1 epoch, got 0"),
        ({"optimizer": SGD, "learning_rate": 1e-2}, "learning_rate and schedule are those of Adam"),
        ({"optimizer": SGD, "schedule": cs.Constant()}, "leave optimizer out"),
        ({"self_consistency": True, "likelihood": False}, "likelihood=False refuses to learn one"),
    ],
)
def test_bad_settings_are_refused(named_model, named_sims, settings, message):
    with pytest.raises(ValueError, match=message):
        quick(named_model, named_sims, **settings)


def test_bad_simulations_are_refused(named_model, named_sims):
    bad = named_sims[np.arange(258) % 256]
    bad.x[[4, 7]] = np.nan
    with pytest.raises(
        ValueError, match=r"2 of 258 simulations.*first at \[4, 7\].*drop_invalid\(\)"
    ):
        quick(named_model, bad)
    assert len(bad.drop_invalid()) == 256
    assert quick(named_model, bad.drop_invalid()).history.simulations == 256

    with pytest.raises(ValueError, match="no simulations to learn from"):
        quick(named_model, named_sims[:0])
    with pytest.raises(ValueError, match=r"missing: \['sigma'\]"):
        quick(named_model, cs.Simulations({"mu": named_sims.theta["mu"]}, named_sims.x))
    with pytest.raises(ValueError, match=r"gives x of shape \(10, 1\).*have \(9, 1\)"):
        quick(named_model, cs.Simulations(named_sims.theta, named_sims.x[:, :9]))
    outside = {**named_sims.theta, "sigma": -named_sims.theta["sigma"]}
    with pytest.raises(ValueError, match="256 of 256 simulations have parameters outside"):
        quick(named_model, cs.Simulations(outside, named_sims.x))
    with pytest.raises(ValueError, match="leave none to train on"):
        quick(named_model, named_sims[:1])


def test_a_constant_column_trains(named_model, named_sims):
    fit = quick(named_model, cs.Simulations(named_sims.theta, np.full_like(named_sims.x, 0.1)))
    assert np.isfinite(fit.history.terms["loss"]).all()
    assert fit.history.terms["skipped"].sum() == 0


def test_any_equinox_module_can_be_the_summary(moments_fit, named_model, named_sims):
    assert not np.allclose(moments_fit.posterior.summary.weight, 1.0), "it must be trained"

    class Wrong(eqx.Module):
        def __call__(self, x):
            return x["data"]

    with pytest.raises(ValueError, match=r"must return a vector.*got \(10, 1\)"):
        quick(named_model, named_sims, summary=Wrong())


@pytest.mark.parametrize("where", ["x", "mu"])
def test_simulations_beyond_float32_are_refused(named_model, named_sims, where):
    theta, x = dict(named_sims.theta), named_sims.x.astype(float)
    theta["mu"] = theta["mu"].astype(float)
    (x if where == "x" else theta["mu"])[3] = 1e39
    with pytest.raises(ValueError, match=rf"values of {where} beyond 3.4e\+38, .* other units"):
        quick(named_model, cs.Simulations(theta, x))


def test_runs_of_whole_numbers_beyond_32_bits_train_as_they_are(named_model, named_sims):
    counts = np.round(named_sims.x * 2**20).astype(np.int64) + 2**33
    fits = [
        quick(named_model, cs.Simulations(named_sims.theta, x))
        for x in (counts, counts.astype(float))
    ]
    draws = [fit.sample(counts[0], 3, key=jax.random.key(2)) for fit in fits]
    np.testing.assert_array_equal(draws[0]["mu"], draws[1]["mu"])


def test_swapped_model_and_simulations_are_refused(named_model, named_sims, unchecked):
    with pytest.raises(TypeError, match=r"a cs.Model and then its cs.Simulations, got Simulations"):
        cs.fit(named_sims, named_model, key=jax.random.key(0))
