"""Wall time and draws of plain neural posterior estimation in consilience.

Same measurements as the scripts in `peers`: seconds from building the networks to the end
of the fit (compilation included, imports excluded), and of drawing, cold and warm.
"""

import argparse
import time

import jax
import numpy as np

import consilience as cs
from consilience.tasks import gmm


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=gmm.PAPER_EPOCHS)
    parser.add_argument("--batch", type=int, default=gmm.PAPER_BATCH)
    args = parser.parse_args()

    with np.load(args.data) as data:
        sims, x_test = cs.Simulations(data["theta"], data["x"]), data["x_test"]
    model, key = gmm.model(), jax.random.key(args.seed)

    start = time.perf_counter()
    fit = cs.fit(
        model,
        sims,
        key=key,
        self_consistency=False,
        posterior=gmm.PAPER_POSTERIOR,
        summary=gmm.PAPER_SUMMARY,
        epochs=args.epochs,
        batch_size=args.batch,
        validation=0.0,
        progress=False,
    )
    train_seconds = time.perf_counter() - start

    sample_seconds = []
    for _ in range(2):
        start = time.perf_counter()
        draws = fit.sample(x_test, 1000, key=key)
        sample_seconds.append(time.perf_counter() - start)

    cold, warm = sample_seconds
    version = f"consilience {cs.__version__}"
    np.savez(
        args.out,
        draws=draws["theta"].values[:, 0],
        train_seconds=train_seconds,
        sample_seconds_cold=cold,
        sample_seconds=warm,
        version=version,
    )
    print(f"{version}: train {train_seconds:.2f} s, sample {cold:.2f} s cold, {warm:.2f} s warm")


if __name__ == "__main__":
    main()
