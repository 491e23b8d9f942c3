"""Saving and loading a fit: safetensors for the arrays, JSON beside them for the rest.

The file's metadata describe the networks, the model and the training, in words that a person
can read; loading builds the networks from the description and never runs code from a file.
Checksums cover the arrays and the description, and what is built has the file's shapes.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save as to_bytes

from consilience.core.files import write
from consilience.core.provenance import Origin
from consilience.identity.learned import build_networks
from consilience.model.model import Model
from consilience.model.spaces import ParameterSpace
from consilience.networks.ensemble import EnsembleSummary, StackedSummary
from consilience.networks.validity import Validity
from consilience.posterior.descriptions import (
    LIBRARY,
    check_fields,
    decode,
    empty_space,
    encode,
    measured,
    plain,
)
from consilience.posterior.fit import Fit, assemble
from consilience.posterior.history import History, Tried
from consilience.posterior.out_of_fold import OutOfFold
from consilience.posterior.parts import MissingPartError, Parts
from consilience.posterior.room import Room
from consilience.posterior.static import differences, notes_of

FORMAT = 1
MARK = "consilience fit"
META, DIGEST = "consilience", "sha256"
"""The file's metadata: the description, and its checksum."""

SPARE = 1000
"""By how many values networks may exceed what a file holds while they are built."""


class LoadError(ValueError):
    """A file that is not a whole fit of this model by this version."""


IN_MEMORY = "The fit is still in memory: fit.save(path) with another path keeps it."


class SaveError(OSError):
    """A fit that could not be written; `reason` says why. The fit itself is as it was."""

    def __init__(self, path: Path, reason: str, then: str = IN_MEMORY):
        self.reason = reason
        super().__init__(f"{path} cannot be written: {reason}. {then}")


def save(fit: Fit, path: str | Path) -> Path:
    """Write a fit to one file."""
    path = Path(path)
    tensors = _tensors(_numbers(fit))
    meta = {
        "what": MARK,
        "format": FORMAT,
        "checksum": _checksum(tensors),
        "model": {**_shapes(fit.model), "fingerprint": fit.model.prior.fingerprint},
        "layout": encode(fit.posterior.data.layout),
        "tails": list(fit.posterior.data.tails),
        "recipe": encode(fit.recipe),
        "static": notes_of(fit.recipe, fit.networks),
        "validity": _validity(fit) is not None,
        "out_of_fold": None if fit.out_of_fold is None else list(fit.out_of_fold.draws.shape),
        "history": {
            **dataclasses.asdict(fit.history),
            "terms": {name: values.tolist() for name, values in fit.history.terms.items()},
        },
        "origin": None if fit.origin is None else dataclasses.asdict(fit.origin),
    }
    text = json.dumps(meta, indent=1, default=plain)
    content = to_bytes(tensors, metadata={META: text, DIGEST: _digest(text, tensors)})
    try:
        write(path, content, shared=True)
    except (OSError, ValueError) as error:
        raise SaveError(path, reason_of(error)) from error
    return path


def reason_of(error: Exception) -> str:
    """What the system says about a file, in words."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "its disk is full"
    return getattr(error, "strerror", None) or str(error)


def load(
    path: str | Path,
    model: Model,
    *,
    parts: Sequence[Any] = (),
    summary: eqx.Module | None = None,
) -> Fit:
    """Read a fit of `model` from a file that `Fit.save` wrote.

    `parts`: what the fit was made with beside parts of this library: the classes of
    descriptions, and instances of modules and of other objects. An error names those that are
    missing. A file holds no code, and builds no classes but the library's and these. Several
    instances of one class are taken in the order posterior, likelihood, prior, summary.
    `summary`: an instance of the summary network; `parts=[summary]` does the same.
    """
    if not isinstance(path, str | Path) or not isinstance(model, Model):
        raise TypeError(
            "cs.load takes a path and then the cs.Model that was fitted, got "
            f"{type(path).__name__} and {type(model).__name__}."
        )
    path, own = Path(path), Parts(parts if summary is None else [*parts, summary], LIBRARY)
    meta, tensors = _read(path)
    with _told(path):
        _check_model(meta["model"], model, path)
        return _rebuild(meta, tensors, model, own, summary, path)


def _rebuild(
    meta: dict[str, Any],
    tensors: dict[str, np.ndarray],
    model: Model,
    parts: Parts,
    summary: eqx.Module | None,
    path: Path,
) -> Fit:
    described = dict(meta["recipe"])
    held = sum(array.size for array in tensors.values())
    # Building draws some values that networks do not keep.
    room = Room(4 * held + SPARE)
    if summary is not None and not _joined(described["summary"]):
        described["summary"] = summary
    recipe = decode(described, parts, held + SPARE)
    space = empty_space(decode(meta["layout"], parts), room, tuple(meta.get("tails", ())))
    parameters = ParameterSpace(model.prior)
    networks = build_networks(measured(recipe, room), parameters, space, room)
    # Files of versions before do not hold notes.
    _check_static(differences(meta.get("static", {}), notes_of(recipe, networks)), path)
    validity = Validity(parameters.dim, room) if meta.get("validity") else None
    judged = None
    if (shape := meta.get("out_of_fold")) is not None:
        judged = OutOfFold.empty(tuple(shape), room)
    networks, (loc, scale), space, validity, judged = _fill(
        (networks, (parameters.loc, parameters.scale), space, validity, judged), tensors, path
    )
    return assemble(
        model,
        ParameterSpace(model.prior, loc, scale),
        space,
        networks,
        recipe,
        _history(meta["history"]),
        validity,
        _origin(meta.get("origin")),
        judged,
    )


def _joined(described: Any) -> bool:
    """Whether a summary network is made of several."""
    joined = (EnsembleSummary.__name__, StackedSummary.__name__)
    return isinstance(described, dict) and described.get("type") in joined


def _check_static(odd: list[str], path: Path):
    if odd:
        raise LoadError(
            f"{path} was made with other networks than these parts build: {'; '.join(odd[:3])}. A "
            "file holds arrays alone: what `build` draws belongs in fields that are arrays, or is "
            "drawn with a fixed seed. Modules are passed as instances with the settings of the fit."
        )


def _history(held: dict[str, Any]) -> History:
    terms = {name: np.array(values, float) for name, values in held["terms"].items()}
    rows = held.get("tried", ())
    for row in rows:
        check_fields(Tried, row)
    held = {**held, "terms": terms, "tried": tuple(Tried(**row) for row in rows)}
    check_fields(History, held)
    return History(**held)


def _origin(held: dict[str, Any] | None) -> Origin | None:
    """None for a file of version 0.1.0, which does not hold one."""
    if held is None:
        return None
    keys = {name: held[name] and tuple(held[name]) for name in ("key", "runs_key")}
    check_fields(Origin, {**held, **keys})
    return Origin(**{**held, **keys})


def _numbers(fit: Fit):
    parameters = fit.posterior.parameters
    scales = parameters.loc, parameters.scale
    return fit.networks, scales, fit.posterior.data, _validity(fit), fit.out_of_fold


def _validity(fit: Fit) -> Validity | None:
    return None if fit.likelihood is None else fit.likelihood.validity


def _tensors(tree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    return {jax.tree_util.keystr(where): np.asarray(leaf) for where, leaf in leaves}


def _fill(tree, tensors: dict[str, np.ndarray], path: Path):
    """The tree with its arrays replaced by those of the file, all of them and no others."""
    arrays, static = eqx.partition(tree, eqx.is_array)
    expected = {
        jax.tree_util.keystr(where): leaf
        for where, leaf in jax.tree_util.tree_leaves_with_path(arrays)
    }
    odd = sorted(set(expected) ^ set(tensors))
    odd = odd or [name for name, leaf in expected.items() if not _alike(leaf, tensors[name])]
    if odd:
        raise LoadError(f"{path} does not hold the weights that it describes: {odd[:3]} differ.")
    leaves = [jax.numpy.asarray(tensors[name]) for name in expected]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), leaves), static)


def _alike(first: Any, second: np.ndarray) -> bool:
    # A fit of 64 bits can be loaded where there are 32, and the other way round.
    return first.shape == second.shape and first.dtype.kind == second.dtype.kind


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise `LoadError` with the reason where the content of a file is invalid."""
    try:
        yield
    except LoadError:
        raise
    except MissingPartError as error:
        raise LoadError(f"{path} {error}") from error
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise LoadError(f"{path} is damaged, or not a saved fit: {reason}") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    with _told(path):
        with safe_open(path, framework="numpy") as file:
            held = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        meta = json.loads(held.get(META, "{}"))
        if not isinstance(meta, dict) or meta.get("what") != MARK:
            raise LoadError(f"{path} is a safetensors file, but not a saved fit.")
        # Files of version 0.1.0 have neither a fingerprint nor a checksum of the description.
        if (DIGEST in held or "fingerprint" in meta.get("model", {})) and held.get(
            DIGEST
        ) != _digest(held[META], tensors):
            raise LoadError(f"{path} is damaged: its description does not match its checksum.")
        if meta["format"] != FORMAT:
            raise LoadError(
                f"{path} has the format {meta['format']}; this version reads format {FORMAT}. "
                "Load it with the version that wrote it, or fit again."
            )
        if meta["checksum"] != _checksum(tensors):
            raise LoadError(f"{path} is damaged: its numbers do not match their checksum.")
    return meta, tensors


def _digest(text: str, tensors: dict[str, np.ndarray]) -> str:
    """The checksum of a description, with the names, types and shapes of all arrays."""
    arrays = [(name, tensors[name].dtype.str, tensors[name].shape) for name in sorted(tensors)]
    return hashlib.sha256(f"{text}\n{arrays}".encode()).hexdigest()


def _checksum(tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].tobytes())
    return digest.hexdigest()


def _shapes(model: Model) -> dict[str, Any]:
    """What must agree between the model that was fitted and the one a fit is loaded for."""
    shapes = {name: list(shape) for name, shape in model.prior.shapes.items()}
    x = None if model.layout is None else {n: list(s) for n, s in model.layout.shapes.items()}
    return {"parameters": shapes, "prior": model.prior.texts, "x": x}


def _check_model(saved: dict[str, Any], model: Model, path: Path):
    given = _shapes(model)
    differs = {name: None not in (saved[name], given[name]) for name in given}
    differs = {name: both and saved[name] != given[name] for name, both in differs.items()}
    differs["prior"] = model.prior.differs_from(saved["prior"], saved.get("fingerprint"))
    for what, words in (("parameters", "parameters"), ("prior", "prior"), ("x", "data")):
        if differs[what]:
            hidden = saved[what] == given[what]
            raise LoadError(
                f"{path} is a fit of a different model. Its {words}: {saved[what]}; "
                f"the {words} of the model given: {given[what]}."
                + " They differ in numbers that these lines leave out."
                * hidden
            )
