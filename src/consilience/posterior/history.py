"""The course of training: the record that a fit keeps."""

import dataclasses
from typing import Literal, TypeAlias

import numpy as np

from consilience.core.html import notebook

Stopped: TypeAlias = Literal["finished", "early", "interrupted"]


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """How training went.

    `terms`: named losses, one value an epoch; `skipped` counts steps that were not finite.
    `best_epochs`: the epoch whose weights were kept, for each learned density.
    `stopped`: "finished", "early" or "interrupted".
    """

    terms: dict[str, np.ndarray]
    best_epochs: dict[str, int]
    stopped: Stopped
    seconds: float
    simulations: int

    def __repr__(self) -> str:
        last = {name: values[-1] for name, values in self.terms.items() if len(values)}
        losses = ", ".join(f"{name} {value:.3f}" for name, value in last.items() if value)
        kept = ", ".join(f"{name} {epoch}" for name, epoch in self.best_epochs.items())
        epochs = len(self.terms.get("loss", ()))
        return (
            f"History: {self.simulations} simulations, {epochs} epochs, {self.seconds:.1f} s, "
            f"{self.stopped}\n  last epoch: {losses}\n  kept epoch: {kept}"
        )

    def _repr_html_(self) -> str:
        return notebook(self)
