"""What the components of a parameter are called: `mu`, `theta[0]`, `a[1, 0]`."""

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np


def label(name: str, index: Sequence[SupportsIndex]) -> str:
    """The component of a parameter at an index.

    >>> label("mu", ()), label("a", (1, 0))
    ('mu', 'a[1, 0]')
    """
    return f"{name}[{', '.join(str(int(i)) for i in index)}]" if index else name


def labels(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The components of an array of a shape, and their indices.

    >>> labels("theta", (2,))
    {'theta[0]': (0,), 'theta[1]': (1,)}
    """
    return {label(name, index): index for index in np.ndindex(shape)}


def components(named: Mapping[str, Any], lead: int) -> dict[str, np.ndarray]:
    """The components of several arrays, each with the first `lead` axes.

    >>> components({"mu": [1, 2], "theta": [[3, 4], [5, 6]]}, 1)["theta[1]"]
    array([4, 6])
    """
    found = {}
    for name, values in named.items():
        array: Any = np.asarray(values)
        for text, index in labels(name, array.shape[lead:]).items():
            found[text] = array[(..., *index)]
    return found
