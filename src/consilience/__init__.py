"""Self-consistent amortized Bayesian inference, in JAX.

>>> import consilience as cs
"""

from importlib.metadata import version

from consilience.data import Series, Set, Vector
from consilience.fitted import Fit, History, Recipe
from consilience.flows import Affine, Coupling, Spline
from consilience.model import Model, PerRow
from consilience.priors import ImplicitPrior
from consilience.results import to_arviz
from consilience.schedules import Constant, Cosine
from consilience.simulations import Simulations, simulate
from consilience.storage import LoadError, load
from consilience.summaries import Convolutions, DeepSet, Dense, Identity, SetTransformer
from consilience.training import TrainingError, fit

__version__ = version("consilience")

__all__ = [
    "Affine",
    "Constant",
    "Convolutions",
    "Cosine",
    "Coupling",
    "DeepSet",
    "Dense",
    "Fit",
    "History",
    "Identity",
    "ImplicitPrior",
    "LoadError",
    "Model",
    "PerRow",
    "Recipe",
    "Series",
    "Set",
    "SetTransformer",
    "Simulations",
    "Spline",
    "TrainingError",
    "Vector",
    "fit",
    "load",
    "simulate",
    "to_arviz",
]
