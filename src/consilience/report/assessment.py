"""The sections of a report that judge a fit over many runs: calibration and recovery."""

import numpy as np
import xarray as xr

from consilience import plots
from consilience.core.html import Html, joined
from consilience.core.labels import components
from consilience.core.panels import stacked
from consilience.report.findings import Findings
from consilience.report.page import figure, listed, number, table, text

COLUMNS = 3
"""Panels side by side: what a page holds."""

MOST = 12
"""Quantities in a figure; tables have all of them."""

RUNS = 200
"""Runs in the figure of recovery."""

LEVELS = (0.5, 0.95)


def outside(judged: xr.Dataset) -> list[str]:
    """The quantities that are not within their bands."""
    bad = ~(judged["inside"] & judged["coverage_inside"]).values
    return [str(name) for name in judged["quantity"].values[bad]]


def _runs(found: Findings) -> str:
    assert found.held_out is not None
    kind = "new runs of the simulator" if found.new else "held-out runs"
    more = f" ({number(found.invalid)} more failed or were not finite)" if found.invalid else ""
    return f"{number(len(found.held_out))} {kind}{more}"


def calibration(found: Findings) -> Html:
    assert found.calibration is not None and found.held_out is not None
    judged = found.calibration.table
    beyond = outside(judged)
    said = (
        f"Outside the bands: {_some(beyond)}. A right posterior leaves each band with a "
        "probability of 5 %."
        if beyond
        else "All quantities are within their bands."
    )
    said += (
        " The table has how often central intervals hold the truth; for the joint density, regions "
        "of highest density."
    )
    rows = []
    for i, name in enumerate(judged["quantity"].values):
        row = judged.isel(quantity=i)
        at = [
            f"{100 * float(row['coverage'].sel(level=v, method='nearest')):.0f} %" for v in LEVELS
        ]
        inside = ["inside" if row[v] else "OUTSIDE" for v in ("inside", "coverage_inside")]
        rows.append((name, *inside, *at, f"{float(row['error']):.3f}"))
    shown = judged.isel(quantity=_largest(judged["error"].values, last=True))
    distance = np.abs(shown["ecdf"].values - shown["point"].values).max(axis=1)
    ranked = _placed(shown, "inside", "at most", distance)
    covered = _placed(shown, "coverage_inside", "mean distance", shown["error"].values)
    return joined(
        [
            text(
                f"The rank of the true parameters among {judged.attrs['draws']} posterior draws is "
                f"uniform if posteriors are right. Evaluated at {_runs(found)}. {said}"
            ),
            *_same_key(found),
            figure(
                plots.ecdf_difference(shown, columns=COLUMNS),
                f"Distribution of ranks minus the uniform one, with 95 % bands: {ranked}.",
                "Ranks: their distribution minus that of a right posterior, which stays in the "
                f"band.{_only_some(judged, shown)}",
            ),
            figure(
                plots.coverage(shown, columns=COLUMNS),
                f"How often credible regions hold the truth, with 95 % bands: {covered}.",
                "Coverage: how often credible regions of every level hold the truth.",
            ),
            table(
                "Bands and coverage",
                ("Quantity", "Ranks", "Coverage", "50 %", "95 %", "Mean error"),
                rows,
            ),
        ]
    )


def _some(names: list[str]) -> str:
    return listed(names) if len(names) <= MOST else f"{len(names)} quantities"


def _placed(shown: xr.Dataset, verdict: str, what: str, values: np.ndarray) -> str:
    """Of every quantity, whether it is inside its band, and a number."""
    rows = zip(shown["quantity"].values, shown[verdict].values, values, strict=True)
    return "; ".join(
        f"{name} {'inside' if ok else 'outside'}, {what} {value:.3f}" for name, ok, value in rows
    )


def _same_key(found: Findings) -> list[Html]:
    origin, held_out = found.fit.origin, found.held_out
    if found.new or origin is None or held_out is None or held_out.key is None:
        return []
    if held_out.key != origin.runs_key:
        return []
    said = (
        "These runs were drawn with the key of the runs that the fit was trained on. If they are "
        "the same runs, this section and the next say too little."
    )
    return [text(said, class_="missing")]


def _largest(values: np.ndarray, *, last: bool = False) -> list[int]:
    """The positions of the largest values, as many as a figure shows, in their old order."""
    if len(values) <= MOST:
        return list(range(len(values)))
    ranked = values.copy()
    ranked[-1] = np.inf if last else ranked[-1]
    return sorted(np.argsort(-ranked)[:MOST].tolist())


def _only_some(every: xr.Dataset, shown: xr.Dataset) -> str:
    n, m = every.sizes["quantity"], shown.sizes["quantity"]
    return f" Of {n} quantities the {m} farthest off, and the joint density." if m < n else ""


def recovery(found: Findings) -> Html:
    assert found.drawn is not None and found.held_out is not None
    drawn = components(stacked(found.drawn, "observation"), 2)
    truth = components(
        {name: found.held_out.theta[name] for name in found.fit.model.prior.names}, 1
    )
    rows, said, shown = [], [], list(drawn)[:MOST]
    for name, values in drawn.items():
        means, true = values.mean(axis=1), truth[name]
        low, high = np.quantile(values, (0.025, 0.975), axis=1)
        varied = np.ptp(means) > 0 and np.ptp(true) > 0
        r = f"{np.corrcoef(means, true)[0, 1]:.3f}" if varied else "not known"
        error = number(np.sqrt(np.mean((means - true) ** 2)))
        held = f"{100 * np.mean((true >= low) & (true <= high)):.0f} %"
        rows.append((name, r, error, number(true.std()), held))
        if name in shown:
            said.append(f"{name}: r = {r}, root mean squared error {error}, {held} held")
    some = slice(min(RUNS, len(found.held_out)))
    axes = plots.recovery(
        xr.Dataset(
            {name: (("observation", "chain", "draw"), drawn[name][some, None]) for name in shown}
        ),
        {name: truth[name][some] for name in shown},
        columns=COLUMNS,
    )
    first = f" The first {len(shown)} of {len(drawn)}." if len(shown) < len(drawn) else ""
    return joined(
        [
            text(
                f"True parameters of {_runs(found)} against their posteriors. Posterior means that "
                "follow the truth say that the data tell of a parameter; 95 % intervals should "
                "hold it in 95 % of the runs."
            ),
            figure(
                axes,
                f"Posterior medians with 95 % intervals against the truth. {'; '.join(said)}.",
                "Posterior medians with 95 % intervals against the truth, which the dashed line "
                f"stands for, at {number(min(RUNS, len(found.held_out)))} of the runs.{first}",
            ),
            table(
                "Posterior means against the truth",
                ("Parameter", "Correlation", "RMS error", "Prior SD", "In 95 % interval"),
                rows,
            ),
        ]
    )
