"""The recipes that compete in a fit without a likelihood, on tasks of the SBI benchmark.

Prints the table of each fit, and the mean log density of 1,000 new runs: of the default, and of NPE
alone, both ensembles. `--seed` gives the key of the runs; new runs have `jax.random.key(999)`.
`--effort` is that of `cs.fit`.

    python benchmarks/recipes.py                    # all six, 1,000 runs
    python benchmarks/recipes.py two_moons --runs 100
"""

import argparse
import time

import jax
import numpy as np

import consilience as cs
from consilience.tasks.sbibm.registry import TASKS

TEST_KEY, TESTS = 999, 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--effort", default="standard")
    args = parser.parse_args()
    for task in args.tasks:
        model = TASKS[task].model(likelihood=False)
        sims = cs.simulate(model, args.runs, key=jax.random.key(args.seed))
        tests = cs.simulate(model, TESTS, key=jax.random.key(TEST_KEY))
        for name, settings in {"default": {}, "NPE": {"self_consistency": False}}.items():
            start = time.perf_counter()
            fit = cs.fit(
                model,
                sims,
                key=jax.random.key(args.seed + 1),
                effort=args.effort,
                progress=False,
                **settings,
            )
            seconds = time.perf_counter() - start
            density = np.mean(fit.log_prob(tests.theta, tests.x))
            print(f"{task}, {args.runs} runs, {name}: {density:.3f} in {seconds:.0f} s")
            print(fit.history.table(), flush=True)


if __name__ == "__main__":
    main()
