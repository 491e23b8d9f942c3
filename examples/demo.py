"""Train a neural posterior on the paper's Gaussian mixture and hold it against the exact one.

Two symmetric components, ten rows a dataset: the posterior has two modes. Prints how close
the learned posterior comes on new datasets, and saves a picture of one to out/demo.png.
"""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import consilience as cs
from consilience.metrics import mmd
from consilience.plots import side_by_side
from consilience.tasks import gmm

SIMULATIONS, TESTS = 1024, 20
OUT = Path("out") / "demo.png"


def main():
    keys = jax.random.split(jax.random.key(2024), 5)
    model = gmm.model()
    print(model, end="\n\n")

    start = time.perf_counter()
    sims = cs.simulate(model, SIMULATIONS, key=keys[0])
    fit = cs.fit(
        model,
        sims,
        key=keys[1],
        posterior=gmm.PAPER_POSTERIOR,
        summary=gmm.PAPER_SUMMARY,
        epochs=gmm.PAPER_EPOCHS,
        batch_size=gmm.PAPER_BATCH,
        validation=0.0,
    )
    print(fit)
    print(f"  {time.perf_counter() - start:.1f} s with simulations and compilation\n")

    tests = cs.simulate(model, TESTS, key=keys[2])
    learned = fit.sample(tests.x, 1000, key=keys[3])["theta"].values[:, 0]
    exact, again = gmm.exact_sample(tests.x, keys[4]), gmm.exact_sample(tests.x, keys[3])
    scores = {
        "prior": mmd(jax.random.normal(keys[0], learned.shape), exact),
        "learned posterior": mmd(jnp.asarray(learned), exact),
        "a second exact sample": mmd(again, exact),
    }
    print(f"Distance to 1,000 exact posterior draws (squared MMD), {TESTS} new datasets:\n")
    print(f"{'':24}{'mean':>8}{'worst':>8}")
    for name, values in scores.items():
        print(f"{name:24}{values.mean():8.3f}{values.max():8.3f}")

    truth = tests.theta["theta"][0]
    print("\nFirst dataset, the mode on the side of the true theta (mean and sd):\n")
    print(f"{'':24}{'theta_1':>14}{'theta_2':>14}")
    for name, draws in {"learned": learned[0], "exact": np.asarray(exact[0])}.items():
        near = draws[draws @ truth > 0]
        numbers = [f"{near[:, i].mean():8.2f} {near[:, i].std():5.2f}" for i in (0, 1)]
        print(f"{name:24}{''.join(numbers)}")

    axes = side_by_side({"learned": learned[0], "exact": exact[0]}, truth=truth)
    OUT.parent.mkdir(exist_ok=True)
    axes[0].figure.savefig(OUT, dpi=160)
    print(f"\nThe posterior of the first dataset, learned beside exact: {OUT}")


if __name__ == "__main__":
    main()
