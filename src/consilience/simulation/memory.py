"""Runs in memory, where a campaign has no store."""

import math

import numpy as np

from consilience.core.types import Theta
from consilience.model.run import Failure, Spec, blank
from consilience.simulation.limits import check_memory


class Memory:
    """Runs in memory: lost when the process ends."""

    def __init__(self, n: int):
        self.n = n
        self.spec: Spec | None = None
        self.x: dict[str, np.ndarray] = {}
        self._settled = np.zeros(n, bool)
        self._failed: dict[int, tuple[Failure, int]] = {}

    def begin(self, spec: Spec, theta: Theta):
        size = sum(math.prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in spec.arrays)
        check_memory(self.n, size, "ask for fewer, or pass store= to keep them on disk")
        self.spec = spec
        self.x = {name: blank(self.n, shape, dtype) for name, shape, dtype in spec.arrays}

    def grow(self, n: int):
        """There is room for all runs from the start."""

    def missing(self, n: int, retry: int = 0) -> np.ndarray:
        again = np.zeros(n, bool)
        again[[i for i, (_, attempts) in self._failed.items() if attempts <= retry]] = True
        return np.flatnonzero(~self._settled[:n] | again)

    def failures(self, numbers: np.ndarray) -> dict[int, Failure]:
        known = self._failed
        return {i: known[j][0] for i, j in enumerate(numbers.tolist()) if j in known}

    def put(
        self,
        numbers: np.ndarray,
        theta: Theta,
        x: dict[str, np.ndarray],
        failed: dict[int, Failure],
    ):
        for name, array in x.items():
            self.x[name][numbers] = array
        self._settled[numbers] = True
        for i, number in enumerate(numbers.tolist()):
            _, attempts = self._failed.pop(number, (None, 0))
            if i in failed:
                self._failed[number] = failed[i], attempts + 1

    def touch(self):
        """Nobody else can see it."""

    def stopped(self, n: int) -> str:
        return (
            f"Stopped after {int(self._settled.sum())} of {n} runs, which are lost: pass "
            'store="runs.zarr" to keep runs, and to go on from them.'
        )
