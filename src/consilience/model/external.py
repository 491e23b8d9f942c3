"""Simulators outside JAX: a Python function, or a command line.

A `Model` takes either in place of a JAX function. Nothing is known of the data before a first
run: its shape is then kept, by the model and by the store of a campaign.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from consilience.core.arrays import warn_caller
from consilience.core.types import Data
from consilience.model.command import OUTPUT, SEED, Command
from consilience.model.run import Spec


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

    def check(self, shapes: Mapping[str, tuple[int, ...]]):
        """Refuse parameters that the simulator does not take; of each, the name and the shape."""
        names = tuple(shapes)
        if isinstance(self.function, Command):
            self._check_fields(set(names), self.function.fields)
            self.function.check(shapes)
            self._check_use(shapes, self.function)
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
        unused = sorted(names - fields)
        if unused:
            raise ValueError(
                f"The command line does not use the parameters {unused}, so that no run could "
                f"depend on them: write {{{unused[0]}}} where it belongs, or leave them out of the "
                "prior."
            )

    def _check_use(self, shapes: Mapping[str, tuple[int, ...]], line: Command):
        """Warn of an array of which only some values are written."""
        for name, shape in shapes.items():
            used = {field.index for field in line.written() if field.name == name}
            if math.prod(shape) > len(used) and all(i.startswith("[") for i in used):
                warn_caller(
                    f"The command line uses {len(used)} of the {math.prod(shape)} values of the "
                    f"parameter {name!r}: no run depends on the others."
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
    if not isinstance(line, str):
        raise TypeError(f"cs.command takes a command line as text, got {type(line).__name__}.")
    if read is not None and not callable(read):
        raise TypeError(f"read must be a function of what a run gives, got {type(read).__name__}.")
    described = Command(line, read)
    described.written()  # refused here rather than in every run
    return External(described)
