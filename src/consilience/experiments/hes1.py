"""Experiment 3, Hes1: section 4.3 and appendix E of the paper."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from consilience.experiments.cells import Block, Cell, Found, Row, read_arrays
from consilience.experiments.experiment import (
    EXACT_KEY,
    Experiment,
    Table,
    computed_once,
    distances,
    draw,
    published_loss,
    ranked,
    test_set,
    training_set,
)
from consilience.identity.consistency import SelfConsistency
from consilience.identity.schedules import Step
from consilience.networks.flow import Coupling
from consilience.plots import predictive
from consilience.tasks import hes1
from consilience.training.train import fit

FLOW = Coupling(layers=4, width=128, df=50.0, spectral=True)
UNDEREXPRESSIVE = Coupling(layers=1, width=128, df=50.0, activation="identity", l2=0.0)
EPOCHS, BATCH = 70, 16
LARGEST_R_HAT = 1.01
TESTS, TOGETHER, PREDICTIONS = 50, 25, 200
CHAINS = {"length": 1000, "warmup": 600}


@functools.cache
def problem(folder: Path):
    """Test sets, and reference draws for each, by NUTS: long, so a few at a time are kept.

    Draws are logarithms, in standard deviations of the prior. Test sets whose chains have
    not mixed are left out.
    """
    x = np.asarray(test_set(hes1.model(), TESTS).x)
    keys = jax.random.split(jax.random.key(EXACT_KEY), TESTS // TOGETHER)

    def make(number: int):
        few = jnp.asarray(x[number * TOGETHER : (number + 1) * TOGETHER])
        found = hes1.reference_sample(few, keys[number], **CHAINS)
        return {"draws": np.asarray(found.draws), "r_hat": np.asarray(found.r_hat)}

    parts = [
        computed_once(folder / "reference" / f"{number}.npz", functools.partial(make, number))
        for number in range(len(keys))
    ]
    r_hat, draws = (np.concatenate([part[name] for part in parts]) for name in ("r_hat", "draws"))
    mixed = (r_hat < LARGEST_R_HAT).all(axis=1)
    return x[mixed], standard(draws[mixed])


@functools.cache
def _scales() -> tuple[np.ndarray, np.ndarray]:
    theta = test_set(hes1.model(), 4096).theta
    logs = np.log(np.stack([theta[name] for name in hes1.NAMES], axis=-1))
    return logs.mean(axis=0), logs.std(axis=0)


def standard(logs: np.ndarray) -> np.ndarray:
    """Logarithms of the parameters in the prior's standard deviations."""
    mean, sd = _scales()
    return (logs - mean) / sd


def settings(cell: Cell, quick: bool) -> dict[str, Any]:
    """The arguments of `fit` for a cell."""
    consistent, poor = cell.samples > 0, cell.variant == "underexpressive"
    if cell.protocol == "default":
        if consistent:
            return {"self_consistency": SelfConsistency(cell.samples)}
        return {"self_consistency": False, "likelihood": True}
    loss = published_loss(cell.samples, Step(10 / 70), limit=SelfConsistency.limit)
    return {
        "self_consistency": loss if consistent else False,
        "posterior": FLOW,
        "likelihood": UNDEREXPRESSIVE if poor else FLOW,
        "epochs": 5 if quick else EPOCHS,
        "batch_size": BATCH,
        "validation": 0.0,
    }


def run(cell: Cell, folder: Path, quick: bool) -> Found:
    model = hes1.model()
    if not quick:
        # Before the fit: stopped here, no fit is lost.
        problem(folder)
    sims, key = training_set(model, cell)
    fitted = fit(model, sims, key=key, **settings(cell, quick))
    ranks = ranked(fitted, 100 if quick else 500, cell.seed)
    fresh = test_set(model, 500)
    held_out = -fitted.log_prob({n: v[:, None] for n, v in fresh.theta.items()}, fresh.x).mean()
    inside = [value for name, value in ranks.numbers.items() if name.startswith("inside_")]
    numbers = {"loss": float(held_out), "inside": sum(inside), **ranks.numbers}
    arrays = {"predicted": _predict(fitted, cell.seed), **ranks.arrays}
    if not quick:
        x, reference = problem(folder)
        draws = draw(fitted, x, cell.seed)
        logs = np.log(np.stack([draws[name] for name in hes1.NAMES], axis=-1))
        arrays["mmd"] = distances(standard(logs), reference)
        numbers["mmd"] = float(arrays["mmd"].mean())
    return Found(numbers, arrays)


def _predict(fitted, seed: int) -> np.ndarray:
    """New measurements, simulated from the posterior of the measured data."""
    draws = draw(fitted, hes1.OBSERVED[None], seed, PREDICTIONS)
    keys = jax.random.split(jax.random.key(seed), PREDICTIONS)
    return np.asarray(jax.vmap(hes1.simulator)(keys, {n: v[0] for n, v in draws.items()}))


def show_predictions(rows: Sequence[Row], folder: Path) -> dict[str, Any]:
    """What the posterior predicts of the measured data, for every method at 512 runs."""
    figures = {}
    for row in rows:
        predicted = read_arrays(folder, row).get("predicted")
        if predicted is not None and row["budget"] == 512 and not row["variant"]:
            name = f"predictive-{row['protocol']}-{row['method'].lower()}-k{row['samples']}"
            axes = figures[name] = predictive(hes1.OBSERVED, predicted)
            axes[0].set_xticks(range(hes1.POINTS), range(30, 30 * hes1.POINTS + 1, 30))
            axes[0].set(xlabel="minutes", ylabel="messenger RNA")
    return figures


BUDGETS = (256, 512, 1024)
POOR = "Underexpressive likelihood network"
EXPERIMENT = Experiment(
    name="hes1",
    title="Hes1",
    blocks=(
        Block("NPLE", BUDGETS),
        Block("SC-NPLE", BUDGETS, (100,), ("paper",)),
        Block("SC-NPLE", BUDGETS, (10,), ("default",)),
        Block("SC-NPLE", (512,), (500,), ("paper",)),
        Block("SC-NPLE", BUDGETS, (100,), ("paper",), variant="underexpressive"),
    ),
    quick=(Block("SC-NPLE", (128,), (5,), ("paper",)),),
    run=run,
    draw=show_predictions,
    tables=(
        Table("inside", "Parameters inside the 95 % band of calibration, of four", higher=True),
        Table("calibration_error", "Calibration error, mean of four parameters"),
        Table("mmd", "Posterior MMD, in the prior's standard deviations"),
        Table("loss", "Negative log posterior density at the true parameters, 500 tests (nats)"),
        Table("calibration_error", f"{POOR}: calibration error", variants=("underexpressive",)),
        Table("mmd", f"{POOR}: posterior MMD", variants=("underexpressive",)),
        Table("loss", f"{POOR}: negative log posterior density", variants=("underexpressive",)),
    ),
    notes=(
        "K = 500 is what the paper's text says, K = 100 what its appendix says. "
        "Calibration is judged on 500 runs, other ones for each seed, so that the verdicts of "
        "the seeds are independent; an exact posterior is inside for all four parameters in "
        "four of five seeds. The default protocol has ten seeds at 512 runs (`--protocols default "
        "--budgets 512 --seeds 10`), other rows three. The likelihood network "
        "of the default recipe was chosen on seed 0, "
        "by the density that it gives the 500 tests of the loss, and its number of epochs by the "
        "loss and by calibration, among 150, 375 and 750. On other seeds these calibrated no "
        "better, some tried beside the jitter below: no labels after the warm-up, or "
        "labels at full weight; half or twice as many "
        "epochs; twice the L2; self-consistency from half of training on; no gradient of it for "
        "the likelihood. Data jittered by half of their spread did there, but not here (2, 2 and "
        "4 parameters inside). A mixture of four fits, draws weighted by the evidence, and a "
        "smaller or a tanh likelihood network were hardly better. Corrected draws calibrate as "
        "the posterior does: it is the likelihood of so few runs that falls short. The MMD is "
        "over those of 50 tests whose reference chains have an R-hat below 1.01."
    ),
)
