"""Whether a simulator is a pure function in JAX: it is traced twice, and its programs compared."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

REAL = (np.floating, np.integer, np.bool_)


class Call(NamedTuple):
    """How a function of the user's is called, and what it returns, for messages."""

    text: str
    returns: str
    theta: Any

    def __str__(self) -> str:
        if isinstance(self.theta, Mapping):
            names = list(self.theta)
            given = f"a dictionary with the names {names}, as in theta[{names[0]!r}]"
        else:
            given = f"an array of shape {self.theta.shape}"
        return f"{self.text}, where theta is {given},"


class _OutputError(Exception):
    """What a simulator returned, where it cannot be used as data."""


SCIPY = "A log-likelihood in NumPy or SciPy goes in as cs.OnHost(function)."

NUMPY = (
    "A simulator in NumPy or SciPy goes in as cs.external(function), a function of a NumPy "
    "Generator and named parameters."
)


def trace_simulator(simulator: Callable, theta: Any, names: list[str]) -> Any:
    """The shape of what a simulator in JAX returns, once it is seen to be pure."""
    if not callable(simulator):
        raise TypeError(
            f"A simulator is a function (key, theta) -> x, got {type(simulator).__name__}. {NUMPY}"
        )
    try:
        inspect.signature(simulator).bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"The simulator is called as simulator(key, theta), but it takes "
            f"{inspect.signature(simulator)}: {error}. {NUMPY}"
        ) from None
    except ValueError:
        pass  # a function in C may not show its signature
    try:
        first, shape = _trace(simulator, theta)
        second, _ = _trace(simulator, theta)
    except _OutputError as error:
        raise TypeError(
            f"The simulator must return an array or a dictionary of arrays, got {error}"
        ) from None
    except KeyError as error:
        raise ValueError(
            f"The simulator asked theta for {error}, but the prior names {names}."
        ) from error
    except Exception as error:
        call = Call("simulator(key, theta)", "an array or a dictionary of arrays", theta)
        reason = _no_jax(error, call)
        if reason is None:
            raise
        raise TypeError(f"{reason} {NUMPY}") from error
    if _other_numbers(first, second):
        raise TypeError(
            "The simulator is not pure: it gives other numbers each time it is compiled, and would "
            "repeat the same ones in every run. Draw random numbers from the key, with jax.random. "
            f"{NUMPY}"
        )
    return shape


def _checked(x: Any) -> Any:
    """What a simulator returned, refused where it is not one array or several with names."""
    if not isinstance(x, Mapping):
        _check_part(x, "")
        return x
    if not x:
        raise _OutputError("an empty dictionary: name at least one array.")
    if not all(isinstance(name, str) for name in x):
        raise _OutputError(f"a dictionary with the names {list(x)}: make each name a text.")
    for name, part in x.items():
        _check_part(part, f" as x[{name!r}]")
    return x


def _check_part(part: Any, where: str):
    """Refuse what is no array of at least one real number."""
    if part is None:
        raise _OutputError(f"None{where}: end the function with `return x`.")
    if isinstance(part, list | tuple | Mapping):
        raise _OutputError(
            f"a {type(part).__name__}{where}: make it one array (jnp.stack), or return a "
            "dictionary with an array for each name."
        )
    if isinstance(part, bool | int | float):
        return
    dtype = np.dtype(complex) if isinstance(part, complex) else getattr(part, "dtype", None)
    if dtype is None:
        raise _OutputError(f"{type(part).__name__}{where}. {NUMPY}")
    if jax.dtypes.issubdtype(dtype, np.complexfloating):
        raise _OutputError(
            f"complex numbers{where}: return their real and imaginary parts as arrays of their "
            'own, such as {"real": x.real, "imag": x.imag}.'
        )
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise _OutputError(f"a random key{where}: return what is drawn with it.")
    if not any(jax.dtypes.issubdtype(dtype, kind) for kind in REAL):
        raise _OutputError(f"an array of {dtype}{where}: return real numbers.")
    if 0 in np.shape(part):
        raise _OutputError(
            f"an array of shape {np.shape(part)}{where}: return at least one number in each."
        )


def trace_likelihood(log_likelihood: Callable, theta: Any, x: Any, seen: Any):
    """Refuse a log-likelihood that is not a JAX function of theta and x with one number.

    `seen`: theta as the user's function gets it.
    """
    try:
        got = jax.eval_shape(log_likelihood, theta, x)
    except Exception as error:
        reason = _no_jax(error, Call("log_likelihood(theta, x)", "one number", seen))
        if reason is None:
            raise
        raise TypeError(f"{reason} {SCIPY}") from error
    if getattr(got, "shape", None) != ():
        raise ValueError(
            "log_likelihood(theta, x) must return one number, got "
            f"{getattr(got, 'shape', type(got).__name__)}. For a function of one row, "
            "pass cs.PerRow(function)."
        )
    if not any(jax.dtypes.issubdtype(got.dtype, kind) for kind in REAL):
        raise ValueError(
            f"log_likelihood(theta, x) must return a real number, got one of type {got.dtype}."
        )


UNKNOWN_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""What JAX raises where Python or NumPy needs the value of an array that is being traced."""


def _no_jax(error: BaseException, call: Call) -> str | None:
    """Why an error shows that a function is not written for JAX; None where it does not."""
    name = call.text.partition("(")[0]
    chain, link = [error], error.__cause__ or error.__context__
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    if any(isinstance(link, UNKNOWN_VALUE) for link in chain):
        return (
            f"The {name} must be a pure JAX function whose output has one fixed shape. It needed "
            "the value of an argument while being compiled: use jax.numpy and jax.random, and no "
            "shape or branch that depends on theta or on random numbers."
        )
    if any("is not a valid JAX array type" in str(link) for link in chain):
        return (
            f"The {name} uses an array of a type that JAX does not have, such as one in another "
            "byte order: array.astype(array.dtype.newbyteorder('=')) converts that."
        )
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if "not a valid JAX type" in text:
        # JAX names the place of its own wrapper first.
        return f"The {name} must return {call.returns}: it {text[text.find('returned a value') :]}."
    if isinstance(error, TypeError | AttributeError | KeyError | IndexError):
        return (
            f"The {name} is called as {call} and must be a pure JAX function; it failed with "
            f"{type(error).__name__}: {text}."
        )
    return None


def _trace(simulator: Callable, theta: Any) -> tuple[list[np.ndarray], Any]:
    """The numbers in a simulator's program, and the shape of its output."""
    # A new function each time: JAX remembers the program of one that it has seen.
    again = lambda key, theta: _checked(simulator(key, theta))  # noqa: E731
    program, shape = jax.make_jaxpr(again, return_shape=True)(jax.random.key(0), theta)
    return list(_numbers_in(program)), shape


def _numbers_in(program: Any) -> Iterator[np.ndarray]:
    """The constants of a traced program and of all programs within it."""
    if isinstance(program, list | tuple):
        for part in program:
            yield from _numbers_in(part)
    elif isinstance(program, ClosedJaxpr):
        yield from (np.asarray(c) for c in program.consts if _is_number(c))
        yield from _numbers_in(program.jaxpr)
    elif isinstance(program, Jaxpr):
        for step in program.eqns:
            found = (atom.val for atom in step.invars if isinstance(atom, Literal))
            yield from (np.asarray(value) for value in found if _is_number(value))
            yield from _numbers_in(list(step.params.values()))


def _is_number(value: Any) -> bool:
    dtype = getattr(value, "dtype", None) or np.result_type(type(value))
    return any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.number, np.bool_))


def _other_numbers(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    """Whether two programs of one form hold different numbers."""
    alike = [(a.shape, a.dtype) for a in first] == [(b.shape, b.dtype) for b in second]
    return alike and any(
        a.tobytes() != b.tobytes() for a, b in zip(first, second, strict=True) if a is not b
    )
