"""Which priors are refused, and why; names that parameters cannot have."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

import consilience as cs
from consilience.model.priors import as_prior

NORMAL = dist.Normal(0.0, 1.0)

IMPROPER = {
    "Delta": (dist.Delta(1.0), "point mass"),
    "Delta for a vector": (dist.Delta(jnp.ones(3)).to_event(1), "point mass"),
    "a spike in a mixture": (
        dist.MixtureGeneral(
            dist.Categorical(jnp.ones(2) / 2),
            [dist.Delta(0.0), NORMAL],
            support=dist.constraints.real,
        ),
        "point mass",
    ),
    "a shifted Delta": (
        dist.TransformedDistribution(dist.Delta(1.0), dist.transforms.AffineTransform(1.0, 2.0)),
        "point mass",
    ),
    "ImproperUniform": (
        dist.ImproperUniform(dist.constraints.positive, (), ()),
        r"is improper \(ImproperUniform\)",
    ),
    "Unit": (dist.Unit(0.5), "numpyro.factor"),
    "a mask": (NORMAL.expand([3]).mask(jnp.array([True, False, True])), "is masked"),
    "a mask of nothing": (NORMAL.mask(False).expand([3]).to_event(1), "is masked"),
    "a discrete one": (dist.Poisson(3.0), "values are discrete"),
}
if hasattr(dist, "HurdleGamma"):
    IMPROPER["a hurdle"] = (dist.HurdleGamma(0.3, 1.0, 1.0), "point mass")
if hasattr(dist, "LeftCensoredDistribution"):
    IMPROPER["a censored one"] = (dist.LeftCensoredDistribution(NORMAL, 1), "is censored")


@pytest.mark.parametrize("part, reason", IMPROPER.values(), ids=IMPROPER)
def test_priors_without_one_proper_density_are_refused_with_the_reason(part, reason):
    with pytest.raises(ValueError, match=f"The prior of 'a'.*{reason}"):
        cs.Model({"a": part})


@pytest.mark.parametrize(
    "part",
    [
        NORMAL.mask(True),
        NORMAL.expand([3]).mask(jnp.ones(3, bool)),
        dist.TruncatedNormal(0.0, 1.0, low=-1.0, high=2.0),
        dist.Dirichlet(jnp.ones(3)),
        dist.LKJ(3),
        dist.LKJCholesky(3),
        dist.ZeroSumNormal(1.0, (3,)),
        dist.VonMises(0.0, 1.0),
        dist.TransformedDistribution(NORMAL.expand([3]), dist.transforms.OrderedTransform()),
    ],
    ids=lambda part: type(part).__name__,
)
def test_proper_priors_are_taken(part):
    prior = as_prior({"a": part})
    draw = prior.draw(jax.random.key(0))
    assert np.isfinite(prior.log_prob(draw))


def observing(before, *, plate=None, obs=None):
    """A NumPyro model of one normal parameter, and what comes before the observed site."""

    def model(y=None):
        a = numpyro.sample("a", NORMAL)
        with before(a) or handlers.block(hide_fn=lambda site: False):
            if plate is None:
                numpyro.sample("y", dist.Normal(a, 1.0).expand([3]).to_event(1), obs=y)
            else:
                with numpyro.plate("rows", plate):
                    numpyro.sample("y", dist.Normal(a, 1.0), obs=y)

    return cs.Model.from_numpyro(model, observed="y")


@pytest.mark.parametrize(
    "part", [(dist.Uniform, 5.0, 1.0), (dist.Normal, 0.0, 1e39)], ids=["Uniform", "Normal"]
)
def test_priors_of_which_no_draw_is_possible_are_refused(part):
    part = part[0](*part[1:])
    with pytest.raises(ValueError, match="not finite or not in its support, such as"):
        cs.Model({"a": part})


@pytest.mark.parametrize(
    "part",
    [(dist.Uniform, 1.0, 1.0), (dist.Uniform, np.array([0.0, 1.0]), np.array([2.0, 1.0]))],
    ids=["a number", "an entry"],
)
def test_a_uniform_prior_of_one_value_is_refused(part):
    part = part[0](*part[1:])
    with pytest.raises(ValueError, match=r"allows one value only.*leave what is known out"):
        cs.Model({"a": part})


@pytest.mark.parametrize(
    ("high", "message"), [(1.0, "not finite or not in its support"), (5.0, "one value only")]
)
def test_impossible_priors_in_a_numpyro_model_are_refused(high, message):
    def model(y=None):
        a = numpyro.sample("a", dist.Uniform(5.0, high))
        with numpyro.plate("groups", 3):
            b = numpyro.sample("b", dist.Normal(a, 1.0))
        numpyro.sample("y", dist.Normal(b.sum(), 1.0), obs=y)

    with pytest.raises(ValueError, match=f"The prior of 'a'.*{message}"):
        cs.Model.from_numpyro(model, observed="y")


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_an_implicit_prior_that_draws_nothing_of_use_is_refused(value):
    draw = lambda key: {"a": jax.random.normal(key), "b": value * jnp.ones(2)}  # noqa: E731
    positive = {"b": dist.constraints.positive}
    with pytest.raises(ValueError, match=r"values of 'b' .*not in its support.*\(support=\.\.\.\)"):
        cs.Model(cs.ImplicitPrior(draw, support=positive))


@pytest.mark.parametrize("mask", [True, np.ones(3, bool)], ids=["True", "all True"])
def test_a_mask_that_leaves_nothing_out_is_no_mask(mask):
    assert observing(lambda a: handlers.mask(mask=mask), plate=3).layout.shapes["data"] == (3,)


@pytest.mark.parametrize("mask", [False, np.array([True, False, True])], ids=["False", "an array"])
def test_rows_under_a_mask_are_refused(mask):
    with pytest.raises(ValueError, match="The observed site 'y' is masked"):
        observing(lambda a: handlers.mask(mask=mask), plate=3)


@pytest.mark.parametrize("plate", [None, 3])
def test_numpyro_factor_is_refused(plate):
    for of in (lambda a: -(a**2), lambda a: -(a**2) * jnp.ones(3)):
        with pytest.raises(ValueError, match=r"'penalty' comes from numpyro\.factor"):
            observing(lambda a, of=of: numpyro.factor("penalty", of(a)), plate=plate)


def test_a_factor_under_a_mask_is_refused_as_a_factor():
    def penalty(a):
        with numpyro.plate("others", 3), handlers.mask(mask=jnp.array([True, False, True])):
            numpyro.factor("penalty", -(a**2))

    with pytest.raises(ValueError, match=r"'penalty' comes from numpyro\.factor"):
        observing(penalty)


def test_scaled_densities_and_plates_that_subsample_are_refused():
    with pytest.raises(ValueError, match="The density of 'y' is scaled"):
        observing(lambda a: handlers.scale(scale=2.0))
    with pytest.raises(ValueError, match="subsamples"):
        observing(lambda a: numpyro.plate("few", 10, subsample_size=5))
    assert observing(lambda a: handlers.scale(scale=1.0)).likelihood is not None


def test_improper_and_fixed_parameters_of_a_numpyro_model_are_named():
    def improper(y=None):
        a = numpyro.sample("a", dist.ImproperUniform(dist.constraints.positive, (), ()))
        numpyro.sample("y", dist.Normal(0.0, a), obs=y)

    def fixed(y=None, z=None):
        a = numpyro.sample("a", NORMAL)
        z = numpyro.sample("z", dist.Delta(2 * a), obs=z)
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)

    with pytest.raises(ValueError, match=r"'a' is improper \(ImproperUniform\)"):
        cs.Model.from_numpyro(improper, observed="y")
    for kwargs in ({}, {"z": 1.0}):
        with pytest.raises(ValueError, match=r"'z' has a point mass.*numpyro\.deterministic"):
            cs.Model.from_numpyro(fixed, observed="y", kwargs=kwargs)


@pytest.mark.skipif(not hasattr(dist, "LeftCensoredDistribution"), reason="an older NumPyro")
def test_censored_observations_are_refused():
    def model(y=None):
        a = numpyro.sample("a", NORMAL)
        part = dist.LeftCensoredDistribution(dist.Normal(a, jnp.ones(3)), jnp.array([0, 1, 0]))
        numpyro.sample("y", part, obs=y)

    with pytest.raises(ValueError, match="The observed site 'y' is censored"):
        cs.Model.from_numpyro(model, observed="y")


def test_the_idioms_of_numpyro_go_on_working():
    def model(y=None):
        mu = numpyro.sample("mu", NORMAL)
        scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
        config = {"a": LocScaleReparam(0.0), "t": TransformReparam()}
        with handlers.reparam(config=config):
            with numpyro.plate("groups", 3), handlers.mask(mask=True):
                a = numpyro.sample("a", dist.Normal(mu, 2.0))
            moved = dist.transforms.AffineTransform(1.0, 2.0)
            t = numpyro.sample("t", dist.TransformedDistribution(NORMAL, moved))
        corr = numpyro.sample("corr", dist.LKJCholesky(2))
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
        level = numpyro.deterministic("level", a.sum() + t)
        with numpyro.plate("rows", 4):
            centre = level + weights
            part = dist.MultivariateNormal(centre, scale_tril=scale * corr)
            numpyro.sample("y", part, obs=y)

    with pytest.warns(UserWarning, match=r"The sites \['a', 't'\] are reparametrised"):
        model = cs.Model.from_numpyro(model, observed="y")
    assert model.prior.names == ("mu", "a_decentered", "t_base", "corr", "weights")
    theta, x = model.simulate_one(jax.random.key(0))
    assert x.shape == (4, 2)
    assert np.isfinite(model.prior.log_prob(theta) + model.log_likelihood(theta, x))


def schools(y=None):
    """Eight schools: effects around a common mean."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfNormal(5.0))
    with numpyro.plate("schools", 8):
        effect = numpyro.sample("effect", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(effect, 10.0), obs=y)


LOC_SCALE = {"effect": LocScaleReparam(0.0)}


@pytest.mark.parametrize(
    "config", [LOC_SCALE, lambda site: LOC_SCALE.get(site["name"])], ids=["names", "a function"]
)
def test_locscalereparam_warns_that_the_original_site_is_no_parameter(config):
    with pytest.warns(UserWarning) as caught:
        model = cs.Model.from_numpyro(handlers.reparam(schools, config=config), observed="y")
    (message,) = [str(warning.message) for warning in caught]
    assert "['effect'] are reparametrised (numpyro.handlers.reparam)" in message
    assert "parameters of this model are ['mu', 'tau', 'effect_decentered']" in message
    assert caught[0].filename == __file__
    assert model.prior.names == ("mu", "tau", "effect_decentered")


def test_a_numpyro_model_without_reparametrisation_does_not_warn():
    def by_hand(y=None):
        raw = numpyro.sample("raw", dist.Normal(0.0, 1.0))
        effect = numpyro.deterministic("effect", 2 * raw)
        with handlers.reparam(config={"other": LocScaleReparam(0.0)}):
            level = numpyro.deterministic("level", effect + 1)
        numpyro.sample("y", dist.Normal(level, 1.0), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cs.Model.from_numpyro(by_hand, observed="y").prior.names == ("raw",)
        cs.Model.from_numpyro(schools, observed="y")


def test_an_observed_site_that_is_reparametrised_is_refused():
    config = {"y": LocScaleReparam(0.0)}
    with pytest.raises(ValueError, match="observed site 'y' is reparametrised"):
        cs.Model.from_numpyro(handlers.reparam(schools, config=config), observed="y")


def test_the_text_of_a_site_that_depends_on_others_shows_no_random_draw():
    prior = cs.Model.from_numpyro(schools, observed="y").prior
    assert prior.texts == {
        "mu": "Normal(loc=0, scale=5)",
        "tau": "HalfNormal(scale=5)",
        "effect": "Normal(loc=..., scale=...) given other parameters",
    }
    # Files of earlier versions hold the draw.
    for held in (prior._earlier, prior._former):
        assert "given" not in held[2]
        assert not prior.differs_from(dict(zip(prior.names, held, strict=True)), None)

    def bent(y=None):
        mu = numpyro.sample("mu", NORMAL)
        base, low = dist.Normal(jnp.array([0.0, 1.0, 2.0]), 3.0), dist.Normal(mu, 2.0)
        a = numpyro.sample("a", dist.TransformedDistribution(low, dist.transforms.ExpTransform()))
        b = numpyro.sample("b", base.to_event(1))
        numpyro.sample("y", dist.Normal(a + b.sum(), 1.0), obs=y)

    texts = cs.Model.from_numpyro(bent, observed="y").prior.texts
    inner = "Normal(loc=..., scale=2), ExpTransform()"
    assert texts["a"] == f"TransformedDistribution({inner}) given other parameters"
    assert texts["b"] == "Normal(loc=[0, 1, 2], scale=3)"


def test_a_site_that_numpyro_substitutes_is_no_parameter():
    fixed = handlers.substitute(schools, data={"mu": 1.0})
    with pytest.raises(ValueError, match=r"'mu' has the value 1.0 in every run.*substitute"):
        cs.Model.from_numpyro(fixed, observed="y")


def test_random_numbers_that_no_site_shows_are_refused():
    """Their likelihood would be that of one draw of them."""

    def noisy(y=None):
        a = numpyro.sample("a", NORMAL)
        noise = jax.random.normal(numpyro.prng_key())
        numpyro.sample("y", dist.Normal(a + noise, 1.0), obs=y)

    for model in (noisy, handlers.block(schools, hide=["mu"])):
        with pytest.raises(ValueError, match="random numbers that are no sample site"):
            cs.Model.from_numpyro(model, observed="y")


def test_a_numpyro_model_whose_only_parameter_is_called_theta():
    def body(y=None):
        theta = numpyro.sample("theta", NORMAL)
        numpyro.sample("y", dist.Normal(theta, 1.0).expand([3]).to_event(1), obs=y)

    model = cs.Model.from_numpyro(body, observed="y")
    sims = cs.simulate(model, 4, key=jax.random.key(0))
    theta, x = {"theta": sims.theta["theta"][0]}, sims.x[0]
    expected = dist.Normal(theta["theta"], 1.0).log_prob(x).sum()
    assert model.log_likelihood(theta, x) == pytest.approx(float(expected), rel=1e-5)


TAKEN = {
    "observation": {"observation": NORMAL},
    "chain": {"chain": NORMAL},
    "draw": {"draw": NORMAL},
    "pareto_k": {"pareto_k": NORMAL},
    "ess": {"ess": NORMAL},
    "gradients": {"gradients": NORMAL},
    "divergences": {"divergences": NORMAL},
    "joint density": {"joint density": NORMAL},
    "a_dim_0": {"a": NORMAL.expand([2]), "a_dim_0": NORMAL},
    "a_dim_1": {"a_dim_1": NORMAL, "a": NORMAL.expand([2, 3])},
    "r_hat_mu": {"mu": NORMAL, "r_hat_mu": NORMAL},
    "ess_mu": {"ess_mu": NORMAL, "mu": NORMAL},
    "a[0]": {"a": NORMAL.expand([2]), "a[0]": NORMAL},
    "a[1, 2]": {"a": NORMAL.expand([2, 3]), "a[1, 2]": NORMAL},
}


@pytest.mark.parametrize("name", TAKEN)
def test_names_that_draws_and_tables_use_themselves_are_refused(name):
    with pytest.raises(ValueError, match=f"cannot be called {name!r}".replace("[", r"\[")):
        cs.Model(TAKEN[name])

    def drawn(key):
        return {name: part.to_event().sample(key) for name, part in TAKEN[name].items()}

    with pytest.raises(ValueError, match="cannot be called"):
        cs.Model(cs.ImplicitPrior(drawn))

    def body(y=None):
        values = [numpyro.sample(site, part.to_event()) for site, part in TAKEN[name].items()]
        numpyro.sample("y", dist.Normal(sum(v.sum() for v in values), 1.0), obs=y)

    with pytest.raises(ValueError, match="cannot be called"):
        cs.Model.from_numpyro(body, observed="y")


def test_names_that_only_look_like_those_are_taken():
    parts = dict.fromkeys(["draws", "a_dim_0", "r_hat_b", "a", "a[0]", "estimator", "x"], NORMAL)
    assert cs.Model(parts).prior.names == tuple(parts)


def test_parameters_need_names_that_differ():
    with pytest.raises(ValueError, match="must differ as text"):
        as_prior({1: NORMAL, "1": NORMAL})
    with pytest.raises(ValueError, match="empty or has control characters"):
        as_prior({" ": NORMAL})
