r"""Whether posteriors say what they should, over many simulations.

If $\theta \sim p(\theta)$, $x \sim p(x \mid \theta)$ and the posterior is right, the rank of
$\theta$ among draws given $x$ is uniform (simulation-based calibration, Talts et al. 2018,
arXiv:1804.06788), for every parameter and for every quantity $f(\theta, x)$. The log density
of the posterior itself is one: its ranks judge regions of highest density, all parameters at
once. Ranks are compared with the uniform by their ECDF, within bands that hold the whole of
it with 95 % probability (Saeilynoja et al. 2022, arXiv:2103.10522).
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import xarray as xr

from consilience.core.html import notebook
from consilience.core.labels import components
from consilience.core.types import PRNGKey
from consilience.model.model import Model
from consilience.model.priors import DENSITY
from consilience.networks.layers import generator
from consilience.posterior.fit import Fit
from consilience.simulation.simulate import simulate
from consilience.simulation.simulations import Simulations

logger = logging.getLogger(__name__)

STEPS = 20
"""`draws + 1` is a multiple of it, so that levels of 5 % fall between ranks."""


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """How the ranks of the truth among posterior draws are spread.

    `table`: a dataset over `quantity` with `ranks` (0 to `draws`) of every simulation, `ecdf`
    with the band from `lower` to `upper`, `coverage` of central intervals (of regions of
    highest density for the joint density) by `level` with its band, and `error`, the mean
    distance of coverage from its level. `inside`, `coverage_inside`: whether the whole ECDF,
    and the whole curve of coverage, are within their bands.
    `invalid`: simulations that were left out because of NaN or infinite values.
    """

    table: xr.Dataset
    invalid: int

    @property
    def passed(self) -> bool:
        """Whether every quantity is inside its bands.

        Each band is left by a right posterior, too, with a probability of 5 %.
        """
        return bool(self.table["inside"].all() and self.table["coverage_inside"].all())

    def plot(self) -> Any:
        """ECDF differences, rank histograms and coverage: three lists of axes, by name."""
        from consilience import plots

        return {
            "ecdf": plots.ecdf_difference(self.table),
            "ranks": plots.rank_histogram(self.table),
            "coverage": plots.coverage(self.table),
        }

    def _repr_html_(self) -> str:
        return notebook(self)

    def __repr__(self) -> str:
        table = self.table
        names = [str(name) for name in table["quantity"].values]
        width = max(map(len, names))
        note = f", {self.invalid} more were not finite" if self.invalid else ""
        lines = [f"Calibration: {table.attrs['simulations']} simulations{note}"]
        for name in names:
            row = table.sel(quantity=name)
            ranks, cover = ("ok" if row[v] else "OUTSIDE" for v in ("inside", "coverage_inside"))
            lines.append(
                f"  {name:<{width}}  ranks {ranks:<7}  coverage {cover:<7}  "
                f"error {float(row['error']):.3f}"
            )
        lines.append("  OUTSIDE: beyond bands that a right posterior leaves with 5 % probability.")
        return "\n".join(lines)


def calibrate(
    fit: Fit,
    model: Model | None = None,
    n: int = 500,
    *,
    key: PRNGKey,
    simulations: Simulations | None = None,
    draws: int = 199,
    quantities: Mapping[str, Callable[[Any, Any], Any]] | None = None,
) -> Calibration:
    """Simulation-based calibration of a fit, from `n` new simulations of a model.

    `model`: by default the fit's own. `simulations`: runs that the fit has not seen, in place
    of new ones. `draws`: the number of posterior draws at each run.
    `quantities`: named functions of (theta, x) in JAX, ranked beside the parameters; theta
    as the model's own functions get it.

    Runs with NaN or infinite values cannot be judged: they are left out, counted in the
    result, and reported.

    >>> import consilience as cs, numpyro.distributions as dist
    >>> model = cs.Model(dist.Normal(0, 1), lambda key, t: t + jax.random.normal(key, (3,)))
    >>> sims = cs.simulate(model, 128, key=jax.random.key(0))
    >>> small = cs.Coupling(layers=1, width=16)
    >>> fit = cs.fit(
    ...     model, sims, key=jax.random.key(1), posterior=small, self_consistency=False, epochs=2
    ... )
    >>> cs.calibrate(fit, n=100, key=jax.random.key(2), draws=99).table["ranks"].shape
    (2, 100)
    """
    if draws < STEPS - 1 or (draws + 1) % STEPS:
        raise ValueError(
            f"draws must be one less than a multiple of {STEPS}, such as 99 or 199, got {draws}."
        )
    if model is not None and simulations is not None:
        raise ValueError(
            "simulations take the place of new ones from a model: pass one of the two."
        )
    k_simulate, k_draw, k_ties = jax.random.split(key, 3)
    if simulations is None:
        simulations = simulate(model or fit.model, n, key=k_simulate)
    invalid = int(simulations.invalid.sum())
    simulations = simulations.drop_invalid()
    if len(simulations) < STEPS:
        raise ValueError(
            f"Calibration needs {STEPS} simulations or more with finite values, got "
            f"{len(simulations)}; {invalid} were not finite."
        )
    if invalid:
        logger.warning("%d simulations were not finite and are left out.", invalid)
    drawn = fit.sample(simulations.x, draws, key=k_draw)
    return calibrate_draws(fit, simulations, drawn, quantities or {}, key=k_ties, invalid=invalid)


def calibrate_draws(
    fit: Fit,
    simulations: Simulations,
    drawn: xr.Dataset,
    quantities: Mapping[str, Callable[[Any, Any], Any]],
    *,
    key: PRNGKey,
    invalid: int,
) -> Calibration:
    """As `calibrate`, from posterior draws of every run that are there already."""
    ranks = _ranks(fit, simulations, drawn, quantities, generator(key))
    return Calibration(rank_table(ranks, drawn.sizes["draw"]), invalid)


def _ranks(fit: Fit, simulations: Simulations, drawn: xr.Dataset, quantities, rng):
    """The ranks of the truth among posterior draws, by quantity; ties are broken by lot."""
    x, truth = simulations.x, simulations.theta
    theta = {name: drawn[name].values[:, 0] for name in truth}
    at_draws = components(theta, 2)
    pairs = {name: (values, at_draws[name]) for name, values in components(truth, 1).items()}
    pairs[DENSITY] = (
        fit.log_prob({name: values[:, None] for name, values in truth.items()}, x)[:, 0],
        fit.log_prob(theta, x),
    )
    for name, quantity in quantities.items():
        if name in pairs:
            raise ValueError(f"The quantity {name!r} has the name of another: rename it.")
        pairs[name] = _evaluate(fit.model, quantity, name, truth, theta, x)
    ranks = {}
    for name, (at_truth, among) in pairs.items():
        below = (among < at_truth[:, None]).sum(axis=1)
        ties = (among == at_truth[:, None]).sum(axis=1)
        ranks[name] = below + rng.integers(0, ties + 1)
    return ranks


def _evaluate(model: Model, quantity: Callable, name: str, truth, theta, x):
    one = lambda theta, x: quantity(model.unwrap(theta), x)  # noqa: E731
    many = jax.vmap(one, in_axes=(0, None))
    at_truth = np.asarray(jax.jit(jax.vmap(one))(truth, x))
    if at_truth.ndim != 1 or not np.issubdtype(at_truth.dtype, np.number):
        raise ValueError(
            f"The quantity {name!r} must return one number for one (theta, x), got the shape "
            f"{at_truth.shape[1:]}."
        )
    at_draws = np.asarray(jax.jit(lambda t, x: jax.lax.map(lambda a: many(*a), (t, x)))(theta, x))
    if np.isnan(at_truth).any() or np.isnan(at_draws).any():
        raise ValueError(f"The quantity {name!r} is NaN for some draws: it cannot be ranked.")
    return at_truth, at_draws


def rank_table(ranks: dict[str, np.ndarray], draws: int) -> xr.Dataset:
    """The table of a `Calibration`, from the ranks of each quantity among `draws` draws."""
    names, every = list(ranks), np.stack(list(ranks.values()))
    n = every.shape[1]
    # In between ranks, where the uniform distribution of ranks has no steps to doubt.
    steps = (draws + 1) // max(1, (draws + 1) // 100)
    points = np.unique(np.arange(1, steps) * (draws + 1) // steps) / (draws + 1)
    levels = np.arange(1, STEPS) / STEPS
    ecdf = (every[..., None] < points * (draws + 1)).mean(axis=1)
    # How far from the middle a rank is; for the density, how far from the top.
    far = np.abs(2 * every - draws) + 1
    far[names.index(DENSITY)] = draws + 1 - every[names.index(DENSITY)]
    covered = (far[..., None] <= levels * (draws + 1) + 1e-9).mean(axis=1)
    lower, upper = ecdf_bands(n, tuple(points))
    cover_lower, cover_upper = ecdf_bands(n, tuple(levels))
    held = lambda value, low, high: ((value >= low) & (value <= high)).all(axis=1)  # noqa: E731
    return xr.Dataset(
        {
            "ranks": (("quantity", "simulation"), every),
            "ecdf": (("quantity", "point"), ecdf),
            "lower": ("point", lower),
            "upper": ("point", upper),
            "coverage": (("quantity", "level"), covered),
            "coverage_lower": ("level", cover_lower),
            "coverage_upper": ("level", cover_upper),
            "error": ("quantity", np.abs(covered - levels).mean(axis=1)),
            "inside": ("quantity", held(ecdf, lower, upper)),
            "coverage_inside": ("quantity", held(covered, cover_lower, cover_upper)),
        },
        coords={"quantity": names, "point": points, "level": levels},
        attrs={"draws": draws, "simulations": n},
    )


@functools.lru_cache(maxsize=64)
def ecdf_bands(
    n: int, points: tuple[float, ...], probability: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Bands that hold the ECDF of `n` uniform numbers at all points with a probability.

    Binomial intervals of one level at each point; the level is found by bisection so that
    all hold at once, with that probability computed exactly: counts at successive points
    are a Markov chain.

    >>> lower, upper = ecdf_bands(100, (0.25, 0.5, 0.75))
    >>> print(lower, upper)
    [0.15 0.39 0.65] [0.35 0.61 0.85]
    """
    at = np.asarray(points)
    if n < 1 or np.any(np.diff(at) <= 0) or at[0] <= 0 or at[-1] >= 1:
        raise ValueError(f"Bands need n >= 1 and rising points inside (0, 1), got {n}, {points}.")
    low, high = (1 - probability) / len(at) / 2, 1 - probability
    ends = _pointwise(n, at, low)
    for _ in range(18):
        middle = 0.5 * (low + high)
        narrower = _pointwise(n, at, middle)
        if _held(n, at, *narrower) >= probability:
            low, ends = middle, narrower
        else:
            high = middle
    return ends[0] / n, ends[1] / n


def _pointwise(n: int, points: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Counts between which a binomial lies with probability 1 - level, at each point."""
    from scipy import stats  # here: a quarter of the time of `import consilience`

    lower, upper = stats.binom.ppf([[level / 2], [1 - level / 2]], n, points).astype(int)
    return lower, upper


def _held(n: int, points: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> float:
    """The probability that counts stay within their limits at all points."""
    from scipy import stats

    chance, before, states = np.ones(1), 0.0, np.zeros(1, int)
    for point, low, high in zip(points, lower, upper, strict=True):
        after = np.arange(low, high + 1)
        steps = after - states[:, None]
        # Of the numbers not yet below the last point, how many fall below this one.
        moves = stats.binom.pmf(steps, (n - states)[:, None], (point - before) / (1 - before))
        chance, before, states = chance @ moves, point, after
    return float(chance.sum())
