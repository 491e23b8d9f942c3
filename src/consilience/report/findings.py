"""A report on a fit: everything that its page shows, computed once; `sections.py` says it.

The same runs serve calibration, recovery and the verdict, and the same posterior draws at them
calibration and recovery.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import xarray as xr

from consilience.core.provenance import KeyName, key_name
from consilience.core.types import Data, PRNGKey
from consilience.diagnostics.calibration import STEPS, Calibration, calibrate_draws
from consilience.diagnostics.check import RARE, Check, Measure, check
from consilience.diagnostics.verdicts import CORRECTED
from consilience.model.data import layout_of
from consilience.posterior.fit import Fit
from consilience.posterior.methods import Method
from consilience.simulation.check import check_simulations
from consilience.simulation.simulate import simulate
from consilience.simulation.simulations import Simulations

DRAWS_PER_RUN = 199
"""Posterior draws at each held-out run."""

SHOWN = 2000
"""Posterior draws of the observation."""

TYPICAL = round(2 / RARE)
"""The fewest held-out runs that a verdict can rest on."""


@dataclasses.dataclass(frozen=True, eq=False)
class Findings:
    """What a report shows. What is None could not be made; `missing` says why, by section.

    `held_out`: runs that the fit has not seen, `drawn` the posterior draws at them.
    `new`: whether they were made for the report; `invalid`: how many more were not finite.
    `draws`: of the posterior of the observation, corrected ones where `check` says so.
    """

    fit: Fit
    key: KeyName
    new: bool
    missing: dict[str, str]
    held_out: Simulations | None = None
    invalid: int = 0
    drawn: xr.Dataset | None = None
    calibration: Calibration | None = None
    check: Check | None = None
    measure: Measure | None = None
    evidence: xr.Dataset | None = None
    draws: xr.Dataset | None = None


def collect(
    fit: Fit,
    x: Data | None,
    key: PRNGKey,
    simulations: Simulations | None,
    n: int,
    predictive: int,
    statistics: Mapping[str, Callable[[Any], Any]] | None,
    step: Callable[[str], None],
    progress: bool,
) -> Findings:
    """All that the page of a fit shows."""
    k_runs, k_draw, k_ties, k_check, k_posterior = jax.random.split(key, 5)
    missing: dict[str, str] = {}
    made: dict[str, Any] = {}
    step("runs")
    held_out, invalid = _held_out(fit, simulations, n, k_runs, progress)
    step("calibration")
    short = _too_few(held_out, invalid, STEPS)
    if short or held_out is None:
        missing |= {"calibration": short, "recovery": short}
    else:
        made["drawn"] = fit.sample(held_out.x, DRAWS_PER_RUN, key=k_draw)
        made["calibration"] = calibrate_draws(
            fit, held_out, made["drawn"], {}, key=k_ties, invalid=invalid
        )
    step("check")
    if x is None:
        why = "No observation was given: fit.report(path, x, key=key) takes one."
        missing |= dict.fromkeys(("posterior", "predictions", "evidence", "verdict"), why)
    else:
        predictive = predictive if fit.model.simulator is not None else 0
        short = _too_few(held_out, invalid, TYPICAL)
        if short:
            missing |= {"verdict": short, "predictions": short}
        else:
            made["check"] = check(
                fit,
                x,
                key=k_check,
                simulations=held_out,
                predictive=predictive,
                statistics=statistics,
            )
            made["evidence"] = made["check"].evidence
            made["measure"] = Measure(fit.posterior.data.layout, statistics)
            if not predictive:
                missing["predictions"] = _no_predictions(fit)
        if not fit.has_joint:
            missing["evidence"] = _no_evidence(fit)
        elif short:
            made["evidence"] = fit.log_evidence(x, key=k_check)
    step("posterior")
    if x is not None:
        corrected = "check" in made and made["check"].verdict == CORRECTED
        method: Method = "corrected" if corrected else "amortized"
        made["draws"] = fit.sample(x, SHOWN, key=k_posterior, method=method)
    new = simulations is None
    return Findings(fit, key_name(key), new, missing, held_out, invalid, **made)


def _held_out(
    fit: Fit, simulations: Simulations | None, n: int, key: PRNGKey, progress: bool
) -> tuple[Simulations | None, int]:
    """Runs with finite values, given or new, and how many more were not finite."""
    if simulations is None:
        if fit.model.simulator is None:
            return None, 0
        simulations = simulate(fit.model, n, key=key, progress=progress)
    valid = simulations.drop_invalid()
    if len(valid):
        check_simulations(fit.model, valid)
        layout = fit.posterior.data.layout
        got = layout_of(valid.blank, layout.kind)
        if got.shapes != layout.shapes:
            raise ValueError(
                f"The held-out simulations have x of shape {got.show(got.shapes)}, but those that "
                f"the fit was trained on {layout.show(layout.shapes)}."
            )
    return valid, len(simulations) - len(valid)


def _too_few(held_out: Simulations | None, invalid: int, least: int) -> str:
    """Why there are fewer than `least` held-out runs; empty if there are enough."""
    if held_out is None:
        return (
            "The model has no simulator to make new runs with, and no held-out runs were given: "
            "pass runs that the fit has not seen as simulations."
        )
    if len(held_out) >= least:
        return ""
    more = f"; {invalid} more failed or were not finite" if invalid else ""
    return (
        f"This takes {least} runs or more that the fit has not seen, and there are "
        f"{len(held_out)}{more}."
    )


def _no_predictions(fit: Fit) -> str:
    if fit.model.simulator is None:
        return "The model has no simulator to run at posterior draws."
    return "No predictions were asked for."


def _no_evidence(fit: Fit) -> str:
    if fit.model.likelihood is None and fit.likelihood is None:
        return (
            "There is no evidence to estimate: the model has no log-likelihood, and none was "
            "learned. cs.fit(..., likelihood=True) learns one."
        )
    return (
        "There is no evidence to estimate: the prior can only be sampled, and its density was "
        "not learned. cs.fit(..., prior=cs.Coupling()) learns it."
    )
