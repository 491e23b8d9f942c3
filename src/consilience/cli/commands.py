"""What the commands around a model of the user's own do; `options.py` has their options.

Results go to standard output, notes and progress to standard error. A command returns its
exit code; bad input is an `InputError`, or another error that `running.py` shows in one line.
"""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from consilience.cli.codes import CODES, INTERRUPTED
from consilience.cli.inputs import (
    InputError,
    check_netcdf,
    check_out,
    read_data,
    read_model,
    write_netcdf,
)
from consilience.cli.saving import check_room, save_somewhere
from consilience.core.files import write
from consilience.core.provenance import key_words
from consilience.core.types import Data, PRNGKey
from consilience.diagnostics.check import Check
from consilience.model.model import Model
from consilience.model.run import Task
from consilience.posterior.fit import Fit
from consilience.posterior.parts import MissingPartError
from consilience.posterior.storage import LoadError, load
from consilience.simulation import simulate as simulating
from consilience.simulation.journal import Journal
from consilience.simulation.lock import owner_of
from consilience.simulation.simulations import Simulations
from consilience.simulation.store import JOURNAL, LOCK, ROOT, Store
from consilience.simulation.workers import Workers
from consilience.training import train


def simulate(options: argparse.Namespace) -> int:
    """Run a campaign, or what is missing of it."""
    model = read_model(options.model)
    if model.simulator is None:
        raise InputError(f"{options.model} has no simulator: pass one to cs.Model.")
    key = jax.random.key(options.seed)
    try:
        with _terminable(), _workers(model, key, options) as executor:
            sims = simulating.simulate(
                model,
                options.runs,
                key=key,
                store=options.store,
                executor=executor,
                timeout=options.timeout,
                retry=options.retry,
                progress=not options.quiet,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_resume(options.store, options.runs)) from None
    failed = len(sims.failures)
    print(f"{len(sims)} runs in {options.store}: {len(sims) - failed} with data, {failed} failed.")
    if failed:
        print(sims.failures.summary())
    return 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends what runs inside like Ctrl-C: batch systems send it when time is up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _workers(model: Model, key: PRNGKey, options: argparse.Namespace) -> Iterator[Executor | None]:
    """As many processes as were asked for; None for the default."""
    if model.external is None:
        given = {
            "--timeout": options.timeout,
            "--retry": options.retry,
            "--workers": options.workers,
        }
        named = [name for name, value in given.items() if value]
        if named:
            raise InputError(
                f"{' and '.join(named)}: for simulators outside JAX alone. That of {options.model} "
                "is compiled, and makes many runs at once: leave it out."
            )
    if model.external is None or options.workers is None:
        yield None
        return
    task = Task(model.external, key_words(key), options.timeout)
    with Workers(task, options.workers) as workers:
        yield workers


def _resume(store: Path, n: int) -> str:
    journal = Journal(store / JOURNAL)
    journal.replay(writable=False)
    there = int(np.count_nonzero(journal.settled < n))
    return f"{there} of {n} runs are in {store}: run the same command to go on from there."


def status(options: argparse.Namespace) -> int:
    """Show what a store holds, without changing it."""
    path: Path = options.store
    owner = owner_of(path / LOCK)
    if owner is not None and not (path / ROOT).exists():
        print(f"{path}: no run has ended yet.\nat work     {owner}")
        return 1
    # A process at work looks after its data itself, and changes them while they are read.
    store = Store(path, verify=owner is None)
    sims = Simulations.open(store)
    failed, missing = len(sims.failures), store.total - len(sims)
    print(f"{path}: {store.total} runs")
    print(f"done        {len(sims) - failed}\nfailed      {failed}\nmissing     {missing}")
    print(f"at work     {owner or 'no process'}")
    for line in _provenance(store.about):
        print(line)
    if failed:
        print(sims.failures.summary())
    return 1 if missing else 0


def _provenance(about: dict[str, Any]) -> list[str]:
    """Lines on what made the runs of a store."""
    kind, *words = about["key"]
    seed = f" (--seed {words[-1]})" if not any(words[:-1]) else ""
    prior = [f"{name} ~ {text}" for name, text in about["prior"].items()]
    return [
        f"simulator   {about['simulator']}",
        *(f"{'prior' if i == 0 else '':<11} {line}" for i, line in enumerate(prior)),
        f"key         {kind} {words}{seed}",
        f"made by     consilience {about['version']}",
    ]


def fit(options: argparse.Namespace) -> int:
    """Train on the runs of a store, and save the fit."""
    check_out(options.out)
    check_room(options.out)
    model = read_model(options.model)
    sims = _runs(options.store, model, options.model)
    failed = sims.failures
    if len(failed) and not options.drop_invalid:
        reasons = ", ".join(f"{n} {reason}" for reason, n in failed.reasons.items())
        raise InputError(
            f"{len(failed)} of {len(sims)} runs in {options.store} failed ({reasons}): see "
            f"`consilience status {options.store}`. Fix the simulator, or pass --drop-invalid: a "
            "fit of the rest takes into account how often runs fail at which parameters."
        )
    result = train.fit(
        model,
        sims.drop_invalid() if options.drop_invalid else sims,
        key=jax.random.key(options.seed),
        self_consistency=False if options.no_self_consistency else None,
        epochs=options.epochs,
        effort=options.effort,
        progress=not options.quiet,
    )
    saved = save_somewhere(result, options.out)
    print(f"{result}\nSaved to {saved}.")
    return INTERRUPTED if result.history.stopped == "interrupted" else 0


def _runs(path: Path, model: Model, name: str) -> Simulations:
    """The runs of a store, once it is seen that they have the model's prior."""
    store = Store(path)
    held = store.about["prior"]
    if model.prior.differs_from(held, store.about.get("fingerprint")):
        raise InputError(
            f"{path} holds runs with the prior {held}, but that of {name} is "
            f"{model.prior.texts}{model.prior.hidden(held)}: name the model that the "
            "runs were made with."
        )
    sims = Simulations.open(store)
    if len(sims) < store.total:
        _note(f"{store.total - len(sims)} of the {store.total} runs in {path} are missing.")
    return sims


def sample(options: argparse.Namespace) -> int:
    """Write posterior draws."""
    check_out(options.out, ".nc")
    fitted, x = _fit_and_data(options)
    check_netcdf(fitted.model.prior.names, options.out)
    draws = fitted.sample(
        x,
        options.draws,
        key=jax.random.key(options.seed),
        method="corrected" if options.corrected else "amortized",
    )
    write_netcdf(draws.assign_attrs(_about(options)), options.out)
    count = draws.sizes.get("observation", 1)
    print(
        f"{options.draws} draws of {', '.join(map(str, draws.data_vars))} for {count} "
        f"observation{'s' * (count > 1)} in {options.out}."
    )
    if options.corrected:
        k = draws["pareto_k"].values
        print(f"Pareto k at most {np.max(k):.2f}; below 0.7 the corrected draws can be trusted.")
    return 0


def check(options: argparse.Namespace) -> int:
    """Say whether to use a posterior; the exit code says it too."""
    if options.out is not None:
        check_out(options.out, ".nc", ".txt")
    fitted, x = _fit_and_data(options)
    held_out = options.held_out
    report = fitted.check(
        x,
        key=jax.random.key(options.seed),
        simulations=None if held_out is None else _runs(held_out, fitted.model, options.model),
        predictive=options.predictive,
    )
    if options.out is not None and options.out.suffix == ".nc":
        write_netcdf(report.table.assign_attrs(_about(options)), options.out)
    elif options.out is not None:
        write(options.out, _text(report).encode(), shared=True)
    print(report)
    return max(CODES[str(verdict)] for verdict in np.ravel(report.verdict))


def report(options: argparse.Namespace) -> int:
    """Write the page of a fit, or the tables and figures of an experiment."""
    if options.source.is_dir():
        return _report_experiment(options)
    if not options.source.exists():
        raise InputError(f"There is no file or folder {options.source}.")
    if options.model is None:
        raise InputError(
            f"A fit has no code: name the model of {options.source} with --model MODULE:OBJECT."
        )
    if options.out is None:
        raise InputError("Name the page to write with --out report.html.")
    check_out(options.out, ".html", ".htm")
    fitted = _load(options.source, options.model)
    x, layout = None, fitted.posterior.data.layout
    if options.observation is not None:
        x = read_data(options.observation, layout)
        arrays, batched = layout.check(x)
        if batched:
            count = len(arrays[layout.names[0]])
            if count > 1:
                raise InputError(
                    f"A report shows one observation, but {options.observation} holds {count}: "
                    "keep one of them."
                )
            x = layout.unnamed({name: array[0] for name, array in arrays.items()})
    held_out = options.held_out
    fitted.report(
        options.out,
        x,
        key=jax.random.key(options.seed),
        simulations=None if held_out is None else _runs(held_out, fitted.model, options.model),
        n=options.runs,
        predictive=options.predictive,
        progress=not options.quiet,
    )
    print(f"Written to {options.out}.")
    return 0


def _report_experiment(options: argparse.Namespace) -> int:
    from consilience.experiments import report as tables
    from consilience.experiments.experiment import read_name
    from consilience.experiments.registry import EXPERIMENTS

    given = {
        "--model": options.model,
        "--observation": options.observation,
        "--held-out": options.held_out,
    }
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise InputError(
            f"{' and '.join(named)}: for the file of a fit alone, but {options.source} is a folder."
        )
    experiment = EXPERIMENTS[read_name(options.source)[0]]
    page = tables.report(experiment, options.source, options.out)
    print(page.read_text())
    print(f"Written to {page.parent}: {page.name}, a CSV and figures.")
    return 0


def _text(report: Check) -> str:
    """A report with a line for each observation of a batch."""
    lines, table = [repr(report)], report.table
    if "observation" in table.sizes:
        pairs = zip(table["verdict"].values, table["reason"].values, strict=True)
        lines += [f"{i}: {verdict}. {reason}" for i, (verdict, reason) in enumerate(pairs)]
    return "\n".join(lines) + "\n"


def _fit_and_data(options: argparse.Namespace) -> tuple[Fit, Data]:
    fitted = _load(options.fit, options.model)
    return fitted, read_data(options.data, fitted.posterior.data.layout)


def _load(path: Path, name: str) -> Fit:
    """A fit of the model of this name, made with parts of the library alone."""
    try:
        return load(path, read_model(name))
    except LoadError as error:
        if not isinstance(error.__cause__, MissingPartError):
            raise
        raise InputError(
            f"{path} is a fit with parts of your own, which the command line cannot load: use "
            "cs.load(path, model, parts=...) in Python, and the methods of the fit."
        ) from error


def _about(options: argparse.Namespace) -> dict[str, Any]:
    """What a result was made from."""
    return {
        "consilience": version("consilience"),
        "model": options.model,
        "fit": str(options.fit),
        "data": str(options.data),
        "seed": options.seed,
    }


def _note(text: str):
    print(f"consilience: {text}", file=sys.stderr)
