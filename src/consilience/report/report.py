"""`Fit.report`: a page on a fit, from what `findings.py` computes and `sections.py` shows."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from consilience.core.files import write
from consilience.core.types import Data, PRNGKey
from consilience.posterior.fit import Fit
from consilience.report.findings import collect
from consilience.report.sections import make_page
from consilience.simulation.simulations import Simulations


def report(
    fit: Fit,
    path: str | Path,
    x: Data | None,
    *,
    key: PRNGKey,
    simulations: Simulations | None,
    n: int,
    predictive: int,
    statistics: Mapping[str, Callable[[Any], Any]] | None,
    title: str | None,
    progress: bool,
) -> Path:
    """Write the page of a fit; see `Fit.report`."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file to write, such as report.html.")
    if x is not None and fit.posterior.data.layout.check(x)[1]:
        raise ValueError("A report shows one observation, got a batch: pass one of them.")
    if x is None and statistics is not None:
        raise ValueError("statistics are of an observation: pass x with them.")
    bar = tqdm(total=5, desc="report", unit="step", disable=None if progress else True)
    with bar:
        steps = _Steps(bar)
        found = collect(fit, x, key, simulations, n, predictive, statistics, steps, progress)
        steps("page")
        write(path, make_page(found, title).encode(), shared=True)
        bar.update()
    return path


class _Steps:
    """What a progress bar is at."""

    def __init__(self, bar: Any):
        self.bar, self.begun = bar, False

    def __call__(self, name: str):
        self.bar.update(int(self.begun))
        self.bar.set_postfix_str(name)
        self.begun = True
