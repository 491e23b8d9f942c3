"""The runs of a simulator: parameters, data, and what failed."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from consilience.core.arrays import as_numbers, finite_rows
from consilience.core.html import notebook
from consilience.core.provenance import KeyName
from consilience.core.types import Data, Theta
from consilience.model.run import Failure, Spec
from consilience.simulation.failures import Attempts, Failures
from consilience.simulation.store import Store


@dataclasses.dataclass(frozen=True)
class Unread:
    """Data that are in a store, and stay there until they are asked for."""

    store: Store
    numbers: np.ndarray

    @property
    def spec(self) -> Spec:
        assert self.store.spec is not None
        return self.store.spec

    def read(self) -> Data:
        return self.spec.unnamed(self.store.x(self.numbers))


class Simulations:
    """Parameters and the data that they gave, run by run: equal leading axes.

    `theta`: a dictionary of named arrays, or one array for a prior without names.
    `x`: an array, or a dictionary of arrays. Runs in a store are read when it is asked for.
    `failures`: the runs that gave no data; print it for a summary.
    `prior`: the prior that `simulate` drew from, in words; None for runs from elsewhere.
    `fingerprint`: all numbers of that prior, as a text for comparison.
    `key`: the random key that the runs were drawn with, as words; None where it is not known.
    `attempts`: after `drop_invalid`, the parameters of all runs and which gave data; else None.

    >>> sims = Simulations({"mu": np.zeros(3)}, np.array([[1.0, 2.0], [3.0, 4.0], [5.0, np.nan]]))
    >>> sims
    Simulations: 3 runs, theta: mu (); x: (2,); 1 run with NaN or infinite values
    >>> len(sims.drop_invalid())
    2
    """

    def __init__(
        self,
        theta: Theta | np.ndarray,
        x: Data | Unread,
        failed: Mapping[int, Failure] | None = None,
        attempts: Attempts | None = None,
        prior: dict[str, str] | None = None,
        key: KeyName | None = None,
        fingerprint: str | None = None,
    ):
        self.attempts = attempts
        self.prior, self.fingerprint, self.key = prior, fingerprint, key
        if isinstance(x, Unread):
            about = x.store.about
            self.prior, self.fingerprint = about.get("prior"), about.get("fingerprint")
            self.key = tuple(about.get("key", ())) or None
        self.theta = _arrays(theta if isinstance(theta, Mapping) else {"theta": theta}, "theta")
        self._x = x
        lengths = {len(array) for array in self.theta.values()}
        if not isinstance(x, Unread):
            self._x = _arrays(x, "x") if isinstance(x, Mapping) else _arrays({"x": x}, "x")["x"]
            lengths |= {len(array) for array in jax.tree.leaves(self._x)}
        if len(lengths) != 1:
            raise ValueError(
                "theta and x must hold one entry for each run; their leading axes are "
                f"{sorted(lengths)}."
            )
        self.failures = Failures(dict(failed or {}), self.theta)

    @classmethod
    def open(cls, path: str | Path | Store) -> "Simulations":
        """The runs that are in a store, finished or not; data are read when asked for."""
        store = path if isinstance(path, Store) else Store(path)
        numbers = store.numbers
        return cls(store.theta(numbers), Unread(store, numbers), store.failures(numbers))

    @property
    def x(self) -> Any:
        if isinstance(self._x, Unread):
            self._x = self._x.read()
        return self._x

    @property
    def unread(self) -> bool:
        """Whether the data are in a store, and have not been read as a whole."""
        return isinstance(self._x, Unread)

    @property
    def blank(self) -> Any:
        """Data of no runs: their names and shapes, without a look at the store."""
        if isinstance(self._x, Unread):
            spec = self._x.spec
            return spec.unnamed({name: np.empty((0, *s), dtype) for name, s, dtype in spec.arrays})
        return jax.tree.map(lambda array: array[:0], self._x)

    @property
    def nbytes(self) -> int:
        """How much memory the data take."""
        return len(self) * sum(
            math.prod(a.shape[1:]) * a.itemsize for a in jax.tree.leaves(self.blank)
        )

    @property
    def chunks(self) -> np.ndarray:
        """For each run the chunk of the store that it is read with."""
        if isinstance(self._x, Unread):
            return self._x.numbers // self._x.store.rows
        return np.zeros(len(self), int)

    def __len__(self) -> int:
        return len(next(iter(self.theta.values())))

    def __getitem__(self, index) -> "Simulations":
        take = np.atleast_1d(np.arange(len(self))[index])
        pick = lambda a: a[take]  # noqa: E731
        if isinstance(self._x, Unread):
            x: Any = Unread(self._x.store, self._x.numbers[take])
        else:
            x = jax.tree.map(pick, self._x)
        theta, failed = jax.tree.map(pick, self.theta), self.failures.take(take).failed
        # Whole, whichever runs are picked: how often runs fail does not depend on that.
        known = (self.attempts, self.prior, self.key, self.fingerprint)
        return Simulations(theta, x, failed, *known)

    @property
    def invalid(self) -> np.ndarray:
        """Which runs failed, or have NaN, infinite or too large values in data or parameters."""
        # What is in a store was looked at when it came in.
        leaves = jax.tree.leaves((self.theta, None if isinstance(self._x, Unread) else self._x))
        return ~finite_rows(*leaves) | self.failures.mask

    def drop_invalid(self) -> "Simulations":
        """The runs that did not fail and have no NaN or infinite values.

        A posterior trained on them is right: an observation is itself a valid run. A likelihood
        learned from them is p(x | theta, valid), and `cs.fit` learns the factor that it lacks,
        p(valid | theta), from `attempts`. A log-likelihood of the model's own is taken as it
        is: where failures depend on theta beyond the data, add that factor to it.
        """
        invalid = self.invalid
        if not invalid.any():
            return self
        kept = self[~invalid]
        kept.attempts = join_attempts([self])
        return kept

    def _repr_html_(self) -> str:
        return notebook(self)

    def __repr__(self) -> str:
        theta = ", ".join(f"{name} {a.shape[1:]}" for name, a in self.theta.items())
        x = jax.tree.map(lambda a: a.shape[1:], self.blank)
        failed = len(self.failures)
        bad = int(self.invalid.sum()) - failed
        note = f"; {failed} failed" if failed else ""
        note += f"; {bad} run{'s' * (bad != 1)} with NaN or infinite values" if bad else ""
        if self.attempts is not None:
            note += f"; {int((~self.attempts.valid).sum())} others were dropped"
        return f"Simulations: {len(self)} runs, theta: {theta}; x: {x}{note}"


def join_attempts(parts: Sequence[Simulations]) -> Attempts | None:
    """All that was tried for some runs, dropped ones included; None where all gave data."""
    tried = []
    for part in parts:
        good = ~part.invalid
        if part.attempts is None:
            tried.append(Attempts(part.theta, good))
        else:
            # Those of its runs that are valid were counted when others were dropped.
            bad = {name: array[~good] for name, array in part.theta.items()}
            tried += [part.attempts, Attempts(bad, good[~good])]
    theta, valid = jax.tree.map(lambda *arrays: np.concatenate(arrays), *tried)
    finite = finite_rows(*theta.values())
    theta, valid = {name: a[finite] for name, a in theta.items()}, valid[finite]
    return None if valid.all() else Attempts(theta, valid)


def _arrays(parts: Mapping, what: str) -> dict[str, np.ndarray]:
    """Arrays of numbers in native byte order, named by text."""
    arrays = {}
    for name, part in parts.items():
        where = what if name == what else f"{what}[{name!r}]"
        array = _numbers(part, what, where)
        if array.ndim == 0:
            raise ValueError(f"{what} must have a leading axis of runs, got one number.")
        arrays[str(name)] = array
    if not arrays:
        raise ValueError(f"{what} is an empty dictionary: name at least one array.")
    if len(arrays) < len(parts):
        raise ValueError(f"The names in {what} must differ as text, got {list(parts)}.")
    return arrays


def _numbers(part: Any, what: str, where: str) -> np.ndarray:
    try:
        ragged = np.asarray(part).dtype == object
    except ValueError as error:
        raise ValueError(f"The shapes in {what} vary from run to run: {error}") from error
    if ragged:
        raise ValueError(
            f"The shapes in {what} vary from run to run: pad them, with a mask. Or {where} holds "
            "Python objects: pass numbers."
        )
    return as_numbers(part, where)
