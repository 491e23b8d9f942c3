"""The options of the commands around a model of the user's own, and their help."""

import argparse
import contextlib
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from consilience.cli.codes import CODES, NO_MEMORY
from consilience.diagnostics.verdicts import AS_IS, CORRECTED, MCMC, MODEL

MODEL_HELP = "a cs.Model or a function that returns one: mymodel:model is `model` in mymodel.py"
DATA_HELP = (
    "DATA holds one observation, or a batch behind a leading axis: .npy; .npz or .nc (netCDF), "
    "by name where the model's data are several arrays; .csv or .txt, numbers without a header: "
    "one observation, or one on each line."
)
WIDTH = 88


def add_commands(commands: Any):
    """Add `simulate`, `status`, `fit`, `sample`, `check` and `report` to a parser's commands."""
    _add_simulate(commands)
    _add_status(commands)
    _add_fit(commands)
    _add_sample(commands)
    _add_check(commands)
    _add_report(commands)


def _add_simulate(commands: Any):
    parser = _add(
        commands,
        "simulate",
        "run a model's simulator, and keep the runs in a store",
        "Draw parameters from the prior, run the simulator on each, and keep the runs in STORE, a "
        "folder in Zarr's format. Stop it at any time: the same command runs what is missing. A "
        "larger --runs adds to the store. Runs that fail are kept with their reason.",
        "consilience simulate mymodel:model runs.zarr --runs 1000 --timeout 60",
        {
            0: "all runs are there, failed ones among them",
            2: "bad input",
            130: "stopped by Ctrl-C or SIGTERM: the same command goes on",
        },
        smaller="Runs in the store are kept. Pass fewer --runs.",
    )
    _add_model_and_store(parser, "the folder of the runs")
    parser.add_argument("--runs", type=_count, required=True, metavar="N", help="runs in all")
    _add_seed(parser)
    _add_quiet(parser)
    outside = parser.add_argument_group("for simulators outside JAX (cs.external, cs.command)")
    outside.add_argument(
        "--timeout", type=_seconds, metavar="SEC", help="a run that takes longer has failed"
    )
    outside.add_argument(
        "--retry", type=_whole, default=0, metavar="R", help="further attempts at failed runs (0)"
    )
    outside.add_argument(
        "--workers", type=_count, metavar="W", help="processes (one for each core)"
    )


def _add_status(commands: Any):
    parser = _add(
        commands,
        "status",
        "how many runs of a store are done, failed and missing, and why",
        "What STORE holds: runs that are done, failed and missing, why and where in parameter "
        "space runs failed, and what made them. It changes nothing, and can be asked while a "
        "campaign runs; where none runs, all data are read, and damaged runs count as missing.",
        "consilience status runs.zarr",
        {0: "all runs are there", 1: "runs are missing", 2: "there is no store"},
        smaller="Use a machine with more memory.",
    )
    parser.add_argument("store", type=Path, metavar="STORE", help="the folder of the runs")


def _add_fit(commands: Any):
    parser = _add(
        commands,
        "fit",
        "learn the posterior from the runs of a store",
        "Train on the runs in STORE with the defaults of cs.fit, and write the fit to a file. "
        "Ctrl-C ends training early and keeps the best so far. Where FILE cannot be written after "
        "training, the fit goes to the current folder or that for temporary files.",
        "consilience fit mymodel:model runs.zarr --out fit.safetensors",
        {
            0: "trained",
            2: "bad input, training failed, or the fit is in another place than FILE",
            130: "stopped by Ctrl-C",
        },
        smaller="Train on fewer runs, or use a machine with more memory.",
    )
    _add_model_and_store(parser, "made by consilience simulate")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write")
    _add_seed(parser)
    parser.add_argument("--drop-invalid", action="store_true", help="leave failed runs out")
    parser.add_argument(
        "--no-self-consistency", action="store_true", help="maximum likelihood alone (NPE)"
    )
    parser.add_argument("--epochs", type=_count, metavar="E", help="passes over the runs")
    parser.add_argument(
        "--effort",
        choices=("quick", "standard", "thorough"),
        help="without a likelihood: how many recipes compete, and for how long (standard)",
    )
    _add_quiet(parser)


def _add_sample(commands: Any):
    parser = _add(
        commands,
        "sample",
        "draw from the posterior of observed data",
        "Draw from the learned posterior of each observation, and write the draws as netCDF, with "
        f"a variable for each parameter. {DATA_HELP}",
        "consilience sample fit.safetensors x.csv --model mymodel:model --out draws.nc",
        {0: "drawn", 2: "bad input"},
        smaller="Pass fewer --draws, or a smaller batch of observations.",
    )
    _add_fit_and_data(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.nc", help="the draws")
    parser.add_argument("--draws", type=_count, default=1000, metavar="N", help="how many (1000)")
    parser.add_argument(
        "--corrected",
        action="store_true",
        help="resample by importance; needs a prior density and a likelihood, given or learned",
    )
    _add_seed(parser)


def _add_check(commands: Any):
    parser = _add(
        commands,
        "check",
        "how far to trust the posterior of observed data",
        "Say whether to use the posterior of each observation. It costs 500 runs of the simulator, "
        f"unless --held-out gives them, and --predictive more for each observation. {DATA_HELP}",
        "consilience check fit.safetensors x.csv --model mymodel:model --out report.txt",
        {
            CODES[AS_IS]: AS_IS,
            CODES[CORRECTED]: f"{CORRECTED}: consilience sample --corrected",
            CODES[MCMC]: MCMC,
            CODES[MODEL]: MODEL,
            2: "bad input",
        },
        "For a batch, the largest code that occurs.",
        smaller="Pass a smaller batch of observations, or a lower --predictive.",
    )
    _add_fit_and_data(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="every observation's verdict: .nc or .txt"
    )
    _add_held_out(parser)
    _add_seed(parser)


def _add_report(commands: Any):
    parser = _add(
        commands,
        "report",
        "a page on a fit; or the tables and figures of an experiment",
        "For FIT, a file made by consilience fit: one HTML page with everything in it, on the "
        "model, its training, its calibration and, with --observation, the posterior of observed "
        "data and the verdict on it. It costs --runs runs of the simulator, unless --held-out "
        "gives them, and --predictive more for an observation. For FOLDER, results of consilience "
        "reproduce: their tables and figures as Markdown, CSV and PNG.",
        "consilience report fit.safetensors --model mymodel:model --observation x.csv \\\n"
        "      --out report.html\n  consilience report out/gmm",
        {0: "written", 2: "bad input"},
        smaller="Pass fewer --runs, or a lower --predictive.",
    )
    parser.add_argument("source", type=Path, metavar="FIT|FOLDER", help="what to report on")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="the page, or where to write (the same folder)"
    )
    fitted = parser.add_argument_group("for a fit")
    fitted.add_argument("--model", metavar="MODULE:OBJECT", help=MODEL_HELP)
    fitted.add_argument(
        "--observation", type=Path, metavar="DATA", help="a file with one, as for `sample`"
    )
    fitted.add_argument(
        "--runs", type=_count, default=500, metavar="N", help="new runs to judge the fit by (500)"
    )
    _add_held_out(fitted)
    _add_seed(fitted)
    _add_quiet(fitted)


def _add(
    commands: Any,
    name: str,
    summary: str,
    text: str,
    example: str,
    codes: Mapping[int, str],
    more: str = "",
    *,
    smaller: str,
) -> argparse.ArgumentParser:
    codes = {**codes, NO_MEMORY: "out of memory"}
    listed = "\n".join(f"  {code:<4} {meaning}" for code, meaning in sorted(codes.items()))
    parser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(text, WIDTH),
        epilog=f"example:\n  {example}\n\nexit codes:\n{listed}\n{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_command(name), stopped="Nothing was written.", smaller=smaller)
    return parser


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """A command, which imports JAX and much else once it is called."""

    def call(options: argparse.Namespace) -> int:
        from consilience.cli import commands

        return getattr(commands, name)(options)

    return call


def _add_held_out(parser: Any):
    parser.add_argument(
        "--held-out",
        type=Path,
        metavar="STORE",
        help="200 or more runs of the model that the fit was not trained on",
    )
    parser.add_argument(
        "--predictive",
        type=_whole,
        default=200,
        metavar="N",
        help="datasets simulated at the posterior of an observation (200; 0 for none)",
    )


def _add_fit_and_data(parser: argparse.ArgumentParser):
    parser.add_argument("fit", type=Path, metavar="FIT", help="a file made by consilience fit")
    parser.add_argument("data", type=Path, metavar="DATA", help="the observations")
    # A saved fit has the networks alone: prior, likelihood and simulator are code.
    parser.add_argument("--model", required=True, metavar="MODULE:OBJECT", help=MODEL_HELP)


def _add_model_and_store(parser: argparse.ArgumentParser, what: str):
    parser.add_argument("model", metavar="MODULE:OBJECT", help=MODEL_HELP)
    parser.add_argument("store", type=Path, metavar="STORE", help=what)


def _add_seed(parser: Any):
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="S", help="the same seed, the same numbers (0)"
    )


def _add_quiet(parser: Any):
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _count(text: str) -> int:
    return _number(text, int, lambda n: n >= 1, "a whole number above zero")


def _whole(text: str) -> int:
    return _number(text, int, lambda n: n >= 0, "a whole number, zero or more")


def _seconds(text: str) -> float:
    return _number(text, float, lambda s: s > 0, "seconds above zero")


def _seed(text: str) -> int:
    # JAX would cut a larger number to 32 bits.
    return _number(text, int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 2**32 - 1")


def _number(text: str, kind: Callable[[str], Any], good: Callable[[Any], bool], what: str) -> Any:
    with contextlib.suppress(ValueError):
        if good(kind(text)):
            return kind(text)
    raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
