"""Self-consistent amortized Bayesian inference, in JAX.

>>> import consilience as cs

A name is imported when it is first used: `import consilience` by itself is quick.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consilience.core.compiling import keep_compiled
    from consilience.diagnostics.calibration import Calibration, calibrate
    from consilience.diagnostics.check import Check
    from consilience.diagnostics.scores import score
    from consilience.identity.augmentation import Augmentation, Bootstrap, Jitter
    from consilience.identity.consistency import SelfConsistency
    from consilience.identity.criteria import (
        Bounded,
        Criterion,
        RatioVariance,
        RelativeConstraint,
        Variance,
    )
    from consilience.identity.proposals import (
        CurrentPosterior,
        EpochCopy,
        FromPrior,
        Mixture,
        Proposal,
    )
    from consilience.identity.schedules import Constant, Cosine, Ramp, Schedule, Smooth, Step
    from consilience.identity.terms import LossTerm
    from consilience.model.data import Series, Set, Vector
    from consilience.model.external import command, external
    from consilience.model.host import OnHost
    from consilience.model.model import Model, PerRow
    from consilience.model.priors import ImplicitPrior
    from consilience.networks.density import BatchedDensity, ConditionalDensity, Density
    from consilience.networks.flow import Coupling
    from consilience.networks.recipe import Recipe
    from consilience.networks.summary import (
        Convolutions,
        DeepSet,
        Dense,
        Identity,
        SetTransformer,
        Summary,
    )
    from consilience.networks.transforms import (
        Affine,
        CouplingTransform,
        RecordedTransform,
        Spline,
    )
    from consilience.posterior.comparison import compare
    from consilience.posterior.datasets import to_arviz
    from consilience.posterior.fit import Fit
    from consilience.posterior.history import History
    from consilience.posterior.storage import LoadError, SaveError, load
    from consilience.simulation.failures import Failures
    from consilience.simulation.lock import StoreError, StoreInUseError
    from consilience.simulation.simulate import simulate, simulate_at
    from consilience.simulation.simulations import Simulations
    from consilience.training.epochs import TrainingError
    from consilience.training.rounds import Atomic, Round, Truncated, sequential
    from consilience.training.train import fit

__version__ = version("consilience")

__all__ = [
    "Affine",
    "Atomic",
    "Augmentation",
    "BatchedDensity",
    "Bootstrap",
    "Bounded",
    "Calibration",
    "Check",
    "ConditionalDensity",
    "Constant",
    "Convolutions",
    "Cosine",
    "Coupling",
    "CouplingTransform",
    "Criterion",
    "CurrentPosterior",
    "DeepSet",
    "Dense",
    "Density",
    "EpochCopy",
    "Failures",
    "Fit",
    "FromPrior",
    "History",
    "Identity",
    "ImplicitPrior",
    "Jitter",
    "LoadError",
    "LossTerm",
    "Mixture",
    "Model",
    "OnHost",
    "PerRow",
    "Proposal",
    "Ramp",
    "RatioVariance",
    "Recipe",
    "RecordedTransform",
    "RelativeConstraint",
    "Round",
    "SaveError",
    "Schedule",
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
    "Summary",
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
    "core.compiling": "keep_compiled",
    "model.data": "Series Set Vector",
    "model.external": "command external",
    "model.host": "OnHost",
    "model.model": "Model PerRow",
    "model.priors": "ImplicitPrior",
    "simulation.failures": "Failures",
    "simulation.lock": "StoreError StoreInUseError",
    "simulation.simulate": "simulate simulate_at",
    "simulation.simulations": "Simulations",
    "networks.density": "BatchedDensity ConditionalDensity Density",
    "networks.flow": "Coupling",
    "networks.recipe": "Recipe",
    "networks.summary": "Convolutions DeepSet Dense Identity SetTransformer Summary",
    "networks.transforms": "Affine CouplingTransform RecordedTransform Spline",
    "identity.augmentation": "Augmentation Bootstrap Jitter",
    "identity.consistency": "SelfConsistency",
    "identity.criteria": "Bounded Criterion RatioVariance RelativeConstraint Variance",
    "identity.proposals": "CurrentPosterior EpochCopy FromPrior Mixture Proposal",
    "identity.schedules": "Constant Cosine Ramp Schedule Smooth Step",
    "identity.terms": "LossTerm",
    "posterior.comparison": "compare",
    "posterior.datasets": "to_arviz",
    "posterior.fit": "Fit",
    "posterior.history": "History",
    "posterior.storage": "LoadError SaveError load",
    "training.rounds": "Atomic Round Truncated sequential",
    "training.epochs": "TrainingError",
    "training.train": "fit",
    "diagnostics.calibration": "Calibration calibrate",
    "diagnostics.check": "Check",
    "diagnostics.scores": "score",
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
