"""Wall time and draws of plain neural posterior estimation in BayesFlow.

Trains on the simulations in ``--data`` and saves to ``--out`` the posterior
draws for its test sets, the seconds from building the networks to the end of
the fit (compilation included, imports excluded), and the seconds of drawing,
cold and warm.
"""

import argparse
import os
import time

os.environ["KERAS_BACKEND"] = "jax"

import bayesflow as bf
import keras
import numpy as np


def train(theta, x, epochs, batch):
    """Fit a DeepSet and a spline coupling flow to all of the simulations."""
    steps = epochs * -(-len(theta) // batch)
    rate = keras.optimizers.schedules.CosineDecay(1e-3, decay_steps=steps)
    workflow = bf.BasicWorkflow(
        inference_variables="theta",
        summary_variables="x",
        summary_network=bf.networks.DeepSet(summary_dim=4),
        inference_network=bf.networks.CouplingFlow(
            depth=4,
            transform="spline",
            subnet_kwargs={"widths": (128, 128)},
            base_distribution=bf.distributions.DiagonalStudentT(df=100),
        ),
        optimizer=keras.optimizers.Adam(rate, clipnorm=1.5),
    )
    workflow.fit_offline({"theta": theta, "x": x}, epochs=epochs, batch_size=batch, verbose=0)
    return workflow


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=35)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()

    with np.load(args.data) as data:
        theta, x, x_test = (data[k].astype(np.float32) for k in ("theta", "x", "x_test"))
    keras.utils.set_random_seed(args.seed)

    start = time.perf_counter()
    workflow = train(theta, x, args.epochs, args.batch)
    train_seconds = time.perf_counter() - start

    sample_seconds = []
    for _ in range(2):
        start = time.perf_counter()
        draws = workflow.sample(num_samples=1000, conditions={"x": x_test})["theta"]
        sample_seconds.append(time.perf_counter() - start)

    cold, warm = sample_seconds
    version = f"bayesflow {bf.__version__}"
    np.savez(
        args.out,
        draws=draws,
        train_seconds=train_seconds,
        sample_seconds_cold=cold,
        sample_seconds=warm,
        version=version,
    )
    print(f"{version}: train {train_seconds:.2f} s, sample {cold:.2f} s cold, {warm:.2f} s warm")


if __name__ == "__main__":
    main()
