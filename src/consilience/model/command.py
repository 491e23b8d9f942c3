"""A command line as a simulator: parameters written into it, numbers read from what it gives."""

import contextlib
import dataclasses
import math
import os
import re
import shlex
import string
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from consilience.core.arrays import warn_caller
from consilience.core.guardian import guardian
from consilience.core.processes import MARK, children_end, end

SEED, OUTPUT = "seed", "output"
"""The fields of a command line that are not parameters."""


PATIENCE = 5.0
"""Seconds to wait for a killed command: the system may hold it, at a disk that does not answer."""


class CommandError(RuntimeError):
    """A command that ended with an exit code other than zero."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Command:
    """A command line as a simulator; see `consilience.model.external.command`."""

    line: str
    read: Callable[[Any], Any] | None = None
    keeps_time = True

    @property
    def name(self) -> str:
        return self.line

    @property
    def function(self) -> Callable[[Any], Any] | None:
        return self.read

    @property
    def program(self) -> tuple[Any, ...]:
        return self.line, self.read

    @property
    def fields(self) -> set[str]:
        """The names in braces, without index or format."""
        return {field.name for field in self.written()}

    def written(self) -> list["Field"]:
        """The fields in the order of the line; it is refused where they cannot be filled."""
        try:
            words = shlex.split(self.line)
        except ValueError as error:
            raise ValueError(
                f"The command line {self.line!r} has a quote that is not closed, or ends in a "
                f"backslash ({error}). Write \\' for an apostrophe of its own."
            ) from None
        if not words:
            raise ValueError("The command line is empty: give a program and its arguments.")
        return [field for word in words for field in _fields(word)]

    def check(self, shapes: Mapping[str, tuple[int, ...]]):
        """Refuse parameters that the line does not use, or writes in a way that does not suit."""
        self._check_names(set(shapes))
        self._check_formats(shapes)
        self._warn_of_unused(shapes)

    def _check_names(self, names: set[str]):
        unknown = self.fields - names - {SEED, OUTPUT}
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
        unused = sorted(names - self.fields)
        if unused:
            raise ValueError(
                f"The command line does not use the parameters {unused}, so that no run could "
                f"depend on them: write {{{unused[0]}}} where it belongs, or leave them out of the "
                "prior."
            )

    def _warn_of_unused(self, shapes: Mapping[str, tuple[int, ...]]):
        """Warn of an array of which only some values are written."""
        for name, shape in shapes.items():
            used = {field.index for field in self.written() if field.name == name}
            if math.prod(shape) > len(used) and all(i.startswith("[") for i in used):
                warn_caller(
                    f"The command line uses {len(used)} of the {math.prod(shape)} values of the "
                    f"parameter {name!r}: no run depends on the others."
                )

    def _check_formats(self, shapes: Mapping[str, tuple[int, ...]]):
        """Refuse a format or an index that does not suit a parameter of its shape."""
        for field in self.written():
            if field.name in shapes:
                shape = shapes[field.name]
                example = _text(np.full(shape, 0.5))
                error = field.refusal(example)
                if error is not None:
                    holds = "one number" if shape == () else f"{math.prod(shape)} numbers"
                    raise ValueError(
                        f"The field {field.text} of the command line does not suit the parameter "
                        f"{field.name!r}, which is {holds}: {error}."
                    )

    def run(self, rng: Generator, theta: Mapping[str, Any], timeout: float | None) -> Any:
        """One run; `TimeoutError` where it takes more seconds than `timeout`."""
        values = {name: _text(value) for name, value in theta.items()}
        values[SEED] = int(rng.integers(2**31))
        if OUTPUT not in self.fields:
            return self._read(_call(self._words(values), timeout))
        with tempfile.TemporaryDirectory(prefix="consilience-") as folder:
            path = Path(folder) / OUTPUT
            _call(self._words({**values, OUTPUT: path}), timeout)
            if not path.exists():
                raise CommandError(f"The command ended well, but wrote no file {{{OUTPUT}}}.")
            return self._read(path)

    def _read(self, source: str | Path) -> Any:
        if self.read is None:
            return _numbers(source if isinstance(source, str) else source.read_text())
        with children_end():  # before the folder of the output is cleared
            return self.read(source)

    def _words(self, values: Mapping[str, Any]) -> list[str]:
        # Split before the fields are filled: no value can become two words.
        return [word.format(**values) for word in shlex.split(self.line)]

    def __repr__(self) -> str:
        return f"External({self.name})"


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a command line: a name, perhaps with an index, and how its value is written."""

    name: str
    index: str
    format: str

    @property
    def text(self) -> str:
        return f"{{{self.name}{self.index}{self.format}}}"

    def refusal(self, value: Any, index: bool = True) -> str | None:
        """Why a value cannot be written so, if it cannot."""
        try:
            ("{value" + self.index * index + self.format + "}").format(value=value)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            return str(error)
        return None


def _fields(word: str) -> list[Field]:
    """The fields of a word, with names and with formats that can be written."""
    try:
        parts = list(string.Formatter().parse(word))
    except ValueError as error:
        raise ValueError(
            f"The word {word!r} of the command line cannot be filled: {error}. Double a brace to "
            "write it as it is, and quote a word with a space in it."
        ) from None
    return [_field(name, form or "", how) for _, name, form, how in parts if name is not None]


def _field(found: str, form: str, conversion: str | None) -> Field:
    name = re.split(r"[.\[]", found)[0]
    written = (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
    field = Field(name, found[len(name) :], written)
    if not name or name.isdigit():
        raise ValueError(
            f"The field {field.text} of the command line has no name: write a parameter of the "
            "prior, as in {mu}. Double a brace to write it as it is."
        )
    # A parameter is a float, but {seed} is a whole number and {output} a path.
    known: dict[str, list[Any]] = {SEED: [1], OUTPUT: [Path(OUTPUT)]}
    refusals = [field.refusal(example, index=False) for example in known.get(name, [0.5, 1])]
    if "{" in form:
        refusals = ["a field within a field"]
    if None not in refusals:
        raise ValueError(
            f"The field {field.text} of the command line has a format that cannot be written: "
            f"{refusals[0]}. Numbers are formatted as in Python, as in {{{name}:.3f}}."
        )
    return field


class _Vector(tuple):
    """Numbers that are written with commas between them."""

    def __format__(self, spec: str) -> str:
        return ",".join(format(value, spec) for value in self)


def _text(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else _Vector(np.ravel(value).tolist())


def _call(words: list[str], timeout: float | None) -> str:
    """What a command writes to standard output; it and its children end when time is up."""
    mark = guardian().mark()
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: mark},
    )
    try:
        guardian().keep(process.pid)
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    finally:
        if process.returncode is None:
            _stop(process, mark)
        guardian().release(process.pid)
    if process.returncode != 0:
        said = (err.strip() or out.strip() or "it wrote nothing").splitlines()[-1]
        raise CommandError(f"exit code {process.returncode}: {said}")
    return out


def _stop(process: subprocess.Popen, mark: str):
    """Kill a command with all that it has started."""
    end({process.pid}, mark)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    # Not read to their ends: a process that was not found may hold them open for ever.
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _numbers(text: str) -> np.ndarray:
    """Numbers with white space or commas between them; several lines are rows."""
    rows = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
    try:
        table = np.array(rows, float)
    except ValueError:
        table = np.zeros(0)
    if not table.size:
        start = " ".join(text.split())[:80]
        raise ValueError(
            "The output must be numbers, as many in every line; it begins with "
            f"{start!r}. Pass read=, a function that turns it into arrays."
        )
    return table.ravel() if 1 in table.shape else table
