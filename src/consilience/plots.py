"""Arrays to figures. Every function returns its Matplotlib axes: `axes[0].figure.savefig(...)`.

Figures are made without pyplot: no global state, and nothing to close.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import xarray as xr
from jaxtyping import Array, Float

from consilience.core.labels import components
from consilience.core.panels import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PALE,
    SKY,
    STYLES,
    each_quantity,
    legend,
    literal,
    note,
    only,
    outlines,
    panels,
    span,
    stacked,
    wrapped,
)
from consilience.core.types import Data, Theta
from consilience.posterior.history import History

TERMS = ("posterior", "likelihood", "prior", "validation", "consistency", "unlabeled")
COUNTS = ("skipped", "dropped")
MOST_COMPONENTS = 8

Rows: TypeAlias = Float[Array | np.ndarray, "datasets _"]
Scores: TypeAlias = Mapping[int, Sequence[float] | np.ndarray]


def side_by_side(
    samples: Mapping[str, np.ndarray],
    *,
    names: Sequence[str] = (r"$\theta_1$", r"$\theta_2$"),
    truth: np.ndarray | None = None,
) -> Any:
    """Two-dimensional samples as scatter plots beside each other, on the same scale.

    `samples`: titled arrays of shape (n, 2). `truth`: a point to mark.
    """
    axes = panels(samples, *names, columns=len(samples), size=(3.0, 3.0), share="both")
    for axis, points in zip(axes, samples.values(), strict=True):
        axis.plot(*np.asarray(points).T, ".", color=BLUE, alpha=0.35, ms=3, mew=0)
        if truth is not None:
            axis.plot(*truth, "*", color=ORANGE, ms=11, mec="white", mew=0.8)
        axis.set_aspect("equal")
    points = np.concatenate([np.asarray(part) for part in samples.values()])
    low, high = points.min(axis=0), points.max(axis=0)
    half = 0.55 * (high - low).max()
    # Square panels: neither direction looks wider than it is.
    axes[0].set_xlim((low + high)[0] / 2 - half, (low + high)[0] / 2 + half)
    axes[0].set_ylim((low + high)[1] / 2 - half, (low + high)[1] / 2 + half)
    return axes


def losses(history: History) -> np.ndarray:
    """The loss and its terms over epochs; self-consistency in a panel below, on a log axis."""
    terms = {name: values for name, values in history.terms.items() if name not in COUNTS}
    asked = {name: terms.pop(name) for name in TERMS[4:] if name in terms}
    asked = {name: np.where(v > 0, v, np.nan) for name, v in asked.items() if (v > 0).any()}
    loss, styles = terms.pop("loss"), dict(zip(TERMS, STYLES, strict=False))
    epochs = np.arange(1, len(loss) + 1)
    titles = ["", ""] if asked else [""]
    axes = panels(titles, "epoch", "loss", columns=1, size=(4.8, 2.2), share="x")
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    # Few epochs need points to be seen; a pale, broad loss shows a term that equals it.
    dot = "." if len(loss) < 20 else ""
    axes[0].plot(epochs, loss, color=PALE, lw=4, marker=dot, ms=12, label="loss")
    for name, values in {**terms, **asked}.items():
        color, line, _ = styles.get(name, STYLES[-1])
        axis = axes[1 if name in asked else 0]
        axis.plot(epochs, values, color=color, ls=line, lw=1.4, marker=dot, label=name)
    if asked:
        axes[1].set(yscale="log", ylabel="self-consistency")
        start = epochs[np.any([np.isfinite(values) for values in asked.values()], axis=0)][0]
        for axis in axes:
            axis.axvline(start, color=GREY, ls=(0, (1, 1)), lw=1.2)
        # Above the panel, where no curve is.
        place = {"xycoords": axes[0].get_xaxis_transform(), "va": "bottom", "fontsize": 8}
        side = "left" if start < epochs.mean() else "right"
        axes[0].annotate("self-consistency on", (start, 1.02), ha=side, **place)
    for name, epoch in history.best_epochs.items():
        if 0 < epoch < len(loss):
            color, _, marker = styles.get(name, STYLES[-1])
            height = terms.get("validation", loss)[epoch - 1]
            look = {"color": color, "ms": 7, "mec": "white", "zorder": 5}
            axes[0].plot([epoch], [height], marker, label=f"kept {name}", **look)
    late = np.stack([values[len(loss) // 10 :] for values in (loss, *terms.values())])
    low, high = np.nanmin(late), np.nanmax(late)
    if axes[0].get_ylim()[1] > high + 2 * (high - low) > high:
        # The fall of the first epochs would flatten all that follows.
        axes[0].set_ylim(low - 0.1 * (high - low), high + 0.5 * (high - low))
    legend(axes)
    return axes


def pairs(
    draws: xr.Dataset,
    *,
    truth: Theta | None = None,
    reference: xr.Dataset | None = None,
    names: Sequence[str] | None = None,
) -> np.ndarray:
    """Posterior draws of one observation: each component, and each two against each other.

    `truth`: named values to mark. `reference`: draws to compare with, as outlines that hold
    50 % and 95 % of them. `names`: parameters, or components such as `theta[0]`, to show.
    The outermost 0.2 % of the draws on either side may lie outside the panels.
    """
    points, other, true = components(stacked(draws), 1), {}, {}
    if names is not None:
        parts = [[p for p in points if name in (p, p.split("[")[0])] or [name] for name in names]
        points = only(itertools.chain(*parts), points, "draws")
    elif len(points) > MOST_COMPONENTS:
        raise ValueError(
            f"{len(points)} components are too many to read, the most is {MOST_COMPONENTS}: "
            f"choose with names=[...] among {', '.join(points)}."
        )
    if reference is not None:
        other = only(points, components(stacked(reference), 1), "reference")
    if truth is not None:
        true = only(points, components(truth, 0), "truth")
    shown, k = list(points), len(points)
    side = max(1.2, min(1.8, 9.0 / k))
    axes = panels([""] * k**2, "", "", columns=k, size=(side, side)).reshape(k, k)
    spans = {name: span(*(f[name] for f in (points, other, true) if f)) for name in points}
    for (i, j), axis in np.ndenumerate(axes):
        row, column = shown[i], shown[j]
        if j > i:
            axis.set_axis_off()
            continue
        axis.set_xlim(spans[column])
        if i == j:
            bins = np.linspace(*spans[row], 31)
            axis.hist(points[row], bins, density=True, color=BLUE, alpha=0.5, label="draws")
            if other:
                heights, _ = np.histogram(other[row], bins, density=True)
                axis.stairs(heights, bins, color=ORANGE, lw=1.3, label="reference")
            if true:
                # The star in the other panels says it, where there are others.
                name = "truth" if k == 1 else None
                axis.axvline(true[row], color=INK, ls="--", lw=1.2, label=name)
        else:
            axis.set_ylim(spans[row])
            # More points would hide each other.
            x, y = (points[name][:: math.ceil(points[name].size / 2000)] for name in (column, row))
            axis.plot(x, y, ".", color=BLUE, ms=2.5, mew=0, alpha=0.4, rasterized=True)
            if other:
                outlines(axis, other[column], other[row])
            if true:
                look = {"color": INK, "ms": 11, "mec": "white", "mew": 0.8}
                axis.plot([true[column]], [true[row]], "*", label="truth", **look)
        axis.locator_params(nbins=4)
        axis.ticklabel_format(scilimits=(-2, 4))
        axis.tick_params(labelbottom=i == k - 1, labelleft=j == 0)
        if i == k - 1:
            axis.set_xlabel(wrapped(column, 18))
        if j == 0:
            axis.set_ylabel(wrapped(row, 18) if i else "density")
    for axis in axes.diagonal():
        axis.set_yticks([])
    legend(axes.ravel())
    return axes


def recovery(draws: xr.Dataset, truth: Theta, *, columns: int = 4) -> np.ndarray:
    """Posterior medians with 95 % intervals against the truth, over observations.

    `truth`: an array for each parameter, behind the axis of observations. r: the correlation
    of the medians with the truth.
    """
    points = components(stacked(draws, "observation"), 2)
    true = only(points, components(truth, 1), "truth")
    axes = panels(points, "truth", "median, 95 % interval", columns=columns)
    for axis, (name, values) in zip(axes, points.items(), strict=True):
        t, m = true[name], len(values)
        if t.shape != (m,):
            raise ValueError(f"There are draws for {m} observations, but truth has {t.size}.")
        low, middle, high = np.quantile(values, (0.025, 0.5, 0.975), axis=1)
        axis.vlines(t, low, high, color=BLUE, lw=0.8, alpha=max(0.15, min(0.6, 40 / m)))
        axis.plot(t, middle, "o", color=BLUE, ms=3, mew=0)
        ends = [min(low.min(), t.min()), max(high.max(), t.max())]
        axis.plot(ends, ends, color=INK, ls="--", lw=1)
        if np.ptp(t) > 0 and np.ptp(middle) > 0:
            note(axis, f"r = {np.corrcoef(t, middle)[0, 1]:.2f}")
    return axes


def ecdf_difference(calibration: xr.Dataset, *, columns: int = 4) -> np.ndarray:
    """The ECDF of the ranks minus that of a right posterior, with its 95 % band."""
    point, low, high = (calibration[name].values for name in ("point", "lower", "upper"))

    def draw(axis, part, style):
        band = axis.fill_between(point, low - point, high - point, color=PALE, lw=0)
        band.set_label("simultaneous 95 % band")
        axis.axhline(0.0, color=GREY, lw=0.8)
        axis.plot(point, part["ecdf"].values - point, **style)
        return []

    labels = "fractional rank", "ECDF difference"
    return each_quantity(calibration, draw, *labels, columns=columns)


def rank_histogram(calibration: xr.Dataset, *, columns: int = 4) -> np.ndarray:
    """How often the truth had which rank among the draws: flat for a right posterior."""
    from scipy.stats import binom

    ranks, n = int(calibration.attrs["draws"]) + 1, calibration.sizes["simulation"]
    most = min(ranks, max(4, min(20, n // 20)))
    # Bins of equally many ranks if there is such a number; else they differ by one rank.
    bins = next((b for b in range(most, most // 2, -1) if ranks % b == 0), most)
    edges = np.round(np.linspace(0, ranks, bins + 1)) - 0.5
    low, high = binom.ppf([[0.025], [0.975]], n, np.diff(edges) / ranks)

    def draw(axis, part, style):
        counts, _ = np.histogram(part["ranks"].values, edges)
        band = axis.stairs(high, edges, baseline=low, fill=True, color=PALE, lw=0)
        band.set_label("95 % range of a single bar")
        axis.stairs(counts, edges, fill=True, color=style["color"], alpha=0.25, lw=0)
        axis.stairs(counts, edges, **style)
        return []

    labels = f"rank among {ranks - 1} draws", "simulations"
    return each_quantity(calibration, draw, *labels, columns=columns)


def coverage(calibration: xr.Dataset, *, columns: int = 4) -> np.ndarray:
    """How often credible regions hold the truth, against how often they should."""
    level = calibration["level"].values
    low, high = calibration["coverage_lower"].values, calibration["coverage_upper"].values

    def draw(axis, part, style):
        axis.fill_between(level, low, high, color=PALE, lw=0, label="95 % band")
        axis.plot([0, 1], [0, 1], color=GREY, lw=0.8)
        axis.plot(level, part["coverage"].values, **style)
        axis.set(xlim=(0, 1), ylim=(0, 1), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
        return [f"calibration error {float(part['error']):.3f}"]

    # The verdict on this very curve, where there is one.
    verdict = "coverage_inside" if "coverage_inside" in calibration else "inside"
    labels = "nominal coverage", "empirical coverage", verdict
    return each_quantity(calibration, draw, *labels, columns=columns)


def predictive(
    x: Data, draws: Data, *, kind: Literal["series", "rows"] = "series", columns: int = 4
) -> np.ndarray:
    """The observation against datasets simulated from its posterior.

    `draws`: shaped as `x`, behind an axis of datasets. `kind`: the axes of `x` are (time,
    channel) in a "series"; "rows" are (row, channel), and are pooled. A number is a histogram.
    """
    made = draws if isinstance(draws, Mapping) else {"": draws}
    shown: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, values in (x if isinstance(x, Mapping) else {"": x}).items():
        seen, many = np.asarray(values), np.asarray(made.get(name, 0.0))
        if many.ndim != seen.ndim + 1 or many.shape[1:] != seen.shape or seen.ndim > 2:
            raise ValueError(
                f"draws must have the shape of x behind an axis of datasets, and x at most two "
                f"axes: got draws of {many.shape} for x of {seen.shape}{name and f' in {name!r}'}."
            )
        seen = seen.reshape(len(seen) if seen.ndim else 1, -1)
        many = many.reshape(len(many), *seen.shape)
        for c in range(seen.shape[1]):
            channel = f"{name}[{c}]" if name else f"channel {c}"
            shown[channel if seen.shape[1] > 1 else name] = seen[:, c], many[..., c]
    axes = panels(shown, "", "", columns=columns, size=(2.6, 2.2))
    for axis, (seen, many) in zip(axes, shown.values(), strict=True):
        if kind == "series" and len(seen) > 1:
            index, q = np.arange(len(seen)), np.quantile(many, (0.025, 0.25, 0.5, 0.75, 0.975), 0)
            axis.fill_between(index, q[0], q[4], color="#cfe3f1", lw=0, label="95 %")
            axis.fill_between(index, q[1], q[3], color="#8fbfdf", lw=0, label="50 %")
            axis.plot(index, q[2], color=BLUE, lw=1.3, label="median")
            axis.plot(index, seen, ".", color=INK, ms=4, mew=0, label="observed")
            axis.set(xlabel="index", ylabel="value")
            continue
        low, high = span(many, seen)
        bins = np.linspace(low, high, 41)
        if np.issubdtype(many.dtype, np.integer):
            # Else some bars would hold one whole number, and others none.
            bins = np.arange(round(low) - 0.5, high + 1, math.ceil((high - low) / 40))
        axis.hist(many.ravel(), bins, density=True, color=BLUE, alpha=0.5, label="predictive")
        if len(seen) > 1:
            foot = {"transform": axis.get_xaxis_transform(), "label": "observed"}
            axis.plot(seen, np.full(len(seen), 0.03), "|", color=INK, ms=9, mew=0.8, **foot)
        else:
            axis.axvline(seen[0], color=INK, ls="--", lw=1.5, label="observed")
        axis.set(xlabel="value", ylabel="density")
    legend(axes)
    return axes


def identity(
    values: Rows | Mapping[str, Rows], *, titles: Sequence[str] | None = None, centre: bool = True
) -> np.ndarray:
    """The identity log p(theta) + log p(x | theta) - log q(theta | x) over draws.

    A right posterior gives the log evidence at every draw; a wrong one, values that spread.
    `values`: (datasets, draws), or such arrays of several fits by name. `titles`: of the
    datasets. `centre`: take from each dataset its median. Infinite values are not drawn.
    """
    fits = values if isinstance(values, Mapping) else {"": values}
    arrays = {name: np.asarray(array) for name, array in fits.items()}
    m = len(next(iter(arrays.values())))
    titles = [f"dataset {i}" for i in range(m)] if titles is None else titles
    if len(titles) != m or any(a.ndim != 2 or len(a) != m for a in arrays.values()):
        shapes = ", ".join(str(array.shape) for array in arrays.values())
        raise ValueError(
            f"values must have the shape (datasets, draws), with as many datasets in every fit as "
            f"titles: got {shapes} and {len(titles)} titles."
        )
    lost = {name: np.sum(~np.isfinite(array)) for name, array in arrays.items()}
    heads = [name + f" ({n} not finite)" * bool(n) for name, n in lost.items()]
    xlabel = f"log evidence estimate{' minus its median' if centre else ''} (nats)"
    size = (4.6 if len(fits) == 1 else 3.0, min(10.0, 1.3 + 0.3 * m))
    axes = panels(heads, xlabel, "", columns=len(fits), size=size, share="both")
    jitter = np.random.default_rng(0)
    for axis, array in zip(axes, arrays.values(), strict=True):
        for i, row in enumerate(array):
            row = row[np.isfinite(row)]
            if not len(row):
                continue
            row = row - np.median(row) if centre else row
            some = row[:: math.ceil(len(row) / 300)]
            heights = i + jitter.uniform(-0.3, 0.3, len(some))
            axis.plot(some, heights, ".", color=SKY, ms=3, mew=0, rasterized=True, label="draws")
            ends = np.quantile(row, (0.025, 0.975))
            axis.plot(ends, [i, i], color=BLUE, lw=3, solid_capstyle="butt", label="central 95 %")
            axis.plot([row.mean()], [i], "D", color="white", mec=INK, ms=4, label="mean")
    every = math.ceil(m / 40)
    axes[0].set_yticks(range(0, m, every), list(map(literal, titles))[::every])
    axes[0].set_ylim(m - 0.5, -0.5)
    legend(axes)
    return axes


def budgets(
    results: Mapping[str, Scores], *, floor: float | None = None, ylabel: str = "MMD"
) -> Any:
    """A score against the number of simulations: the mean of each method, and every seed.

    `results`: by method and budget, a value for each seed. `floor`: the best there can be.
    The axis of scores is logarithmic where all are positive.
    """
    axis = panels([""], "simulations", ylabel, size=(4.6, 3.2))[0]
    for (name, scores), style in zip(results.items(), itertools.cycle(STYLES), strict=False):
        (color, line, marker), at = style, sorted(scores)
        means = [np.mean(scores[n]) for n in at]
        axis.plot(at, means, color=color, ls=line, marker=marker, ms=5, lw=1.5, label=name)
        seeds = np.array([(n, value) for n in at for value in scores[n]])
        axis.plot(*seeds.T, marker, color=color, ms=2.5, mew=0, alpha=0.6)
    if floor is not None:
        axis.axhline(floor, color=INK, ls=":", lw=1.2, label="floor")
    positive = all(np.min(seeds) > 0 for scores in results.values() for seeds in scores.values())
    axis.set(xscale="log", yscale="log" if positive else "linear")
    every = sorted({n for scores in results.values() for n in scores})
    ticks = every[:1]
    for n in every:
        # Labels closer than an eighth of the axis would touch.
        if math.log(n / ticks[-1]) > math.log(every[-1] / every[0]) / 8:
            ticks.append(n)
    axis.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axis.set_xticks([], minor=True)
    legend(np.array([axis]))
    return axis
