"""One run of a simulator outside JAX, and chunks of many: what a worker does.

A worker gets a `Task`, the numbers of its runs and their parameters, and gives an `Outcome`
for each. Nothing that a simulator does ends a chunk: failures are outcomes too. Nothing here
imports JAX, and so no worker does.
"""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator, Philox, SeedSequence

from consilience.core.arrays import as_real
from consilience.core.processes import children_end
from consilience.model.external import External

DATA = "data"
"""The name of data that are one array."""

RAISED, LATE, NOT_FINITE, WRONG, DIED = (
    "raised",
    "timed out",
    "not finite",
    "wrong shape",
    "worker died",
)
LONGEST = 500
"""Characters of a message that are kept."""


class Failure(NamedTuple):
    """Why a run gave no data."""

    reason: str
    message: str


class Outcome(NamedTuple):
    """The data of a run, an array or a dictionary of arrays, or its failure.

    `number` and `mark` say which run of which chunk it is the outcome of.
    """

    x: Any
    failure: Failure | None
    seconds: float
    number: int = -1
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class Task:
    """What every run of a campaign shares: the simulator, the key as numbers, a time limit.

    `mark` differs each time that a chunk is sent: it tells whether an outcome is of that chunk, and
    Dask would answer a chunk that is sent again with the outcome that it remembers.
    """

    simulator: External
    entropy: tuple[int, ...]
    timeout: float | None = None
    mark: str = ""


def stream(entropy: tuple[int, ...], number: int) -> Generator:
    """The random numbers of one run: they depend on the key and the run's number alone.

    >>> bool(stream((0, 1), 7).random() == stream((0, 1), 7).random())
    True
    """
    return Generator(Philox(SeedSequence(entropy, spawn_key=(number,))))


def run_chunk(task: Task, numbers: np.ndarray, theta: Mapping[str, np.ndarray]) -> list[Outcome]:
    """The outcomes of runs with these numbers, at parameters with a leading axis of runs."""
    return [run_one(task, int(number), at(theta, i)) for i, number in enumerate(numbers)]


def at(theta: Mapping[str, np.ndarray], i: int) -> dict[str, Any]:
    """The parameters of one run as a simulator takes them: floats, or arrays."""
    return {name: a[i].item() if a.ndim == 1 else a[i] for name, a in theta.items()}


def run_one(task: Task, number: int, theta: Mapping[str, Any]) -> Outcome:
    """One run, whatever comes of it; a child that the simulator forks does not come back."""
    start = time.perf_counter()
    with children_end():
        x, failure = _attempt(task, stream(task.entropy, number), theta)
    return Outcome(x, failure, time.perf_counter() - start, number, task.mark)


def _attempt(task: Task, rng: Generator, theta: Mapping[str, Any]) -> tuple[Any, Failure | None]:
    late = Failure(LATE, f"The run took longer than {task.timeout} s.")
    own = task.simulator.keeps_time
    try:
        with _time_limit(None if own else task.timeout):
            x = task.simulator.run(rng, theta, task.timeout if own else None)
    except _Late:
        return None, late
    except _NoTimer as error:
        raise ValueError(str(error)) from None
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and own and task.timeout is not None:
            return None, late
        return None, Failure(RAISED, f"{type(error).__name__}: {error}"[:LONGEST])
    try:
        arrays = _arrays(x)
    except (TypeError, ValueError) as error:
        return None, Failure(WRONG, str(error)[:LONGEST])
    bad = [name for name, a in _named(arrays).items() if not np.isfinite(a).all()]
    if bad:
        return None, Failure(NOT_FINITE, f"{_where(bad[0], arrays)} has NaN or infinite values.")
    return arrays, None


def _arrays(x: Any) -> Any:
    """What a simulator returned as arrays of numbers in native byte order."""
    if x is None:
        raise TypeError("The simulator returned nothing (None): end it with `return x`.")
    arrays = _as_arrays(x)
    for name, array in _named(arrays).items():
        if array.size == 0:
            raise ValueError(
                f"{_where(name, arrays)} has the shape {array.shape}: return at least one number."
            )
    return arrays


def _as_arrays(x: Any) -> Any:
    # What is beyond the largest float64 becomes infinite, and is found so.
    with np.errstate(over="ignore"):
        if not isinstance(x, Mapping):
            return as_real(x, "x")
        arrays = {str(name): as_real(part, f"x[{str(name)!r}]") for name, part in x.items()}
    if not arrays:
        raise ValueError("x is an empty dictionary: name at least one array.")
    if len(arrays) < len(x):
        raise ValueError(f"The names in x must differ as text, got {list(x)}.")
    return arrays


def _named(x: Any) -> dict[str, np.ndarray]:
    return x if isinstance(x, dict) else {DATA: x}


def _where(name: str, x: Any) -> str:
    return f"x[{name!r}]" if isinstance(x, dict) else "x"


class _Late(BaseException):
    """Time is up. Not an `Exception`, so that a simulator's own handlers let it through."""


class _NoTimer(BaseException):
    """There is no way to stop a function here."""


@contextlib.contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Stop the code inside after `seconds`, by a signal."""
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise _NoTimer(
            "A time limit for a Python function needs processes, and this executor runs it in "
            "a thread: leave executor out, pass a ProcessPoolExecutor, or make the simulator "
            "a cs.command, which has its own limit."
        )

    def stop(*_: Any):
        raise _Late

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The arrays of a run's data: name, shape and type of each.

    >>> spec = Spec.of(np.zeros(3))
    >>> spec.match(np.ones(2))
    Failure(reason='wrong shape', message='x must have the shape (3,), got (2,).')
    """

    arrays: tuple[tuple[str, tuple[int, ...], str], ...]
    bare: bool

    @classmethod
    def of(cls, x: Any) -> "Spec":
        """The spec of one run's data. Whole numbers are kept as floats: the next may not be."""
        # Written as little-endian, whatever the machine.
        kind = lambda a: np.dtype(float if a.dtype.kind in "iu" else a.dtype).newbyteorder("<")  # noqa: E731
        arrays = tuple((name, a.shape, kind(a).str) for name, a in _named(x).items())
        return cls(arrays, not isinstance(x, dict))

    @classmethod
    def floats(cls, shapes: Mapping[str, tuple[int, ...]], bare: bool) -> "Spec":
        """Arrays of these shapes, which hold any real numbers."""
        return cls(tuple((name, shape, "<f8") for name, shape in shapes.items()), bare)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape, _ in self.arrays}

    def match(self, x: Any) -> dict[str, np.ndarray] | Failure:
        """Named arrays of the right type, or what is wrong with them."""
        named = _named(x)
        if self.bare == isinstance(x, dict) or set(named) != set(self.shapes):
            expected = "an array" if self.bare else f"a dictionary with {sorted(self.shapes)}"
            got = f"a dictionary with {sorted(x)}" if isinstance(x, dict) else "an array"
            return Failure(WRONG, f"x must be {expected}, got {got}.")
        matched = {}
        for name, shape, dtype in self.arrays:
            array = named[name]
            if array.shape != shape:
                wrong = f"have the shape {shape}, got {array.shape}"
            elif not np.can_cast(array.dtype, dtype, "same_kind"):
                wrong = f"hold {np.dtype(dtype).name}, got {array.dtype}"
            else:
                # A number may be too large for the type that the first run had.
                with np.errstate(over="ignore"):
                    matched[name] = array.astype(dtype)
                if np.isfinite(matched[name]).all():
                    continue
                return Failure(NOT_FINITE, _too_large(_where(name, x), array, np.dtype(dtype)))
            return Failure(WRONG, f"{_where(name, x)} must {wrong}.")
        return matched

    def unnamed(self, arrays: dict[str, Any]) -> Any:
        """The arrays as the simulator returned them: alone, or in a dictionary."""
        return arrays[DATA] if self.bare else arrays


def _too_large(where: str, array: np.ndarray, dtype: np.dtype) -> str:
    if not np.isfinite(array).all():
        return f"{where} has NaN or infinite values."
    return (
        f"{where} has values beyond {np.finfo(dtype).max:.2g}, the largest number of {dtype.name}, "
        f"which the first run returned: return {array.dtype.name} in every run."
    )


def blank(n: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Room for `n` runs: NaN where that can be said, zeros elsewhere."""
    dtype = np.dtype(dtype)
    return np.full((n, *shape), np.nan if dtype.kind == "f" else 0, dtype)
