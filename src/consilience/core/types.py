"""The names that signatures share. `theta` are parameters, `x` are data, everywhere."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxtyping import Array, Float, Key

PRNGKey: TypeAlias = Key[Array, ""]
"""One random key, from `jax.random.key`."""

Scalar: TypeAlias = Float[Array, ""]

Theta: TypeAlias = Mapping[str, Any]
"""Named parameters in the user's own space, one array a name."""

Data: TypeAlias = Any
"""What a simulator returns: an array, or a dictionary of arrays."""

SummaryNetwork: TypeAlias = Callable[[dict[str, Array]], Float[Array, "_"]]
"""One standardised dataset to a vector: an Equinox module with parameters to train."""

Flat: TypeAlias = Float[Array, "_"]
"""Parameters or data as the networks see them: flat, unconstrained, standardised."""
