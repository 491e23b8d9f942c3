"""Random damage to saved fits and to stores: the right answer, or one of our own errors.

    python benchmarks/fuzz.py load --minutes 30 --seed 0
    python benchmarks/fuzz.py journal --minutes 30 --seed 0
    python benchmarks/fuzz.py load --seed 0 --case 1234     # one case again, with its traceback

A case is bytes flipped, inserted, deleted, moved or cut off, or a JSON structure changed, with its
checksum corrected so that deeper code sees it. Cases run in a process of their own, which has a
limit of memory, and each has a limit of time; a process that dies is told and started again.
"""

import argparse
import json
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro.distributions as dist
from safetensors.numpy import load_file

import consilience as cs
from consilience.posterior import storage
from consilience.simulation.store import Store

SECONDS, MEMORY = 20, 2**30
"""What a case may take: seconds, and bytes beyond those of the process before it."""

VALUES = [None, True, -1, 0, 1, 7, 1e300, 10**9, 10**40, "", "relu", [], {}, [[1]], float("nan")]
MODEL = cs.Model(dist.Normal(0.0, 1.0), lambda key, t: t + jax.random.normal(key, (3,)))
RUNS, KEY, DRAWN = 40, jax.random.key(0), np.linspace(-1, 1, 4)


def hurt_bytes(content: bytes, rng: np.random.Generator, reach: int) -> bytes:
    """One to three kinds of damage, most of it to the first bytes."""
    data = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        end = max(1, min(len(data), reach if rng.random() < 0.8 else len(data)))
        at, n = int(rng.integers(end)), int(rng.integers(1, 30))
        kind = rng.integers(5)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            data[at:at] = rng.bytes(n)
        elif kind == 2:
            del data[at : at + n]
        elif kind == 3:
            there = int(rng.integers(end))
            data[there : there + n] = data[at : at + n]
        elif rng.random() < 0.3:
            del data[at:]
    return bytes(data)


def hurt_json(node: Any, rng: np.random.Generator) -> Any:
    """A JSON structure with some of its values changed, lost, swapped or nested."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any):
        for name in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, name))
            if isinstance(node[name], dict | list):
                walk(node[name])

    walk(node)
    for _ in range(rng.integers(1, 4)):
        (parent, name), (other, key) = (places[int(i)] for i in rng.integers(len(places), size=2))
        kind = rng.integers(4)
        try:
            if kind == 0:
                parent[name] = VALUES[int(rng.integers(len(VALUES)))]
            elif kind == 1:
                del parent[name]
            elif kind == 2:
                parent[name] = json.loads(json.dumps(other[key]))
            else:
                parent[name] = [parent[name]]
        except (KeyError, IndexError):
            continue  # an earlier change has taken that place away
    return node


class Fits:
    """Damage to a saved fit."""

    def __init__(self, folder: Path):
        small = cs.Coupling(transform=cs.Affine(), layers=1, width=8, depth=1)
        sims = cs.simulate(MODEL, 64, key=KEY)
        settings = {"posterior": small, "likelihood": small, "self_consistency": False, "epochs": 1}
        fit = cs.fit(MODEL, sims, key=KEY, progress=False, **settings)
        self.path = fit.save(folder / "fit.safetensors")
        self.whole = self.path.read_bytes()
        self.tensors = load_file(self.path)
        self.expected = fit.log_prob(DRAWN, np.zeros(3))

    def run(self, rng: np.random.Generator):
        n = int.from_bytes(self.whole[:8], "little")
        if rng.random() < 0.4:
            self.path.write_bytes(hurt_bytes(self.whole, rng, 8 + n))
            found = cs.load(self.path, MODEL).log_prob(DRAWN, np.zeros(3))
            assert np.array_equal(found, self.expected), "other numbers, and no error"
            return
        header, body = json.loads(self.whole[8 : 8 + n]), self.whole[8 + n :]
        meta = header["__metadata__"]
        if rng.random() < 0.2:
            header = hurt_json(header, rng)
        else:
            text = json.dumps(hurt_json(json.loads(meta[storage.META]), rng))
            meta |= {storage.META: text, storage.DIGEST: storage._digest(text, self.tensors)}
        packed = json.dumps(header).encode()
        self.path.write_bytes(len(packed).to_bytes(8, "little") + packed + body)
        cs.load(self.path, MODEL)


class Stores:
    """Damage to a store: its journal, Zarr's descriptions, its chunks."""

    def __init__(self, folder: Path):
        self.whole, self.path = folder / "whole.zarr", folder / "hurt.zarr"
        cs.simulate(MODEL, RUNS, key=KEY, store=self.whole)
        self.expected = cs.simulate(MODEL, RUNS, key=KEY).x
        self.files = sorted(p.relative_to(self.whole) for p in self.whole.rglob("*") if p.is_file())
        self.records = [p for p in self.files if p.name in ("zarr.json", "journal.jsonl")]

    def run(self, rng: np.random.Generator):
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self.whole, self.path)
        among = self.records if rng.random() < 0.8 else self.files
        file = self.path / among[int(rng.integers(len(among)))]
        content = file.read_bytes()
        if rng.random() < 0.5 and file.name == "zarr.json":
            file.write_text(json.dumps(hurt_json(json.loads(content), rng)))
        elif rng.random() < 0.5 and file.name == "journal.jsonl":
            lines = content.splitlines()
            at = int(rng.integers(len(lines)))
            entry = hurt_json([json.loads(lines[at].partition(b" ")[2])], rng)
            text = json.dumps(entry[0] if entry else None).encode()
            lines[at] = b"%08x %s" % (zlib.crc32(text), text)
            file.write_bytes(b"\n".join(lines) + b"\n")
        else:
            file.write_bytes(hurt_bytes(content, rng, len(content)))
        store = Store(self.path)
        numbers = store.numbers
        good = ~np.isin(np.arange(len(numbers)), list(store.failures(numbers)))
        found = store.x(numbers)["data"][good]
        assert np.array_equal(found, self.expected[numbers[good]]), "other data, and no error"
        again = cs.simulate(MODEL, RUNS, key=KEY, store=self.path)
        assert np.array_equal(again.x, self.expected), "other data after going on, and no error"


ALLOWED = (cs.LoadError, cs.StoreError, FileNotFoundError)


def work(what: str, seed: int, first: int, until: float, only: bool, note: Path):
    """Cases one after another; what is found goes to standard output."""
    with tempfile.TemporaryDirectory() as folder:
        target = {"load": Fits, "journal": Stores}[what](Path(folder))
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))

        def late(*_: Any):
            raise TimeoutError(f"longer than {SECONDS} s")

        signal.signal(signal.SIGALRM, late)
        case, crashes, refused = first, 0, 0
        while time.time() < until:
            note.write_text(str(case))
            signal.alarm(SECONDS)
            try:
                target.run(np.random.default_rng([seed, case]))
            except ALLOWED as error:
                refused += 1
                if isinstance(error.__cause__, MemoryError | TimeoutError):
                    crashes += 1
                    print(f"case {case}: {error}", flush=True)
            except Exception as error:
                crashes += 1
                print(f"case {case}: {type(error).__name__}: {error}", flush=True)
                if only:
                    traceback.print_exc()
            signal.alarm(0)
            case += 1
            if only:
                break
        print(f"{case - first} cases from {first}: {refused} refused, {crashes} crashes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["load", "journal"])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this one alone, in this process")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    until = time.time() + 60 * options.minutes
    if options.worker:
        first, until, note = options.worker
        work(options.what, options.seed, int(first), float(until), False, Path(note))
        return
    with tempfile.NamedTemporaryFile() as note:
        path = Path(note.name)
        if options.case is not None:
            work(options.what, options.seed, options.case, until, True, path)
            return
        first = 0
        while time.time() < until:
            words = [sys.executable, __file__, options.what, "--seed", str(options.seed)]
            code = subprocess.call([*words, "--worker", str(first), str(until), note.name])
            if code:
                print(f"case {path.read_text()}: the process ended with {code}", flush=True)
            first = int(path.read_text() or first) + 1


if __name__ == "__main__":
    main()
