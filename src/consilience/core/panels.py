"""The one look of all figures, and draws as the arrays that they show."""

import math
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import xarray as xr

INK, GREY, PALE, SKY = "#1b1b1b", "#8c8c8c", "#d4d4d4", "#56b4e9"
BLUE, ORANGE, GREEN, PURPLE, AMBER = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"
STYLES: tuple[tuple[str, Any, str], ...] = (
    *((BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, "-.", "^"), (INK, ":", "v")),
    *((PURPLE, (0, (6, 1, 1, 1)), "D"), (SKY, (0, (8, 2)), "P"), (AMBER, (0, (3, 1, 1, 1)), "X")),
)
"""Colour, line and marker: any of the three tells one curve from another."""


def panels(
    titles: Iterable[str],
    xlabel: str,
    ylabel: str,
    *,
    columns: int = 4,
    size: tuple[float, float] = (2.3, 2.1),
    share: Literal["both", "x", ""] = "",
) -> np.ndarray:
    """Axes of one look in a new figure, in rows as even as can be, labelled on the outside."""
    from matplotlib.figure import Figure

    titles = list(titles)
    rows = math.ceil(len(titles) / columns)
    columns = math.ceil(len(titles) / rows)
    width, height = max(3.4, size[0] * columns), max(2.6, size[1] * rows)
    figure = Figure(figsize=(width, height), layout="constrained")
    both = share == "both"
    grid = figure.subplots(rows, columns, sharex=both or share == "x", sharey=both, squeeze=False)
    axes, unused = np.split(grid.ravel(), [len(titles)])
    for axis in unused:
        axis.remove()
    letters = int(10.5 * width / columns)
    for i, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.15)
        axis.tick_params(which="both", labelsize=8)
        axis.set_title(wrapped(title, letters), color=INK, fontsize=9)
        axis.set_ylabel(literal(ylabel) if i % columns == 0 else "", fontsize=9)
        outer = i + columns >= len(axes)
        axis.set_xlabel(wrapped(xlabel, letters) if outer else "", fontsize=9)
        if outer:
            axis.tick_params(labelbottom=True)
    return axes


def wrapped(name: str, width: int) -> str:
    """A long name in lines, broken at spaces and underscores; formulas and indices stay whole."""
    if "$" in name:
        return literal(name)
    name, bracket, index = name.partition("[")
    lines = textwrap.wrap(name.replace("_", "_ "), width)
    return "\n".join(lines).replace("_ ", "_") + bracket + index


def literal(text: str) -> str:
    """A text whose dollar signs are shown as they are, unless a formula is between them."""
    return "\n".join(
        line if _drawn(line) else line.replace("$", r"\$") for line in text.split("\n")
    )


def _drawn(line: str) -> bool:
    """Whether Matplotlib can draw a line; it takes what is between two dollar signs as math."""
    from matplotlib.mathtext import MathTextParser

    signs = line.count("$") - line.count(r"\$")
    if signs == 0 or signs % 2:
        return True
    try:
        MathTextParser("path").parse(line)
    except ValueError:
        return False
    return True


def legend(axes: np.ndarray) -> None:
    """One legend for all panels, below them; each label once."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(literal(label), handle)
    figure = axes[0].figure
    fits = int(figure.get_figwidth() / (0.6 + 0.065 * max(map(len, found))))
    where = {"loc": "outside lower center", "ncols": max(1, fits), "frameon": False}
    figure.legend(list(found.values()), list(found), fontsize=8, **where)


def note(axis: Any, text: str) -> None:
    """Text in the upper left corner."""
    box = {"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 1}
    where = {"transform": axis.transAxes, "va": "top", "fontsize": 8}
    axis.text(0.03, 0.97, literal(text), color=INK, bbox=box, **where)


def each_quantity(
    calibration: xr.Dataset,
    draw: Callable,
    xlabel: str,
    ylabel: str,
    verdict: str = "inside",
    *,
    columns: int = 4,
) -> np.ndarray:
    """A panel for each quantity, drawn by `draw`; in orange where it is outside its band."""
    names = map(str, calibration["quantity"].values)
    axes = panels(names, xlabel, ylabel, columns=columns, share="both")
    for i, axis in enumerate(axes):
        part = calibration.isel(quantity=i)
        color, line, _ = STYLES[0 if part[verdict] else 1]
        notes = draw(axis, part, {"color": color, "ls": line, "lw": 1.5})
        note(axis, ", ".join([*notes, *([] if part[verdict] else ["outside"])]))
    low, high = axes[0].get_ylim()
    # Room for the notes above the curves.
    axes[0].set_ylim(low, high + 0.15 * (high - low))
    legend(axes)
    return axes


def stacked(draws: xr.Dataset, *lead: str) -> dict[str, np.ndarray]:
    """Draws as arrays: the `lead` dimensions, then the draws of all chains, then their own."""
    if "observation" in draws.dims and not lead:
        raise ValueError(
            "The draws have the dimension 'observation', but one observation is shown: choose "
            "it with draws.isel(observation=0)."
        )
    flat = draws.stack(sample=("chain", "draw"), create_index=False)
    arrays = flat.transpose(*lead, "sample", ...).data_vars
    return {str(name): array.values for name, array in arrays.items()}


def only(wanted: Iterable[str], found: dict[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
    """The components that are wanted, in that order; an error where one is not there."""
    wanted = list(wanted)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"{what} has no {', '.join(missing)}, it has {', '.join(found)}.")
    return {name: found[name] for name in wanted}


def span(*parts: np.ndarray) -> tuple[float, float]:
    """A range that holds all numbers but the outermost of many, with a margin."""
    ends = [np.quantile(part, (0.002, 0.998)) for part in parts]
    low, high = float(np.min(ends)), float(np.max(ends))
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + margin


def outlines(axis: Any, x: np.ndarray, y: np.ndarray) -> None:
    """Where a smoothed histogram holds 50 % and 95 % of the points."""
    from scipy.ndimage import gaussian_filter

    counts, *edges = np.histogram2d(x, y, 50, (axis.get_xlim(), axis.get_ylim()))
    density = gaussian_filter(counts, 2.0)
    ranked = np.sort(density, axis=None)[::-1]
    held = np.cumsum(ranked) / ranked.sum()
    levels = np.unique([ranked[np.searchsorted(held, share)] for share in (0.95, 0.5)])
    middles = [(edge[1:] + edge[:-1]) / 2 for edge in edges]
    axis.contour(*middles, density.T, levels, colors=ORANGE, linewidths=1.2)
