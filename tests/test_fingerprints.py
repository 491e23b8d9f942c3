"""Which priors count as the same, and how they are described."""

import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.sparse
from numpyro.distributions import constraints, transforms

import consilience as cs
from consilience.model.fingerprint import agree, describe, describe_briefly, fingerprint
from consilience.model.priors import as_prior


def differ(a, b) -> bool:
    """Whether a prior is taken for another, by all that a file keeps of it."""
    held, given = as_prior(a), as_prior(b)
    there, back = (
        p.differs_from(q.texts, q.fingerprint) for p, q in ((given, held), (held, given))
    )
    assert there == back
    return there


def transformed(*parts):
    return dist.TransformedDistribution(dist.Normal(0.0, 1.0), list(parts))


def mixture(weights, locs, scale=1.0):
    components = dist.Normal(jnp.array(locs), scale)
    return dist.MixtureSameFamily(dist.Categorical(jnp.array(weights)), components)


def general(*components):
    return dist.MixtureGeneral(dist.Categorical(jnp.ones(2) / 2), list(components))


VECTOR = np.linspace(1.0, 2.0, 6)
AFFINE, EXP = transforms.AffineTransform, transforms.ExpTransform

FAMILIES = {
    "truncated normals": [
        dist.TruncatedNormal(0.0, 1.0, low=0.0),
        dist.TruncatedNormal(0.0, 2.0, low=0.0),
        dist.TruncatedNormal(1.0, 1.0, low=0.0),
        dist.TruncatedNormal(0.0, 1.0, low=-1.0),
        dist.TruncatedNormal(0.0, 1.0, high=0.0),
        dist.TruncatedNormal(0.0, 1.0, low=0.0, high=2.0),
        dist.TruncatedNormal(0.0, 1.0, low=0.0, high=3.0),
        dist.TruncatedCauchy(0.0, 1.0, low=0.0),
    ],
    "mixtures": [
        mixture([0.5, 0.5], [0.0, 1.0]),
        mixture([0.4, 0.6], [0.0, 1.0]),
        mixture([0.5, 0.5], [0.0, 2.0]),
        mixture([0.5, 0.5], [0.0, 1.0], 2.0),
        mixture([0.3, 0.3, 0.4], [0.0, 1.0, 1.0]),
        general(dist.Normal(0.0, 1.0), dist.Normal(1.0, 1.0)),
        general(dist.Normal(0.0, 1.0), dist.Cauchy(1.0, 1.0)),
        general(dist.Normal(0.0, 1.0), dist.Normal(1.0, 3.0)),
    ],
    "transforms": [
        transformed(AFFINE(0.0, 1.0)),
        transformed(AFFINE(0.0, 2.0)),
        transformed(AFFINE(1.0, 2.0)),
        transformed(EXP(), AFFINE(0.0, 2.0)),
        transformed(AFFINE(0.0, 2.0), EXP()),
        transformed(transforms.SigmoidTransform()),
        transformed(transforms.ComposeTransform([AFFINE(0.0, 3.0)])),
        transformed(transforms.ComposeTransform([AFFINE(0.0, 4.0)])),
    ],
    "vectors with equal sums": [
        dist.Normal(VECTOR, 1.0),
        dist.Normal(VECTOR[::-1], 1.0),
        dist.Normal(np.full(6, VECTOR.mean()), 1.0),
        dist.Normal(VECTOR.mean(), 1.0).expand([6]),
        dist.Normal(0.0, 1.0).expand([6]),
        dist.Normal(0.0, 1.0).expand([2, 3]),
        dist.Normal(0.0, 1.0).expand([3, 2]).to_event(1),
    ],
    "matrices": [
        dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3) + 0.5),
        dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3) + 0.25),
        dist.LKJCholesky(3, 1.0),
        dist.LKJCholesky(3, 2.0),
        dist.LKJ(3, 1.0),
        dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])),
        dist.Dirichlet(jnp.array([3.0, 2.0, 1.0])),
        dist.GaussianRandomWalk(1.0, num_steps=3),
    ],
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_priors_that_differ_in_any_number_are_told_apart(family):
    for (i, a), (j, b) in itertools.product(enumerate(family), repeat=2):
        assert differ({"a": a}, {"a": b}) == (i != j), (i, j)


def test_the_same_prior_written_in_two_ways_is_the_same():
    assert not differ(dist.Normal(0, 1).expand([3]), dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    assert not differ(dist.Normal(np.zeros(3), 1), dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    used = dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2))
    used.log_prob(used.sample(jax.random.key(0))), used.covariance_matrix, used.precision_matrix
    assert not differ(used, dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))
    assert not differ(dist.Normal(1 / 3, 1.0), dist.Normal(np.float32(1 / 3), 1.0))


def test_small_numbers_count_and_rounding_does_not():
    assert differ(dist.Normal(0.0, 1e-9), dist.Normal(0.0, 2e-9))
    assert differ(
        dist.Exponential(jnp.array([1e-9, 1e3])), dist.Exponential(jnp.array([1e-8, 1e3]))
    )
    assert differ(dist.Normal(300.0, 0.02), dist.Normal(300.02, 0.02))
    assert differ(dist.Normal(1e6, 1.0), dist.Normal(1e6 + 5, 1.0))
    assert differ(dist.Uniform(1e5, 1e5 + 1.0), dist.Uniform(1e5, 1e5 + 1.9))
    locs = (jnp.array([-1000.0, 0.0, third]) for third in (0.0, 0.008))
    assert differ(*(dist.Normal(loc, jnp.array([1.0, 1.0, 1e-3])) for loc in locs))
    assert not differ(
        dist.Normal(300.0, 0.02), dist.Normal(np.nextafter(np.float32(300), 301), 0.02)
    )
    # What is left where numbers cancel depends on the machine.
    assert not differ(dist.Normal(jnp.array([0.0, 1.0])), dist.Normal(jnp.array([1e-8, 1.0])))


def test_the_names_of_parameters_and_their_order_count():
    a, b = dist.Normal(0.0, 1.0), dist.Normal(1.0, 1.0)
    assert differ({"a": a, "b": b}, {"b": b, "a": a})
    assert differ({"a": a}, {"b": a})
    first, second = as_prior({"a": a, "b": b}), as_prior({"b": b, "a": a})
    assert first.differs_from(second.texts, None)


def hierarchy(centre, spread=1.0):
    """A model whose third parameter depends on the others."""

    def model(y=None):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        nu = numpyro.sample("nu", dist.HalfNormal(1.0))
        loc = {"zero": 0.0, "mu": mu, "tau": tau, "nu": nu, "-mu": -mu, "mu**2": mu**2}[centre]
        with numpyro.plate("groups", 3):
            a = numpyro.sample("a", dist.Normal(loc, spread * tau))
        numpyro.sample("y", dist.Normal(a.sum(), 1.0).expand([2]).to_event(1), obs=y)

    return cs.Model.from_numpyro(model, observed="y").prior


def test_hierarchical_priors_that_differ_in_a_conditional_alone_are_told_apart():
    kinds = ("zero", "mu", "tau", "nu", "-mu", "mu**2")
    priors = [*map(hierarchy, kinds), hierarchy("mu", 2.0)]
    again = [*map(hierarchy, kinds), hierarchy("mu", 2.0)]
    for (i, a), (j, b) in itertools.product(enumerate(priors), enumerate(again)):
        assert a.differs_from(b.texts, b.fingerprint) == (i != j), (i, j)


def test_entries_of_a_vector_that_change_places_in_a_numpyro_model_are_told_apart():
    def model(i):
        def body(y=None):
            a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            b = numpyro.sample("b", dist.Normal(a[i], 1.0))
            numpyro.sample("y", dist.Normal(b, 1.0), obs=y)

        return cs.Model.from_numpyro(body, observed="y").prior

    first, second = model(0), model(1)
    assert first.differs_from(second.texts, second.fingerprint)


def drawn(scale):
    offsets = jnp.arange(3.0)  # what a prior closes over may have another precision
    return cs.ImplicitPrior(lambda key: {"a": scale * jax.random.normal(key, (3,)) + offsets})


def test_priors_that_can_only_be_sampled_are_known_by_their_draws():
    assert not differ(drawn(1.0), drawn(1.0))
    assert differ(drawn(1.0), drawn(1.001))
    assert differ(drawn(1.0), {"a": dist.Normal(jnp.arange(3.0), 1.0)})


class Tabulated(dist.Distribution):
    """A distribution of a user's own, which does not tell NumPyro what it is made of."""

    support = constraints.real

    def __init__(self, table):
        self.table = np.asarray(table)
        super().__init__()

    def sample(self, key, sample_shape=()):
        return self.table.mean() + jax.random.normal(key, sample_shape)

    def log_prob(self, value):
        return dist.Normal(self.table.mean(), 1.0).log_prob(value)


class Times(transforms.Transform):
    """A transform of a user's own."""

    domain = codomain = constraints.real

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x

    def _inverse(self, y):
        return y / self.factor

    def log_abs_det_jacobian(self, x, y, intermediates=None):
        return jnp.full(jnp.shape(x), jnp.log(self.factor))


def wiener(drift):
    t = jnp.linspace(0.0, 1.0, 4)
    return dist.EulerMaruyama(t, lambda x, t: (-drift * x, jnp.ones_like(x)), dist.Normal(1.0, 1.0))


@pytest.mark.parametrize("make", [Tabulated, lambda k: transformed(Times(k)), wiener])
def test_distributions_and_transforms_of_a_users_own_are_known_by_their_draws(make):
    assert not differ({"a": make(2.0)}, {"a": make(2.0)})
    assert differ({"a": make(2.0)}, {"a": make(3.0)})


def everywhere() -> dict[str, cs.ImplicitPrior | object]:
    """Priors whose numbers are computed."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(4, 4))
    return {
        "matrix": as_prior(dist.MultivariateNormal(np.zeros(4), root @ root.T + np.eye(4))),
        "several": as_prior(
            {
                "gamma": dist.Gamma(0.3, 0.7),
                "mixture": mixture([0.3, 0.7], [0.1, 0.2]),
                "truncated": dist.TruncatedNormal(0.1, 0.3, low=-0.7),
                "uniform": dist.LogUniform(1e-3, 1e3),
                "bent": transformed(AFFINE(0.1, 0.2), EXP()),
            }
        ),
        "hierarchy": hierarchy("mu**2", 0.3),
        "drawn": as_prior(drawn(0.3)),
    }


@pytest.mark.slow
def test_priors_are_the_same_in_float64():
    with jax.enable_x64(True):
        found = [(prior.texts, prior.fingerprint) for prior in everywhere().values()]
    for (name, prior), (texts, held) in zip(everywhere().items(), found, strict=True):
        assert agree(held, prior.fingerprint) is True, name
        assert not prior.differs_from(texts, held), name


@pytest.mark.slow
def test_another_process_with_another_hash_seed_in_float64_finds_the_same_priors():
    code = (
        "import json; from tests.test_fingerprints import everywhere; "
        "print(json.dumps([[p.texts, p.fingerprint] for p in everywhere().values()]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4242", "JAX_ENABLE_X64": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout.splitlines()[-1])
    for (name, prior), (texts, held) in zip(everywhere().items(), found, strict=True):
        assert agree(held, prior.fingerprint) is True, name
        assert not prior.differs_from(texts, held), name


def test_texts_of_files_without_a_fingerprint_are_accepted():
    prior = as_prior(
        {"a": dist.TruncatedNormal(0.0, 2.0, low=1.0), "b": mixture([0.5, 0.5], [0, 1])}
    )
    old = {"a": "LeftTruncatedDistribution(low=1)", "b": "MixtureSameFamily()"}
    assert {name: describe_briefly(part) for name, part in _parts().items()} == old
    assert not prior.differs_from(old, None)
    assert not prior.differs_from(prior.texts, None)
    assert not prior.differs_from(None, None)
    assert prior.differs_from({**old, "b": "Normal(loc=0, scale=1)"}, None)
    assert prior.differs_from({"a": old["a"]}, None)


def _parts():
    return {"a": dist.TruncatedNormal(0.0, 2.0, low=1.0), "b": mixture([0.5, 0.5], [0, 1])}


def test_fingerprints_of_other_versions_leave_it_to_the_texts():
    prior = as_prior({"a": dist.Normal(0.0, 1.0)})
    held = prior.fingerprint.replace(f'"numpyro": "{numpyro.__version__}"', '"numpyro": "0.1"')
    assert agree(held, prior.fingerprint) is None
    assert not prior.differs_from(prior.texts, held)
    assert prior.differs_from({"a": "Normal(loc=0, scale=2)"}, held)
    for damaged in ("", "{}", "[1]", "no JSON", held[:50], '{"numpyro": 3}'):
        assert agree(damaged, prior.fingerprint) is None
        assert not prior.differs_from(prior.texts, damaged)


ARGUMENTS = {
    "CAR": (jnp.zeros(3), 0.3, 1.0, 1 - jnp.eye(3)),
    "CirculantNormal": (jnp.zeros(4), jnp.array([2.0, 0.5, 0.1, 0.5])),
    "Dirichlet": (jnp.ones(3),),
    "DirichletMultinomial": (jnp.ones(3), 5),
    "DoublyTruncatedPowerLaw": (-1.5, 1.0, 3.0),
    "EulerMaruyama": (jnp.linspace(0.0, 1.0, 4), lambda x, t: (-x, x), dist.Normal(0.0, 1.0)),
    "FoldedDistribution": (dist.Normal(1.0, 2.0),),
    "GaussianStateSpace": (3, jnp.eye(2), jnp.eye(2)),
    "InverseWishart": (4.0, jnp.eye(3)),
    "LeftCensoredDistribution": (dist.Normal(0.0, 1.0), 1),
    "LowRankMultivariateNormal": (jnp.zeros(3), jnp.ones((3, 1)), jnp.ones(3)),
    "MatrixNormal": (jnp.zeros((2, 2)), jnp.eye(2), jnp.eye(2)),
    "Multinomial": (3, jnp.ones(3) / 3),
    "MultivariateStudentT": (3.0, jnp.zeros(3), jnp.eye(3)),
    "OrderedLogistic": (0.0, jnp.array([-1.0, 1.0])),
    "RelaxedBernoulli": (0.5, 0.3),
    "SineBivariateVonMises": (0.0, 0.0, 1.0, 1.0, 0.3),
    "Uniform": (0.0, 1.0),
    "Wishart": (4.0, jnp.eye(3)),
    "ZeroInflatedDistribution": (dist.Poisson(2.0),),
    "ZeroSumNormal": (1.0, (3,)),
}


def test_every_distribution_of_numpyro_can_be_described_and_told():
    told = {}
    for name in sorted(set(dir(dist)) - {"Distribution"}):
        cls = getattr(dist, name)
        if not isinstance(cls, type) or not issubclass(cls, dist.Distribution):
            continue
        for arguments in (ARGUMENTS.get(name), (), (0.7,), (0.7, 0.8), (0.5, 0.6, 0.7)):
            try:
                part = None if arguments is None else cls(*arguments)
            except Exception:
                continue
            if part is not None:
                told[name] = fingerprint({"a": part.to_event()})
                assert agree(told[name], told[name]), name
                assert name in ("ExpandedDistribution", "Independent") or describe(part)
                assert describe_briefly(part)
                break
    assert len(told) > 60
    aliases = len(told) - len(set(told.values()))
    assert aliases < 6  # Bernoulli is BernoulliProbs, say


def test_a_sparse_matrix_in_a_prior_is_described_by_its_type():
    matrix = scipy.sparse.csr_matrix(1.0 - np.eye(3))
    part = dist.CAR(jnp.zeros(3), 0.3, 1.0, matrix, is_sparse=True)
    assert "adj_matrix=csr_matrix" in describe(part)
    assert fingerprint(part)


def test_a_fingerprint_is_made_once():
    calls = []

    def model(y=None):
        calls.append(1)
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y)

    prior = cs.Model.from_numpyro(model, observed="y").prior
    before = len(calls)
    assert prior.fingerprint == prior.fingerprint
    assert len(calls) - before == 3


def test_descriptions_name_what_a_prior_is_made_of():
    assert describe(dist.TruncatedNormal(0.0, 2.0, low=1.0)) == (
        "LeftTruncatedDistribution(Normal(loc=0, scale=2), low=1)"
    )
    assert describe(mixture([0.5, 0.5], [0.0, 1.0])) == (
        "MixtureSameFamily(Normal(loc=[0, 1], scale=1), CategoricalProbs(probs=[0.5, 0.5]))"
    )
    assert describe(transformed(AFFINE(1.0, 2.0), EXP())) == (
        "TransformedDistribution(Normal(loc=0, scale=1), AffineTransform(loc=1, scale=2), "
        "ExpTransform())"
    )
    assert "AffineTransform(loc=0, scale=3)" in describe(FAMILIES["transforms"][6])
