"""What a command line names: a model in a module, an observation in a file, a file to write."""

import importlib
import inspect
import math
import os
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from consilience.core.files import whole
from consilience.core.types import Data
from consilience.model.data import Layout
from consilience.model.model import Model

Found = np.ndarray | dict[str, np.ndarray]


class InputError(ValueError):
    """Something on the command line that cannot be used; its message says what to do."""


def read_model(text: str) -> Model:
    """The model that `module:object` names; the current folder is searched first.

    The object is a `Model`, or a function without arguments that returns one.
    """
    name, _, attribute = text.partition(":")
    if not name or not attribute:
        raise InputError(
            f"{text!r} names no model: write MODULE:OBJECT, such as mymodel:model for `model` in "
            "mymodel.py."
        )
    module = _import(name)
    if not hasattr(module, attribute):
        there = [key for key, value in vars(module).items() if isinstance(value, Model)]
        hint = f"its models are {', '.join(there)}" if there else "it has no model by any name"
        raise InputError(f"{name} ({module.__file__}) has no {attribute!r}: {hint}.")
    return _as_model(getattr(module, attribute), text)


def _import(name: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # A file may be newer than what the import system remembers of its folder.
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise InputError(_failed(f"Importing {name}", error)) from error
        hint = f": leave out .py and write {name[:-3]}:..." if name.endswith(".py") else ""
        raise InputError(
            f"There is no module {name!r} in {folder} or among the installed packages{hint}."
        ) from None
    except (Exception, SystemExit) as error:
        raise InputError(_failed(f"Importing {name}", error)) from error


def _as_model(found: Any, text: str) -> Model:
    if isinstance(found, Model):
        return found
    if not callable(found):
        raise InputError(
            f"{text} is of type {type(found).__name__}: it must be a cs.Model, or a function "
            "without arguments that returns one."
        )
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{text} cannot be called without arguments ({error}): name a cs.Model, or a function "
            "without arguments that returns one."
        ) from None
    try:
        made = found()
    except (Exception, SystemExit) as error:
        raise InputError(_failed(f"{text}()", error)) from error
    if not isinstance(made, Model):
        raise InputError(f"{text}() must return a cs.Model, got {type(made).__name__}.")
    return made


def _failed(what: str, error: BaseException) -> str:
    """What happened, and the last line in the user's own folder that led to it."""
    said = (str(error).strip() or "no message").splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(os.getcwd() + os.sep)]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{what} failed: {type(error).__name__}: {said}{where}"


def read_data(path: Path, layout: Layout) -> Data:
    """One observation or a batch, as a fit with this layout takes them."""
    if not path.is_file():
        raise InputError(f"There is no file {path}.")
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise InputError(f"The data in {path} cannot be read: a file ends in {', '.join(READERS)}.")
    try:
        found = read(path)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} cannot be read as {path.suffix}: {said}") from error
    parts = found if isinstance(found, dict) else {"x": found}
    for name, array in parts.items():
        if array.dtype.kind not in "biuf":
            raise InputError(f"{path} must hold numbers, but {name} is of type {array.dtype}.")
        if not array.size:
            raise InputError(f"{path} must hold an observation, but {name} is empty.")
    x = _shaped(found, layout, path, is_text=read is _text)
    try:
        arrays, batched = layout.check(x, str(path))
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from None
    # As they were checked: a file may have another byte order.
    return layout.unnamed({n: array if batched else array[0] for n, array in arrays.items()})


def _shaped(found: Found, layout: Layout, path: Path, *, is_text: bool) -> Data:
    """What a file holds, alone or named as the model's data are."""
    expected = ", ".join(layout.names)
    if isinstance(found, dict):
        if not layout.bare:
            return found
        if len(found) != 1 and "x" not in found:
            raise InputError(
                f"The model's data are one array, but {path} holds {len(found)} "
                f"({', '.join(found)}): keep one of them, or name it x."
            )
        return found.get("x", next(iter(found.values()), np.zeros(0)))
    if len(layout.names) > 1:
        raise InputError(
            f"The model's data are several arrays ({expected}), but {path} holds one: write "
            "them by name into an .npz or .nc file."
        )
    (name,) = layout.names
    array = _from_table(found, layout.shapes[name], path) if is_text else found
    return layout.unnamed({name: array})


def _from_table(table: np.ndarray, shape: tuple[int, ...], path: Path) -> np.ndarray:
    """One observation as it is, on one line or in one column; or one on each line."""
    size, (lines, columns) = math.prod(shape), table.shape
    if table.shape == shape:
        return table
    if table.size == size and 1 in table.shape:
        return table.reshape(shape)
    if columns == size:
        return table.reshape(lines, *shape)
    raise InputError(
        f"{path} must hold an observation of shape {shape}, or one on each line of {size} numbers; "
        f"it has {lines} lines of {columns} numbers."
    )


def _text(path: Path) -> np.ndarray:
    text = path.read_text()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input contained no data")
        table = np.loadtxt(text.splitlines(), delimiter="," if "," in text else None, ndmin=2)
    if not table.size:
        raise ValueError("it holds no numbers.")
    return table


def _npy(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _npz(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _netcdf(path: Path) -> dict[str, np.ndarray]:
    with xr.open_dataset(path, decode_times=False) as dataset:
        return {str(name): array.values for name, array in dataset.data_vars.items()}


READERS: dict[str, Callable[[Path], Found]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".csv": _text,
    ".txt": _text,
    ".nc": _netcdf,
}
"""How files are read, by the end of their names."""


def check_out(path: Path, *endings: str):
    """Refuse a file that cannot be written, before anything is computed; make its folder."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file to write.")
    if endings and path.suffix not in endings:
        raise InputError(f"{path} must end in {' or '.join(endings)}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}") from None
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written: no permission in {path.parent}.")


def check_netcdf(names: Iterable[str], path: Path):
    """Refuse names that netCDF does not take, before anything is computed."""
    for name in names:
        if "/" in name:
            raise InputError(
                f"{path} cannot hold a parameter called {name!r}: netCDF takes no slash in a name. "
                "Call it something else in the model."
            )


def write_netcdf(dataset: xr.Dataset, path: Path):
    """Write a dataset, whole or not at all."""
    try:
        with whole(path, shared=True) as unfinished:
            dataset.to_netcdf(unfinished, engine="h5netcdf")
    except ValueError as error:
        raise InputError(f"{path} cannot be written as netCDF: {error}") from error
