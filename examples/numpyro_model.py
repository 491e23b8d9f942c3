# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, name: python3}
# ---

# %% [markdown]
# # A NumPyro model, amortized: eight schools
#
# Eight schools coached pupils for a test. Each gives an estimated effect with its standard error
# (Rubin 1981, table 1). A hierarchical model says how far the true effects differ from school to
# school. Written for NumPyro as it stands, it becomes a `cs.Model` without further code, and its
# amortized posterior is held against NumPyro's own NUTS. As a script, `--quick` makes a rough run.

# %%
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import xarray as xr
from numpyro.infer import MCMC, NUTS

import consilience as cs
from consilience import plots
from consilience.metrics import c2st

QUICK = "--quick" in sys.argv
DRAWS = 400 if QUICK else 2000
OUT = Path("out")
OUT.mkdir(exist_ok=True)

effects = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
errors = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

# %% [markdown]
# ## The model
#
# Non-centred: schools differ from the mean `mu` by `tau * z`. NUTS likes that form better, and so
# does a flow, since `z` has the same scale whatever `tau` is.


# %%
def eight_schools(y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    tau = numpyro.sample("tau", dist.HalfNormal(10))
    with numpyro.plate("schools", 8):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + tau * z, errors), obs=y)


# %% [markdown]
# ## From the model to its posterior

# %%
model = cs.Model.from_numpyro(eight_schools, observed="y")
sims = cs.simulate(model, 128 if QUICK else 512, key=jax.random.key(0))
fit = cs.fit(model, sims, key=jax.random.key(1), epochs=60 if QUICK else None)
draws = fit.sample(effects, DRAWS, key=jax.random.key(2))
print(fit.check(effects, key=jax.random.key(3)))

# %% [markdown]
# That was all. The fit holds for any eight effects with these standard errors; these are the real
# ones. `check` needed no reference: it compares the learned posterior with prior and likelihood.
# Corrected draws are chosen from it by importance weights.

# %%
corrected = fit.sample(effects, DRAWS, key=jax.random.key(4), method="corrected")
print(f"Corrected: {float(corrected['ess']):.0f} effective draws of {4 * DRAWS}\n")

# %% [markdown]
# ## Against NUTS
#
# NumPyro's NUTS on the same function: no part of consilience, and no network. C2ST is how often a
# classifier tells the draws from those of NUTS: one half where it can but guess.

# %%
mcmc = MCMC(
    NUTS(eight_schools, target_accept_prob=0.95),
    num_warmup=500,
    num_samples=DRAWS,
    thinning=4,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
mcmc.run(jax.random.key(5), y=jnp.asarray(effects))


def table(named):
    """mu, log tau and the effects of the eight schools, a row for each draw."""
    mu, tau = named["mu"].reshape(-1, 1), named["tau"].reshape(-1, 1)
    return np.concatenate([mu, np.log(tau), mu + tau * named["z"].reshape(-1, 8)], axis=1)


columns = ["mu", "log tau", *(f"school {letter}" for letter in "ABCDEFGH")]
tables = {
    "NUTS": table(mcmc.get_samples()),
    "amortized": table({name: draws[name].values for name in draws}),
    "corrected": table({name: corrected[name].values for name in corrected}),
}
print(f"{'mean (sd)':<12}" + "".join(f"{name:>16}" for name in tables))
for i, column in enumerate(columns):
    cells = [f"{part[:, i].mean():.2f} ({part[:, i].std():.2f})" for part in tables.values()]
    print(f"{column:<12}" + "".join(f"{cell:>16}" for cell in cells))
told_apart = {
    name: float(c2st(tables[name], tables["NUTS"], key=jax.random.key(6)))
    for name in ("amortized", "corrected")
}
print(f"{'C2ST':<28}" + "".join(f"{value:>16.3f}" for value in told_apart.values()))

# %% [markdown]
# Means and standard deviations agree, and the classifier does little better than guess, with
# the amortized draws as they are; with the corrected ones it guesses. Amortized draws as points
# and bars, NUTS as outlines that hold 50 % and 95 % of its draws.

# %%
amortized, nuts = (
    xr.Dataset({columns[i]: (("chain", "draw"), tables[name][None, :, i]) for i in (0, 1, 2, 4)})
    for name in ("amortized", "NUTS")
)
axes = plots.pairs(amortized, reference=nuts)
axes[0, 0].figure.savefig(OUT / "numpyro_model.png", dpi=160)
axes[0, 0].figure
