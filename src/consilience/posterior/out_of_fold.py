"""What a cross-fitted ensemble says of the runs that it was trained on, each by a member that has
not seen it: calibration without a new simulation."""

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int

from consilience.core.compiling import on_device
from consilience.posterior.room import Room


class OutOfFold(eqx.Module):
    """Out-of-fold densities and draws of the runs of a fit.

    `run`: the place of each run among the simulations. `member`: the one that was trained without
    it. `log_prob`: the log density of its parameters, in the user's units. `u`: its parameters as
    free vectors, standardised (`fit.posterior.parameters` maps them back). `draws`: draws of the
    posterior given its data, likewise.
    """

    run: Int[Array, " n"]
    member: Int[Array, " n"]
    log_prob: Float[Array, " n"]
    u: Float[Array, "n d"]
    draws: Float[Array, "n s d"]

    @classmethod
    def empty(cls, shape: tuple[int, int, int], room: Room) -> "OutOfFold":
        """Zeros for draws of this shape, as large as there is room for."""
        n, draws, dim = shape
        numbers = on_device(room.zeros((n,))).astype(np.int32)
        each = on_device(room.zeros((n,)))
        u = on_device(room.zeros((n, dim)))
        return cls(numbers, numbers, each, u, on_device(room.zeros((n, draws, dim))))
