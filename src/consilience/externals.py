"""Simulators outside JAX: a Python function, or a command line.

A `Model` takes either in place of a JAX function. Nothing is known of the data before a first
run: its shape is then kept, by the model and by the store of a campaign.
"""

import inspect
from collections.abc import Callable
from typing import Any

from consilience.commands import OUTPUT, SEED, Command
from consilience.runs import Spec
from consilience.types import Data


class External:
    """A simulator outside JAX; `spec` is what its first run was seen to give, None before."""

    def __init__(self, function: Callable[..., Data] | Command):
        self.function = function
        self.spec: Spec | None = None

    @property
    def name(self) -> str:
        """What the simulator is called in the store of a campaign."""
        if isinstance(self.function, Command):
            return self.function.line
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def check(self, names: tuple[str, ...]):
        """Refuse parameters that the simulator does not take."""
        if isinstance(self.function, Command):
            self._check_fields(set(names), self.function.fields)
            return
        try:
            signature = inspect.signature(self.function)
        except ValueError:
            return  # a function in C may not say
        try:
            signature.bind(None, **dict.fromkeys(names))
        except TypeError as error:
            raise ValueError(
                f"The simulator is called as function(rng, {', '.join(f'{n}=...' for n in names)}) "
                f"with the parameters of the prior, but its signature is {signature}: {error}."
            ) from None

    def _check_fields(self, names: set[str], fields: set[str]):
        unknown = fields - names - {SEED, OUTPUT}
        if unknown:
            raise ValueError(
                f"The command has the fields {sorted(unknown)}, which are no parameters: the "
                f"prior names {sorted(names)}; {{{SEED}}} and {{{OUTPUT}}} are there too. "
                "Double a brace to write it as it is."
            )
        if names & {SEED, OUTPUT}:
            raise ValueError(
                f"{SEED!r} and {OUTPUT!r} have a meaning of their own in a command: give the "
                "parameter another name."
            )

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
    return External(function)


def command(line: str, *, read: Callable[[Any], Data] | None = None) -> External:
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
    return External(Command(line, read))
