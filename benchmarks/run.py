"""Plain NPE on the paper's Gaussian mixture: consilience beside its peers, in one run.

Installs each peer into an environment of its own under `.bench`, trains each library on the
same simulations in a fresh process, one after the other, and writes times, ratios and
accuracies to docs/results/benchmark.md.
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
# An sbi transform changes one half of theta; a layer of the others changes both: eight are four.
PEERS = {"bayesflow": ["npe_bayesflow.py"], "sbi": ["npe_sbi.py", "--transforms", "8"]}
SIMULATIONS, TESTS = 1024, 100


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


def make_data(seed: int) -> Path:
    path = WORK / f"data-{seed}.npz"
    sims = cs.simulate(gmm.model(), SIMULATIONS, key=jax.random.key(seed))
    tests = cs.simulate(gmm.model(), TESTS, key=jax.random.key(10_000))
    np.savez(path, theta=sims.theta["theta"], x=sims.x, x_test=tests.x)
    return path


def run(name: str, python: Path, script: list, seed: int) -> dict:
    out = WORK / f"{name}-{seed}.npz"
    command = [python, *script, "--data", WORK / f"data-{seed}.npz", "--out", out]
    subprocess.run(
        [*command, "--seed", str(seed)], check=True, env={**os.environ, "TQDM_DISABLE": "1"}
    )
    with np.load(out) as result:
        return {key: result[key] if key == "draws" else result[key].item() for key in result}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    args = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    scripts = {"consilience": (Path(sys.executable), [HERE / "npe_consilience.py"])}
    for peer in args.peers:
        name, *options = PEERS[peer]
        scripts[peer] = (install(peer), [HERE / "peers" / name, *options])

    x_test = np.load(make_data(0))["x_test"]
    exact, again = (gmm.exact_sample(x_test, jax.random.key(k)) for k in (20_000, 20_001))
    rows: dict[str, list[dict]] = {name: [] for name in scripts}
    for seed in range(args.seeds):
        make_data(seed)
        for name, (python, script) in scripts.items():
            row = run(name, python, script, seed)
            row["mmd"] = float(mmd(jnp.asarray(row.pop("draws")), exact).mean())
            rows[name].append(row)
    text = report(rows, float(mmd(exact, again).mean()), args.seeds)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(text)
    (WORK / "rows.json").write_text(json.dumps(rows, indent=1))
    print(text)


def report(rows: dict[str, list[dict]], floor: float, seeds: int) -> str:
    def middle(name: str, what: str) -> float:
        return statistics.median(row[what] for row in rows[name])

    def cell(name: str, what: str) -> str:
        values = sorted(row[what] for row in rows[name])
        ratio = middle(name, what) / middle("consilience", what)
        return f"{middle(name, what):.2f} ({values[0]:.2f} to {values[-1]:.2f}), {ratio:.1f}x"

    lines = [
        "# Benchmark",
        "",
        "Plain neural posterior estimation on the Gaussian mixture of experiment 1:",
        f"{SIMULATIONS:,} simulations, {gmm.PAPER_EPOCHS} epochs, batch {gmm.PAPER_BATCH}, four",
        "spline layers of 128 units, a DeepSet to 4 numbers. Training from a cold process after",
        f"import, compilation included; drawing 1,000 draws for each of {TESTS} test sets.",
        f"Medians over {seeds} seeds (least to most), and the ratio to consilience. MMD: mean over",
        f"the test sets and seeds; two exact samples score {floor:.4f}. sbi has eight transforms,",
        "each of one half of theta, which is four layers of the others; no Student-t base.",
        "Dropout and L2 of consilience were chosen on this problem, the peers run at their",
        "defaults: the times compare like with like, the MMDs do not.",
        "",
        "| library | training, s | drawing, first call, s | drawing, warm, s | MMD |",
        "|---|---|---|---|---|",
    ]
    for name, results in rows.items():
        times = [cell(name, w) for w in ("train_seconds", "sample_seconds_cold", "sample_seconds")]
        score = statistics.mean(row["mmd"] for row in results)
        lines.append(f"| {results[0]['version']} | {' | '.join(times)} | {score:.4f} |")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    lines += ["", f"Made by `make bench` on {date.today()}: {machine}, jax {jax.__version__}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
