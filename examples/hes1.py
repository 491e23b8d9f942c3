# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, name: python3}
# ---

# %% [markdown]
# # From a simulator to a verdict: Hes1
#
# The messenger RNA of the protein Hes1 rises and falls in cells: eight measurements, half an hour
# apart ([Silk et al. 2011](https://doi.org/10.1038/ncomms1496)), and a model by three differential
# equations with four unknown parameters. We pretend that there is nothing but a simulator, and
# that 512 runs are all we can pay for. The likelihood is learned jointly with the posterior. As
# a script, `--quick` makes a rough run.

# %%
import sys
from pathlib import Path

import jax
import numpy as np

import consilience as cs
from consilience import plots
from consilience.tasks import hes1

QUICK = "--quick" in sys.argv
OUT = Path("out")
OUT.mkdir(exist_ok=True)

# %% [markdown]
# ## Simulate and fit
#
# The default recipe takes twelve thousand steps where a likelihood is learned too. Here it is given
# a fifth of them, to be quick; leave `epochs` out where the answer matters.

# %%
model = hes1.model()
print(model)
sims = cs.simulate(model, 128 if QUICK else 512, key=jax.random.key(0))
fit = cs.fit(model, sims, key=jax.random.key(1), epochs=4 if QUICK else 150)
print(fit)

# %% [markdown]
# ## Calibrate
#
# Parameters that made new simulations are ranked among posterior draws. If the posterior is right,
# ranks are uniform, and each curve stays inside its band.

# %%
calibration = cs.calibrate(fit, n=100 if QUICK else 500, key=jax.random.key(2))
print(calibration)
axes = plots.ecdf_difference(calibration.table)
axes[0].figure.savefig(OUT / "hes1-calibration.png", dpi=160)
axes[0].figure

# %% [markdown]
# All curves stay inside, that of the joint density too, and coverage is off by one to three
# percent.
#
# ## The real data
#
# Calibration judges all data together. `check` asks about these eight measurements. Are they like
# the simulations, do the values of the identity agree there, and do data simulated at the posterior
# look like them?

# %%
report = fit.check(hes1.OBSERVED, key=jax.random.key(3))
print(report)
axes = report.plot()
axes[0].set_xticks(range(hes1.POINTS), range(30, 30 * hes1.POINTS + 1, 30))
axes[0].set(xlabel="minutes", ylabel="messenger RNA")
axes[0].figure.savefig(OUT / "hes1-predictive.png", dpi=160)
axes[0].figure

# %% [markdown]
# ## The posterior
#
# The verdict is to correct the draws by importance weights, so we do; prior and learned likelihood
# are all it takes. All parameters are positive, and are shown as logarithms: `nu` and `k1` are
# known better together than alone.

# %%
draws = fit.sample(hes1.OBSERVED, 2000, key=jax.random.key(4), method="corrected")
print(f"\nCorrected: {float(draws['ess']):.0f} effective draws of 8000")
for name in hes1.NAMES:
    low, middle, high = np.quantile(draws[name], (0.025, 0.5, 0.975))
    print(f"{name:<3} {middle:8.4f}, 95 % from {low:.4f} to {high:.4f}")
logs = np.log(draws).rename({name: f"log {name}" for name in hes1.NAMES})
axes = plots.pairs(logs)
axes[0, 0].figure.savefig(OUT / "hes1-posterior.png", dpi=160)
axes[0, 0].figure
