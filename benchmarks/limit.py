"""The physical limit of a self-consistent step: its products, at the rate of this machine.

A network of the flow is three products for every value; drawing runs it once, evaluating once,
and its derivative takes the same products twice more. All else (activations, splines, random
numbers, the optimizer) counts as free.
"""

import statistics
import time

import jax
import jax.numpy as jnp

from consilience.core.compiling import CPU_OPTIONS

CHAIN = 200


def product_seconds(rows: int, inner: int, columns: int) -> float:
    """The time of one product (rows, inner) @ (inner, columns), warm and in cache."""
    weight = jnp.full((rows, inner), 1e-3)
    value = jnp.ones((inner, columns))

    def chain(weight, value):
        def body(value, _):
            # The next product waits for this one, but only one number is copied over.
            out = weight @ value
            return jax.lax.dynamic_update_slice(value, out[:1, :1], (0, 0)), None

        return jax.lax.scan(body, value, None, length=CHAIN)[0]

    run = jax.jit(chain, compiler_options=CPU_OPTIONS)
    jax.block_until_ready(run(weight, value))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(run(weight, value))
        times.append((time.perf_counter() - start) / CHAIN)
    return statistics.median(times)


def flow_products(flow, dim: int, values: int) -> list[tuple[int, int, int]]:
    """The products of one pass of `values` values through a flow."""
    half, width = dim // 2, flow.width
    step = [(width, half, values)] + [(width, width, values)] * (flow.depth - 1)
    step.append((flow.transform.n_raw * (dim - half), width, values))
    return 2 * flow.layers * step


def step_limit(flow, dim: int, batch: int, samples: int) -> dict[str, float]:
    """The time of all products of a step: as the algorithm is written, and at the least.

    As written: K - 1 draws, K densities and their derivative, for each dataset. At the least:
    the pass that draws is the pass that evaluates, and is made once.
    """
    values = batch * samples
    passes = flow_products(flow, dim, values)
    known = {shape: product_seconds(*shape) for shape in set(passes)}
    one = sum(known[shape] for shape in passes)
    written = (samples - 1) / samples + 3
    operations = sum(2 * rows * inner * columns for rows, inner, columns in passes)
    return {
        "written": written * one,
        "least": 3 * one,
        "operations": written * operations,
        "rate": operations / one,
    }
