"""What the diagnostics catch and cost: every figure in docs/results/diagnostics.md."""

import argparse
import platform
import time
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import consilience as cs
from consilience.diagnostics.calibration import ecdf_bands
from consilience.diagnostics.check import AS_IS
from consilience.metrics import mmd

REPORT = Path(__file__).parent.parent / "docs" / "results" / "diagnostics.md"
ROWS = 10


def timing() -> list[str]:
    """The MMD of 100 pairs of 1,000 draws in two dimensions, compiled."""
    a, b = jax.random.normal(jax.random.key(0), (2, 100, 1000, 2))
    jax.block_until_ready(mmd(a, b))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(mmd(a, b))
        seconds.append(time.perf_counter() - start)
    return [
        "## MMD of 100 pairs of 1,000 draws in 2 dimensions\n",
        f"{np.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}, five times), "
        "after compilation.\n",
    ]


def bands() -> list[str]:
    """The share of uniform samples whose whole ECDF is inside the bands."""
    rng, points, shares = np.random.default_rng(0), np.arange(1, 100) / 100, []
    for n in (50, 100, 500, 2000):
        lower, upper = ecdf_bands(n, tuple(points))
        u = rng.uniform(size=(2000, n))
        ecdf = np.stack([(u < point).mean(axis=1) for point in points], axis=1)
        shares.append((n, ((ecdf >= lower) & (ecdf <= upper)).all(axis=1).mean()))
    table = [f"| {n} | {share:.1%} |" for n, share in shares]
    head = ["## Simultaneous 95 % bands of an ECDF, 2,000 uniform samples\n"]
    return [*head, "| numbers a sample | inside |", "|---|---|", *table, ""]


def conjugate(shift: float = 0.0, noise: float = 1.0) -> cs.Model:
    """Rows N(theta, 1) under theta ~ N(0, 1), two of each; or data that the model does not know."""
    return cs.Model(
        dist.Normal(0.0, 1.0).expand([2]).to_event(1),
        lambda key, t: shift + t + noise * jax.random.normal(key, (ROWS, 2)),
        lambda t, x: jnp.sum(dist.Normal(t, 1.0).log_prob(x)),
        data=cs.Set(),
    )


def verdicts() -> list[str]:
    """How often `check` holds observations of right and of other simulators."""
    model = conjugate()
    fit = cs.fit(model, cs.simulate(model, 512, key=jax.random.key(0)), key=jax.random.key(1))
    sources = {
        "the model itself": model,
        "shifted by 5": conjugate(shift=5.0),
        "noise twice as large": conjugate(noise=2.0),
    }
    rows = []
    for name, source in sources.items():
        x = cs.simulate(source, 200, key=jax.random.key(2)).x
        found = fit.check(x, key=jax.random.key(3)).verdict
        flagged = np.mean(found != AS_IS)
        values, counts = np.unique(found, return_counts=True)
        each = ", ".join(f"{c} {v}" for v, c in zip(values, counts, strict=True))
        rows.append(f"| {name} | {flagged:.1%} | {each} |")
    return [
        "## Verdicts on 200 observations\n",
        "Conjugate Gaussian, default recipe from 512 runs.\n",
        "| observations from | flagged | verdicts |",
        "|---|---|---|",
        *rows,
        "",
    ]


def regression(y=None):
    """A curve with unknown noise, whose bend is relative to its rise: the posterior is bent."""
    rise = numpyro.sample("rise", dist.LogNormal(0.0, 0.5))
    bend = numpyro.sample("bend", dist.Normal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.5))
    t = jnp.linspace(0.0, 1.0, ROWS)
    mean = rise * (t + bend * t**2)
    numpyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=y)


def chains() -> list[str]:
    """NUTS from amortized draws beside a long run of NumPyro's."""
    model = cs.Model.from_numpyro(regression, observed="y")
    sims = cs.simulate(model, 512, key=jax.random.key(0))
    fit = cs.fit(model, sims, key=jax.random.key(1))
    rows = []
    for i, observed in enumerate(cs.simulate(model, 3, key=jax.random.key(7)).x):
        draws = fit.sample(observed, 4000, key=jax.random.key(2), method="nuts")
        other = numpyro.infer.MCMC(
            numpyro.infer.NUTS(regression),
            num_warmup=1000,
            num_samples=5000,
            num_chains=4,
            chain_method="vectorized",
            progress_bar=False,
        )
        other.run(jax.random.key(5), jnp.asarray(observed), extra_fields=("num_steps",))
        long = other.get_samples(group_by_chain=True)
        spent = float(np.sum(other.get_extra_fields()["num_steps"]))
        summary = numpyro.diagnostics.summary(long)
        for name in draws:
            mine, theirs = draws[name].values, np.asarray(long[name])
            sd = theirs.std(axis=(0, 1))
            error = sd * np.sqrt(1 / draws[f"ess_{name}"].values + 1 / summary[name]["n_eff"])
            off = np.abs(mine.mean(axis=(0, 1)) - theirs.mean(axis=(0, 1))) / error
            ratio = mine.std(axis=(0, 1)) / sd
            rows.append(
                f"| {i} | {name} | {np.max(off):.1f} | {np.min(ratio):.2f} to "
                f"{np.max(ratio):.2f} | {np.max(draws[f'r_hat_{name}'].values):.3f} | "
                f"{np.min(draws[f'ess_{name}'].values):.0f} | {float(draws['gradients']):.0f} | "
                f"{np.min(summary[name]['n_eff']):.0f} | {spent:.0f} |"
            )
    return [
        "## NUTS from amortized draws\n",
        "A regression with a bent posterior, default recipe from 512 runs; 4 x 1,000 draws, "
        "beside NumPyro's 4 x 5,000. Means: the largest difference in standard errors; standard "
        "deviations: their ratio. Our gradients include the warm-up, NumPyro's do not.\n",
        "| data | parameter | means | standard deviations | R-hat | ESS | gradients | "
        "NumPyro's ESS | NumPyro's gradients |",
        "|" + "---|" * 9,
        *rows,
        "",
    ]


PARTS = {"timing": timing, "bands": bands, "verdicts": verdicts, "chains": chains}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    chosen = parser.parse_args().only
    text = [line for name in chosen for line in PARTS[name]()]
    where = f"{platform.machine()}, Python {platform.python_version()}, jax {jax.__version__}"
    text.append(f"Made by `make diagnostics` on {date.today()}: {where}.\n")
    print("\n".join(text))
    if len(chosen) == len(PARTS):
        REPORT.write_text("\n".join(["# Diagnostics\n", *text]))


if __name__ == "__main__":
    main()
