"""The command line, and its command around the paper: `reproduce`.

The experiments are imported when one is asked for: worker processes import this file too.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from consilience.compiling import keep_compiled
from consilience.options import add_commands
from consilience.shell import INTERRUPTED
from consilience.training import TrainingError
from consilience.workers import StartError

EXPERIMENTS = ("gmm", "two-moons", "hes1", "source", "sir")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code comes back."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for noisy in ("jax", "matplotlib", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        return options.command(options)
    except (ValueError, OSError, StartError, TrainingError) as error:
        print(f"consilience: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"consilience: stopped. {str(stop) or options.stopped}", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="consilience", description="Self-consistent amortized Bayesian inference."
    )
    parser.add_argument("--version", action="version", version=version("consilience"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_commands(commands)
    run = commands.add_parser(
        "reproduce",
        help="run an experiment of the paper, cell by cell",
        description="Run an experiment of the paper. Finished cells are kept: stop at any time, "
        "and run again to go on.",
    )
    run.add_argument("experiment", choices=EXPERIMENTS)
    run.add_argument("--out", type=Path, help="folder for the results (out/EXPERIMENT)")
    run.add_argument("--budgets", type=int, nargs="+", metavar="N", help="numbers of simulations")
    run.add_argument("--samples", type=int, nargs="+", metavar="K", help="values of theta a loss")
    run.add_argument("--seeds", type=int, metavar="S", help="how many seeds")
    run.add_argument("--methods", nargs="+", metavar="M", help="such as NPE, SC-NPE, SC-NPLE")
    run.add_argument("--protocols", nargs="+", metavar="P", help="paper, default, or both")
    run.add_argument("--quick", action="store_true", help="a look in minutes, on small budgets")
    run.set_defaults(command=_reproduce, stopped="What was finished is kept: run again to go on.")
    return parser


def _reproduce(options: argparse.Namespace) -> int:
    from consilience import experiments
    from consilience.experiments.cells import Choice

    keep_compiled()
    quick = "-quick" * options.quick
    folder = options.out or Path("out") / f"{options.experiment}{quick}"
    choice = Choice(
        options.budgets, options.samples, options.seeds, options.methods, options.protocols
    )
    experiment = experiments.EXPERIMENTS[options.experiment]
    rows = experiment.reproduce(folder, choice, quick=options.quick)
    print(f"{len(rows)} cells in {folder}. For tables and figures: consilience report {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
