"""How a campaign of an external simulator runs: executor, time limit, attempts, chunks."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from consilience.model.external import External


@runtime_checkable
class Executor(Protocol):
    """Where the runs of a simulator outside JAX are made: a chunk of runs, and a future for it.

    Every `concurrent.futures.Executor` is one, and so is a Dask client's; by default it is
    `consilience.simulation.workers.Workers`. Runs draw from streams of their own, so that
    executors change no number.

    How to write your own: have `submit`. It may run a chunk anywhere, in any order, and more
    than once. The function and its arguments can be pickled if the simulator can. If a future
    raises an exception, the worker of its chunk counts as lost: the runs of that chunk are sent
    again one by one, and a run that loses two workers has failed. `BrokenExecutor` and
    `CancelledError` end the campaign. An attribute `size` may say how many chunks are run at a
    time: twice as many are then in flight. The executor stays open when a campaign is over.

    Example:
        >>> import consilience as cs, jax, numpy as np, numpyro.distributions as dist
        >>> class Here:
        ...     size = 1
        ...     def submit(self, fn, /, *args):
        ...         future = Future()
        ...         try:
        ...             future.set_result(fn(*args))
        ...         except Exception as error:
        ...             future.set_exception(error)
        ...         return future
        >>> model = cs.Model({"mu": dist.Normal(0, 1)}, cs.external(lambda rng, mu: rng.normal(mu)))
        >>> cs.simulate(model, 20, key=jax.random.key(0), executor=Here(), progress=False)
        Simulations: 20 runs, theta: mu (); x: ()
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future:
        """Call `fn(*args)` now or later.

        Args:
            fn: a function in a module of the library; it returns the outcomes of a chunk.
            args: the task, the numbers of the runs, and their parameters by name.

        Returns:
            A future of what `fn` returns.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a campaign runs; nothing here changes its numbers.

    `executor`: where chunks of runs are made; None for the default. `timeout`: seconds for each
    run. `retry`: further attempts at a run that failed. `chunk`: runs sent together.
    `in_flight`: chunks sent out at a time.
    """

    executor: Executor | None = None
    timeout: float | None = None
    retry: int = 0
    chunk: int | None = None
    in_flight: int | None = None
    progress: bool = True

    def check(self, external: External):
        check_executor(self.executor)
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be seconds above zero, got {self.timeout}.")
        if self.retry < 0:
            raise ValueError(f"retry must be a number of further attempts, got {self.retry}.")
        for name in ("chunk", "in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least one, got {value}.")
        in_threads = isinstance(self.executor, ThreadPoolExecutor)
        if in_threads and self.timeout and not external.keeps_time:
            raise ValueError(
                "A Python function cannot be stopped in a thread: for a time limit leave executor "
                "out, or pass a ProcessPoolExecutor."
            )


def check_executor(executor: Any):
    """Refuse a class of executors, and what has half of the interface."""
    if executor is None:
        return
    name = executor.__name__ if isinstance(executor, type) else type(executor).__name__
    if isinstance(executor, type):
        raise TypeError(f"executor must be an object, not its class: pass {name}(), not {name}.")
    if not callable(getattr(executor, "submit", None)):
        raise TypeError(
            "executor must have submit(fn, *args), which returns a future, as every "
            f"concurrent.futures.Executor has, but {name} has none: see "
            "consilience.simulation.settings.Executor."
        )


def as_future(executor: Executor, returned: Any) -> Future:
    """What `submit` returned, which campaigns wait for."""
    if isinstance(returned, Future):
        return returned
    raise TypeError(
        f"{type(executor).__name__}.submit must return a concurrent.futures.Future, got "
        f"{type(returned).__name__}: see consilience.simulation.settings.Executor."
    )
