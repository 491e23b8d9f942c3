"""Where the runs of an epoch come from: memory, or a store that is larger than it.

A store is read in parts of equal size, so that one compiled function serves them all, while
the part before is trained on. Parts are made of the store's chunks in a new random order each
epoch, and runs are mixed within a part.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.random import Generator

from consilience.core.arrays import within_range
from consilience.core.devices import replicate
from consilience.identity.batches import Example
from consilience.model.spaces import ParameterSpace, to_vectors
from consilience.simulation.limits import physical_memory
from consilience.simulation.simulations import Simulations

SHARE = 4
"""By default, data may use 1/SHARE of the machine's memory."""

AT_ONCE = 4
"""Parts in memory together: on the device, as it was read, being read, and its batches."""


class Part(NamedTuple):
    """Runs on the device, and which of them make each batch."""

    examples: Example
    order: np.ndarray


class Whole:
    """All runs, or those at `index`, on the device throughout.

    `fewest`: the steps that an epoch has at least; where there are fewer runs, it passes several
    times over them.
    """

    def __init__(
        self,
        examples: Example,
        batch_size: int,
        mesh: Mesh | None,
        index: np.ndarray | None = None,
        fewest: int = 1,
    ):
        self.examples, self.batch_size = replicate(examples, mesh), batch_size
        self.index = np.arange(len(self.examples.u)) if index is None else index
        self.passes = -(-fewest // max(1, len(self) // batch_size))
        self.steps = self.passes * (len(self) // batch_size)

    def __len__(self) -> int:
        return len(self.index)

    def epoch(self, rng: Generator) -> Iterator[Part]:
        orders = [_order(rng, len(self), self.batch_size) for _ in range(self.passes)]
        picked = self.index[np.concatenate(orders)].astype(np.int32)
        yield Part(self.examples, picked)


class Streamed:
    """The runs at `index` of a store, read in parts of at most `room` runs."""

    def __init__(
        self,
        parameters: ParameterSpace,
        simulations: Simulations,
        index: np.ndarray,
        batch_size: int,
        room: int,
        mesh: Mesh | None,
    ):
        if room < batch_size:
            raise ValueError(
                f"memory leaves room for {room} runs at a time, fewer than a batch of "
                f"{batch_size}: pass more memory, or a smaller batch_size."
            )
        self.simulations, self.mesh = simulations, mesh
        self.u = np.asarray(to_vectors(parameters, parameters.check(simulations.theta)))
        self.index, self.batch_size = np.sort(index), batch_size
        ends = np.flatnonzero(np.diff(simulations.chunks[self.index])) + 1
        self.chunks = np.split(self.index, ends)
        self.parts = -(-len(index) // room)
        self.size = len(index) // self.parts // batch_size * batch_size
        if not self.size:
            raise ValueError(
                f"memory leaves room for {room} runs at a time, too few to cut {len(index)} runs "
                f"into parts of whole batches of {batch_size}: pass more memory, or a smaller "
                "batch_size."
            )
        self.steps = self.parts * (self.size // batch_size)

    def __len__(self) -> int:
        return len(self.index)

    def epoch(self, rng: Generator) -> Iterator[Part]:
        mixed = np.concatenate([self.chunks[i] for i in rng.permutation(len(self.chunks))])
        parts = mixed[: self.parts * self.size].reshape(self.parts, self.size)
        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(self._read, parts[0])
            for i in range(self.parts):
                examples = ahead.result()
                if i + 1 < self.parts:
                    ahead = reader.submit(self._read, parts[i + 1])
                yield Part(examples, _order(rng, self.size, self.batch_size))

    def _read(self, numbers: np.ndarray) -> Example:
        x = jax.tree.map(within_range, self.simulations[numbers].x)
        examples = Example(self.u[numbers], x)
        return replicate(jax.device_put(examples), self.mesh)


def _order(rng: Generator, n: int, batch_size: int) -> np.ndarray:
    steps = n // batch_size
    order = rng.permutation(n)[: steps * batch_size]
    return order.reshape(steps, batch_size).astype(np.int32)


def part_size(simulations: Simulations, memory: int | None) -> int | None:
    """How many runs can be held at once, or None for all of them."""
    if memory is not None and memory < 1:
        raise ValueError(f"memory must be a number of bytes, got {memory}.")
    memory = physical_memory() // SHARE if memory is None else memory
    if not simulations.unread or simulations.nbytes <= memory:
        return None
    return max(1, len(simulations) * memory // (simulations.nbytes * AT_ONCE))
