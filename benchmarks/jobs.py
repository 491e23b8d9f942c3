"""The jobs of the benchmark, as consilience does them: each in a process of its own.

    python benchmarks/jobs.py JOB --out FILE [--data FILE] [--seed N] [...]

Training is timed from the call of `cs.fit` in a cold process after import, compilation
included, and again warm, in the same process, for the time of a step; what compilation took is
the difference of the two. Results are written to FILE as JSON, draws beside it as .npy.
"""

import argparse
import dataclasses
import json
import resource
import statistics
import time
from pathlib import Path

import jax
import numpy as np
import numpyro.distributions as dist
from limit import step_limit

import consilience as cs
from consilience.tasks import gmm, sir, two_moons
from consilience.training import train as training

training.SHORT = 0  # Times of a step are those of a long fit, however short the measurement.
QUIET = {"progress": False}
CONSISTENT = dataclasses.replace(gmm.PAPER_POSTERIOR, dropout=0.0, l2=1e-5)
"""The flow of the mixture without dropout: self-consistency does not overfit the labels."""


def seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def median(run, times: int = 5) -> float:
    return statistics.median(seconds(run) for _ in range(times))


def timed_fit(model, sims, steps_an_epoch: int, *, warm_epochs: int, **options):
    """A fit from cold, and its times; then warm, for the time of a step."""
    start = time.perf_counter()
    fit = cs.fit(model, sims, **options, **QUIET)
    train = time.perf_counter() - start
    short = options | {"epochs": warm_epochs}
    step = median(lambda: cs.fit(model, sims, **short, **QUIET), 3) / warm_epochs / steps_an_epoch
    steps = options["epochs"] * steps_an_epoch
    return fit, {"train": train, "step": step, "compile": train - step * steps}


def mixture_options(args) -> dict:
    return {
        "key": jax.random.key(args.seed),
        "summary": gmm.PAPER_SUMMARY,
        "epochs": gmm.PAPER_EPOCHS,
        "batch_size": gmm.PAPER_BATCH,
        "validation": 0.0,
    }


def load_mixture(args):
    with np.load(args.data) as data:
        return cs.Simulations(data["theta"], data["x"]), data["x_test"]


def npe(args) -> dict:
    """Job 1 and 5: plain NPE on the mixture; then drawing and evaluating."""
    sims, tests = load_mixture(args)
    options = mixture_options(args) | {"posterior": gmm.PAPER_POSTERIOR, "self_consistency": False}
    fit, times = timed_fit(gmm.model(), sims, len(sims) // 32, warm_epochs=10, **options)
    key = jax.random.key(args.seed)
    many = lambda: fit.sample(tests, 1000, key=key)  # noqa: E731
    one = lambda: fit.sample(tests[0], 1000, key=key)  # noqa: E731
    times["first draws"] = seconds(many)
    times["draws"] = median(many)
    times["first latency"] = seconds(one)
    times["latency"] = median(one, 20)
    theta = np.asarray(many()["theta"])[:, 0]
    evaluate = lambda: fit.log_prob({"theta": theta}, tests)  # noqa: E731
    times["first densities"] = seconds(evaluate)
    times["densities"] = median(evaluate)
    np.save(args.out.with_suffix(".npy"), theta)
    fit.save(args.out.with_suffix(".safetensors"))
    return times


def self_consistent(args) -> dict:
    """Job 2: SC-NPE on the mixture with K draws, by the paper's schedule."""
    sims, tests = load_mixture(args)
    settings = dataclasses.replace(gmm.PAPER_CONSISTENCY, samples=args.samples)
    options = mixture_options(args) | {"posterior": CONSISTENT, "self_consistency": settings}
    steps = len(sims) // gmm.PAPER_BATCH
    # Warm with all epochs: the schedule decides which steps are self-consistent.
    start = time.perf_counter()
    fit = cs.fit(gmm.model(), sims, **options, **QUIET)
    train = time.perf_counter() - start
    warm = seconds(lambda: cs.fit(gmm.model(), sims, **options, **QUIET))
    always = options | {"self_consistency": dataclasses.replace(settings, weight=cs.Constant())}
    always["epochs"] = 4
    cs.fit(gmm.model(), sims, **always, **QUIET)
    # Limit and step by turns: the machine's own speed changes within minutes.
    pairs = []
    for _ in range(5):
        limit = step_limit(CONSISTENT, 2, gmm.PAPER_BATCH, args.samples)
        step = seconds(lambda: cs.fit(gmm.model(), sims, **always, **QUIET)) / 4 / steps
        pairs.append({"step": step, **limit})
    middle = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
    for name in ("written", "least"):
        middle[f"share {name}"] = statistics.median(pair[name] / pair["step"] for pair in pairs)
    draws = fit.sample(tests, 1000, key=jax.random.key(args.seed))
    np.save(args.out.with_suffix(".npy"), draws["theta"].values[:, 0])
    return {"train": train, "compile": train - warm, **middle}


def moons(args) -> dict:
    """Job 3: SC-NPLE on two moons, two six-layer networks."""
    model = two_moons.model(likelihood=False)
    sims = cs.simulate(model, 1024, key=jax.random.key(args.seed))
    flow = cs.Coupling(layers=6, width=128, df=50.0, l2=1e-4)
    _, times = timed_fit(
        model,
        sims,
        32,
        warm_epochs=20,
        key=jax.random.key(args.seed),
        posterior=flow,
        likelihood=flow,
        self_consistency=cs.SelfConsistency(10, cs.Step(0.5)),
        epochs=20,
        batch_size=32,
        validation=0.0,
        learning_rate=5e-4,
    )
    return times


def epidemic(args) -> dict:
    """Job 4: SC-NPLE on the 160-dimensional SIR, K = 100."""
    model = sir.model(likelihood=False)
    sims = cs.simulate(model, 2048, key=jax.random.key(args.seed))
    flow = cs.Coupling(layers=5, width=128, df=30.0)
    start = time.perf_counter()
    fit = cs.fit(
        model,
        sims,
        key=jax.random.key(args.seed),
        posterior=flow,
        likelihood=flow,
        self_consistency=cs.SelfConsistency(100, cs.Step(0.4, after=0.1)),
        epochs=5,
        batch_size=32,
        validation=0.0,
        **QUIET,
    )
    train = time.perf_counter() - start
    assert np.isfinite(fit.history.terms["loss"]).all()
    return {"train": train, "memory": peak_memory()}


def peak_memory() -> float:
    """The most memory this process has held, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def growth(args) -> dict:
    """Job 6: the time and the memory of a self-consistent step."""
    k, n, d, m = args.samples, args.runs, args.parameters, args.numbers
    rng = np.random.default_rng(0)
    mix = (rng.standard_normal((m, d)) / np.sqrt(d)).astype(np.float32)
    model = cs.Model(
        dist.Normal(0.0, 1.0).expand([d]).to_event(1),
        lambda key, theta: mix @ theta + jax.random.normal(key, (m,)),
        lambda theta, x: dist.Normal(mix @ theta, 1.0).log_prob(x).sum(),
        data=cs.Vector(),
    )
    sims = cs.simulate(model, n, key=jax.random.key(0))
    settings = cs.SelfConsistency(k, cs.Constant(), augmentation=None)
    options = {
        "key": jax.random.key(0),
        "posterior": cs.Coupling(layers=4, width=128),
        "summary": cs.Dense(out=2 * d),
        "self_consistency": settings,
        "batch_size": 32,
        "validation": 0.0,
        "epochs": 1,
    }
    before = peak_memory()
    cs.fit(model, sims, **options, **QUIET)
    step = median(lambda: cs.fit(model, sims, **options, **QUIET), 3) / (n // 32)
    return {"step": step, "memory": peak_memory(), "memory before": before}


def first_call(args) -> dict:
    """Job 5: the first draws of a process that loads a fit, with a cache of compilations."""
    cs.keep_compiled(args.cache)
    with np.load(args.data) as data:
        tests = data["x_test"]
    fit = cs.load(args.fit, gmm.model())
    return {"first latency": seconds(lambda: fit.sample(tests[0], 1000, key=jax.random.key(0)))}


JOBS = {
    "npe": npe,
    "sc": self_consistent,
    "moons": moons,
    "sir": epidemic,
    "growth": growth,
    "first": first_call,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--fit", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--runs", type=int, default=1024)
    parser.add_argument("--parameters", type=int, default=2)
    parser.add_argument("--numbers", type=int, default=10)
    args = parser.parse_args()
    found = {name: float(value) for name, value in JOBS[args.job](args).items()}
    args.out.write_text(json.dumps(found))
    shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    print(f"consilience {args.job} K={args.samples}: {shown}", flush=True)


if __name__ == "__main__":
    main()
