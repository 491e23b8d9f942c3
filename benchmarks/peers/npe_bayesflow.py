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
    ends = Ends()
    workflow.fit_offline(
        {"theta": theta, "x": x}, epochs=epochs, batch_size=batch, verbose=0, callbacks=[ends]
    )
    return workflow, ends.times


class Ends(keras.callbacks.Callback):
    """When each epoch ended."""

    def __init__(self):
        super().__init__()
        self.times = []

    def on_epoch_end(self, epoch, logs=None):
        self.times.append(time.perf_counter())


def median(run, times=5):
    def once():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return float(np.median([once() for _ in range(times)]))


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
    workflow, ends = train(theta, x, args.epochs, args.batch)
    train_seconds = time.perf_counter() - start
    # The first epochs compile.
    step_seconds = float(np.median(np.diff(ends[2:]))) / -(-len(theta) // args.batch)

    sample_seconds = []
    for _ in range(2):
        start = time.perf_counter()
        draws = workflow.sample(num_samples=1000, conditions={"x": x_test})["theta"]
        sample_seconds.append(time.perf_counter() - start)

    one = {"x": x_test[:1]}
    workflow.sample(num_samples=1000, conditions=one)
    latency = median(lambda: workflow.sample(num_samples=1000, conditions=one))
    # Of 100,000 draws: 1,000 for each test set.
    every = {"theta": draws.reshape(-1, 2), "x": np.repeat(x_test, 1000, axis=0)}
    workflow.log_prob(every)
    densities = median(lambda: workflow.log_prob(every), 1)

    cold, warm = sample_seconds
    version = f"bayesflow {bf.__version__}"
    np.savez(
        args.out,
        draws=draws,
        train_seconds=train_seconds,
        sample_seconds_cold=cold,
        sample_seconds=warm,
        step_seconds=step_seconds,
        latency_seconds=latency,
        density_seconds=densities,
        version=version,
    )
    print(f"{version}: train {train_seconds:.2f} s, sample {cold:.2f} s cold, {warm:.2f} s warm")


if __name__ == "__main__":
    main()
