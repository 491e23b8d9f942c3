"""Requests of any size in blocks of bounded memory and of few shapes: few are compiled."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

DRAWS_AT_ONCE = 4096
"""Parameter vectors that go through a flow at once: fits a CPU's cache."""


def blocks(m: int, n: int, share: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of datasets and draws, of one shape; the last may reach beyond `m` and `n`.

    Sizes are powers of two, or one dataset: requests of many sizes share few shapes. Draws
    can be shared out evenly among `share` devices.
    """
    columns = min(DRAWS_AT_ONCE, 1 << max(4, (n - 1).bit_length())) if n else 1
    columns = -(-columns // share) * share
    rows = 1 if m == 1 else max(1, min(DRAWS_AT_ONCE // columns, 1 << (m - 1).bit_length()))
    for i in range(0, m, rows):
        for j in range(0, n, columns):
            yield np.arange(i, i + rows), np.arange(j, j + columns)


def in_blocks(m: int, n: int, block, share: int = 1):
    """A tree of arrays (m, n, ...), made block by block of datasets and draws."""
    result: Any = None
    for i, j in blocks(m, n, share):
        part = jax.device_get(block(np.minimum(i, m - 1), j))
        if result is None:
            result = jax.tree.map(lambda a: np.empty((m, n, *a.shape[2:]), a.dtype), part)
        keep_i, keep_j = i[i < m], j[j < n]
        for whole, piece in zip(jax.tree.leaves(result), jax.tree.leaves(part), strict=True):
            whole[np.ix_(keep_i, keep_j)] = piece[: len(keep_i), : len(keep_j)]
    return result
