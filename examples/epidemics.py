# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, name: python3}
# ---

# %% [markdown]
# # Which epidemic? Comparing models by their evidence
#
# In January 1978 influenza went through a boarding school of 763 boys; the number in bed is known
# for 14 days (British Medical Journal, 4 March 1978, p. 587). Were boys infectious at once (SIR),
# or only after a time of incubation (SEIR)? Each model is amortized once; after that, comparing
# them costs no simulation, for the school and for hundreds of simulated outbreaks, which show how
# far the answer can be trusted. As a script, `--quick` makes a rough run.

# %%
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

import consilience as cs
from consilience.core.panels import INK, STYLES, legend, panels
from consilience.tasks.ode import solve

QUICK = "--quick" in sys.argv
OUT = Path("out")
OUT.mkdir(exist_ok=True)

BOYS = 763.0
in_bed = np.array([3, 8, 26, 76, 225, 298, 258, 233, 189, 128, 68, 29, 14, 4], np.float32)

# %% [markdown]
# ## Two models
#
# Both begin with one boy ill. Counts scatter more than those of a Poisson distribution: they are
# negative binomial, with a concentration to be learned too. Rates are per day. SEIR has one more,
# the rate at which the infected fall ill, and its contacts are more frequent for that, so that
# both priors expect outbreaks of about the same size. The data are log(1 + count): networks see
# three orders of magnitude alike.


# %%
def expected(theta):
    """The boys in bed on each day."""

    def slope(state):
        susceptible, exposed, ill = state
        infections = theta["contact"] * susceptible * ill / BOYS
        onset = theta["onset"] * exposed if "onset" in theta else infections
        return jnp.stack([-infections, infections - onset, onset - theta["recovery"] * ill])

    start = jnp.array([BOYS - 1.0, 0.0, 1.0])
    ill = solve(slope, start, interval=1.0, points=len(in_bed), substeps=4)[:, 2]
    return jnp.clip(ill, 1e-3, BOYS)


def counts(theta):
    return dist.NegativeBinomial2(expected(theta), theta["concentration"])


def simulator(key, theta):
    return jnp.log1p(counts(theta).sample(key))


def log_likelihood(theta, x):
    return counts(theta).log_prob(jnp.round(jnp.expm1(x))).sum()


sir = {
    "contact": dist.LogNormal(np.log(1.7), 0.4),
    "recovery": dist.LogNormal(np.log(0.5), 0.4),
    "concentration": dist.LogNormal(np.log(10.0), 0.5),
}
priors = {
    "SIR": sir,
    "SEIR": {
        **sir,
        "contact": dist.LogNormal(np.log(3.0), 0.4),
        "onset": dist.LogNormal(np.log(1.0), 0.4),
    },
}
models = {name: cs.Model(prior, simulator, log_likelihood) for name, prior in priors.items()}

# %% [markdown]
# ## Two fits
#
# Everything after this is amortized.

# %%
n = 128 if QUICK else 512
fits = {}
for name, model in models.items():
    sims = cs.simulate(model, n, key=jax.random.key(0))
    fits[name] = cs.fit(model, sims, key=jax.random.key(1), epochs=25 if QUICK else None)

# %% [markdown]
# ## Does the right model win?
#
# New outbreaks from either model, each compared under equal odds. The evidence of SEIR already pays
# for its further parameter: a model that could explain more data gives less to each.

# %%
outbreaks = [
    cs.simulate(model, 10 if QUICK else 100, key=jax.random.key(2)).x for model in models.values()
]
table = cs.compare(fits, np.concatenate(outbreaks), 500, key=jax.random.key(3))
true = np.repeat(list(models), len(outbreaks[0]))
factor = table["log_bayes_factor"].sel(model="SEIR", versus="SIR").values
won = np.where(factor > 0, "SEIR", "SIR") == true
sure = np.abs(factor) > np.log(10)
for name in models:
    right = won[true == name]
    print(f"{len(right)} outbreaks of {name}: {name} wins {right.mean():.0%} of them")
print(f"Bayes factors above 10: {sure.mean():.0%} of all, {won[sure].mean():.0%} of these right")
trusted = (table["pareto_k"] < 0.7).mean()
print(f"Evidences with a Pareto k below 0.7: {float(trusted):.0%}\n")

# %% [markdown]
# Four in five are told right, and those with a Bayes factor above ten nearly always. The others
# are hard to tell: fast onset looks like none. The bridge estimates that `compare` takes rest on
# importance weights; a Pareto k below 0.7 says that they can be trusted, as most can.
#
# ## The school
#
# `check` says how far to trust the posteriors that the comparison rests on. Where it asks for
# corrected draws, its predictions are made from them already.

# %%
school = cs.compare(fits, np.log1p(in_bed), key=jax.random.key(4))
reports = {name: fit.check(np.log1p(in_bed), key=jax.random.key(5)) for name, fit in fits.items()}
for name, report in reports.items():
    row = school.sel(model=name)
    print(
        f"{name}: log evidence {float(row['log_evidence']):.2f} "
        f"({float(row['lower']):.2f} to {float(row['upper']):.2f}), "
        f"probability {float(row['probability']):.3f}, check: {report.verdict}"
    )
observed = float(school["log_bayes_factor"].sel(model="SEIR", versus="SIR"))
print(f"Bayes factor of SEIR against SIR: {np.exp(observed):.1f}")

# %% [markdown]
# Incubation it was, most likely. On the left what both models predict from the posterior of the
# school; on the right where its Bayes factor (dashed) lies among those of outbreaks whose model is
# known: seldom does SIR get there.

# %%
axes = panels(["", ""], "", "", size=(3.6, 2.8))
days = np.arange(1, len(in_bed) + 1)
bins = np.linspace(-8, 8, 33)
for name, (color, line, _) in zip(models, STYLES, strict=False):
    low, middle, high = np.quantile(
        np.expm1(reports[name].predictions), (0.025, 0.5, 0.975), axis=0
    )
    axes[0].fill_between(days, low, high, color=color, alpha=0.2, lw=0)
    axes[0].plot(days, middle, color=color, ls=line, label=name)
    values = np.clip(factor[true == name], bins[0], bins[-1])
    axes[1].hist(values, bins, color=color, alpha=0.35)
    axes[1].hist(values, bins, color=color, ls=line, histtype="step")
axes[0].plot(days, in_bed, "o", color=INK, ms=4, label="the school")
axes[0].set(xlabel="day", ylabel="boys in bed: median, 95 %")
axes[1].axvline(observed, color=INK, ls="--")
axes[1].set(xlabel="log Bayes factor, SEIR against SIR", ylabel="simulated outbreaks")
legend(axes)
axes[0].figure.savefig(OUT / "epidemics.png", dpi=160)
axes[0].figure
