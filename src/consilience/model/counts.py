"""Counts on the scale of their roots, for learned likelihoods and for jitter."""

from jaxtyping import Array


def root(y):
    """Like a square root far from zero, smooth and increasing everywhere.

    On this scale the noise of counts is about the same for small and large ones.
    """
    return y / (1 + abs(y)) ** 0.5


def root_slope(y: Array) -> Array:
    """The derivative of `root`."""
    return (1 + abs(y) / 2) / (1 + abs(y)) ** 1.5


def unroot(z: Array) -> Array:
    """The inverse of `root`."""
    return 0.5 * (z * abs(z) + z * (z**2 + 4) ** 0.5)
