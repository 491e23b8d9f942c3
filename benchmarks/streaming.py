"""Training from a store ten times larger than the memory it may use, beside training in memory.

    .venv/bin/python benchmarks/streaming.py

Times are of whole fits less those of as many epochs fewer, so that compilation and the first
look at the store are left out.
"""

import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

import consilience as cs

RUNS, LENGTH, SHARE = 8_192, 4_000, 10
SHORT, LONG = 2, 8


def simulator(key, theta):
    wave = jnp.sin(jnp.linspace(0.0, 6.0, LENGTH) * (2.0 + theta))
    return wave + jax.random.normal(key, (LENGTH,))


def seconds(model: cs.Model, sims: cs.Simulations, memory: int | None) -> float:
    """Of one epoch."""

    def fit(epochs: int) -> float:
        start = time.perf_counter()
        cs.fit(
            model,
            sims,
            key=jax.random.key(1),
            self_consistency=False,
            epochs=epochs,
            memory=memory,
            progress=False,
        )
        return time.perf_counter() - start

    fit(1)
    short = fit(SHORT)
    return (fit(LONG) - short) / (LONG - SHORT)


def main():
    model = cs.Model(dist.Normal(0.0, 1.0), simulator)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.zarr"
        sims = cs.simulate(model, RUNS, key=jax.random.key(0), store=path, progress=False)
        size = sims.nbytes
        streamed = seconds(model, sims, size // SHARE)
        whole = seconds(model, cs.Simulations(sims.theta, sims.x), None)
    print(f"{RUNS} runs of {LENGTH} numbers, {size / 2**20:.0f} MiB.")
    print(f"in memory {whole:.2f} s an epoch, streamed with a tenth of it {streamed:.2f} s")
    print(f"speed of streaming: {whole / streamed:.2f} of that in memory")


if __name__ == "__main__":
    main()
