"""What tells one simulator's program from another of the same name: a digest of what it does.

Comments, layout and the names of local variables do not count. A digest that differs does not
mean that the data do: another version of Python compiles the same lines to another program.
"""

import contextlib
import functools
import hashlib
import re
import site
import sysconfig
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from consilience.model.model import Model

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))


def program_of(model: Model) -> str:
    """A digest of the program of a model's simulator.

    >>> import jax, numpyro.distributions as dist
    >>> draw = lambda sd: lambda key, theta: theta + sd * jax.random.normal(key)
    >>> first, second, third = (Model(dist.Normal(0, 1), draw(sd)) for sd in (1.0, 1.0, 2.0))
    >>> program_of(first) == program_of(second), program_of(first) == program_of(third)
    (True, False)
    """
    if model.external is not None:
        return digest_of(*model.external.program)
    theta = jax.eval_shape(model.prior.draw, jax.random.key(0))
    text = trace(model.simulate_at, jax.random.key(0), theta)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(*parts: Any) -> str:
    """A digest of texts, and of what functions in Python do."""
    reader = _Reader()
    for part in parts:
        (reader.word if isinstance(part, str) else reader.read)(part)
    return reader.digest.hexdigest()


ADDRESS = re.compile(r"0x[0-9a-f]+")
"""Where an object lies in memory: it differs each time that a program is traced."""


def trace(function: Callable, *args: Any) -> str:
    """The program of a function in JAX as text, its constants included."""
    # A new function each time: JAX remembers the program of one that it has seen.
    program = jax.make_jaxpr(lambda *args: function(*args))(*args)
    constants = [np.asarray(c).tobytes() for c in program.consts if not _is_key(c)]
    return f"{ADDRESS.sub('', str(program.jaxpr))} {constants}"


def _is_key(value: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(value, "dtype", np.dtype(float)), jax.dtypes.prng_key)


class _Reader:
    """Goes through functions of the user's own, and the constants that they read.

    What a run may change is left out: lists and dictionaries of closures and of instances, such
    as a log of calls. Those of a module are taken for constants.
    """

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.seen: set[int] = set()

    def word(self, *words: Any):
        for word in words:
            part = word if isinstance(word, bytes) else str(word).encode(errors="replace")
            self.digest.update(b"%d:%s" % (len(part), part))

    def read(self, value: Any, fixed: bool = False):
        """`fixed`: whether lists and dictionaries are constants."""
        if isinstance(value, PLAIN):
            self.word(type(value).__name__, repr(value))
        elif isinstance(value, tuple | frozenset) or (fixed and isinstance(value, list | set)):
            ordered = isinstance(value, tuple | list)
            self.word(type(value).__name__, len(value))
            for part in value if ordered else sorted(value, key=repr):
                self.read(part, fixed)
        elif isinstance(value, np.ndarray | np.generic | jax.Array):
            self._array(value)
        elif id(value) not in self.seen:
            self.seen.add(id(value))
            self._once(value, fixed)

    def _array(self, value: Any):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        self.word(array.dtype.str, array.shape)
        if not array.dtype.hasobject:
            self.word(array.tobytes())

    def _once(self, value: Any, fixed: bool):
        if isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.read(value.__func__)
            self.read(value.__self__)
        elif isinstance(value, functools.partial):
            self.read((value.func, *value.args))
            self._items(value.keywords)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, Mapping):
            if fixed:
                self._items(value)
        elif isinstance(getattr(value, "py_func", None), types.FunctionType):
            self.read(value.py_func)  # compiled by Numba
        elif not isinstance(value, types.ModuleType | list | set):
            self.read(type(value))
            if _own(type(value)):
                self._items(getattr(value, "__dict__", {}), fixed=False)

    def _items(self, items: Mapping, fixed: bool = True):
        for name, part in items.items():
            self.word(name)
            self.read(part, fixed)

    def _function(self, function: types.FunctionType):
        self.word(function.__name__)
        if not _own(function):
            return
        code = function.__code__
        self._code(code, function.__doc__)
        self.read(function.__defaults__)
        self._items(function.__kwdefaults__ or {})
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                self.read(cell.cell_contents)
        self._outside(function.__globals__, _names(code))

    def _outside(self, scope: Mapping[str, Any], names: list[str]):
        """The functions and constants of modules that a function names."""
        for name in names:
            value = scope.get(name)
            if isinstance(value, types.ModuleType):
                if _own_file(getattr(value, "__file__", None)) and id(value) not in self.seen:
                    self.seen.add(id(value))
                    self._outside(vars(value), names)
            elif name in scope:
                self.word(name)
                self.read(value, fixed=True)

    def _code(self, code: types.CodeType, doc: str | None = None):
        self.word(code.co_code, *code.co_names)
        for i, constant in enumerate(code.co_consts):
            self.read(None if i == 0 and constant == doc else constant)

    def _class(self, cls: type):
        self.word(cls.__qualname__)
        if not _own(cls):
            return
        self.read(cls.__bases__)
        for name, part in vars(cls).items():
            part = getattr(part, "__func__", getattr(part, "fget", part))
            if isinstance(part, types.FunctionType) or not name.startswith("__"):
                self.word(name)
                self.read(part)


def _names(code: types.CodeType) -> list[str]:
    """What a function and those within it name, in order."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return [*code.co_names, *(name for part in inner for name in _names(part))]


def _own(value: Callable | type) -> bool:
    """Whether the user wrote it: what is installed has a version instead."""
    if isinstance(value, types.FunctionType):
        return _own_file(value.__code__.co_filename)
    root = value.__module__.partition(".")[0]
    methods = [part for part in vars(value).values() if isinstance(part, types.FunctionType)]
    return root not in ("builtins", "consilience") and any(map(_own, methods))


@functools.cache
def _installed() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = [*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()]
    paths.append(str(Path(__file__).parent))
    return tuple(str(Path(path).resolve()) for path in paths)


def _own_file(file: str | None) -> bool:
    if file is None or file.startswith("<frozen"):
        return False
    return not str(Path(file).resolve()).startswith(_installed())
