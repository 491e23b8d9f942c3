"""Training from a store ten times larger than the memory it may use, beside training in memory."""

import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

import consilience as cs

LENGTH, SHARE = 4_000, 10
SHORT, LONG = 2, 8


def simulator(key, theta):
    wave = jnp.sin(jnp.linspace(0.0, 6.0, LENGTH) * (2.0 + theta))
    return wave + jax.random.normal(key, (LENGTH,))


def seconds(model: cs.Model, sims: cs.Simulations, memory: int | None) -> float:
    """Of one epoch: a longer fit less a shorter, so that compilation and preparation cancel."""

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

    fit(SHORT)
    short = fit(SHORT)
    return (fit(LONG) - short) / (LONG - SHORT)


def streaming(runs: int) -> list[str]:
    """The lines of the report."""
    model = cs.Model(dist.Normal(0.0, 1.0), simulator)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.zarr"
        sims = cs.simulate(model, runs, key=jax.random.key(0), store=path, progress=False)
        size = sims.nbytes
        streamed = seconds(model, sims, size // SHARE)
        whole = seconds(model, cs.Simulations(sims.theta, sims.x), None)
    return [
        f"## Training on {runs:,} runs of {LENGTH:,} numbers, {size / 2**20:.0f} MiB\n",
        f"NPE, from the store with `memory` for a part in {SHARE} of the data, and in memory.\n",
        "| | s for each epoch |",
        "|---|---|",
        f"| in memory | {whole:.2f} |",
        f"| streamed | {streamed:.2f}, {whole / streamed:.2f} of the speed in memory |",
        "",
    ]
