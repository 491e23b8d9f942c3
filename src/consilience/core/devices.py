"""Several devices: training splits each batch among them, sampling the draws."""

from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "devices"

Devices = Sequence[Any]


def make_mesh(devices: Devices | None) -> Mesh | None:
    """A mesh of one axis, or None where there is nothing to split."""
    if devices is None:
        return None
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise TypeError(_wrong(devices))
    if len(devices) < 2:
        return None
    return Mesh(np.array(devices), (AXIS,))


def check_devices(batch_size: int, mesh: Mesh | None):
    """Refuse a batch that devices cannot share evenly."""
    if mesh is not None and batch_size % mesh.size:
        raise ValueError(
            f"A batch of {batch_size} runs cannot be split evenly among {mesh.size} devices: "
            "pass a batch_size that can, or fewer devices."
        )


def _wrong(devices: Any) -> str:
    return f"devices is a list of JAX devices, as in devices=jax.devices(), got {devices!r}."


def replicate(tree, mesh: Mesh | None):
    """A tree with its arrays on every device."""
    if mesh is None:
        return tree
    if not all(isinstance(device, jax.Device) for device in mesh.devices.flat):
        raise TypeError(_wrong(mesh.devices.tolist()))
    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, NamedSharding(mesh, PartitionSpec())), rest)


def to_one_device(tree, mesh: Mesh | None):
    """Arrays back on one device."""
    return tree if mesh is None else replicate(tree, Mesh(mesh.devices[:1], (AXIS,)))


def split_leading(tree, mesh: Mesh | None):
    """Inside a compiled function: the leading axis of every array split among devices.

    An axis that cannot be split evenly is left to the compiler.
    """
    if mesh is None:
        return tree
    along = NamedSharding(mesh, PartitionSpec(AXIS))

    def split(leaf):
        even = leaf.shape[0] % mesh.size == 0
        return jax.lax.with_sharding_constraint(leaf, along) if even else leaf

    return jax.tree.map(split, tree)


def along_second(function, mesh: Mesh | None):
    """`function(posterior, joint, z, x)`, each device with its share of `z` along axis 1."""
    if mesh is None:
        return function

    def run(posterior, joint, z, x):
        (arrays, rest) = eqx.partition((posterior, joint), eqx.is_array)
        share, whole = PartitionSpec(None, AXIS), PartitionSpec()
        each = lambda arrays, z, x: function(*eqx.combine(arrays, rest), z, x)  # noqa: E731
        return jax.shard_map(
            each, mesh=mesh, in_specs=(whole, share, whole), out_specs=share, check_vma=False
        )(arrays, z, x)

    return run
