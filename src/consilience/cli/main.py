"""The command line, and its command around the paper: `reproduce`.

Only options are imported here, and the rest of the library once they are read: the help needs no
JAX, and worker processes import this file too.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from consilience.cli.options import add_commands

EXPERIMENTS = ("gmm", "two-moons", "hes1", "source", "sir", "sbibm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code comes back."""
    with _to_readers_that_may_leave():
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    from consilience.cli.running import run

    return run(options)


@contextlib.contextmanager
def _to_readers_that_may_leave() -> Iterator[None]:
    """Let a command end as it would, whether or not its output is read: `| head` closes its end."""
    with contextlib.ExitStack() as stack:
        # Python has no stream at all where a shell closed it before the start.
        if sys.stdout is not None:
            kept: Any = _Kept(sys.stdout)
            stack.enter_context(contextlib.redirect_stdout(kept))
            stack.callback(kept.flush)
        if sys.stderr is not None:
            errors: Any = _Kept(sys.stderr)
            stack.enter_context(contextlib.redirect_stderr(errors))
        yield


class _Kept:
    """A stream that throws away what nobody reads any more."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        with self._unless_closed():
            self._stream.write(text)
        return len(text)

    def flush(self):
        with self._unless_closed():
            self._stream.flush()

    @contextlib.contextmanager
    def _unless_closed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What is left in the buffer goes there too, at the end of the process.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if not isinstance(error, BrokenPipeError):
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="consilience", description="Self-consistent amortized Bayesian inference."
    )
    parser.add_argument("--version", action="version", version=version("consilience"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_commands(commands)
    run = commands.add_parser(
        "reproduce",
        help="run an experiment of the paper or the SBI benchmark, cell by cell",
        description="Run an experiment of the paper, or the SBI benchmark. Finished cells are "
        "kept: stop at any time, and run again to go on.",
    )
    run.add_argument("experiment", choices=EXPERIMENTS)
    run.add_argument("--out", type=Path, help="folder for the results (out/EXPERIMENT)")
    run.add_argument("--budgets", type=int, nargs="+", metavar="N", help="numbers of simulations")
    run.add_argument("--samples", type=int, nargs="+", metavar="K", help="values of theta a loss")
    run.add_argument("--seeds", type=int, metavar="S", help="how many seeds")
    run.add_argument("--methods", nargs="+", metavar="M", help="such as NPE, SC-NPE, SC-NPLE")
    run.add_argument("--protocols", nargs="+", metavar="P", help="paper, default, or both")
    run.add_argument("--quick", action="store_true", help="a look in minutes, on small budgets")
    run.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="for sbibm: the benchmark's files, TASK.npz and published.csv",
    )
    run.set_defaults(
        command=_reproduce,
        stopped="What was finished is kept: run again to go on.",
        smaller="What was finished is kept: pass fewer --samples.",
    )
    return parser


def _reproduce(options: argparse.Namespace) -> int:
    from consilience.core.compiling import keep_compiled
    from consilience.experiments import registry
    from consilience.experiments.cells import Choice

    keep_compiled()
    quick = "-quick" * options.quick
    folder = options.out or Path("out") / f"{options.experiment}{quick}"
    choice = Choice(
        options.budgets, options.samples, options.seeds, options.methods, options.protocols
    )
    experiment = registry.EXPERIMENTS[options.experiment]
    rows = experiment.reproduce(folder, choice, quick=options.quick, data=options.data)
    print(f"{len(rows)} cells in {folder}. For tables and figures: consilience report {folder}")
    return 0
