"""The sections of a report about one observation: posterior, predictions, evidence, verdict."""

from typing import Any

import numpy as np
import xarray as xr

from consilience import plots
from consilience.core.arrays import finite_rows
from consilience.core.html import Html, element, joined
from consilience.core.labels import components
from consilience.core.panels import stacked
from consilience.diagnostics.check import FEW, HEAVY, RARE, WIDE_SPREAD
from consilience.diagnostics.verdicts import AS_IS, CORRECTED
from consilience.model.data import Layout
from consilience.report.findings import Findings
from consilience.report.page import figure, number, table, text

COLUMNS = 3
"""Panels side by side: what a page holds."""

MOST = 12
"""Statistics in a table."""


def posterior(found: Findings) -> Html:
    """The posterior of the observation."""
    assert found.draws is not None
    points = components(stacked(found.draws), 1)
    corrected = "pareto_k" in found.draws.coords
    kind = "corrected draws" if corrected else "draws of the learned posterior"
    rows, said = [], []
    shown = list(points)[: plots.MOST_COMPONENTS]
    for name, values in points.items():
        low, middle, high = (number(v) for v in np.quantile(values, (0.025, 0.5, 0.975)))
        mean = number(values.mean())
        rows.append((name, mean, number(values.std()), middle, low, high))
        said.append(f"{name} has mean {mean} and 95 % interval {low} to {high}")
    first = f" The first {len(shown)} of {len(points)}." if len(shown) < len(points) else ""
    lead = f"{number(len(next(iter(points.values()))))} {kind}."
    if found.check is not None and found.check.verdict not in (AS_IS, CORRECTED):
        lead += f" The verdict on them: {found.check.verdict}."
    return joined(
        [
            text(lead),
            figure(
                plots.pairs(found.draws, names=shown),
                f"Posterior draws, each parameter and each two. {'; '.join(said[: len(shown)])}.",
                "Each parameter by itself, and each two against one another." + first,
            ),
            table(
                "Marginal posteriors",
                ("Parameter", "Mean", "SD", "Median", "2.5 %", "97.5 %"),
                rows,
            ),
        ]
    )


def predictions(found: Findings) -> Html:
    """The observation beside data simulated at its posterior."""
    assert found.check is not None and found.measure is not None
    layout, check = found.fit.posterior.data.layout, found.check
    seen, made = (
        {name: np.asarray(a) for name, a in layout.named(x).items()}
        for x in (check.x, check.predictions)
    )
    good = finite_rows(*made.values())
    made = {name: array[good] for name, array in made.items()}
    row = check.table
    if not good.any():
        return text("No run of the simulator at a posterior draw gave finite data.")
    missed = row.attrs["predictive"] - np.sum(good)
    lost = f" {number(missed)} more failed or were not finite." if missed else ""
    said = text(
        f"{number(np.sum(good))} datasets were simulated at posterior draws.{lost} The statistic "
        f"that they miss by most is the {row['statistic'].item()}; chance misses by as much with "
        f"p = {number(row['predictive'])}."
    )
    return joined([said, _drawn(layout, check.kind, seen, made), _statistics(found, seen, made)])


def _drawn(layout: Layout, kind: Any, seen: dict[str, Any], made: dict[str, np.ndarray]) -> Html:
    names = layout.data_names
    if layout.mask_name is not None:
        return text("Datasets of varying size are compared by their statistics alone.")
    if any(seen[name].ndim > 2 for name in names):
        return text("Data with three axes or more are compared by their statistics alone.")
    inside = []
    for name in names:
        low, high = np.quantile(made[name], (0.025, 0.975), axis=(0, 1) if kind == "rows" else 0)
        inside.append(np.ravel((seen[name] >= low) & (seen[name] <= high)))
    share = np.concatenate(inside)
    count = f"{number(share.sum())} of {number(share.size)} observed values"
    pick = lambda arrays: (  # noqa: E731
        arrays[names[0]] if layout.bare else {name: arrays[name] for name in names}
    )
    return figure(
        plots.predictive(pick(seen), pick(made), kind=kind, columns=COLUMNS),
        f"The observation beside predictions: {count} are within the central 95 % of the "
        "predictions.",
        f"The observation beside data simulated at its posterior; {count} are within the central "
        "95 %.",
    )


def _statistics(found: Findings, seen: dict[str, Any], made: dict[str, np.ndarray]) -> Html:
    assert found.measure is not None
    one = {name: array[None] for name, array in seen.items()}
    observed, predicted = found.measure(one), found.measure(made)
    rows = []
    for name in list(observed)[:MOST]:
        low, middle, high = (number(v) for v in np.nanquantile(predicted[name], QUANTILES))
        rows.append((name, number(observed[name][0]), middle, f"{low} to {high}"))
    some = f", the first {MOST} of {len(observed)}" if len(observed) > MOST else ""
    return table(
        f"Statistics of the observation and of its predictions{some}",
        ("Statistic", "Observed", "Predicted", "95 % of predictions"),
        rows,
    )


QUANTILES = (0.025, 0.5, 0.975)


def bridge(evidence: xr.Dataset) -> str:
    """The estimate to take, with its interval."""
    row = evidence.sel(estimator="bridge")
    value, low, high = (_nats(row[name]) for name in ("log_evidence", "lower", "upper"))
    return f"{value} ({low} to {high})"


def _nats(value: Any) -> str:
    return f"{float(value):,.2f}".replace("-", "−").replace("inf", "∞")


def log_evidence(found: Findings) -> Html:
    """The log evidence by three methods."""
    assert found.evidence is not None
    rows = [
        (label, _nats(row["log_evidence"]), f"{_nats(row['lower'])} to {_nats(row['upper'])}")
        for name, label in METHODS.items()
        for row in [found.evidence.sel(estimator=name)]
    ]
    k = float(found.evidence["pareto_k"])
    trust = "can be trusted" if k < HEAVY else "cannot be trusted"
    said = (
        f"The log of the probability density of the observation under the model, with a 95 % "
        f"interval: {bridge(found.evidence)}, by the bridge. With a Pareto k of {number(k)} "
        f"({HEAVY} is the limit), the estimates {trust}."
    )
    if found.fit.model.likelihood is None:
        said += " The likelihood is learned, and the evidence is no better than it."
    return joined([text(said), table("Log evidence", ("Estimate", "Value", "95 % interval"), rows)])


METHODS = {
    "bridge": "Bridge",
    "importance": "Importance weights",
    "mean": "Mean, a lower bound",
}


def reasons(found: Findings) -> Html:
    """What the verdict rests on."""
    assert found.check is not None and found.held_out is not None
    row, draws = found.check.table, found.check.table.attrs["draws"]
    value = lambda name: number(row[name])  # noqa: E731
    runs = number(len(found.held_out))
    rows = [
        (
            "Is the observation like the simulations?",
            f"p = {value('typical')}, among {runs}",
            f"{RARE} or more",
        )
    ]
    if found.fit.has_joint:
        rows += [
            (
                "Do the identity's values agree?",
                f"within {value('spread')} nats",
                f"{number(WIDE_SPREAD)} or less",
            ),
            ("Can weights correct the rest?", f"Pareto k {value('pareto_k')}", f"below {HEAVY}"),
            (
                "Do enough draws remain?",
                f"{value('ess')} of {number(draws)}",
                f"{number(FEW * draws)} or more",
            ),
        ]
    if not np.isnan(row["predictive"]):
        rows.append(
            (
                "Do predictions look like the observation?",
                f"p = {value('predictive')}",
                f"{RARE} or more",
            )
        )
    unasked = [] if found.fit.has_joint else [text(UNWEIGHED)]
    return joined(
        [
            text(
                element("strong", f"{found.check.verdict[0].upper()}{found.check.verdict[1:]}."),
                " ",
                row["reason"].item(),
            ),
            *unasked,
            table("Four questions", ("Question", "Answer", "Needed"), rows),
        ]
    )


UNWEIGHED = (
    "The identity cannot be evaluated: it takes a likelihood and the density of the prior, and one "
    "of them is missing."
)
