"""What campaigns survive and cost: every figure in docs/results/campaigns.md."""

import argparse
import itertools
import logging
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import jax
import numpy as np
import numpyro.distributions as dist
from streaming import streaming

import consilience as cs
from consilience.model.run import stream
from consilience.simulation import campaign as campaigns
from consilience.simulation import store, workers

REPORT = Path(__file__).parent.parent / "docs" / "results" / "campaigns.md"
KEY = jax.random.key(5)
PROCESSES, CHUNK = 2, 2
IN_FLIGHT = 2 * PROCESSES
SLEEP, DASK_SLEEP = 0.02, 0.1
"""Seconds of a run; of one on Dask, where a killed worker takes many seconds to come back."""


class Logged:
    """Adds a line to a file for each run, and takes some time."""

    def __init__(self, log: Path, seconds: float = SLEEP):
        self.log, self.seconds = str(log), seconds

    def __call__(self, rng, mu, sigma):
        handle = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{mu!r}\n".encode())
        os.close(handle)
        time.sleep(self.seconds)
        return mu + sigma * rng.normal(size=3)


def trivial(rng, mu, sigma):
    return mu + sigma * rng.normal(size=3)


def large(rng, mu, sigma):
    """Ten million bytes."""
    return rng.normal(mu, sigma, size=1_250_000)


def model(function) -> cs.Model:
    prior = {"mu": dist.Normal(0.0, 1.0), "sigma": dist.Uniform(0.0, 2.0)}
    return cs.Model(prior, cs.external(function))


def simulate(function, n: int, **settings) -> cs.Simulations:
    return cs.simulate(model(function), n, key=KEY, progress=False, **settings)


def undisturbed(n: int) -> cs.Simulations:
    with ThreadPoolExecutor(1) as executor:
        return simulate(trivial, n, executor=executor)


def compare(folder: Path, n: int, expected: cs.Simulations) -> tuple[bool, Counter]:
    """Whether a store holds what it should, and how often each run was executed."""
    kept = cs.Simulations.open(folder / "x.zarr")
    same = len(kept) == n and not len(kept.failures) and np.array_equal(kept.x, expected.x)
    same = same and all(np.array_equal(kept.theta[name], a) for name, a in expected.theta.items())
    numbers = {repr(mu): i for i, mu in enumerate(expected.theta["mu"].tolist())}
    lines = (folder / "log").read_text().split()
    return same, Counter(numbers[line] for line in lines)


def killed_campaign(folder: Path, n: int, kills: int) -> list[str]:
    """The whole process group of a campaign killed again and again."""
    rng, command = np.random.default_rng(0), [sys.executable, __file__, "--campaign", str(folder)]
    log = folder / "log"
    log.touch()
    start, done, exposed = time.perf_counter(), 0, Counter()
    expected = undisturbed(n)
    numbers = {repr(mu): i for i, mu in enumerate(expected.theta["mu"].tolist())}
    while True:
        process = subprocess.Popen([*command, "--runs", str(n)], start_new_session=True)
        if done < kills:
            size = log.stat().st_size
            while log.stat().st_size == size and process.poll() is None:
                time.sleep(0.005)
            # Kills are spread over the runs, each at a random moment of its share.
            time.sleep(rng.uniform(0.0, 1.5 * n * SLEEP / PROCESSES / kills))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                done += 1
                exposed.update(in_flight(folder, log, numbers))
                continue
        if process.wait() != 0:
            raise RuntimeError(f"The campaign ended with exit code {process.returncode}.")
        break
    seconds = time.perf_counter() - start
    same, ran = compare(folder, n, expected)
    again = {number: times - 1 for number, times in ran.items() if times > 1}
    return [
        f"## {n:,} runs on {PROCESSES} processes, killed {done} times\n",
        "SIGKILL to all processes of the campaign at random moments; then the same call again. "
        f"Runs of {SLEEP * 1000:.0f} ms, {CHUNK} in a chunk, {IN_FLIGHT} chunks in flight; "
        f"{seconds:.0f} s in all.\n",
        "| | |",
        "|---|---|",
        f"| store identical to that of a run left alone | {'yes' if same else 'NO'} |",
        f"| runs begun but not stored at a kill, all kills together | {exposed.total()} |",
        f"| runs executed more than once | {len(again)} |",
        f"| of these, not in flight at a kill | {len(set(again) - set(exposed))} |",
        f"| executions beyond one for each run | {sum(again.values())} of {n} |",
        "",
    ]


def in_flight(folder: Path, log: Path, numbers: dict[str, int]) -> set[int]:
    """The runs that have begun and are not in the store."""
    begun = {numbers[line] for line in log.read_text().split()}
    stored = folder / "x.zarr"
    if not (stored / store.ROOT).exists():
        return begun
    return begun - set(store.Store(stored).numbers.tolist())


def campaign(folder: Path, n: int):
    """What is killed: one call, on a fixed number of processes."""
    workers.cores = lambda: PROCESSES
    simulate(Logged(folder / "log"), n, store=folder / "x.zarr", chunk=CHUNK)


def watched(client, scheduler):
    """An executor that knows which runs the scheduler of Dask holds."""
    from distributed.cfexecutor import ClientExecutor

    class Watched(ClientExecutor):
        numbers, names = {}, itertools.count()

        def submit(self, fn, task, numbers, theta):
            name = f"chunk-{next(self.names)}"
            self.numbers[name] = numbers.tolist()
            return super().submit(fn, task, numbers, theta, key=name)

        def held(self) -> set[int]:
            return {number for name in list(scheduler.tasks) for number in self.numbers[name]}

    return Watched(client)


def killed_workers(folder: Path, n: int, kills: int) -> list[str]:
    """Workers of a Dask cluster killed while a campaign goes on."""
    # Here: every process of the other campaigns imports this script.
    import dask
    from distributed import Client, LocalCluster, Status

    # A local cluster closes a worker that it sees missing twice within this time.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"})
    rng, log, expected = np.random.default_rng(1), folder / "log", undisturbed(n)
    log.touch()
    exposed, done, ended = Counter(), 0, threading.Event()
    cluster = LocalCluster(
        n_workers=PROCESSES,
        threads_per_worker=1,
        dashboard_address=":0",
        silence_logs=logging.CRITICAL,
    )
    with cluster, Client(cluster) as client:
        executor = watched(client, cluster.scheduler)

        def ready(nanny) -> bool:
            # A nanny gives up on a worker that dies while it starts.
            known = nanny.worker_address in cluster.scheduler.workers
            return known and nanny.status == nanny.process.status == Status.running

        def kill():
            nonlocal done
            size = 0
            for due in np.sort(rng.uniform(0.02, 0.9, kills)) * n:
                while not ended.is_set():
                    lines = log.read_bytes().count(b"\n")
                    up = [nanny for nanny in cluster.workers.values() if ready(nanny)]
                    if lines >= due and lines > size + CHUNK and len(up) == PROCESSES:
                        held = executor.held()
                        os.kill(up[rng.integers(len(up))].pid, signal.SIGKILL)
                        # A chunk may be sent out between the look and the kill.
                        exposed.update(held | executor.held())
                        done, size = done + 1, lines
                        break
                    time.sleep(0.005)

        killer = threading.Thread(target=kill)
        killer.start()
        start = time.perf_counter()
        settings = {"store": folder / "x.zarr", "chunk": CHUNK, "in_flight": IN_FLIGHT}
        simulate(Logged(log, DASK_SLEEP), n, executor=executor, **settings)
        seconds = time.perf_counter() - start
        ended.set()
        killer.join()
    same, ran = compare(folder, n, expected)
    again = {number: times - 1 for number, times in ran.items() if times > 1}
    return [
        f"## {n:,} runs on a Dask cluster of {PROCESSES} workers, killed {done} times\n",
        "SIGKILL to one worker at random moments; its nanny starts another. The campaign goes on: "
        f"one call, {seconds:.0f} s, with runs of {1e3 * DASK_SLEEP:.0f} ms.\n",
        "| | |",
        "|---|---|",
        f"| store identical to that of a run left alone | {'yes' if same else 'NO'} |",
        f"| runs that the scheduler held at a kill, all kills together | {exposed.total()} |",
        f"| runs executed more than once | {len(again)} |",
        f"| of these, not held at a kill | {len(set(again) - set(exposed))} |",
        f"| executions beyond one for each run | {sum(again.values())} of {n} |",
        "",
    ]


def overhead(n: int) -> list[str]:
    """What a campaign costs for a simulator that costs nothing."""
    theta = undisturbed(1).theta
    mu, sigma = theta["mu"][0].item(), theta["sigma"][0].item()
    start = time.perf_counter()
    for _ in range(n):
        trivial(np.random.default_rng(0), mu, sigma)
    bare = time.perf_counter() - start
    start = time.perf_counter()
    for i in range(n):
        trivial(stream((0, 5), i), mu, sigma)
    streamed = time.perf_counter() - start
    rows = []
    for where in ("memory", "store"):
        with tempfile.TemporaryDirectory() as folder:
            kept = {"store": Path(folder) / "x.zarr"} if where == "store" else {}
            start = time.perf_counter()
            simulate(trivial, n, **kept)
            rows.append((f"campaign, into {where}", time.perf_counter() - start))
    size = workers.cores()
    return [
        f"## {n:,} runs of a simulator that takes microseconds\n",
        f"Wall time divided by runs. Campaigns on the default executor, {size} workers; their "
        "start is included.\n",
        "| | µs for each run | s in all |",
        "|---|---|---|",
        f"| a loop, `default_rng(0)` for each run | {1e6 * bare / n:.1f} | {bare:.1f} |",
        f"| a loop, the run's own random stream | {1e6 * streamed / n:.1f} | {streamed:.1f} |",
        *(f"| {what} | {1e6 * seconds / n:.1f} | {seconds:.1f} |" for what, seconds in rows),
        "",
    ]


def memory(n: int) -> list[str]:
    """The memory of the process that keeps large runs, beside what it starts with."""
    rows = []
    for runs in (1, n):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--memory", folder, "--runs", str(runs)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append((runs, *(int(word) for word in out.split())))
    table = [
        f"| {runs} | {before / 1e6:.0f} | {peak / 1e6:.0f} | {10 * runs} |"
        for runs, before, peak in rows
    ]
    return [
        f"## {n} runs of 10 million bytes into a store\n",
        f"A chunk sent to a worker holds at most {campaigns.CHUNK_BYTES / 2**20:.0f} MiB or one "
        f"run, a chunk of the store at most {store.CHUNK_BYTES / 2**20:.0f} MiB or one run; on the "
        f"default executor, {workers.cores()} workers. Largest resident memory of the process "
        "that calls.\n",
        "| runs | before, MB | at most, MB | data, MB |",
        "|---|---|---|---|",
        *table,
        "",
    ]


def measure_memory(folder: Path, n: int):
    unit = 1 if platform.system() == "Darwin" else 1024
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit  # noqa: E731
    undisturbed(1)
    before = peak()
    simulate(large, n, store=folder / "x.zarr")
    print(before, peak())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["killed", "dask", "overhead", "memory", "streaming"])
    parser.add_argument("--quick", action="store_true", help="small, and not written to the page")
    parser.add_argument("--campaign", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.campaign:
        return campaign(options.campaign, options.runs)
    if options.memory:
        return measure_memory(options.memory, options.runs)
    quick = options.quick
    parts = {
        "killed": lambda: in_folder(killed_campaign, *((200, 2) if quick else (2000, 20))),
        "dask": lambda: in_folder(killed_workers, *((200, 2) if quick else (2000, 20))),
        "overhead": lambda: overhead(2000 if quick else 100_000),
        "memory": lambda: memory(6 if quick else 60),
        "streaming": lambda: streaming(1024 if quick else 8192),
    }
    lines = ["# Campaigns\n"]
    for name, part in parts.items():
        if options.only in (None, name):
            made = part()
            print("\n".join(made), flush=True)
            lines += made
    if not quick and options.only is None:
        where = f"{platform.machine()}, {workers.cores()} cores, Python {platform.python_version()}"
        lines.append(f"Made by `make campaigns` on {date.today()}: {where}.\n")
        REPORT.write_text("\n".join(lines))
    return None


def in_folder(measure, *args) -> list[str]:
    folder = Path(tempfile.mkdtemp(prefix="campaigns-"))
    try:
        return measure(folder, *args)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
