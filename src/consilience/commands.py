"""A command line as a simulator: parameters written into it, numbers read from what it gives."""

import dataclasses
import os
import re
import shlex
import signal
import string
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from consilience.types import Data

SEED, OUTPUT = "seed", "output"
"""The fields of a command line that are not parameters."""


class CommandError(RuntimeError):
    """A command that ended with an exit code other than zero."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line with fields in braces; see `consilience.externals.command`."""

    line: str
    read: Callable[[Any], Data] | None = None

    @property
    def fields(self) -> set[str]:
        """The names in braces, without index or format."""
        found = (field for _, field, _, _ in string.Formatter().parse(self.line))
        return {re.split(r"[.\[]", field)[0] for field in found if field is not None}

    def run(self, rng: Generator, theta: Mapping[str, Any], timeout: float | None) -> Data:
        """One run; `TimeoutError` where it takes more seconds than `timeout`."""
        values = {name: _text(value) for name, value in theta.items()}
        values[SEED] = int(rng.integers(2**31))
        if OUTPUT not in self.fields:
            text = _call(self._words(values), timeout)
            return _numbers(text) if self.read is None else self.read(text)
        with tempfile.TemporaryDirectory(prefix="consilience-") as folder:
            path = Path(folder) / OUTPUT
            _call(self._words({**values, OUTPUT: path}), timeout)
            if not path.exists():
                raise CommandError(f"The command ended well, but wrote no file {{{OUTPUT}}}.")
            return _numbers(path.read_text()) if self.read is None else self.read(path)

    def _words(self, values: Mapping[str, Any]) -> list[str]:
        # Split before the fields are filled: no value can become two words.
        return [word.format(**values) for word in shlex.split(self.line)]


class _Vector(tuple):
    """Numbers that are written with commas between them."""

    def __format__(self, spec: str) -> str:
        return ",".join(format(value, spec) for value in self)


def _text(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else _Vector(np.ravel(value).tolist())


def _call(words: list[str], timeout: float | None) -> str:
    """What a command writes to standard output; it and its children end when time is up."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        said = (err.strip() or out.strip() or "it wrote nothing").splitlines()[-1]
        raise CommandError(f"exit code {process.returncode}: {said}")
    return out


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
