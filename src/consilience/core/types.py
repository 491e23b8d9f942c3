"""The names that signatures share. `theta` are parameters, `x` are data, everywhere."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Key

PRNGKey: TypeAlias = Key[Array, ""]
"""One random key, from `jax.random.key`."""

Scalar: TypeAlias = Float[Array, ""]


@runtime_checkable
class SupportsArray(Protocol):
    """What NumPy can turn into an array: a column of pandas, an array of xarray or PyTorch."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...


Numbers: TypeAlias = (
    Array | np.ndarray | np.generic | float | int | bool | list | tuple | SupportsArray
)
"""An array, or what becomes one: a number, a nested list or tuple, another library's array."""

if TYPE_CHECKING:
    Theta: TypeAlias = Mapping[str, Any]
    Data: TypeAlias = Numbers | dict[str, Any]
else:
    Theta: TypeAlias = Mapping[str, Numbers]
    """Named parameters in the user's own space, one array a name.

    A type checker refuses arrays here, and what is annotated as `Data`. It takes values of any
    type, so that theta from the library can be computed with; at run time, values must be
    `Numbers`. `ParameterSpace.check` compares the names and shapes with those of the prior.
    """

    Data: TypeAlias = Numbers | Mapping[str, Numbers]
    """What a simulator returns: an array, or a dictionary of arrays.

    Parameters and data may both be dictionaries of arrays, with nothing in their structure to
    tell them apart. So a type checker takes a `dict` for data, but no other mapping: it refuses
    what is annotated as `Theta`, and cannot refuse a plain dictionary of parameters. At run time
    every mapping is taken. `Layout.check` compares names and shapes with those of the simulator.

    Data from the library, and data passed to a function of the user's own, are annotated as
    `Any`: whether they are an array or a dictionary is the simulator's choice.
    """

SummaryNetwork: TypeAlias = Callable[[dict[str, Array]], Float[Array, "_"]]
"""One standardised dataset to a vector: an Equinox module with parameters to train."""

Flat: TypeAlias = Float[Array, "_"]
"""Parameters or data as the networks see them: flat, unconstrained, standardised."""
