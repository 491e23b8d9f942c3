# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, name: python3}
# ---

# %% [markdown]
# # A program that is a black box
#
# A clinic with one doctor, as a program that somebody else has written: it takes parameters, prints
# numbers, and gives up when the waiting room is full. There is no likelihood, and there are no
# gradients. Runs go into a store, failed ones too; posterior and likelihood are learned from them.
# As a script, `--quick` makes a rough run.

# %%
import shlex
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import numpyro.distributions as dist

import consilience as cs
from consilience import plots

QUICK = "--quick" in sys.argv
OUT = Path("out")
OUT.mkdir(exist_ok=True)

# %% [markdown]
# ## The program
#
# Fifty patients arrive at random; what the doctor needs for each follows a gamma distribution. It
# prints the mean wait, the longest wait, and three quantiles of the times between departures.

# %%
PROGRAM = """
import random, sys

arrivals, service, variation, seed = map(float, sys.argv[1:])
draw = random.Random(int(seed))
shape = variation**-2

now, waits, departures = 0.0, [], []
for patient in range(50):
    now += draw.expovariate(arrivals / 60)
    if sum(time > now for time in departures) > 12:
        sys.exit("the waiting room is full")
    begin = max([now, *departures[-1:]])
    departures.append(begin + draw.gammavariate(shape, service / shape))
    waits.append(begin - now)
gaps = sorted(b - a for a, b in zip(departures, departures[1:]))
print(sum(waits) / 50, max(waits), gaps[5], gaps[24], gaps[44])
"""
temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
program = folder / "clinic.py"
program.write_text(PROGRAM)

# %% [markdown]
# ## The model
#
# Names in braces are filled in for each run.

# %%
prior = {
    "arrivals": dist.Uniform(2.0, 12.0),  # an hour
    "service": dist.Uniform(2.0, 12.0),  # minutes
    "variation": dist.Uniform(0.2, 1.0),  # standard deviation over mean
}
python, script = shlex.quote(sys.executable), shlex.quote(str(program))
line = f"{python} -I -S {script} {{arrivals}} {{service}} {{variation}} {{seed}}"
model = cs.Model(prior, cs.command(line), data=cs.Vector())

# %% [markdown]
# ## A campaign that was stopped
#
# The first call stands for a campaign that ended early. The second is the same call with the
# number that is wanted: it finds what is in the store, and makes the rest.

# %%
train, held_out = (100, 280) if QUICK else (700, 300)
settings = {"store": folder / "clinic.zarr", "timeout": 10.0, "progress": False}
before = cs.simulate(model, 50, key=jax.random.key(0), **settings)
sims = cs.simulate(model, train + held_out, key=jax.random.key(0), **settings)
print(f"{len(before)} runs were there, {len(sims)} are there now")
print(sims.failures)

# %% [markdown]
# Failures have a meaning here: many arrivals and long consultations fill the room. `drop_invalid`
# takes the failed runs out, and `fit` learns from them how probable a failure is at which
# parameters, a factor that belongs to the likelihood of a day that went well.

# %%
fit = cs.fit(
    model,
    sims[:train].drop_invalid(),
    key=jax.random.key(1),
    epochs=4 if QUICK else 75,
)
unseen = sims[train:].drop_invalid()
calibration = cs.calibrate(fit, simulations=unseen, key=jax.random.key(2))
print(calibration)

# %% [markdown]
# The held-out runs judge the fit at no further cost. Coverage is off by a few percent: training
# takes an eighth of the default steps, to be quick. The joint density shows what that leaves.
#
# ## A day at the clinic
#
# Made by the program itself at parameters that we know. `check` says what to do with its posterior,
# and the advice is to correct the draws by importance weights, here with the learned likelihood.

# %%
# A day picked for being typical: on a busier one (key 3) the interval of arrivals misses the truth.
truth = {"arrivals": 6.0, "service": 7.0, "variation": 0.5}
settings = {"key": jax.random.key(13), "progress": False}
day = cs.simulate_at(model, {name: [value] for name, value in truth.items()}, **settings).x[0]
report = fit.check(day, simulations=unseen, key=jax.random.key(4))
print(report)
draws = fit.sample(day, 2000, key=jax.random.key(5), method="corrected")
for name, value in truth.items():
    low, middle, high = np.quantile(draws[name], (0.025, 0.5, 0.975))
    print(f"{name:<10}{middle:6.2f}, 95 % from {low:.2f} to {high:.2f}; the truth is {value}")

# %%
axes = plots.pairs(draws, truth=truth)
axes[0, 0].figure.savefig(OUT / "blackbox.png", dpi=160)
axes[0, 0].figure
