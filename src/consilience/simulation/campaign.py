"""A campaign: all runs of an external simulator, on any executor, kept as they arrive.

Chunks of runs are sent out, never more than a window of them at a time; each outcome goes to a
keeper, in memory or on disk, before the next is looked at. What a run gives depends on the key
and its number alone, so that executors, chunks and restarts change nothing.
"""

import contextlib
import dataclasses
import math
import pickle
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Future,
    wait,
)
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from consilience.core.guardian import guardian
from consilience.core.types import Theta
from consilience.model.external import External
from consilience.model.run import DIED, LONGEST, Failure, Outcome, Spec, Task, blank
from consilience.simulation.failures import Failures
from consilience.simulation.memory import Memory
from consilience.simulation.settings import Executor, Settings, as_future
from consilience.simulation.store import Store
from consilience.simulation.workers import StartError, Workers, run_limited

TARGET = 0.25
"""Seconds of work in a chunk: long beside what it costs to send, short beside a restart."""

CHUNK_RUNS, CHUNK_BYTES = 4096, 2**23
"""The most that a chunk may hold."""

TRIES = 16
"""Runs that may fail before one shows the shape of the data."""

WINDOW = 256
"""Chunks in flight on an executor that does not say how many workers it has."""

UNSENDABLE = (pickle.PicklingError, AttributeError, TypeError, ImportError)
"""What executors raise where a simulator cannot be sent; its own exceptions are outcomes."""

TICK = 30.0
"""Seconds between signs of life while no run ends."""


Keeper = Memory | Store
"""Where outcomes go."""


def run_campaign(
    external: External,
    keeper: Keeper,
    n: int,
    draw: Callable[[np.ndarray], Theta],
    entropy: tuple[int, ...],
    settings: Settings,
    spec: Spec | None = None,
):
    """Run what the keeper misses of `n` runs; `draw` gives the parameters of any numbers.

    `spec`: the arrays of the data, where it is known; otherwise a first run shows them.
    """
    settings.check(external)
    if spec is not None:
        keeper.begin(spec, draw(np.arange(1)))
    if keeper.spec is not None:
        keeper.grow(n)
        if not len(keeper.missing(n, settings.retry)):
            return
    task = Task(external, entropy, settings.timeout)
    with _executor(task, settings.executor) as executor:
        campaign = _Campaign(task, keeper, n, draw, executor, settings)
        with campaign.bar:
            try:
                campaign.run()
            except KeyboardInterrupt:
                campaign.save_finished()
                raise KeyboardInterrupt(keeper.stopped(n)) from None
            finally:
                campaign.call_back()


def run_again(
    external: External,
    keeper: Keeper,
    number: int,
    draw: Callable[[np.ndarray], Theta],
    entropy: tuple[int, ...],
    settings: Settings,
) -> dict[str, np.ndarray] | Failure:
    """The named data of one run, made once more and not kept."""
    settings.check(external)
    assert keeper.spec is not None
    task = Task(external, entropy, settings.timeout)
    quiet = dataclasses.replace(settings, progress=False)
    with _executor(task, settings.executor) as executor:
        campaign = _Campaign(task, keeper, 0, draw, executor, quiet)
        try:
            outcome = campaign._alone(np.array([number]))
        finally:
            campaign.call_back()
    return outcome.failure or keeper.spec.match(outcome.x)


@contextlib.contextmanager
def _executor(task: Task, given: Executor | None) -> Iterator[Executor]:
    """The user's executor, which stays open, or one for this campaign."""
    if given is None or hasattr(given, "_processes"):
        guardian().start()
    if given is not None:
        yield given
        return
    own = Workers(task)
    try:
        yield own
    finally:
        own.shutdown()


class _Campaign:
    def __init__(
        self,
        task: Task,
        keeper: Keeper,
        n: int,
        draw: Callable[[np.ndarray], Theta],
        executor: Executor,
        settings: Settings,
    ):
        self.task, self.keeper, self.n, self.draw = task, keeper, n, draw
        self.executor, self.settings = executor, settings
        self.workers = getattr(executor, "size", getattr(executor, "_max_workers", WINDOW // 2))
        self.window = settings.in_flight or 2 * self.workers
        self.flying: dict[Future, _Chunk] = {}
        self.guarded: set[int] = set()
        self.lost: Counter[int] = Counter()
        self.pace = TARGET
        self.settled = np.ones(n, bool)
        self.settled[keeper.missing(n)] = False
        self.failed = set(keeper.failures(np.arange(n)))
        self.bar = tqdm(
            total=n,
            initial=int(self.settled.sum()),
            desc="Simulations",
            unit="run",
            disable=not settings.progress,
        )

    def run(self) -> None:
        if self.keeper.spec is None:
            self._find_spec()
        while len(todo := self.keeper.missing(self.n, self.settings.retry)):
            self._run_all(todo)

    def save_finished(self) -> None:
        """Keep what has arrived, and call back what has not begun."""
        for future, chunk in list(self.flying.items()):
            here = not future.cancel() and future.done() and future.exception() is None
            if here and self.keeper.spec is not None and chunk.answered_by(future.result()):
                self._settle(chunk.numbers, future.result())

    def call_back(self) -> None:
        """Call back what has not begun: a user's executor would go on with it."""
        for future in self.flying:
            future.cancel()
        self._guard(set())

    def _find_spec(self) -> None:
        """The first run that gives data shows their shape; it and those before it are kept."""
        outcomes: list[Outcome] = []
        for number in range(min(TRIES, self.n)):
            outcomes.append(self._alone(np.arange(number, number + 1)))
            if outcomes[-1].failure is None:
                break
        tried = np.arange(len(outcomes))
        theta = self.draw(tried)
        if outcomes[-1].failure is not None:
            failed = {i: outcome.failure for i, outcome in enumerate(outcomes) if outcome.failure}
            raise ValueError(
                "No run has shown the shape of the data yet, so nothing is stored. "
                f"{Failures(failed, dict(theta)).summary()}"
            )
        self.keeper.begin(Spec.of(outcomes[-1].x), theta)
        self.keeper.grow(self.n)
        self._settle(tried, outcomes)
        self.pace = outcomes[-1].seconds

    def _alone(self, numbers: np.ndarray) -> Outcome:
        """The outcome of one run, while no other is sent out."""
        while True:
            self._submit(numbers)
            while not self._arrived():
                pass
            future, chunk = self.flying.popitem()
            try:
                return self._result(future, chunk)[0]
            except _WorkerLostError as error:
                lost = self._lost(int(numbers[0]), error)
                if lost is not None:
                    return lost

    def _run_all(self, todo: np.ndarray):
        sent, again = 0, deque[np.ndarray]()
        while sent < len(todo) or again or self.flying:
            while (sent < len(todo) or again) and len(self.flying) < self.window:
                if again:
                    numbers = again.popleft()
                else:
                    numbers = todo[sent : sent + self._size(len(todo) - sent)]
                    sent += len(numbers)
                self._submit(numbers)
            again.extend(self._receive())

    def _receive(self) -> list[np.ndarray]:
        """Settle what has arrived; the chunks that are to be sent again.

        No future outlives this call: while one is held, Dask keeps its result on a worker, and
        runs the chunk again if that worker dies.
        """
        again = []
        for future in self._arrived():
            chunk = self.flying[future]
            try:
                outcomes = self._result(future, chunk)
            except _WorkerLostError as error:
                again += self._after_loss(chunk.numbers, error)
            else:
                self._settle(chunk.numbers, outcomes)
            del self.flying[future]
        return again

    def _submit(self, numbers: np.ndarray):
        chunk = _Chunk(uuid.uuid4().hex, numbers)
        task = dataclasses.replace(self.task, mark=chunk.mark)
        theta = self.draw(numbers)
        try:
            future = self.executor.submit(run_limited, task, numbers, theta)
        except UNSENDABLE as error:
            raise self._unsendable(error) from error
        except Exception as error:
            raise self._broken(error) from error
        self.flying[as_future(self.executor, future)] = chunk

        # The processes of a pool do not notice that their parent is dead.
        pool = getattr(self.executor, "_processes", None)
        self._guard(set(pool) if isinstance(pool, dict) else set())

    def _guard(self, pids: set[int]):
        """Have these processes end with this one."""
        for pid in pids - self.guarded:
            guardian().keep(pid)
        for pid in self.guarded - pids:
            guardian().release(pid)
        self.guarded = pids

    def _arrived(self) -> set[Future]:
        done, _ = wait(self.flying, timeout=TICK, return_when=FIRST_COMPLETED)
        self.keeper.touch()
        return done

    def _result(self, future: Future, chunk: "_Chunk") -> list[Outcome]:
        try:
            outcomes = future.result()
        except (ValueError, StartError):
            raise
        except (BrokenExecutor, CancelledError) as error:
            raise self._broken(error) from error
        except UNSENDABLE as error:
            raise self._unsendable(error) from error
        except Exception as error:
            raise _WorkerLostError(f"{type(error).__name__}: {error}") from error
        if not chunk.answered_by(outcomes):
            raise _WorkerLostError("The executor answered with the outcomes of other runs.")
        return outcomes

    def _unsendable(self, error: Exception) -> TypeError:
        return TypeError(
            f"The executor cannot send the simulator to its workers: {error}. Define it in a "
            "module that they can import."
        )

    def _broken(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"The executor takes no more runs ({error}): a worker died, or it was shut down. "
            f"{self.keeper.stopped(self.n)} Make a new executor for it."
        )

    def _after_loss(self, numbers: np.ndarray, error: Exception) -> list[np.ndarray]:
        """Runs to send again, one in a chunk; a run that loses two workers has failed."""
        if len(numbers) > 1:
            return list(numbers[:, None])
        lost = self._lost(int(numbers[0]), error)
        if lost is None:
            return [numbers]
        self._settle(numbers, [lost])
        return []

    def _lost(self, number: int, error: Exception) -> Outcome | None:
        """Count a worker that a run on its own has lost; its outcome, after two of them."""
        self.lost[number] += 1
        if self.lost[number] < 2:
            return None
        return Outcome(None, Failure(DIED, str(error)[:LONGEST]), 0.0)

    def _size(self, left: int) -> int:
        """How many runs to send together, so that chunks take `TARGET` seconds."""
        if self.settings.chunk is not None:
            return self.settings.chunk
        assert self.keeper.spec is not None
        room = sum(
            math.prod(shape) * np.dtype(dtype).itemsize
            for _, shape, dtype in self.keeper.spec.arrays
        )
        wanted = TARGET / max(self.pace, 1e-6)
        # Towards the end smaller, so that all workers end together; but not too small to pay.
        share = max(math.ceil(left / self.window), int(wanted / 20))
        return max(1, min(int(wanted), share, CHUNK_RUNS, CHUNK_BYTES // max(room, 1)))

    def _settle(self, numbers: np.ndarray, outcomes: list[Outcome]):
        """Hand outcomes to the keeper, and show them."""
        spec = self.keeper.spec
        assert spec is not None
        x = {name: blank(len(numbers), shape, dtype) for name, shape, dtype in spec.arrays}
        failed: dict[int, Failure] = {}
        for i, outcome in enumerate(outcomes):
            matched = outcome.failure or spec.match(outcome.x)
            if isinstance(matched, Failure):
                failed[i] = matched
                continue
            for name, array in matched.items():
                x[name][i] = array
        self.keeper.put(numbers, self.draw(numbers), x, failed)
        # Falls slowly: a run that fails at once must not send all others out in one chunk.
        seconds = sum(outcome.seconds for outcome in outcomes) / len(outcomes)
        self.pace = max(seconds, self.pace / 2)
        self.failed -= set(numbers.tolist())
        self.failed |= {int(numbers[i]) for i in failed}
        self.bar.set_postfix(failed=len(self.failed), refresh=False)
        self.bar.update(int(np.count_nonzero(~self.settled[numbers])))
        self.settled[numbers] = True


class _Chunk(NamedTuple):
    """Runs that were sent together, and the mark that their outcomes must bear."""

    mark: str
    numbers: np.ndarray

    def answered_by(self, outcomes: Any) -> bool:
        """Whether these are the outcomes of these runs, in order, each of them once."""
        asked = [(self.mark, number) for number in self.numbers.tolist()]
        return isinstance(outcomes, list) and asked == [
            (outcome.mark, outcome.number) for outcome in outcomes if isinstance(outcome, Outcome)
        ]


class _WorkerLostError(Exception):
    """The executor lost the worker of a chunk, and can go on without it."""
