"""Arguments that contradict one another are refused, saying which to leave out."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import consilience as cs

KEY = jax.random.key(0)


def test_calibration_of_given_runs_takes_no_model(named_model, named_sims, named_fit):
    with pytest.raises(ValueError, match="simulations take the place of new ones from a model"):
        cs.calibrate(named_fit, named_model, key=KEY, simulations=named_sims)


def test_statistics_need_datasets_to_be_compared_with(named_sims, named_fit):
    with pytest.raises(ValueError, match="predictive=0 asks for none"):
        named_fit.check(
            named_sims.x[0],
            key=KEY,
            simulations=named_sims,
            predictive=0,
            statistics={"mean": np.mean},
        )


def test_statistics_of_a_report_need_an_observation(tmp_path, named_sims, named_fit):
    with pytest.raises(ValueError, match="statistics are of an observation: pass x"):
        named_fit.report(
            tmp_path / "report.html",
            key=KEY,
            simulations=named_sims,
            statistics={"mean": np.mean},
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("settings", [{"executor": ThreadPoolExecutor(1)}, {"timeout": 3.0}])
def test_runs_of_a_simulator_in_jax_have_no_executor_and_no_time_limit(named_model, settings):
    theta = {"mu": np.zeros(3), "sigma": np.ones(3)}
    for run in (
        lambda: cs.simulate(named_model, 3, key=KEY, **settings),
        lambda: cs.simulate_at(named_model, theta, key=KEY, **settings),
    ):
        with pytest.raises(ValueError, match="are for simulators outside JAX"):
            run()
