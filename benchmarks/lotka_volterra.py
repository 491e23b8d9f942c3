"""Lotka-Volterra by SciPy, as a user without a likelihood brings it: 300 runs, default settings.

Four rates with log-normal priors; both populations at ten times, with log-normal
noise (the task of Lueckmann et al. 2021, arXiv:2101.04653). Prints, for each seed, the mean log
density of 500 new runs by the default and by NPE alone, and how far coverage of central intervals
is from their level: the mean over levels from 5 to 95 %, for each parameter, and of joint regions.
The runs of seed s have `jax.random.key(s)`, the new ones `jax.random.key(999)`.

    python benchmarks/lotka_volterra.py --seeds 3
"""

import argparse
import time

import jax
import numpy as np
import numpyro.distributions as dist
from scipy.integrate import solve_ivp

import consilience as cs

RUNS, TESTS, TEST_KEY, DRAWS = 300, 500, 999, 500
TIMES = np.linspace(0.0, 20.0, 11)[1:]
PRIOR = {
    "alpha": dist.LogNormal(-0.125, 0.5),
    "beta": dist.LogNormal(-3.0, 0.5),
    "gamma": dist.LogNormal(-0.125, 0.5),
    "delta": dist.LogNormal(-3.0, 0.5),
}


def simulate(rng, alpha, beta, gamma, delta):
    """Prey and predators at ten times, of the shape (10, 2)."""

    def slope(_, y):
        return [alpha * y[0] - beta * y[0] * y[1], delta * y[0] * y[1] - gamma * y[1]]

    solved = solve_ivp(slope, (0.0, TIMES[-1]), [30.0, 1.0], t_eval=TIMES, method="LSODA")
    sizes = np.maximum(solved.y.T, 1e-6)
    return np.exp(np.log(sizes) + 0.1 * rng.standard_normal(sizes.shape))


def coverage_errors(fit: cs.Fit, tests: cs.Simulations) -> tuple[dict[str, float], float]:
    """The mean distance of coverage from its level, of each parameter and jointly."""
    levels = np.arange(0.05, 1.0, 0.05)
    draws = fit.sample(tests.x, DRAWS, key=jax.random.key(7)).isel(chain=0)
    errors = {}
    for name in PRIOR:
        rank = np.mean(draws[name].values < tests.theta[name][:, None], axis=1)
        inside = 2 * np.abs(rank - 0.5)
        errors[name] = float(np.mean(np.abs([np.mean(inside <= a) - a for a in levels])))
    # The region of highest density that just holds the truth.
    own = fit.log_prob({n: v[:, None] for n, v in tests.theta.items()}, tests.x)
    mass = np.mean(fit.log_prob(draws, tests.x) > own, axis=1)
    return errors, float(np.mean(np.abs([np.mean(mass <= a) - a for a in levels])))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    model = cs.Model(PRIOR, cs.external(simulate))
    tests = cs.simulate(model, TESTS, key=jax.random.key(TEST_KEY), progress=False)
    for seed in range(args.seeds):
        sims = cs.simulate(model, RUNS, key=jax.random.key(seed), progress=False)
        for name, settings in {"default": {}, "NPE": {"self_consistency": False}}.items():
            start = time.perf_counter()
            key = jax.random.key(seed)
            fit = cs.fit(model, sims, key=key, progress=False, **settings)
            seconds = time.perf_counter() - start
            one_each = {n: v[:, None] for n, v in tests.theta.items()}
            density = np.mean(fit.log_prob(one_each, tests.x))
            each, joint = coverage_errors(fit, tests)
            shown = ", ".join(f"{n} {error:.3f}" for n, error in each.items())
            print(f"seed {seed}, {name}: log density {density:.3f}, {seconds:.0f} s")
            print(f"  coverage error: {shown}; joint {joint:.3f}")
            print(fit.history.table(), flush=True)


if __name__ == "__main__":
    main()
