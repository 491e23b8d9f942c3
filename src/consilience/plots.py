"""Arrays to figures. Every function returns its Matplotlib axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

INK = "#1b1b1b"
BLUE, ORANGE = "#0072b2", "#d55e00"


def side_by_side(
    samples: Mapping[str, np.ndarray],
    *,
    names: Sequence[str] = (r"$\theta_1$", r"$\theta_2$"),
    truth: np.ndarray | None = None,
) -> Any:
    """Two-dimensional samples as scatter plots beside each other, on the same scale.

    `samples`: titled arrays of shape (n, 2). `truth`: a point to mark.
    """
    from matplotlib.figure import Figure

    width = 3.0 * len(samples)
    figure = Figure(figsize=(width, 3.2), layout="constrained")
    axes = figure.subplots(1, len(samples), sharex=True, sharey=True, squeeze=False)[0]
    for axis, (title, points) in zip(axes, samples.items(), strict=True):
        axis.plot(*np.asarray(points).T, ".", color=BLUE, alpha=0.35, ms=3, mew=0)
        if truth is not None:
            axis.plot(*truth, "*", color=ORANGE, ms=11, mec="white", mew=0.8)
        axis.set_title(title, color=INK)
        axis.set_xlabel(names[0])
        axis.set_aspect("equal")
        axis.grid(alpha=0.15)
    points = np.concatenate([np.asarray(part) for part in samples.values()])
    low, high = points.min(axis=0), points.max(axis=0)
    half = 0.55 * (high - low).max()
    # Square panels: neither direction looks wider than it is.
    axes[0].set_xlim((low + high)[0] / 2 - half, (low + high)[0] / 2 + half)
    axes[0].set_ylim((low + high)[1] / 2 - half, (low + high)[1] / 2 + half)
    axes[0].set_ylabel(names[1])
    return axes
