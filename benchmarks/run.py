"""The benchmark: consilience beside its peers and beside the machine's limit, in one run.

Installs each peer into an environment of its own under `.bench`, runs every job in a fresh
process, one after the other, and writes times, ratios and accuracies to
docs/results/benchmark.md. `--resume` keeps the results of a run that was cut short.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import consilience as cs
from consilience.metrics import mmd
from consilience.tasks import gmm

HERE = Path(__file__).parent
WORK = HERE.parent / ".bench"
REPORT = HERE.parent / "docs" / "results" / "benchmark.md"
# A transform of sbi or sbijax changes one half of theta, a layer of the others both.
PEERS = {
    "bayesflow": ["npe_bayesflow.py"],
    "sbi": ["npe_sbi.py", "--transforms", "8"],
    "sbijax": ["npe_sbijax.py"],
}
SIMULATIONS, TESTS = 1024, 100
GROWTH = [
    *({"samples": k} for k in (5, 10, 20, 32, 64, 100, 200, 500)),
    *({"runs": n} for n in (256, 4096, 65536)),
    *({"parameters": d, "numbers": 50} for d in (2, 10, 50)),
    *({"numbers": m} for m in (2, 100, 1000)),
]


def install(peer: str) -> Path:
    """The Python of the peer's environment, made if it is not there."""
    home, pins = WORK / peer, HERE / "peers" / f"requirements-{peer}.txt"
    python, ready = home / "bin" / "python", home / "ready"
    if not ready.exists() or ready.read_text() != pins.read_text():
        print(f"installing {peer} into {home.relative_to(HERE.parent)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        # One at a time and in order: a later package must not change what is pinned.
        for line in pins.read_text().split():
            subprocess.run([python, "-m", "pip", "install", "--quiet", line], check=True)
        ready.write_text(pins.read_text())
    return python


def data_file(seed: int) -> Path:
    path = WORK / f"data-{seed}.npz"
    sims = cs.simulate(gmm.model(), SIMULATIONS, key=jax.random.key(seed))
    tests = cs.simulate(gmm.model(), TESTS, key=jax.random.key(10_000))
    np.savez(path, theta=sims.theta["theta"], x=sims.x, x_test=tests.x)
    return path


class Runner:
    """Runs a command unless its result is there and may be kept."""

    def __init__(self, resume: bool):
        self.resume = resume

    def __call__(self, out: Path, command: list):
        if not (self.resume and out.exists()):
            out.unlink(missing_ok=True)
            environment = {**os.environ, "TQDM_DISABLE": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
            parts = [str(part) for part in (*command, "--out", out)]
            subprocess.run(parts, check=True, env=environment, stderr=subprocess.DEVNULL)
        return out

    def job(self, name: str, **options) -> dict:
        """A job of consilience; its result, and where draws are, the path of those."""
        label = "-".join([name, *(f"{k}{v}" for k, v in options.items() if k != "data")])
        out = WORK / f"job-{label.replace('/', '_')}.json"
        flags = [part for k, v in options.items() for part in (f"--{k}", v)]
        self(out, [sys.executable, HERE / "jobs.py", name, *flags])
        return {**json.loads(out.read_text()), "file": out.with_suffix(".npy")}

    def peer(self, name: str, python: Path, seed: int) -> dict:
        out = WORK / f"{name}-{seed}.npz"
        script, *options = PEERS[name]
        data = ["--data", WORK / f"data-{seed}.npz", "--seed", seed]
        self(out, [python, HERE / "peers" / script, *options, *data])
        with np.load(out) as result:
            return {k: result[k] if k == "draws" else result[k].item() for k in result}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--resume", action="store_true", help="keep results that are there")
    parser.add_argument("--skip", nargs="*", default=[], choices=["moons", "sir"])
    args = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    pythons = {peer: install(peer) for peer in args.peers}
    run, seeds = Runner(args.resume), range(args.seeds)
    files = {seed: data_file(seed) for seed in seeds}
    x_test = np.load(files[0])["x_test"]
    exact, again = (gmm.exact_sample(x_test, jax.random.key(k)) for k in (20_000, 20_001))

    def score(draws) -> float:
        draws = draws if isinstance(draws, np.ndarray) else np.load(draws)
        return float(mmd(jnp.asarray(draws), exact).mean())

    rows: dict[str, list[dict]] = {"consilience": [], **{peer: [] for peer in pythons}}
    consistent: dict[int, list[dict]] = {10: [], 100: []}
    # All of a seed together: what is compared runs within minutes.
    for seed in seeds:
        found = run.job("npe", data=files[seed], seed=seed)
        rows["consilience"].append({**found, "mmd": score(found["file"])})
        for samples in (10, 100) if seed == 0 else (10,):
            found = run.job("sc", data=files[seed], seed=seed, samples=samples)
            consistent[samples].append({**found, "mmd": score(found["file"])})
        for peer, python in pythons.items():
            found = run.peer(peer, python, seed)
            found["mmd"] = score(found.pop("draws"))
            rows[peer].append(found)
    cache = WORK / "compiled"
    first = []
    for i in range(2):
        options = {"fit": WORK / "job-npe-seed0.safetensors", "cache": cache}
        out = WORK / f"job-first-{i}.json"
        flags = [part for k, v in options.items() for part in (f"--{k}", v)]
        if i == 0 and not args.resume and cache.exists():
            for entry in cache.iterdir():
                entry.unlink()
        run(out, [sys.executable, HERE / "jobs.py", "first", "--data", files[0], *flags])
        first.append(json.loads(out.read_text())["first latency"])
    growth = [(options, run.job("growth", **options)) for options in GROWTH]
    others = {name: run.job(name) for name in ("moons", "sir") if name not in args.skip}
    floor = float(mmd(exact, again).mean())
    text = report(rows, consistent, first, growth, others, floor)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(text)
    print(text)


def spread(values, scale: float = 1.0, digits: int = 2) -> str:
    """The median, and the least and the most."""
    values = sorted(scale * value for value in values)
    middle = statistics.median(values)
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({values[0]:.{digits}f} to {values[-1]:.{digits}f})"


NAMES = {
    "train": "train_seconds",
    "step": "step_seconds",
    "draws": "sample_seconds",
    "latency": "latency_seconds",
    "densities": "density_seconds",
}


def report(rows, consistent, first, growth, others, floor) -> str:
    def times(name: str, what: str) -> list[float]:
        field = what if name == "consilience" else NAMES[what]
        return [row[field] for row in rows[name]]

    def cell(name: str, what: str, scale: float = 1.0, digits: int = 2) -> str:
        ours = statistics.median(times("consilience", what))
        ratio = statistics.median(times(name, what)) / ours
        shown = spread(times(name, what), scale, digits)
        return shown if name == "consilience" else f"{shown}, {ratio:.1f}x"

    versions = {"consilience": f"consilience {cs.__version__}"}
    versions |= {name: row[0]["version"] for name, row in rows.items() if name in PEERS}
    seeds = len(rows["consilience"])
    plain = statistics.median(times("bayesflow", "train")) if "bayesflow" in rows else None
    lines = [
        "# Benchmark",
        "",
        f"Every job runs in a process of its own, one after the other. Medians over {seeds} seeds",
        "(least to most); behind a comma, how many times longer than consilience.",
        "",
        "## Plain neural posterior estimation",
        "",
        f"The Gaussian mixture of experiment 1: {SIMULATIONS:,} simulations, {gmm.PAPER_EPOCHS} "
        f"epochs, batch {gmm.PAPER_BATCH}, four spline",
        "layers of 128 units, a DeepSet to 4 numbers. Training from a cold process after import,",
        "compilation included; a step, warm; MMD over 100 test sets, where two exact samples",
        f"score {floor:.4f}.",
        "",
        "| library | training, s | a step, ms | MMD |",
        "|---|---|---|---|",
    ]
    for name, results in rows.items():
        accuracy = statistics.mean(row["mmd"] for row in results)
        lines.append(
            f"| {versions[name]} | {cell(name, 'train')} | {cell(name, 'step', 1e3)} "
            f"| {accuracy:.4f} |"
        )
    lines += [
        "",
        "Dropout and L2 of consilience were chosen on this problem, the peers run at their",
        "defaults: the times compare like with like, the MMDs do not. sbi and sbijax have eight",
        "transforms, each of one half of theta, which is four layers of the others, and no",
        "Student-t base. sbijax compiles its validation loss in every epoch; here it does not.",
        "",
        "## Drawing and evaluating, warm",
        "",
        "| library | 1,000 draws for each of 100, s | 1,000 draws for one, ms "
        "| 100,000 log densities, s |",
        "|---|---|---|---|",
    ]
    for name in rows:
        lines.append(
            f"| {versions[name]} | {cell(name, 'draws')} | {cell(name, 'latency', 1e3, 1)} "
            f"| {cell(name, 'densities')} |"
        )
    if "sbijax" in rows:
        own = spread(row["sample_posterior_seconds"] for row in rows["sbijax"])
        lines += [
            "",
            "sbijax: its network, compiled, for all test sets at once. Its own call takes one test",
            f"set, and {own} s for it. BayesFlow summarises the data anew for every density.",
        ]
    lines += [
        "",
        "A process that loads a fit and draws for one observation, first call: "
        f"{first[0]:.2f} s; in a second",
        f"process, with `cs.keep_compiled()`: {first[1]:.2f} s.",
        "",
        "## Self-consistency",
        "",
        "The same mixture, flow (without dropout) and epochs, by the paper's schedule: lambda is 0",
        "for 5 epochs, then 1. The limit is the time that the products of a step take at the rate",
        "this machine reaches at their sizes, measured by turns with the step: as the algorithm is",
        "written (K - 1 draws, K densities, their derivative), and at the least, where the pass",
        "that draws is also the pass that evaluates, as it is here.",
        "",
        "| K | training, s | of it compilation, s | a step, ms | limit as written, ms "
        "| share of it | limit at the least, ms | share of it | MMD |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for samples, results in consistent.items():
        col = lambda name, scale=1.0, digits=2: spread(  # noqa: E731
            (row[name] for row in results),  # noqa: B023
            scale,
            digits,
        )
        accuracy = statistics.mean(row["mmd"] for row in results)
        lines.append(
            f"| {samples} | {col('train')} | {col('compile')} | {col('step', 1e3)} "
            f"| {col('written', 1e3)} | {col('share written', 100, 0)} % | {col('least', 1e3)} "
            f"| {col('share least', 100, 0)} % | {accuracy:.4f} |"
        )
    if plain is not None:
        ours = statistics.median(row["train"] for row in consistent[10])
        lines += [
            "",
            f"With K = 10 it trains in {ours / plain:.2f} of BayesFlow's time for plain NPE.",
            "No released peer has self-consistency in training; BayesFlow has merged an "
            "experimental form of it, expected in its 2.1.",
        ]
    lines += [
        "",
        "Two moons, SC-NPLE, 1,024 simulations, two six-layer networks, 20 epochs,",
    ]
    if "moons" in others:
        found = others["moons"]
        lines.append(f"K = 10: {found['train']:.1f} s, {1e3 * found['step']:.1f} ms a step.")
    else:
        lines.append("K = 10: left out of this run.")
    lines.append(
        "SIR with 160 days, SC-NPLE, 2,048 simulations, two five-layer networks, 5 epochs,"
    )
    if "sir" in others:
        found = others["sir"]
        lines.append(f"K = 100: {found['train']:.0f} s, {found['memory']:.1f} GB at most.")
    else:
        lines.append("K = 100: left out of this run.")
    lines += [
        "",
        "## Growth",
        "",
        "A self-consistent step of batch 32 on a linear Gaussian model, four spline layers of 128",
        "units; K = 10, N = 1,024, 2 parameters and 10 numbers of data unless said. Memory is the",
        "most that the process held, and what it held before training.",
        "",
        "| what | a step, ms | memory, GB | before, GB |",
        "|---|---|---|---|",
    ]
    titles = {"samples": "K", "runs": "N", "parameters": "parameters", "numbers": "data"}
    for options, found in growth:
        what = ", ".join(f"{titles[k]} = {v:,}" for k, v in options.items())
        lines.append(
            f"| {what} | {1e3 * found['step']:.2f} | {found['memory']:.2f} "
            f"| {found['memory before']:.2f} |"
        )
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    lines += ["", f"Made by `make bench` on {date.today()}: {machine}, jax {jax.__version__}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
