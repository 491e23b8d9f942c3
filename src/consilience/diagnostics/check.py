"""How far to trust the posterior of one observation.

Four questions. Is the observation like the simulations that the fit was made from? Do the
values of the identity agree there? Can importance weights correct the draws if
they do not? Do data simulated at the posterior look like the observation? The answers give
one verdict, which says what to do.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
import xarray as xr

from consilience.core.arrays import as_count, as_numbers, finite_rows, within_range
from consilience.core.compiling import compiled
from consilience.core.html import notebook
from consilience.core.labels import label
from consilience.core.types import Data, PRNGKey
from consilience.diagnostics.verdicts import AS_IS, CORRECTED, MCMC, MODEL
from consilience.identity.learned import Posterior
from consilience.model.data import Layout, Series, Set, Vector
from consilience.posterior.fit import Fit
from consilience.simulation.simulate import simulate, simulate_at
from consilience.simulation.simulations import Simulations

Arrays = dict[str, Any]

RARE = 0.01
"""Below this p-value an observation is not like the simulations, or like its predictions."""
WIDE_SPREAD = 1.0
"""Above this spread of the identity, in nats, draws are worth correcting."""
HEAVY = 0.7
"""From this Pareto k-hat on, importance weights say nothing (Vehtari et al. 2024)."""
FEW = 0.05
"""Below this share of effective draws, correcting leaves too few."""

DATASETS_AT_ONCE = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
    """A verdict for each observation, and what it rests on.

    `table`: `verdict` and `reason`; `typical`, the p-value of the observation among held-out
    simulations; `spread`, `pareto_k` and `ess` of the identity's values (NaN without a
    likelihood); `predictive`, the p-value of the statistic that posterior predictions miss
    by most, and its name, `statistic`.
    `x`, `predictions`: the observation and data simulated at its posterior, where there is
    one observation; `kind`: how to draw them.
    `evidence`: the estimates of `Fit.log_evidence`, where there is a likelihood.
    """

    table: xr.Dataset
    x: Any = None
    predictions: Any = None
    kind: Literal["series", "rows"] = "series"
    evidence: xr.Dataset | None = None

    @property
    def verdict(self) -> Any:
        """The verdict, or an array of them."""
        values = self.table["verdict"].values
        return str(values) if values.ndim == 0 else values

    def plot(self) -> Any:
        """The observation against data simulated at its posterior."""
        from consilience import plots

        if self.predictions is None:
            raise ValueError(
                "There is nothing to draw: check one observation, with predictive > 0."
            )
        return plots.predictive(self.x, self.predictions, kind=self.kind)

    def __repr__(self) -> str:
        t = self.table
        if "observation" in t.sizes:
            values, counts = np.unique(t["verdict"].values, return_counts=True)
            lines = [f"  {count:>5}  {value}" for value, count in zip(values, counts, strict=True)]
            return "\n".join([f"Check of {t.sizes['observation']} observations", *lines])
        number = lambda name: f"{float(t[name]):.3g}"  # noqa: E731
        identity = (
            f"spread {number('spread')} nats, Pareto k {number('pareto_k')}, "
            f"effective draws {number('ess')} of {t.attrs['draws']}"
        )
        predictions = f"p = {number('predictive')} ({t['statistic'].item()})"
        if np.isnan(t["predictive"]):
            predictions = "not simulated"
        return (
            f"Check: {self.verdict}\n  {t['reason'].item()}\n"
            f"  typical of the simulations: p = {number('typical')}\n"
            f"  identity: {'not known' if np.isnan(t['spread']) else identity}\n"
            f"  posterior predictions: {predictions}"
        )

    def _repr_html_(self) -> str:
        return notebook(self)


def check(
    fit: Fit,
    x: Data,
    *,
    key: PRNGKey,
    simulations: Simulations | None = None,
    n: int = 500,
    draws: int = 1000,
    predictive: int = 200,
    statistics: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Check:
    """Whether to use the posterior of an observation; see `Fit.check`."""
    layout = fit.posterior.data.layout
    arrays, batched = layout.check(x)
    measure = Measure(layout, statistics)
    draws = as_count(draws, "draws, the number of posterior draws,")
    predictive = as_count(predictive, "predictive, the number of simulations at the posterior,")
    if statistics is not None and predictive == 0:
        raise ValueError(
            "statistics compare the observation with datasets simulated at its posterior, and "
            "predictive=0 asks for none: pass one of the two."
        )
    k_simulate, k_identity, k_predict = jax.random.split(key, 3)
    if simulations is None:
        simulations = simulate(fit.model, n, key=k_simulate)
    held_out = simulations.drop_invalid()
    if len(held_out) < 2 / RARE:
        raise ValueError(
            f"check needs {2 / RARE:.0f} held-out simulations or more with finite values, got "
            f"{len(held_out)}."
        )
    every = layout.unnamed(arrays)
    m = _length(arrays)
    table: dict[str, Any] = {"typical": _typical(fit, every, held_out.x)}
    weighed, found = fit.has_joint, None
    if weighed:
        found = fit.log_evidence(every, draws, key=k_identity)
        table |= {name: found[name].values for name in ("spread", "pareto_k", "ess")}
    else:
        table |= {name: np.full(m, np.nan) for name in ("spread", "pareto_k", "ess")}
    p_values, names, predictions = np.full(m, np.nan), np.full(m, "not simulated", object), None
    if predictive:
        for i in range(m):
            one, use = _entry(arrays, slice(i, i + 1)), weighed and table["pareto_k"][i] < HEAVY
            k_one = jax.random.fold_in(k_predict, i)
            predictions = _predict(fit, layout.unnamed(one), predictive, k_one, bool(use))
            p_values[i], names[i] = _misfit(measure, one, layout.named(predictions))
    table |= {"predictive": p_values, "statistic": names.astype(str)}
    rows = [{name: values[i] for name, values in table.items()} for i in range(m)]
    learned = fit.model.likelihood is None
    judged = [_judge(row, draws, weighed, learned) for row in rows]
    table |= {"verdict": [v for v, _ in judged], "reason": [r for _, r in judged]}
    dataset = xr.Dataset(
        {name: ("observation", np.asarray(values)) for name, values in table.items()},
        attrs={"draws": draws, "predictive": predictive},
    )
    if batched:
        return Check(dataset, evidence=found)
    kind: Any = "rows" if isinstance(layout.kind, Set) else "series"
    found = None if found is None else found.isel(observation=0, drop=True)
    return Check(dataset.isel(observation=0), x, predictions, kind, found)


def _judge(row: dict[str, Any], draws: int, weighed: bool, learned: bool) -> tuple[str, str]:
    """A verdict and its reason."""
    strange = row["typical"] < RARE
    like = f"The observation is unlike the simulations (p = {row['typical']:.3g})"
    misfit = row["predictive"] < RARE
    unlike = (
        f"Data simulated at the posterior do not look like the observation: its "
        f"{row['statistic']} is out of their range (p = {row['predictive']:.3g})"
    )
    if not weighed:
        limit = "there is no likelihood or no prior density to check the posterior against"
        if strange:
            advice = "give the model a likelihood, or simulate near it with cs.sequential"
            return MCMC, f"{like}, and {limit}: {advice}."
        if misfit:
            return MODEL, f"{unlike}, and {limit}."
        return AS_IS, f"The observation is like the simulations; {limit}."
    heavy = not row["pareto_k"] < HEAVY
    # Where nearly all values agree, weights have nothing to correct, and k judges far tails alone.
    if not row["spread"] <= WIDE_SPREAD and (heavy or row["ess"] < FEW * draws):
        why = (
            f"The learned posterior misses the true one: importance weights fail (Pareto k "
            f"{row['pareto_k']:.2f}, {row['ess']:.0f} effective draws of {draws})"
        )
        return MCMC, f"{why}." if not strange else f"{why}. {like}."
    if misfit:
        return MODEL, f"{unlike}. MCMC on the same model would not change that."
    if row["spread"] > WIDE_SPREAD:
        why = f"The identity's values differ by {row['spread']:.2f} nats; weights can correct that"
        return CORRECTED, f"{why}." if not strange else f"{why}. {like}."
    if strange:
        return CORRECTED, f"{like}, but the identity's values agree."
    tails = f" Only its far tails may be wrong (Pareto k {row['pareto_k']:.2f})." if heavy else ""
    return AS_IS, (
        f"The observation is like the simulations, and the identity's values agree to "
        f"{row['spread']:.2f} nats.{tails}{LEARNED if learned else ''}"
    )


LEARNED = " The likelihood is learned too, so their agreement is a weaker sign."


def _typical(fit: Fit, x: Data, held_out: Data) -> np.ndarray:
    """The p-values of datasets among held-out simulations, by their distance in summary space.

    Half of the simulations set the distance, the other half say how large it is by chance.
    """
    parts = (jax.tree.map(within_range, held_out), x)
    known, seen = (np.asarray(_summaries(fit.posterior, part), float) for part in parts)
    half = len(known) // 2
    centre, covariance = known[:half].mean(axis=0), np.atleast_2d(np.cov(known[:half].T))
    values, vectors = np.linalg.eigh(covariance)
    scale = np.sqrt(np.maximum(values, 1e-6 * max(values[-1], 1e-300)))
    distance = lambda s: (((s - centre) @ vectors / scale) ** 2).sum(axis=1)  # noqa: E731
    chance = distance(known[half:])
    return (1 + (chance >= distance(seen)[:, None]).sum(axis=1)) / (1 + len(chance))


@compiled
def _summaries(posterior: Posterior, x: Data):
    each = lambda x: posterior.summary(posterior.data.standardise(x))  # noqa: E731
    return jax.lax.map(each, x, batch_size=DATASETS_AT_ONCE)


def _predict(fit: Fit, x: Data, n: int, key: PRNGKey, corrected: bool) -> Data:
    """Data simulated at posterior draws of one observation, by the runs that did not fail."""
    k_draw, k_run = jax.random.split(key)
    draws = fit.sample(x, n, key=k_draw, method="corrected" if corrected else "amortized")
    theta = {name: draws[name].values[0, 0] for name in fit.model.prior.names}
    runs = simulate_at(fit.model, theta, key=k_run)
    good = ~runs.failures.mask
    return runs[good].x if good.any() else runs.x


def _misfit(measure: "Measure", x: Arrays, predictions: Arrays) -> tuple[float, str]:
    """The statistic that predictions miss by most, and how often chance misses by as much."""
    seen, made = measure(x), measure(predictions)
    observed = np.array([values[0] for values in seen.values()])
    values = np.stack([made[name] for name in seen], axis=1)
    values = values[finite_rows(values)]
    if not len(values) or not np.isfinite(observed).all():
        return 0.0, "finite values"
    loc, scale = values.mean(axis=0), values.std(axis=0)
    # A statistic that is the same in all predictions allows for rounding alone.
    scale = np.where(scale > 0, scale, np.maximum(1e-6 * np.abs(loc), np.finfo(float).tiny))
    far, chance = np.abs((observed - loc) / scale), np.abs((values - loc) / scale).max(axis=1)
    p = (1 + (chance >= far.max()).sum()) / (1 + len(chance))
    return float(p), list(seen)[int(far.argmax())]


@dataclasses.dataclass(frozen=True)
class Measure:
    """Named statistics of datasets along a leading axis.

    The user's own, or, of a vector, its entries; of rows and series, the mean, standard
    deviation, least and largest value of every channel, and of series how rough they are.
    """

    layout: Layout
    own: Mapping[str, Callable[[Any], Any]] | None

    def __post_init__(self):
        if self.own is None:
            return
        if not isinstance(self.own, Mapping):
            raise TypeError(
                f"statistics must be functions by name, got {type(self.own).__name__}: pass a "
                "dictionary."
            )
        for name, function in self.own.items():
            if not callable(function):
                raise TypeError(
                    f"The statistic {name!r} must be a function of one dataset, got "
                    f"{type(function).__name__}."
                )
        if not self.own:
            raise ValueError(
                "statistics names no statistic: pass at least one function by name, or leave it "
                "out for plain ones of every channel."
            )

    def __call__(self, x: Arrays) -> dict[str, np.ndarray]:
        if self.own is not None:
            every = [self.layout.unnamed(_entry(x, i)) for i in range(_length(x))]
            return {
                name: np.array([_one_number(function(one), name) for one in every])
                for name, function in self.own.items()
            }
        found: dict[str, np.ndarray] = {}
        for name in self.layout.data_names:
            values = np.asarray(x[name], float)
            if isinstance(self.layout.kind, Vector):
                flat = values.reshape(len(values), -1)
                found |= {label(name, (i,)): flat[:, i] for i in range(flat.shape[1])}
            else:
                found |= self._of_rows(name, values.reshape(*values.shape[:2], -1), x)
        return found

    def _of_rows(self, name: str, rows: np.ndarray, x: Arrays) -> dict[str, np.ndarray]:
        if self.layout.mask_name is not None:
            rows = np.where(np.asarray(x[self.layout.mask_name], bool)[..., None], rows, np.nan)
        found = {}
        for c in range(rows.shape[2]):
            channel, where = rows[..., c], label(name, (c,) if rows.shape[2] > 1 else ())
            found[f"mean of {where}"] = np.nanmean(channel, axis=1)
            found[f"standard deviation of {where}"] = np.nanstd(channel, axis=1)
            found[f"minimum of {where}"] = np.nanmin(channel, axis=1)
            found[f"maximum of {where}"] = np.nanmax(channel, axis=1)
            if isinstance(self.layout.kind, Series) and rows.shape[1] > 2:
                found[f"roughness of {where}"] = np.diff(channel, axis=1).std(axis=1)
        return found


def _one_number(value: Any, name: str) -> float:
    array = as_numbers(value, f"The statistic {name!r}")
    if array.size != 1:
        raise ValueError(
            f"The statistic {name!r} must return one number for one dataset, got the shape "
            f"{array.shape}: pass a function for each of them."
        )
    return float(array.reshape(()))


def _length(arrays: Arrays) -> int:
    return len(next(iter(arrays.values())))


def _entry(arrays: Arrays, index) -> Arrays:
    return {name: array[index] for name, array in arrays.items()}
