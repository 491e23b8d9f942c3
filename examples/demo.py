"""Train posteriors on the paper's Gaussian mixture and hold them against the exact one.

Two symmetric components, ten rows a dataset: the posterior has two modes. From the same 128
simulations, maximum likelihood alone and self-consistency. Prints how close each comes on new
datasets, and saves a picture of one to out/demo.png.
"""

import time
from pathlib import Path

import jax
import jax.numpy as jnp

import consilience as cs
from consilience.metrics import mmd
from consilience.plots import side_by_side
from consilience.tasks import gmm

SIMULATIONS, TESTS = 128, 20
OUT = Path("out") / "demo.png"


def main():
    keys = jax.random.split(jax.random.key(2024), 5)
    model = gmm.model()
    print(model, end="\n\n")

    sims = cs.simulate(model, SIMULATIONS, key=keys[0])
    tests = cs.simulate(model, TESTS, key=keys[2])
    exact, again = gmm.exact_sample(tests.x, keys[4]), gmm.exact_sample(tests.x, keys[3])
    learned = {}
    for name, choice in {"maximum likelihood": False, "self-consistent": None}.items():
        start = time.perf_counter()
        fit = cs.fit(model, sims, key=keys[1], self_consistency=choice)
        print(f"{name}, {time.perf_counter() - start:.1f} s with compilation\n{fit}\n")
        learned[name] = fit.sample(tests.x, 1000, key=keys[3])["theta"].values[:, 0]

    scores = {
        "prior": mmd(jax.random.normal(keys[0], exact.shape), exact),
        **{name: mmd(jnp.asarray(draws), exact) for name, draws in learned.items()},
        "a second exact sample": mmd(again, exact),
    }
    print(f"Distance to 1,000 exact posterior draws (squared MMD), {TESTS} new datasets:\n")
    print(f"{'':24}{'mean':>8}{'worst':>8}")
    for name, values in scores.items():
        print(f"{name:24}{values.mean():8.3f}{values.max():8.3f}")

    evidence = fit.log_evidence(tests.x[0], key=keys[3]).sel({"estimator": "bridge"})
    numbers = [float(evidence[name]) for name in ("log_evidence", "lower", "upper")]
    print("\nLog evidence of the first dataset: {:.2f}, from {:.2f} to {:.2f}".format(*numbers))

    truth = tests.theta["theta"][0]
    panels = {name: draws[0] for name, draws in learned.items()}
    axes = side_by_side({**panels, "exact": exact[0]}, truth=truth)
    OUT.parent.mkdir(exist_ok=True)
    axes[0].figure.savefig(OUT, dpi=160)
    print(f"\nThe posterior of the first dataset, learned and exact: {OUT}")


if __name__ == "__main__":
    main()
