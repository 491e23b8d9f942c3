"""Where a fit comes from: the random keys, settings and versions that made it."""

import dataclasses
import functools
import platform
from importlib.metadata import version
from typing import Any, TypeAlias

import jax
import numpy as np

from consilience.core.types import PRNGKey

KeyName: TypeAlias = tuple[str | int, ...]
"""A random key as JSON takes it: its kind, then its words."""

PACKAGES = (
    *("consilience", "jax", "jaxlib", "equinox", "optax", "numpyro", "blackjax"),
    *("numpy", "scipy", "xarray", "matplotlib"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """What a fit was made with.

    `key`: of training. `runs_key`: of the simulations, None where they came from elsewhere.
    `tried`: how many runs were made, those that failed and were dropped among them.
    `settings`: of training, by name, in numbers and words. `versions`: of Python and packages.
    """

    key: KeyName
    runs_key: KeyName | None
    tried: int
    settings: dict[str, Any]
    versions: dict[str, str]


def key_words(key: PRNGKey) -> tuple[int, ...]:
    """A key as whole numbers, for random streams outside JAX."""
    return tuple(np.asarray(jax.random.key_data(key)).ravel().tolist())


def key_name(key: PRNGKey) -> KeyName:
    """What tells one key from all others.

    >>> key_name(jax.random.key(7))
    ('threefry2x32', 0, 7)
    """
    return (str(jax.random.key_impl(key)), *key_words(key))


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that numbers depend on, and the machine."""
    return {
        "python": platform.python_version(),
        **_packages(),
        "system": f"{platform.system()} {platform.machine()}, JAX on {jax.default_backend()}",
    }


@functools.cache
def _packages() -> dict[str, str]:
    # Files are searched for them: once, not at every fit.
    return {name: version(name) for name in PACKAGES}


def in_words(settings: Any) -> dict[str, Any] | None:
    """The fields of a description as numbers and words; None stays None."""
    if settings is None:
        return None
    named = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    plain = (int, float, str, type(None))
    return {name: v if isinstance(v, plain) else repr(v) for name, v in named.items()}
