"""Runs that gave no data: how many, why, and where in parameter space."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from consilience.core.labels import components
from consilience.model.run import Failure


class Place(NamedTuple):
    """One number of theta: where its failed runs lie among all, from 0 (lowest) to 1."""

    name: str
    rank: float
    low: float
    high: float


class Failures:
    """The failed runs among `n`: their positions, reasons, messages and parameters.

    >>> theta = {"rate": np.arange(100.0)}
    >>> failures = Failures({98: Failure("raised", "ValueError: overflow")}, theta)
    >>> print(failures.summary())
    1 of 100 runs failed: 1 raised.
      raised: ValueError: overflow (run 98)
      rate: failed runs in 98 to 98, all runs in 0 to 99
    """

    def __init__(self, failed: dict[int, Failure], theta: dict[str, np.ndarray]):
        self.failed = dict(sorted(failed.items()))
        self._theta = theta
        self.total = len(next(iter(theta.values())))

    def __len__(self) -> int:
        return len(self.failed)

    def __getitem__(self, position: int | np.integer) -> Failure:
        return self.failed[int(position)]

    @property
    def positions(self) -> np.ndarray:
        return np.fromiter(self.failed, int, len(self.failed))

    @property
    def theta(self) -> dict[str, np.ndarray]:
        """The parameters of the failed runs."""
        return {name: array[self.positions] for name, array in self._theta.items()}

    @property
    def mask(self) -> np.ndarray:
        """Which of all runs failed."""
        mask = np.zeros(self.total, bool)
        mask[self.positions] = True
        return mask

    @property
    def reasons(self) -> dict[str, int]:
        """How often each reason occurs, the most frequent first."""
        return dict(Counter(f.reason for f in self.failed.values()).most_common())

    def take(self, index: np.ndarray) -> "Failures":
        """The failures among the runs at these positions."""
        theta = {name: array[index] for name, array in self._theta.items()}
        old = enumerate(index.tolist())
        return Failures({i: self.failed[j] for i, j in old if j in self.failed}, theta)

    def places(self) -> list[Place]:
        """For every number of theta the mean rank and the range of its failed runs."""
        found = []
        for name, values in components(self._theta, 1).items():
            values = values.astype(float)
            ranks = values.argsort().argsort() / max(self.total - 1, 1)
            bad = values[self.mask]
            found.append(Place(name, ranks[self.mask].mean(), bad.min(), bad.max()))
        return found

    def summary(self, most: int = 5) -> str:
        """A few lines: how many runs failed, why, and the parameters that set them apart."""
        if not len(self):
            return f"None of {self.total} runs failed."
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.reasons.items())
        lines = [f"{len(self)} of {self.total} runs failed: {reasons}."]
        seen = Counter(self.failed.values())
        first = {failure: i for i, failure in reversed(self.failed.items())}
        for failure, n in seen.most_common(most):
            message = failure.message.splitlines()[0] if failure.message else "no message"
            times = f"run {first[failure]}" if n == 1 else f"{n} runs, first {first[failure]}"
            lines.append(f"  {failure.reason}: {message} ({times})")
        if len(seen) > most:
            lines.append(f"  and {len(seen) - most} other messages")
        # What lies farthest from the middle tells most.
        places = sorted(self.places(), key=lambda place: -abs(place.rank - 0.5))[:most]
        whole = components(self._theta, 1)
        for place in places:
            every = whole[place.name].astype(float)
            lines.append(
                f"  {place.name}: failed runs in {place.low:.4g} to {place.high:.4g}, "
                f"all runs in {every.min():.4g} to {every.max():.4g}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.summary()


class Attempts(NamedTuple):
    """The parameters of all runs of a campaign, and which of them gave data."""

    theta: dict[str, np.ndarray]
    valid: np.ndarray
