"""Figures that others published on the SBI benchmark, as `--data` brings them."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

FILE = "published.csv"
COLUMNS = ("task", "method", "simulations", "mean_c2st")
AMORTIZED = ("NPE", "tabpfn", "filtered_tabpfn", "npe/nsf", "npe_ensemble/nsf")
"""Methods that have a posterior for any observation, by the last word of their names.

Those of a likelihood or a ratio (NLE, NRE) run chains for each, and sequential ones (SNPE)
simulate for each.
"""


class Score(NamedTuple):
    """The mean C2ST of a method at a number of simulations."""

    task: str
    method: str
    simulations: int
    mean_c2st: float


def read_published(folder: Path) -> list[Score]:
    """The figures in a folder's `published.csv`; none where it has no such file."""
    path = folder / FILE
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} must have the columns {', '.join(COLUMNS)}: no {missing[0]}.")
        try:
            return [
                Score(row["task"], row["method"], int(row["simulations"]), float(row["mean_c2st"]))
                for row in reader
            ]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}.") from error


def write_published(path: Path, scores: Iterable[Score]):
    """The figures as the same kind of file."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(scores)


def best(
    scores: Sequence[Score], task: str, simulations: int, *, amortized: bool = True
) -> Score | None:
    """The lowest figure for a task and a number of simulations, if there is any."""
    fitting = [
        score
        for score in scores
        if (score.task, score.simulations) == (task, simulations)
        and (not amortized or _is_amortized(score.method))
    ]
    return min(fitting, key=lambda score: score.mean_c2st, default=None)


def _is_amortized(method: str) -> bool:
    name = method.split("(")[0].split()
    return bool(name) and name[-1] in AMORTIZED
