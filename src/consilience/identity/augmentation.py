"""Augmentation: datasets that cost no simulation.

The identity holds at every dataset, simulated or not, so the loss may be evaluated at datasets
that are made from those at hand.
"""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from consilience.core.types import PRNGKey
from consilience.identity.setting import Setting
from consilience.model.counts import root, unroot
from consilience.model.data import Layout, Set

Named = dict[str, Array]


class Spread(NamedTuple):
    """The standard deviation (of counts: of their roots) and the range of each entry."""

    scale: Named
    low: Named
    high: Named


@runtime_checkable
class Augmentation(Protocol):
    """One dataset to another of the same shape, to evaluate the identity at.

    How to write your own: a hashable callable, such as a function or a frozen dataclass, of one
    named dataset (`"data"` is the name where x is one array), a random key, the layout of the
    data, and the scale and range of every entry in training. It is compiled and vectorised.

    Signals that may be turned around:

    >>> import consilience as cs, jax
    >>> @dataclasses.dataclass(frozen=True)
    ... class Flip:
    ...     def __call__(self, x, key, layout, spread):
    ...         sign = jax.random.rademacher(key, (), float)
    ...         return x | {"data": sign * x["data"]}
    >>> settings = cs.SelfConsistency(augmentation=Flip())

    `resolved(setting)` is optional: it returns the augmentation with choices made for a
    `consilience.identity.setting.Setting`, as `Bootstrap` does.
    """

    def __call__(self, x: Named, key: PRNGKey, layout: Layout, spread: Spread) -> Named: ...


@dataclasses.dataclass(frozen=True)
class Jitter:
    """Gaussian noise on the data, `size` times the spread of each entry; of counts, on their roots.

    Values stay within the range of the training data, whole numbers stay whole, and side
    information and masks stay as they are. Safe for any shape of data.
    """

    size: float = 0.1

    def __post_init__(self):
        if not self.size >= 0:
            raise ValueError(f"The size of the jitter must not be negative, got {self.size}.")

    def __call__(self, x: Named, key: PRNGKey, layout: Layout, spread: Spread) -> Named:
        changed = dict(x)
        for i, name in enumerate(layout.data_names):
            value = jnp.asarray(x[name], dtype=float)
            noise = jax.random.normal(jax.random.fold_in(key, i), value.shape)
            noise *= self.size * spread.scale[name]
            moved = unroot(root(value) + noise) if layout.kind.counts else value + noise
            moved = jnp.clip(moved, spread.low[name], spread.high[name])
            whole = layout.kind.counts or not jnp.issubdtype(x[name].dtype, jnp.floating)
            changed[name] = (jnp.round(moved) if whole else moved).astype(x[name].dtype)
        return changed


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """Rows of a set drawn with replacement, then jittered.

    Side information and mask go with their row. Data that are not a set are only jittered:
    the places of their entries mean something.

    `jitter`: as the size of `Jitter`. By default a tenth; half of the spread for data that are
    not a set where the likelihood is exact: it holds far from the simulations too, and nothing
    else makes such data new.
    """

    jitter: float | None = None

    def resolved(self, setting: Setting) -> "Bootstrap":
        """With a jitter, if it has none."""
        if self.jitter is not None:
            return self
        far = setting.exact and not isinstance(setting.kind, Set)
        return Bootstrap(0.5 if far else Jitter.size)

    def __call__(self, x: Named, key: PRNGKey, layout: Layout, spread: Spread) -> Named:
        k_rows, k_jitter = jax.random.split(key)
        if isinstance(layout.kind, Set):
            rows = jax.random.randint(k_rows, (layout.rows,), 0, layout.rows)
            x = {name: part[rows] if layout.by_row(name) else part for name, part in x.items()}
        size = Jitter.size if self.jitter is None else self.jitter
        return Jitter(size)(x, k_jitter, layout, spread)
