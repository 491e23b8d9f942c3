r"""Data with heavy tails or wild scales: a smooth logarithm where it makes them more Gaussian.

An entry $y$ becomes $\operatorname{asinh}((y - c) / w)$: linear within $w$ of $c$, logarithmic
beyond. The centre $c$ is zero or the median, and the width $w$ a quantile of the distances from it.
Of these and $y$ itself the one is taken under which a Gaussian gives the values of the training set
the highest density, the Jacobian included. Where that gains little, the entry stays as it is.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from consilience.core.compiling import on_device

GAIN = 0.1
"""How many nats a value must gain, in the mean, for its entry to change."""
WIDTHS = (0.05, 0.2, 0.5)
"""Quantiles of the distances from the centre that are tried as widths."""
CHANCE = 5.0
"""How many nats more all values of an entry together must gain."""
REPEATED = 0.05
"""An entry stays as it is if one value has more than this share, and not all are whole numbers."""
MOST = 5000
"""The most values of an entry that are looked at."""
ENTRIES = 4096
"""Larger data, such as images, stay as they are."""
FARTHEST = 60.0
"""The largest size on the new scale that is mapped back: of this size numbers are 1e26."""


class Tails(eqx.Module):
    """The change of each entry of an array; an infinite width leaves the entry as it is."""

    centre: Array
    width: Array

    def forward(self, y: Array) -> Array:
        """Entries on their new scale."""
        there, width = self._safe
        return jnp.where(there, jnp.arcsinh((y - self.centre) / width), y)

    def back(self, z: Array) -> Array:
        """Entries from their new scale."""
        there, width = self._safe
        far = self.centre + width * jnp.sinh(jnp.clip(z, -FARTHEST, FARTHEST))
        return jnp.where(there, far, z)

    def log_slope(self, y: Array) -> Array:
        """The log derivative of `forward`."""
        there, width = self._safe
        z = (y - self.centre) / width
        return jnp.where(there, -jnp.log(width) - 0.5 * jnp.log1p(z**2), 0.0)

    @property
    def _safe(self) -> tuple[Array, Array]:
        there = jnp.isfinite(self.width)
        return there, jnp.where(there, self.width, 1.0)


def find_tails(values: Float[np.ndarray, "n *entries"]) -> Tails | None:
    """The change of every entry that its values call for; None where no entry changes.

    >>> rng = np.random.default_rng(0)
    >>> find_tails(rng.standard_normal((500, 3))) is None
    True
    >>> found = find_tails(np.exp(3 * rng.standard_normal((500, 1))))
    >>> bool(np.isfinite(found.width[0]))
    True
    """
    flat = values.reshape(len(values), -1).astype(np.float64)
    if flat.shape[1] > ENTRIES:
        return None
    if len(flat) > MOST:
        flat = flat[np.linspace(0, len(flat) - 1, MOST).astype(int)]
    centre, width = np.zeros(flat.shape[1]), np.full(flat.shape[1], np.inf)
    for i, y in enumerate(flat.T):
        centre[i], width[i] = _best(y)
    if np.isinf(width).all():
        return None
    shape = values.shape[1:]
    return Tails(on_device(centre.reshape(shape)), on_device(width.reshape(shape)))


def _best(y: np.ndarray) -> tuple[float, float]:
    """The centre and the width for the values of one entry."""
    # Values that repeat, as counts do, would have an infinite density: the least step blurs them.
    distinct, counts = np.unique(y, return_counts=True)
    if len(distinct) < 10:
        return 0.0, np.inf
    # A value that many have, such as zero, in continuous data: no width is right for both.
    if counts.max() > REPEATED * len(y) and np.any(distinct != np.floor(distinct)):
        return 0.0, np.inf
    if len(distinct) < 0.5 * len(y):
        step = np.diff(distinct).min()
        y = y + step * (np.random.default_rng(0).uniform(size=len(y)) - 0.5)
    # Some of the gain is chance where there are few values.
    least = GAIN + CHANCE / len(y)
    best, found = _log_density(y, np.zeros_like(y)) + least, (0.0, np.inf)
    for centre in (0.0, float(np.median(y))):
        away = np.abs(y - centre)
        for width in np.quantile(away, WIDTHS):
            if not width > 1e-6 * away.max() * np.finfo(np.float32).eps:
                continue
            z = np.arcsinh((y - centre) / width)
            score = _log_density(z, -np.log(width) - 0.5 * np.log1p(((y - centre) / width) ** 2))
            if score > best:
                best, found = score, (centre, float(width))
    return found


def _log_density(z: np.ndarray, log_slope: np.ndarray) -> float:
    """The mean log density of values under a Gaussian on another scale, up to a constant."""
    spread = z.std()
    return -np.inf if not spread > 0 else float(np.mean(log_slope) - np.log(spread))
