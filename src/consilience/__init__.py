"""Self-consistent amortized Bayesian inference, in JAX.

>>> import consilience as cs
"""

from importlib.metadata import version

from consilience.augmentation import Bootstrap, Jitter
from consilience.calibration import Calibration, calibrate
from consilience.comparison import compare
from consilience.compiling import keep_compiled
from consilience.consistency import SelfConsistency
from consilience.criteria import Bounded, RatioVariance, RelativeConstraint, Variance
from consilience.data import Series, Set, Vector
from consilience.external import command, external
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
from consilience.storage import LoadError, load
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
