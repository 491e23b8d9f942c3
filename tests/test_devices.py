"""Several devices give what one gives: in a process of its own, with eight virtual ones."""

import subprocess
import sys

import jax
import pytest

from consilience.core.devices import make_mesh, replicate
from consilience.posterior.blocks import blocks
from tests.conftest import quick

PROGRAM = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
import consilience as cs
from tests.conftest import TINY, conjugate_model

model = cs.Model(conjugate_model(2).prior, conjugate_model(2).simulator, data=cs.Set())
sims = cs.simulate(model, 64, key=jax.random.key(0))
found = []
for devices in (None, jax.devices()):
    fit = cs.fit(
        model, sims, key=jax.random.key(1), posterior=TINY, epochs=4, batch_size=16,
        likelihood=TINY, unlabeled=sims.x[:16],
        self_consistency=cs.SelfConsistency(4, cs.Constant(1.0)),
        devices=devices, progress=False,
    )
    weights = [np.asarray(leaf) for leaf in jax.tree.leaves(fit.networks)]
    found.append((weights, fit.history.terms))
assert len(jax.devices()) == 8
(one, terms), (eight, terms_8) = found
for a, b in zip(one, eight, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
for name in ("posterior", "consistency", "unlabeled"):
    assert np.all(terms[name] != 0)
    np.testing.assert_allclose(terms[name], terms_8[name], rtol=1e-3, atol=1e-4)
options = {"key": jax.random.key(3), "corrected": True}
plain, split = (
    fit.sample(sims.x[:3], 100, **options, devices=d) for d in (None, jax.devices())
)
np.testing.assert_allclose(plain["theta"], split["theta"], rtol=1e-4, atol=1e-5)
np.testing.assert_allclose(plain["ess"], split["ess"], rtol=1e-3)
print("the same")
"""


@pytest.mark.slow
def test_eight_devices_give_the_fit_and_the_draws_of_one():
    """Posterior and likelihood learned jointly, with unlabelled data."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("the same")


def test_a_batch_that_cannot_be_split_is_refused(named_model, named_sims):
    with pytest.raises(ValueError, match=r"batch of 15 runs cannot be split evenly among 2"):
        quick(named_model, named_sims, batch_size=15, devices=["first", "second"])


@pytest.mark.parametrize("share", [1, 3, 24])
def test_blocks_of_draws_can_be_shared_out_evenly(share):
    for m, n in [(1, 5), (3, 100), (200, 5000)]:
        made = list(blocks(m, n, share))
        assert all(len(j) % share == 0 for _, j in made)
        assert {(a, b) for i, j in made for a in i for b in j} >= {(0, 0), (m - 1, n - 1)}


@pytest.mark.parametrize("given", ["cpu", jax.devices()[0], 2], ids=repr)
def test_what_is_no_list_of_devices_is_refused(given, unchecked):
    with pytest.raises(TypeError) as error:
        make_mesh(given)
    assert f"devices=jax.devices(), got {given!r}" in str(error.value)


def test_names_of_devices_are_no_devices():
    with pytest.raises(TypeError, match=r"devices=jax.devices\(\), got \['cpu', 'gpu'\]"):
        replicate({}, make_mesh(["cpu", "gpu"]))


def test_one_device_is_no_mesh():
    assert make_mesh(None) is None
    assert make_mesh(["only"]) is None
