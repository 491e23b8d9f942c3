"""The course of training: the record that a fit keeps."""

import dataclasses
from typing import Literal, TypeAlias

import numpy as np

from consilience.core.html import notebook

Stopped: TypeAlias = Literal["finished", "early", "interrupted"]


@dataclasses.dataclass(frozen=True)
class Tried:
    """A recipe that competed in a fit.

    `score`: the mean log density of the parameters of `runs` runs that it was not trained on.
    `members`: its networks that were trained. `weight`: its share of the posterior.
    """

    name: str
    score: float
    runs: int
    members: int
    weight: float
    seconds: float
    decision: str


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """How training went.

    `terms`: named losses, one value an epoch; `skipped` counts steps that were not finite.
    `best_epochs`: the epoch whose weights were kept, for each learned density.
    `stopped`: "finished", "early" or "interrupted".
    `tried`: the recipes that competed, where the library chose among several. `terms` and
    `best_epochs` are then those of one member of the recipe with the largest weight.
    """

    terms: dict[str, np.ndarray]
    best_epochs: dict[str, int]
    stopped: Stopped
    seconds: float
    simulations: int
    tried: tuple[Tried, ...] = ()

    def table(self) -> str:
        """The recipes that competed, their held-out scores, and why each was kept or dropped.

        >>> tried = (Tried("NPE", -1.25, 64, 2, 1.0, 3.1, "kept"),)
        >>> history = History({"loss": np.zeros(3)}, {"posterior": 2}, "early", 3.2, 64, tried)
        >>> print(history.table())
        recipe  held-out log density  weight  networks  seconds  decision
        NPE                   -1.250    1.00         2      3.1  kept
        """
        width = max([len("recipe"), *(len(one.name) for one in self.tried)])
        head = f"{'recipe':{width}}  held-out log density  weight  networks  seconds  decision"
        rows = [
            f"{one.name:{width}}  {one.score:20.3f}  {one.weight:6.2f}  {one.members:8d}"
            f"  {one.seconds:7.1f}  {one.decision}"
            for one in self.tried
        ]
        return "\n".join([head, *rows])

    def __repr__(self) -> str:
        last = {name: values[-1] for name, values in self.terms.items() if len(values)}
        losses = ", ".join(f"{name} {value:.3f}" for name, value in last.items() if value)
        kept = ", ".join(f"{name} {epoch}" for name, epoch in self.best_epochs.items())
        epochs = len(self.terms.get("loss", ()))
        if self.tried:
            table = "\n".join(f"  {line}" for line in self.table().splitlines())
            return (
                f"History: {self.simulations} simulations, {self.seconds:.1f} s, "
                f"{self.stopped}\n{table}"
            )
        return (
            f"History: {self.simulations} simulations, {epochs} epochs, {self.seconds:.1f} s, "
            f"{self.stopped}\n  last epoch: {losses}\n  kept epoch: {kept}"
        )

    def _repr_html_(self) -> str:
        return notebook(self)
