"""Simulators outside JAX: the interface `External`, and a Python function as one of them.

A `Model` takes any object with this interface in place of a JAX function. Nothing is known of
the data before a first run: their shapes are then kept with the runs, and the model stays as it is.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from numpy.random import Generator

from consilience.model.command import Command


@runtime_checkable
class External(Protocol):
    """A simulator outside JAX: `cs.external` and `cs.command` make one, and so can you.

    `name`: what the simulator is called in reports and in the description of a store.
    `function`: the Python code of the user's own that a run calls, a function or a class. Worker
    processes import its module. None where a run calls no such code.
    `program`: what tells this simulator from another of the same name, in a tuple: texts, and
    functions whose code counts. A store that another program has made is not added to.
    `keeps_time`: whether `run` ends by itself, in any thread, when its time is up. Where it is
    False, the library stops `run` by a signal, in a process of its own. Where it is True, `run`
    gets a `KeyboardInterrupt` when its worker has to end, and can end what it has started.

    How to write your own: have these four attributes and the two methods, nothing to inherit
    from. The object must be hashable, and should be picklable: worker processes get a copy. Where
    it is not, workers are forks of this process. A run may depend on its arguments alone.

    Example:
        >>> import consilience as cs, jax, numpy as np, numpyro.distributions as dist
        >>> class Dice:
        ...     name, program, keeps_time = "dice", ("dice", "with six faces"), False
        ...     function = property(type)
        ...     def check(self, shapes):
        ...         if set(shapes) != {"loaded"}:
        ...             raise ValueError("The dice have one parameter, `loaded`.")
        ...     def run(self, rng, theta, timeout):
        ...         return np.where(rng.random(3) < theta["loaded"], 6, rng.integers(1, 7, size=3))
        >>> model = cs.Model({"loaded": dist.Uniform(0, 1)}, Dice())
        >>> cs.simulate(model, 20, key=jax.random.key(0), progress=False)
        Simulations: 20 runs, theta: loaded (); x: (3,)
    """

    @property
    def name(self) -> str: ...

    @property
    def function(self) -> Callable[..., Any] | None: ...

    @property
    def program(self) -> tuple[Any, ...]: ...

    @property
    def keeps_time(self) -> bool: ...

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise a ValueError if the simulator does not take these parameters.

        Args:
            shapes: the shape of each parameter of the prior, by name; `()` for one number.
        """
        ...

    def run(self, rng: Generator, theta: Mapping[str, Any], timeout: float | None) -> Any:
        """The data of one run: an array or a dictionary of arrays, of the same shape in every run.

        Args:
            rng: the random numbers of this run.
            theta: the parameters of this run by name, as floats or arrays.
            timeout: how many seconds the run may take; None where `keeps_time` is False, or where
                there is no limit.

        Raises:
            TimeoutError: if the simulator `keeps_time`, and the run takes longer.
            Exception: whatever else is raised becomes the message of a failed run.
        """
        ...


MEMBERS = ("name", "function", "program", "keeps_time", "check", "run")


def is_external(simulator: Any) -> bool:
    """Whether a simulator is one outside JAX; half of the interface, or a class, is an error."""
    if isinstance(simulator, type) and _makes_simulators(simulator):
        raise TypeError(
            f"A simulator is an object, not its class: pass {simulator.__name__}(), not "
            f"{simulator.__name__}."
        )
    if isinstance(simulator, External):
        hash(simulator)  # refused here rather than in the first fit
        return True
    if callable(simulator) or not callable(getattr(simulator, "run", None)):
        return False
    missing = [name for name in MEMBERS if not hasattr(simulator, name)]
    raise TypeError(
        f"A simulator outside JAX has {', '.join(MEMBERS)}, but {type(simulator).__name__} has no "
        f"{' and no '.join(missing)}: see consilience.model.external.External."
    )


def _makes_simulators(cls: type) -> bool:
    """Whether objects of a class can be called or have `run`; every class can be called itself."""
    held = {name for base in cls.__mro__ for name in vars(base)}
    return bool(held & {"run", "__call__"})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Function:
    """A Python function as a simulator; see `external`."""

    function: Callable[..., Any]
    keeps_time = False

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    @property
    def program(self) -> tuple[Any, ...]:
        return (self.function,)

    def check(self, shapes: Mapping[str, tuple[int, ...]]):
        try:
            signature = inspect.signature(self.function)
        except ValueError:
            return  # a function in C may not say
        names = tuple(shapes)
        try:
            signature.bind(None, **dict.fromkeys(names))
        except TypeError as error:
            raise ValueError(
                f"The simulator is called as function(rng, {', '.join(f'{n}=...' for n in names)}) "
                f"with the parameters of the prior, but its signature is {signature}: {error}."
            ) from None

    def run(self, rng: Generator, theta: Mapping[str, Any], timeout: float | None) -> Any:
        return self.function(rng, **theta)

    def __repr__(self) -> str:
        return f"External({self.name})"


def external(function: Any) -> External:
    """A plain Python function as the simulator of a model: `function(rng, **parameters) -> x`.

    `rng` is a NumPy `Generator` of the run's own; parameters come by name, as floats or arrays
    (`theta` for a prior without names). `x` is an array or a dictionary of arrays, of the same
    shape in every run. Runs are spread over processes: best is a function in a module.

    >>> import consilience as cs, numpy as np, numpyro.distributions as dist
    >>> def decay(rng, rate):
    ...     return rng.poisson(100 * np.exp(-rate * np.arange(5)))
    >>> model = cs.Model({"rate": dist.HalfNormal(1)}, cs.external(decay))
    >>> model
    Model
      rate  HalfNormal(scale=1)
      x     External(decay), shape known after its first run
      log-likelihood: not given
    """
    if not callable(function):
        raise TypeError(
            "cs.external takes a function of a NumPy Generator and named parameters, got "
            f"{type(function).__name__}. For a command line, use cs.command."
        )
    return Function(function)


def command(line: str, *, read: Callable[[Any], Any] | None = None) -> External:
    """A command line as the simulator of a model.

    Fields in braces are filled for each run: parameters by name (`{beta}`, `{beta:.3f}`, for
    arrays `{beta[0]}`, or all values with commas between them); `{seed}`, a whole number below
    2**31 of the run's own; `{output}`, a path in a folder of the run's own. No shell sees it:
    for pipes, write `sh -c "..."`.

    `read`: a function from what comes to an array or a dictionary of arrays. It gets the text
    of standard output or, where the line has `{output}`, the path of that file. By default
    the text is read as numbers with white space or commas between them; lines are rows.

    >>> import consilience as cs, jax, numpyro.distributions as dist
    >>> model = cs.Model({"beta": dist.Uniform(0, 1)}, cs.command("echo {beta} {seed}"))
    >>> cs.simulate(model, 3, key=jax.random.key(0), progress=False)
    Simulations: 3 runs, theta: beta (); x: (2,)
    """
    if not isinstance(line, str):
        raise TypeError(f"cs.command takes a command line as text, got {type(line).__name__}.")
    if read is not None and not callable(read):
        raise TypeError(f"read must be a function of what a run gives, got {type(read).__name__}.")
    described = Command(line, read)
    described.written()  # refused here rather than in every run
    return described
