"""Self-consistent amortized Bayesian inference, in JAX.

>>> import consilience as cs

A name is imported when it is first used: `import consilience` by itself is quick.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consilience.augmentation import Bootstrap, Jitter
    from consilience.calibration import Calibration, calibrate
    from consilience.comparison import compare
    from consilience.compiling import keep_compiled
    from consilience.consistency import SelfConsistency
    from consilience.criteria import Bounded, RatioVariance, RelativeConstraint, Variance
    from consilience.data import Series, Set, Vector
    from consilience.externals import command, external
    from consilience.failures import Failures
    from consilience.files import StoreError, StoreInUseError
    from consilience.fitted import Fit, History, Recipe
    from consilience.flows import Affine, Coupling, Spline
    from consilience.host import OnHost
    from consilience.model import Model, PerRow
    from consilience.priors import ImplicitPrior
    from consilience.proposals import CurrentPosterior, EpochCopy, FromPrior, Mixture
    from consilience.results import to_arviz
    from consilience.rounds import Atomic, Round, Truncated, sequential
    from consilience.schedules import Constant, Cosine, Ramp, Smooth, Step
    from consilience.scores import score
    from consilience.simulating import simulate, simulate_at
    from consilience.simulations import Simulations
    from consilience.storage import LoadError, SaveError, load
    from consilience.summaries import Convolutions, DeepSet, Dense, Identity, SetTransformer
    from consilience.training import TrainingError, fit
    from consilience.trust import Check

__version__ = version("consilience")

__all__ = [
    "Affine",
    "Atomic",
    "Bootstrap",
    "Bounded",
    "Calibration",
    "Check",
    "Constant",
    "Convolutions",
    "Cosine",
    "Coupling",
    "CurrentPosterior",
    "DeepSet",
    "Dense",
    "EpochCopy",
    "Failures",
    "Fit",
    "FromPrior",
    "History",
    "Identity",
    "ImplicitPrior",
    "Jitter",
    "LoadError",
    "Mixture",
    "Model",
    "OnHost",
    "PerRow",
    "Ramp",
    "RatioVariance",
    "Recipe",
    "RelativeConstraint",
    "Round",
    "SaveError",
    "SelfConsistency",
    "Series",
    "Set",
    "SetTransformer",
    "Simulations",
    "Smooth",
    "Spline",
    "Step",
    "StoreError",
    "StoreInUseError",
    "TrainingError",
    "Truncated",
    "Variance",
    "Vector",
    "calibrate",
    "command",
    "compare",
    "external",
    "fit",
    "keep_compiled",
    "load",
    "score",
    "sequential",
    "simulate",
    "simulate_at",
    "to_arviz",
]

_MODULES = {"metrics", "plots", "tasks"}
_HOMES = {
    "augmentation": "Bootstrap Jitter",
    "calibration": "Calibration calibrate",
    "comparison": "compare",
    "compiling": "keep_compiled",
    "consistency": "SelfConsistency",
    "criteria": "Bounded RatioVariance RelativeConstraint Variance",
    "data": "Series Set Vector",
    "externals": "command external",
    "failures": "Failures",
    "files": "StoreError StoreInUseError",
    "fitted": "Fit History Recipe",
    "flows": "Affine Coupling Spline",
    "host": "OnHost",
    "model": "Model PerRow",
    "priors": "ImplicitPrior",
    "proposals": "CurrentPosterior EpochCopy FromPrior Mixture",
    "results": "to_arviz",
    "rounds": "Atomic Round Truncated sequential",
    "schedules": "Constant Cosine Ramp Smooth Step",
    "scores": "score",
    "simulating": "simulate simulate_at",
    "simulations": "Simulations",
    "storage": "LoadError SaveError load",
    "summaries": "Convolutions DeepSet Dense Identity SetTransformer",
    "training": "TrainingError fit",
    "trust": "Check",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"consilience.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'consilience' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"consilience.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
