"""The time of a step and of draws, in this checkout and in another one, in the same run.

    git worktree add /elsewhere/before REVISION
    python benchmarks/speed.py --against /elsewhere/before

Both checkouts run in this environment, one after the other, several times in turn; a figure is
the fastest of all. Nothing else may run on the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parents[1]
STEPS = {"a step of NPE": 1536, "a step at K = 10": 768, "a step at K = 100": 576}
SIZE = 32


def measure() -> dict[str, float]:
    """Milliseconds of each, by the public interface alone, once everything is compiled."""
    import jax
    import jax.numpy as jnp
    import numpyro.distributions as dist

    import consilience as cs

    model = cs.Model(
        {"mu": dist.Normal(0, 1).expand([2]).to_event(1), "sigma": dist.HalfNormal(1)},
        lambda key, t: t["mu"] + t["sigma"] * jax.random.normal(key, (10, 2)),
        cs.PerRow(lambda t, row: jnp.sum(dist.Normal(t["mu"], t["sigma"]).log_prob(row))),
    )
    sims = cs.simulate(model, 1024, key=jax.random.key(0))
    options = {"key": jax.random.key(1), "batch_size": SIZE, "validation": 0.0, "progress": False}
    chosen = {
        "a step of NPE": False,
        "a step at K = 10": cs.SelfConsistency(10, cs.Constant()),
        "a step at K = 100": cs.SelfConsistency(100, cs.Constant()),
    }

    def run(what: str) -> float:
        """Milliseconds a step."""
        epochs, steps = STEPS[what] * SIZE // len(sims), STEPS[what]
        settings = {**options, "self_consistency": chosen[what], "epochs": epochs}
        return (
            cs.fit(model, sims, posterior=cs.Coupling(), **settings).history.seconds / steps * 1e3
        )

    # The first of three compiles.
    found = {what: min([run(what) for _ in range(3)][1:]) for what in chosen}
    fit = cs.fit(model, sims, self_consistency=False, epochs=2, **options)
    many = sims.x[:100]
    fit.sample(many, 1000, key=jax.random.key(2))
    times = []
    for i in range(10):
        start = time.perf_counter()
        fit.sample(many, 1000, key=jax.random.key(i))
        times.append(time.perf_counter() - start)
    found["100 x 1,000 draws"] = min(times) * 1e3
    return found


def in_checkout(folder: Path) -> dict[str, float]:
    """The figures of one process that takes the package from a checkout."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure"]
    environment = {**os.environ, "PYTHONPATH": str(folder.resolve() / "src")}
    done = subprocess.run(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--times", type=int, default=3, help="processes of each checkout")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return
    folders = {"before": options.against, "after": HERE}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for _ in range(options.times):
        for name, folder in folders.items():
            found[name].append(in_checkout(folder))
    print("| fastest of", 2 * options.times, "(ms) | before | after | ratio |\n|---|---|---|---|")
    for what in found["after"][0]:
        before, after = (min(one[what] for one in found[name]) for name in folders)
        print(f"| {what} | {before:.3f} | {after:.3f} | {after / before:.3f} |")


if __name__ == "__main__":
    main()
