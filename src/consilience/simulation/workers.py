"""The default executor of campaigns: a process for each core, watched run by run.

A thread stands by each process. Where a run crashes the process or does not end in time, the
thread records that failure, starts a new process and goes on with the rest of the chunk: a
pool of the standard library would be broken by the one, and would wait for ever in the other.
For this the process calls the function that was submitted once for each run of a chunk.
"""

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.util
import os
import pickle
import queue
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from consilience.core import processes
from consilience.core.guardian import guardian
from consilience.model.run import DIED, LATE, Failure, Outcome, Task, run_chunk
from consilience.simulation.starting import StartError, importable, script_hidden, start_method

GRACE = 1.0
"""Seconds beyond the time limit after which a process that heeds no signal is killed."""

FLUSH = 0.1
"""Seconds after which a process hands over the outcomes that it has."""

IDLE = 3
"""Processes in a row that may die without an outcome before a run counts as failed."""

UNBEGUN = f"{IDLE} processes in a row ended before they gave an outcome."

READY = "ready"

Chunk = Callable[[Task, np.ndarray, Mapping[str, np.ndarray]], list[Outcome]]
"""What is submitted: `run_limited`, `run_chunk`, or another function of the same arguments."""


class Workers(Executor):
    """Processes that run chunks of one task.

    Processes are started clean (`forkserver`) where they can import the simulator. One that
    lives in a notebook, or inside another function, is inherited instead (`fork`).
    """

    def __init__(self, task: Task, processes: int | None = None):
        self.task = task
        self.size = processes or cores()
        self._context: Any = multiprocessing.get_context(start_method(task.simulator))
        if self._context.get_start_method() == "forkserver":
            # One import for all processes. It starts no thread of JAX, so forks are safe.
            self._context.set_forkserver_preload(["consilience.model.run"])
        self._threads = ThreadPoolExecutor(self.size)
        self._mine = threading.local()
        self._all: set[_Worker] = set()
        self._guard = threading.Lock()
        self._stopped = False

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future:
        """The outcomes of a chunk: `submit(run_chunk, task, numbers, theta)`.

        `fn` is called with one run at a time; the processes have the task already.
        """
        if kwargs or len(args) != 3 or not isinstance(args[0], Task):
            given = [type(arg).__name__ for arg in args] + [f"{name}=" for name in kwargs]
            raise TypeError(
                "Workers run chunks of one simulator: call submit(fn, task, numbers, theta), not "
                f"submit(fn{''.join(f', {one}' for one in given)}). For other functions pass an "
                "executor of concurrent.futures."
            )
        task, numbers, theta = args
        if dataclasses.replace(task, mark=self.task.mark) != self.task:
            raise ValueError("These processes were started for another task: make new Workers.")
        return self._threads.submit(self._chunk, fn, task.mark, numbers, theta)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False):
        """End all processes; a run that has not ended is lost."""
        with self._guard:
            self._stopped = True
            for worker in self._all:
                worker.end()
        self._threads.shutdown(wait, cancel_futures=True)

    def _chunk(
        self, fn: Chunk, mark: str, numbers: np.ndarray, theta: Mapping[str, np.ndarray]
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        idle = 0
        while rest := [i for i in range(len(numbers)) if i not in outcomes]:
            part = {name: array[rest] for name, array in theta.items()}
            worker, before = self._worker(), len(outcomes)
            for j, outcome in worker.work(fn, mark, numbers[rest], part):
                outcomes[rest[j]] = outcome
            idle = 0 if len(outcomes) > before else idle + 1
            if idle == IDLE and not self._stopped:
                outcomes[rest[0]] = Outcome(None, Failure(DIED, UNBEGUN), 0.0)
        return [
            outcomes[i]._replace(number=int(number), mark=mark) for i, number in enumerate(numbers)
        ]

    def _worker(self) -> "_Worker":
        """This thread's process, a new one where the last has ended."""
        worker = getattr(self._mine, "worker", None)
        if worker is None or not worker.alive:
            with self._guard:
                if self._stopped:
                    raise CancelledError
                self._all.discard(worker)
                worker = self._mine.worker = _Worker(self._context, self.task)
                self._all.add(worker)
            worker.await_start()
        return worker


class _Worker:
    """One process, seen from outside."""

    def __init__(self, context: Any, task: Task):
        self.timeout = task.timeout
        self.alive = True
        # The position of the run at work, and when it began: readable when the process is dead.
        self.current = context.RawArray("d", [-1.0, 0.0])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.current, task))
        self._ending = threading.Lock()
        with warnings.catch_warnings(), script_hidden(task.simulator):
            # The process never touches JAX: its warning about forks is for those that do.
            warnings.filterwarnings("ignore", message=r".*fork", category=RuntimeWarning)
            warnings.filterwarnings("ignore", message=r".*fork", category=DeprecationWarning)
            self.process.start()
        theirs.close()
        guardian().keep(self.process.pid)

    def await_start(self):
        try:
            self.connection.recv()
        except EOFError:
            self.end()
            raise StartError(
                "A worker process could not start; its own message is above. In a script, call "
                "cs.simulate under `if __name__ == '__main__':`, since every worker imports the "
                "script; or pass executor=."
            ) from None

    def work(
        self, fn: Chunk, mark: str, numbers: np.ndarray, theta: Mapping[str, np.ndarray]
    ) -> Iterator[tuple[int, Outcome]]:
        """Outcomes with their positions, until all are there or the process has died."""
        missing = set(range(len(numbers)))
        try:
            self.current[0] = -1.0
            self.connection.send((fn, mark, numbers, theta))
            while missing:
                if self.connection.poll(self._patience()):
                    for i, outcome in self._received():
                        # Others may hold the pipe: an answer that was not asked for is dropped.
                        if i in missing and (outcome.mark, outcome.number) == (mark, numbers[i]):
                            missing.discard(i)
                            yield i, outcome
                elif self._overdue():
                    late = int(self.current[0])
                    if late in missing:
                        message = f"The run took longer than {self.timeout} s."
                        yield late, self._failed(LATE, message)
                    self.end()
                    return
                elif self._gone():
                    raise EOFError
        except (EOFError, OSError):
            # Ended from here, or before a run had begun: nothing is to be recorded.
            lost = int(self.current[0])
            at_fault = self.alive and lost in missing
            self.end()
            if at_fault:
                code = self.process.exitcode
                message = f"The process ended during the run, with exit code {code}."
                yield lost, self._failed(DIED, message)

    def _received(self) -> list[tuple[int, Outcome]]:
        try:
            done = self.connection.recv()
            failed = [error for _, error in done if isinstance(error, Exception)]
        except (EOFError, OSError):
            raise
        except Exception as error:  # two processes have written at once
            raise OSError("The worker sent what cannot be read.") from error
        if failed:
            self.end()
            raise failed[0]
        return [(i, outcome) for i, outcome in done if isinstance(outcome, Outcome)]

    def _gone(self) -> bool:
        """Whether the process has died though others, which it has forked, hold its pipe."""
        with self._ending:
            return self.process.exitcode is not None and not self.connection.poll()

    def end(self):
        """Kill the process and what its run has started; what it had handed over stays."""
        self.alive = False
        with self._ending:
            pid, busy = self.process.pid, self.current[0] >= 0
            started: set[int] = set()
            if busy and self.process.exitcode is None:
                started = processes.families({pid}) - {pid}
            self.process.terminate()
            self.process.join(GRACE)
            if self.process.exitcode is None:
                self.process.kill()
                self.process.join()
            if started:
                processes.end(started)
            guardian().release(pid)

    def _patience(self) -> float:
        return GRACE if self.timeout is None else min(GRACE, self.timeout) / 4

    def _overdue(self) -> bool:
        began = self.current[1]
        limit = None if self.timeout is None else self.timeout + GRACE
        return limit is not None and self.current[0] >= 0 and time.monotonic() - began > limit

    def _failed(self, reason: str, message: str) -> Outcome:
        return Outcome(None, Failure(reason, message), time.monotonic() - self.current[1])


def _serve(connection: Connection, current: Any, task: Task):
    """The life of a process: chunks in, outcomes out, until the other end closes."""
    # Ctrl-C is for the process that started the campaign.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if task.simulator.keeps_time:
        signal.signal(signal.SIGTERM, _interrupt)  # so that a command ends with its worker
    # A child that the simulator forks has no business here: it would hold the pipe open, too.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=connection.close)
    first_parent = os.getppid()
    orphaned = lambda: os.getppid() != first_parent  # noqa: E731
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        connection.send(READY)
        while True:
            while not connection.poll(1.0):
                if orphaned():
                    return
            fn, mark, numbers, theta = connection.recv()
            marked = dataclasses.replace(task, mark=mark)
            done: list[tuple[int, Outcome | Exception]] = []
            sent = time.monotonic()
            for i in range(len(numbers)):
                if orphaned():
                    return
                current[1], current[0] = time.monotonic(), i
                done.append((i, _single(fn, marked, numbers, theta, i)))
                if time.monotonic() - sent > FLUSH:
                    connection.send(done)
                    done, sent = [], time.monotonic()
            current[0] = -1.0
            if done:
                connection.send(done)


def _single(
    fn: Chunk, task: Task, numbers: np.ndarray, theta: Mapping[str, np.ndarray], i: int
) -> Outcome | Exception:
    """The outcome of one run of a chunk, or what the function raised."""
    try:
        (outcome,) = fn(task, numbers[i : i + 1], {name: a[i : i + 1] for name, a in theta.items()})
        if (outcome.mark, outcome.number) != (task.mark, numbers[i]):
            raise ValueError(f"The function gave the outcome of another run than {numbers[i]}.")
    except Exception as error:
        return _sendable(error)
    return outcome


def _sendable(error: Exception) -> Exception:
    """An exception itself, or its text where the other end could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception_only(error)).strip())
    return error


def _interrupt(*_: Any):
    raise KeyboardInterrupt


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_limited(task: Task, numbers: np.ndarray, theta: Mapping[str, np.ndarray]) -> list[Outcome]:
    """`run_chunk`, with a time limit that holds in threads too: there, in a child process."""
    main = threading.current_thread() is threading.main_thread()
    if task.timeout is None or main or task.simulator.keeps_time:
        return run_chunk(task, numbers, theta)
    if multiprocessing.current_process().daemon or not importable(task.simulator):
        raise ValueError(
            "A time limit for a Python function needs a child process here, since this executor "
            "runs it in a thread. Define the function in a module; for Dask also set "
            "distributed.worker.daemon to False where workers start, in the script of a job by "
            "`export DASK_DISTRIBUTED__WORKER__DAEMON=False`. Or leave timeout out."
        )
    held, child = _child(dataclasses.replace(task, mark=""))
    try:
        same = dataclasses.replace(child.task, mark=task.mark)
        return child.submit(run_chunk, same, numbers, theta).result()
    finally:
        _idle.put((held, child))


_idle: queue.SimpleQueue[tuple[bytes, Workers]] = queue.SimpleQueue()
"""Children of this process that wait for the next chunk, each with its pickled task: to start one
takes longer than most chunks."""


def _child(task: Task) -> tuple[bytes, Workers]:
    """A child that has run chunks of this task, or a new one."""
    wanted = pickle.dumps(task)
    with contextlib.suppress(queue.Empty):
        while True:
            held, child = _idle.get_nowait()
            if held == wanted:
                return held, child
            child.shutdown()
    child = Workers(task, 1)
    # A process that ends waits for its children.
    multiprocessing.util.Finalize(None, child.shutdown, exitpriority=1)
    return wanted, child
