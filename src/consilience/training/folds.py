"""Cross-fitting: each member of an ensemble is trained without its own part of the runs."""

from typing import NamedTuple

import numpy as np
from numpy.random import Generator

FOLDS = 5
"""Parts of the runs where a single member is trained."""
FEWEST_RUNS = 10
"""With fewer runs than this nothing is held out."""


class Fold(NamedTuple):
    """The runs that a member is trained on, and those that it does not see."""

    train: np.ndarray
    held_out: np.ndarray


def make_folds(n: int, members: int, rng: Generator) -> list[Fold]:
    """A fold for each member; together they hold out every run once.

    All have equally many runs to train on, so that one compiled function serves them all.

    >>> [len(fold.train) for fold in make_folds(11, 2, np.random.default_rng(0))]
    [5, 5]
    """
    parts = np.array_split(rng.permutation(n), FOLDS if members == 1 else members)
    size = n - len(parts[0])
    folds = []
    for i in range(members):
        rest = np.concatenate([part for j, part in enumerate(parts) if j != i])
        folds.append(Fold(np.sort(rng.permutation(rest)[:size]), np.sort(parts[i])))
    return folds
