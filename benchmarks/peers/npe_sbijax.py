"""Wall time and draws of plain neural posterior estimation in sbijax.

Trains on the simulations in ``--data`` and saves to ``--out`` the posterior
draws for its test sets, the seconds from building the networks to the end of
the fit (compilation included, imports excluded), the seconds of drawing, cold
and warm, and the seconds of one optimisation step.

sbijax has a spline coupling flow (``make_spf``) but no DeepSet and no argument
for an embedding: a haiku module here joins the two and trains them together.

``NPE.fit`` returns the weights of the best validation loss, and compiles that
loss anew every epoch. Here the loss is replaced by one that falls every epoch,
and the validation set is empty: every simulation, every epoch, the last
weights, and a step that is compiled once.

``NPE.sample_posterior`` takes one test set and runs the network uncompiled, 200
draws at a time. Here the network draws for all test sets in one compiled call;
the seconds of ``sample_posterior`` for one test set are saved beside it.
"""

import argparse
import os
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sbijax
from sbijax.nn import make_spf
from tensorflow_probability.substrates.jax import distributions as tfd

BINS, BOUND = 8, 5.0


class LastWeights(sbijax.NPE):
    """NPE that never stops early, keeps its last weights, and notes the end of each epoch."""

    def _validation_loss(self, rng_key, params, val_iter, n_atoms):
        # No extra wait: fit itself reads the training loss here.
        jax.block_until_ready(params)
        self.ends = [*getattr(self, "ends", []), time.perf_counter()]
        return -float(len(self.ends))


def summary(x):
    """A DeepSet that maps flattened rows of two numbers to four."""
    rows = hk.nets.MLP((64, 64), name="rows", activate_final=True)(x.reshape(len(x), -1, 2))
    return hk.nets.MLP((64, 64, 4), name="head")(rows.mean(axis=1))


def network():
    """The DeepSet and eight spline layers, each of one half of theta."""
    sizes = {"n_layers": 8, "hidden_sizes": (128, 128), "n_params": 3 * BINS + 1}
    flow = make_spf(2, -BOUND, BOUND, **sizes)

    @hk.transform
    def estimator(method, x, **kwargs):
        inputs = {"method": method, "x": summary(x), **kwargs}
        params = hk.lift(flow.init, name="flow")(hk.maybe_next_rng_key(), **inputs)
        return flow.apply(params, hk.maybe_next_rng_key(), **inputs)

    return estimator


def prior():
    return tfd.JointDistributionNamed({"theta": tfd.MultivariateNormalDiag(jnp.zeros(2))})


def train(key, theta, x, epochs, batch):
    """Fit the networks to all of the simulations."""
    # Theta is on the whole line: no bijection of it. No simulator: the data are given.
    model = LastWeights((prior, None), network(), use_event_space_bijections=False)
    params, _ = model.fit(
        key,
        {"y": x, "theta": {"theta": theta}},
        optimizer=optax.adam(1e-3),
        n_iter=epochs,
        batch_size=batch,
        percentage_data_as_validation_set=0.0,
    )
    return model, jax.block_until_ready(params)


def sampler(model):
    """A compiled function that draws for many test sets from the network of ``model``."""

    @jax.jit
    def sample(key, params, x):
        options = {"method": "sample", "sample_shape": (1000 * len(x),)}
        draws = model.model.apply(params, key, x=jnp.repeat(x, 1000, axis=0), **options)
        return draws.reshape(len(x), 1000, -1)

    return sample


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
    x, x_test = x.reshape(len(x), -1), x_test.reshape(len(x_test), -1)
    key = jax.random.PRNGKey(args.seed)

    start = time.perf_counter()
    model, params = train(key, theta, x, args.epochs, args.batch)
    train_seconds = time.perf_counter() - start

    sample = sampler(model)
    sample_seconds = []
    for _ in range(2):
        start = time.perf_counter()
        draws = np.asarray(sample(key, params, x_test))
        sample_seconds.append(time.perf_counter() - start)

    # The library's own call, for one test set, warm.
    for _ in range(2):
        start = time.perf_counter()
        model.sample_posterior(key, params, x_test[0], n_samples=1000)
        sample_posterior_seconds = time.perf_counter() - start

    def median(run, times=5):
        run()
        found = []
        for _ in range(times):
            start = time.perf_counter()
            jax.block_until_ready(run())
            found.append(time.perf_counter() - start)
        return float(np.median(found))

    latency = median(lambda: sample(key, params, x_test[:1]))
    # Of 100,000 draws: 1,000 for each test set.
    values, given = draws.reshape(-1, 2), np.repeat(x_test, 1000, axis=0)
    evaluate = jax.jit(
        lambda params, y, x: model.model.apply(params, None, method="log_prob", y=y, x=x)
    )
    densities = median(lambda: evaluate(params, values, given), 3)

    # Every fit compiles its step in the first epoch; the ten epochs after it are warm.
    again, _ = train(key, theta, x, 11, args.batch)
    step_seconds = (again.ends[-1] - again.ends[0]) / (10 * -(-len(theta) // args.batch))

    cold, warm = sample_seconds
    version = f"sbijax {sbijax.__version__}"
    np.savez(
        args.out,
        draws=draws,
        train_seconds=train_seconds,
        sample_seconds_cold=cold,
        sample_seconds=warm,
        sample_posterior_seconds=sample_posterior_seconds,
        step_seconds=step_seconds,
        latency_seconds=latency,
        density_seconds=densities,
        version=version,
    )
    print(f"{version}: train {train_seconds:.2f} s, sample {cold:.2f} s cold, {warm:.2f} s warm")
    print(f"step {1e3 * step_seconds:.2f} ms, sample_posterior {sample_posterior_seconds:.2f} s")


if __name__ == "__main__":
    main()
