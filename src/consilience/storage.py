"""Saving and loading a fit: safetensors for the numbers, JSON beside them for the rest.

The file's metadata describe the networks, the model and the training, in words that a person
can read; loading builds the networks from the description and never runs code from a file.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from consilience import data, flows, summaries
from consilience.data import DataSpace, Layout
from consilience.fitted import Fit, History, Recipe
from consilience.model import Model
from consilience.origins import Origin
from consilience.preparation import build_networks
from consilience.spaces import ParameterSpace
from consilience.training import assemble
from consilience.validity import Validity

FORMAT = 1
MARK = "consilience fit"

_DESCRIPTIONS = {
    cls.__name__: cls
    for cls in (
        *(flows.Coupling, flows.Spline, flows.Affine, Recipe, Layout),
        *(data.Vector, data.Series, data.Set),
        *(summaries.Identity, summaries.Dense, summaries.Convolutions),
        *(summaries.DeepSet, summaries.SetTransformer),
    )
}


class LoadError(ValueError):
    """A file that is not a whole fit of this model by this version."""


def save(fit: Fit, path: str | Path) -> Path:
    """Write a fit to one file."""
    path = Path(path)
    tensors = _tensors(_numbers(fit))
    meta = {
        "what": MARK,
        "format": FORMAT,
        "checksum": _checksum(tensors),
        "model": _fingerprint(fit.model),
        "layout": _encode(fit.posterior.data.layout),
        "recipe": _encode(fit.recipe),
        "validity": _validity(fit) is not None,
        "history": {
            **dataclasses.asdict(fit.history),
            "terms": {name: values.tolist() for name, values in fit.history.terms.items()},
        },
        "origin": None if fit.origin is None else dataclasses.asdict(fit.origin),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    # All or nothing: a crash while writing leaves an older file as it was.
    save_file(tensors, part, metadata={"consilience": json.dumps(meta, indent=1)})
    part.replace(path)
    return path


def load(path: str | Path, model: Model, *, summary: eqx.Module | None = None) -> Fit:
    """Read a fit of `model` from a file that `Fit.save` wrote.

    `summary`: an instance of the summary network, where it was a module of the user's own.
    """
    path = Path(path)
    meta, tensors = _read(path)
    _check_model(meta["model"], _fingerprint(model), path)
    described = dict(meta["recipe"])
    if described["summary"] == _CUSTOM and summary is None:
        raise LoadError(
            f"{path} was made with a summary network of your own: pass an instance of it, "
            "cs.load(path, model, summary=...)."
        )
    recipe = _decode({**described, "summary": summary or described["summary"]})
    layout = _decode(meta["layout"])
    scaled = [name for name in layout.names if name != layout.mask_name]
    empty = {name: jax.numpy.zeros(()) for name in scaled}
    parameters, space = ParameterSpace(model.prior), DataSpace(empty, empty, layout)
    rng = np.random.default_rng(0)
    networks = build_networks(recipe, parameters, space, rng)
    validity = Validity(parameters.dim, rng) if meta.get("validity") else None
    networks, (loc, scale), space, validity = _fill(
        (networks, (parameters.loc, parameters.scale), space, validity), tensors, path
    )
    history = dict(meta["history"])
    history["terms"] = {name: np.array(values) for name, values in history["terms"].items()}
    return assemble(
        model,
        ParameterSpace(model.prior, loc, scale),
        space,
        networks,
        recipe,
        History(**history),
        validity,
        _origin(meta.get("origin")),
    )


def _origin(said: dict[str, Any] | None) -> Origin | None:
    """None for a file of an earlier version, which does not say."""
    if said is None:
        return None
    keys = {name: said[name] and tuple(said[name]) for name in ("key", "runs_key")}
    return Origin(**{**said, **keys})


def _numbers(fit: Fit):
    parameters = fit.posterior.parameters
    return fit.networks, (parameters.loc, parameters.scale), fit.posterior.data, _validity(fit)


def _validity(fit: Fit) -> Validity | None:
    return None if fit.likelihood is None else fit.likelihood.validity


def _tensors(tree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    return {jax.tree_util.keystr(where): np.asarray(leaf) for where, leaf in leaves}


def _fill(tree, tensors: dict[str, np.ndarray], path: Path):
    """The tree with its arrays replaced by those of the file, all of them and no others."""
    arrays, static = eqx.partition(tree, eqx.is_array_like)
    names = [
        jax.tree_util.keystr(where) for where, _ in jax.tree_util.tree_leaves_with_path(arrays)
    ]
    if set(names) != set(tensors):
        odd = sorted(set(names) ^ set(tensors))[:3]
        raise LoadError(f"{path} does not hold the weights that it describes: {odd} differ.")
    leaves = [jax.numpy.asarray(tensors[name]) for name in names]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), leaves), static)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="numpy") as file:
            meta = json.loads((file.metadata() or {}).get("consilience", "{}"))
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, ValueError, OSError) as error:
        raise LoadError(f"{path} is damaged, or not a saved fit: {error}") from error
    if meta.get("what") != MARK:
        raise LoadError(f"{path} is a safetensors file, but not a saved fit.")
    if meta["format"] != FORMAT:
        raise LoadError(
            f"{path} has the format {meta['format']}; this version reads format {FORMAT}. "
            "Load it with the version that wrote it, or fit again."
        )
    if meta["checksum"] != _checksum(tensors):
        raise LoadError(f"{path} is damaged: its numbers do not match their checksum.")
    return meta, tensors


def _checksum(tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].tobytes())
    return digest.hexdigest()


def _fingerprint(model: Model) -> dict[str, Any]:
    """What must agree between the model that was fitted and the one a fit is loaded for."""
    shapes = {name: list(shape) for name, shape in model.prior.shapes.items()}
    x = None if model.layout is None else {n: list(s) for n, s in model.layout.shapes.items()}
    return {"parameters": shapes, "prior": model.prior.texts, "x": x}


def _check_model(saved: dict, given: dict, path: Path):
    for what, words in (("parameters", "parameters"), ("prior", "prior"), ("x", "data")):
        if saved[what] != given[what] and None not in (saved[what], given[what]):
            raise LoadError(
                f"{path} is a fit of a different model. Its {words}: {saved[what]}; "
                f"the {words} of the model given: {given[what]}."
            )


_CUSTOM = "a module of the user's own"


def _encode(value: Any) -> Any:
    if isinstance(value, eqx.Module):
        return _CUSTOM
    if dataclasses.is_dataclass(value):
        fields = {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    return [_encode(item) for item in value] if isinstance(value, tuple) else value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value  # a number, a word, or a module of the user's own
    fields = {name: _decode(item) for name, item in value.items() if name != "type"}
    if value.get("type") not in _DESCRIPTIONS:
        raise LoadError(f"The file describes a {value.get('type')!r}, unknown to this version.")
    try:
        return _DESCRIPTIONS[value["type"]](**fields)
    except TypeError as error:
        raise LoadError(f"The file's description of a {value['type']} is off: {error}") from error
