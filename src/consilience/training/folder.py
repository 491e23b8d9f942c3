"""The rounds of one observation on disk: whose they are, their runs and failures, their fits.

A folder holds the observation, `campaign.json` with what made the rounds, and for each round a
file of runs and one of the fit. Folders of version 0.1.0 have no `campaign.json`: they are taken
as they are, and get one.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from consilience.core.arrays import computed_in
from consilience.core.files import write
from consilience.core.provenance import in_words, key_name
from consilience.core.types import Data, PRNGKey
from consilience.model.data import make_layout
from consilience.model.host import OnHost
from consilience.model.model import Model
from consilience.model.run import DATA, Failure, Spec
from consilience.model.spaces import ParameterSpace
from consilience.posterior.fit import Fit
from consilience.posterior.storage import LoadError, SaveError, load, reason_of
from consilience.simulation.lock import Lock, StoreError
from consilience.simulation.programs import ADDRESS, digest_of, program_of, trace
from consilience.simulation.simulations import Simulations

logger = logging.getLogger(__name__)

CAMPAIGN, OBSERVATION, ABOUT = "campaign.json", "observation.npz", "about"


def about(model: Model, key: PRNGKey, settings: dict[str, Any]) -> dict[str, Any]:
    """What made the rounds of a folder: all that the numbers in it depend on."""
    return {
        "version": version("consilience"),
        "prior": model.prior.texts,
        "fingerprint": model.prior.fingerprint,
        "key": list(key_name(key)),
        "simulator": model.simulator_name,
        "simulator's body": _simulator_body(model),
        "log-likelihood": _name(model.likelihood),
        "log-likelihood's body": _likelihood_body(model),
        "kind of data": _words(model.data),
        "precision": computed_in().name,
        **{name: _words(value) for name, value in settings.items()},
    }


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _words(value: Any) -> Any:
    """A setting as JSON takes it."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int | float | str | None):
        return value
    if not dataclasses.is_dataclass(value) or isinstance(value, eqx.Module):
        return type(value).__name__
    fields = {"type": type(value).__name__, **(in_words(value) or {})}
    return {
        n: ADDRESS.sub("", part) if isinstance(part, str) else part for n, part in fields.items()
    }


def _simulator_body(model: Model) -> list[str]:
    """What tells the body of a simulator, and what it depends on."""
    inside = model.external is None
    by = f"JAX {jax.__version__}" if inside else f"Python {platform.python_version()}"
    return [by, program_of(model)]


def _likelihood_body(model: Model) -> list[str] | None:
    function = getattr(model.likelihood, "log_likelihood", model.likelihood)
    if function is None:
        return None
    if model.external is not None or isinstance(model.likelihood, OnHost):
        return [f"Python {platform.python_version()}", digest_of(function)]
    example = jax.eval_shape(model.simulate_one, jax.random.key(0))
    program = trace(model.log_likelihood, *example)
    return [f"JAX {jax.__version__}", hashlib.sha256(program.encode()).hexdigest()]


def held_spec(path: str | Path, model: Model, x: Data) -> Spec | None:
    """The arrays of the runs that a folder of rounds holds, if the observation is like them."""
    file = Path(path) / "round-0.npz"
    # Whatever is wrong with the folder is said when it is opened.
    with contextlib.suppress(Exception), np.load(file, allow_pickle=False) as arrays:
        first = {n[2:]: arrays[n][0] for n in arrays.files if n.startswith("x.")}
        bare = list(first) == [DATA] and not isinstance(x, Mapping)
        spec = Spec.of(first[DATA] if bare else first)
        make_layout(spec.shapes, model.data, bare).check(x)
        return spec
    return None


class Kept:
    """A folder of rounds, locked for one writer until it is closed."""

    def __init__(
        self,
        path: str | Path,
        model: Model,
        x: Data,
        about: dict[str, Any],
        parts: Sequence[Any] = (),
    ):
        # Absolute: a simulator may change the current folder.
        self.path, self.model, self.parts = Path(path).absolute(), model, parts
        assert model.layout is not None
        self.layout = model.layout
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path / "lock")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._check_observation(x)
            self._check_campaign(json.loads(json.dumps(about)))
        except OSError as error:
            self._lock.release()
            raise self._unwritable(error) from error
        except BaseException:
            self._lock.release()
            raise

    def _unwritable(self, error: OSError) -> StoreError:
        return StoreError(f"{self.path} cannot be used for rounds: {reason_of(error)}.")

    def __enter__(self) -> "Kept":
        return self

    def __exit__(self, *error: object):
        self._lock.release()

    # Whose rounds they are.

    def _check_observation(self, x: Data):
        given, _ = self.layout.check(x)
        known = self._read(OBSERVATION, "Delete it if the rounds are of this observation.")
        if known is None:
            write(self.path / OBSERVATION, _to_bytes(given))
        elif set(known) != set(given) or not all(
            np.array_equal(known[name].astype(computed_in()), array.astype(computed_in()))
            for name, array in given.items()
        ):
            raise StoreError(
                f"{self.path} holds the rounds of another observation: pass another directory."
            )

    def _check_campaign(self, given: dict[str, Any]):
        file = self.path / CAMPAIGN
        if not file.exists() or not any(self.path.glob("round-*")):
            write(file, json.dumps(given, indent=1).encode())
            return
        try:
            held = json.loads(file.read_bytes())
            differ = [name for name in given if _differ(name, held, given)]
            other = self.model.prior.differs_from(held["prior"], held["fingerprint"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise StoreError(
                f"{file} is damaged: {error!r}. Delete it if the rounds were made by this very "
                "call: nothing is compared then."
            ) from error
        for name in [*["prior"] * other, *differ]:
            shown = f"Its {name}: {held[name]}; the {name} given: {given[name]}"
            shown += self.model.prior.hidden(held[name]) if name == "prior" else ""
            if name.endswith(BODY):
                shown = f"The {name} has changed; if it computes the same, delete {file}"
            raise StoreError(
                f"{self.path} holds the rounds of another campaign. {shown}. Call with what made "
                "them, or pass another directory."
            )

    # The runs and fits of a round.

    def simulations(self, number: int) -> Simulations | None:
        """The runs of a round, with what failed; None where they are still to be made."""
        name, advice = f"round-{number}.npz", "Delete it, and call again: that round is run again."
        arrays = self._read(name, advice)
        if arrays is None:
            return None
        with self._told(name, advice):
            return self._simulations(arrays)

    def _simulations(self, arrays: dict[str, np.ndarray]) -> Simulations:
        about: dict[str, Any] = {}
        if ABOUT in arrays:
            about = json.loads(arrays.pop(ABOUT).tobytes())
        parts: dict[str, dict[str, np.ndarray]] = {"theta": {}, "x": {}}
        for label, array in arrays.items():
            part, _, name = label.partition(".")
            parts[part][name] = array
        theta, x = ParameterSpace(self.model.prior).check(parts["theta"]), parts["x"]
        n = len(next(iter(theta.values())))
        for name, shape in self.layout.shapes.items():
            if x[name].shape != (n, *shape) or x[name].dtype.kind not in "biuf":
                raise ValueError(f"x has the shape {x[name].shape}, not {(n, *shape)}")
        failed = {int(i): Failure(*words) for i, words in about.get("failed", {}).items()}
        if any(i not in range(n) for i in failed) or len(x) != len(self.layout.shapes):
            raise ValueError("its arrays are not those of a round")
        key = tuple(about.get("key") or ()) or None
        return Simulations(theta, self.layout.unnamed(x), failed, key=key)

    def keep_simulations(self, number: int, runs: Simulations):
        """Write the runs of a round, failed ones with their reasons."""
        about = {"failed": runs.failures.failed, "key": runs.key}
        x = self.layout.named(runs.x)
        arrays = {
            **{f"theta.{name}": array for name, array in runs.theta.items()},
            **{f"x.{name}": array for name, array in x.items()},
            ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8),
        }
        name = f"round-{number}.npz"
        with self._going_on(name):
            write(self.path / name, _to_bytes(arrays))
            self._lock.touch()

    def fit(self, number: int) -> Fit | None:
        """The fit after a round, None where it is still to be trained."""
        file = self.path / f"round-{number}.fit"
        if not file.exists():
            return None
        try:
            return load(file, self.model, parts=self.parts)
        except (LoadError, FileNotFoundError) as error:
            raise LoadError(
                f"{error} Delete {file}, and call again: it is trained again on the runs beside it."
            ) from error

    def keep_fit(self, number: int, result: Fit):
        """Save the fit after a round."""
        name = f"round-{number}.fit"
        with self._going_on(name):
            result.save(self.path / name)
            self._lock.touch()

    @contextlib.contextmanager
    def _going_on(self, name: str) -> Iterator[None]:
        """What cannot be written is still in memory: the rounds go on."""
        try:
            yield
        except OSError as error:
            logger.warning(
                "%s cannot be written: %s. The rounds go on in memory; another call in this folder "
                "makes it again.",
                *(
                    self.path / name,
                    error.reason if isinstance(error, SaveError) else reason_of(error),
                ),
            )

    def _read(self, name: str, advice: str) -> dict[str, np.ndarray] | None:
        file = self.path / name
        if not file.exists():
            return None
        with self._told(name, advice), np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)

    @contextlib.contextmanager
    def _told(self, name: str, advice: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever NumPy and zipfile make of damaged bytes
            said = (str(error) or repr(error)).splitlines()[0].rstrip(".")
            raise StoreError(f"{self.path / name} is damaged: {said}. {advice}") from error


def _to_bytes(arrays: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    return content.getvalue()


BODY = "'s body"


def _differ(name: str, held: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether a setting is another one; what only one of two versions knows is not compared."""
    if name in ("version", "prior", "fingerprint") or name not in held:
        return False
    if name + BODY in given and _comparable(held.get(name + BODY), given[name + BODY]):
        return False  # what a function does counts, not what it is called
    first, second = held[name], given[name]
    if name.endswith(BODY):
        return _comparable(first, second) and first != second
    if isinstance(first, dict) and isinstance(second, dict):
        return any(first[field] != second[field] for field in first.keys() & second.keys())
    return first != second


def _comparable(first: list[str] | None, second: list[str] | None) -> bool:
    return first is not None and second is not None and first[0] == second[0]
