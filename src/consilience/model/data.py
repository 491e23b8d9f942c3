r"""What data look like: a vector, a set of rows, a series; and how networks see them.

A *kind* is a few words about the data that their shape alone does not say. `DataSpace`
is a kind with the shapes and the scales of a training set: it standardises data, and cuts
them into the units whose densities a learned likelihood multiplies.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from consilience.core.arrays import (
    as_numbers,
    computed_in,
    finite_rows,
    largest,
    warn_caller,
    warn_if_coarse,
)
from consilience.core.compiling import on_device
from consilience.core.types import Data, PRNGKey
from consilience.model.counts import root, root_slope, unroot
from consilience.model.run import DATA
from consilience.model.tails import Tails, find_tails


@dataclasses.dataclass(frozen=True)
class Vector:
    """Numbers in fixed places: no order and no exchange among them is assumed.

    `side`: the keys of a dictionary `x` that are known side information, not data.
    `counts`: the data are whole numbers; a learned likelihood sees their roots, dequantised.
    """

    side: tuple[str, ...] = ()
    counts: bool = False


@dataclasses.dataclass(frozen=True)
class Series:
    """Values in time: the leading axis is ordered.

    `side`, `counts`: as for `Vector`; side information with the leading axis of the data
    goes with its time step, any other goes with every step.
    """

    side: tuple[str, ...] = ()
    counts: bool = False


@dataclasses.dataclass(frozen=True)
class Set:
    """Rows whose order says nothing: the leading axis is exchangeable.

    `side`, `counts`: as for `Vector`; side information with the leading axis of the data
    goes with its row, any other goes with every row.
    `mask`: the key of a dictionary `x` that says which rows are there, for sets of
    varying size, padded to the largest.
    `independent`: rows are independent given theta (and their side information), so that
    a learned likelihood is a product over rows. False learns all rows as one vector.
    """

    side: tuple[str, ...] = ()
    counts: bool = False
    mask: str | None = None
    independent: bool = True


Kind = Vector | Series | Set


def default_kind(shapes: dict[str, tuple[int, ...]]) -> Kind:
    """Two axes are taken as a series: never wrong, if wasteful where rows are exchangeable."""
    (first, *others) = shapes.values()
    return Series() if not others and len(first) == 2 else Vector()


class Units(NamedTuple):
    """Data as the factors of a likelihood: values, side information, and which are there."""

    values: Float[Array, "units n"]
    side: Float[Array, "units m"]
    mask: Float[Array, " units"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The named arrays of a dataset, and the two forms that networks take them in.

    `kind`: `Vector`, `Set` or `Series`, with its choices. `names`, `array_shapes`: of the arrays;
    `shapes` is the dictionary of both.
    `bare`: whether the data of the user are one array, which networks see as `{"data": array}`.
    """

    kind: Kind
    names: tuple[str, ...]
    array_shapes: tuple[tuple[int, ...], ...]
    bare: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(zip(self.names, self.array_shapes, strict=True))

    @property
    def aside(self) -> tuple[str, ...]:
        """The arrays that are not data: side information and the mask."""
        return (*self.kind.side, *([self.mask_name] if self.mask_name else []))

    @property
    def mask_name(self) -> str | None:
        return self.kind.mask if isinstance(self.kind, Set) else None

    @property
    def data_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.aside)

    @property
    def rows(self) -> int:
        """The length of the leading axis of a set or a series; one for a vector."""
        return 1 if isinstance(self.kind, Vector) else self.shapes[self.data_names[0]][0]

    @property
    def n_features(self) -> int:
        return sum(self._width(name) for name in (*self.data_names, *self.kind.side))

    @property
    def unit_sizes(self) -> tuple[int, int]:
        """How many values and how much side information a factor of the likelihood has."""
        values = sum(self._width(name) for name in self.data_names)
        side = sum(self._width(name) for name in self.kind.side)
        one = isinstance(self.kind, Set) and self.kind.independent
        return (values, side) if one else (values * self.rows, side * self.rows)

    def features(self, x: dict[str, Array]) -> Float[Array, "rows n"]:
        """Data and side information side by side, row by row."""
        return self._side_by_side(x, (*self.data_names, *self.kind.side))

    def mask(self, x: dict[str, Array]) -> Float[Array, " rows"]:
        """Which rows are there: 1 for each that is, 0 for padding."""
        return jnp.ones(self.rows) if self.mask_name is None else x[self.mask_name]

    def units(self, x: dict[str, Array]) -> Units:
        """Data as the factors of a likelihood."""
        values = self._side_by_side(x, self.data_names)
        side = self._side_by_side(x, self.kind.side)
        if isinstance(self.kind, Set) and self.kind.independent:
            return Units(values, side, self.mask(x))
        return Units(values.reshape(1, -1), side.reshape(1, -1), jnp.ones(1))

    def from_units(self, values: Float[Array, "units n"]) -> dict[str, Array]:
        """The arrays of data that the values of all units make."""
        widths = [self._width(name) for name in self.data_names]
        parts = jnp.split(values.reshape(self.rows, -1), np.cumsum(widths)[:-1], axis=1)
        pairs = zip(self.data_names, parts, strict=True)
        return {name: part.reshape(self.shapes[name]) for name, part in pairs}

    def by_row(self, name: str) -> bool:
        """Whether an array has an entry for each row, not one for all of them."""
        shape = self.shapes[name]
        return not isinstance(self.kind, Vector) and shape[:1] == (self.rows,)

    def _width(self, name: str) -> int:
        return math.prod(self.shapes[name]) // (self.rows if self.by_row(name) else 1)

    def _side_by_side(self, x: dict[str, Array], names: tuple[str, ...]) -> Array:
        shape = [(self.rows if self.by_row(name) else 1, self._width(name)) for name in names]
        parts = [x[name].reshape(s) for name, s in zip(names, shape, strict=True)]
        parts = [jnp.broadcast_to(part, (self.rows, part.shape[1])) for part in parts]
        return jnp.concatenate([jnp.zeros((self.rows, 0)), *parts], axis=1)

    def named(self, x: Any) -> dict[str, Any]:
        """Data as the user has them, as a dictionary of arrays."""
        return {DATA: x} if self.bare else dict(x)

    def unnamed(self, x: dict[str, Any]) -> Any:
        """A dictionary of arrays, as the user has data."""
        return x[DATA] if self.bare else x

    def check(self, x: Data, what: str = "The observation") -> tuple[dict[str, np.ndarray], bool]:
        """Named arrays with one leading axis, and whether it was there: a batch, not one."""
        if self.bare == isinstance(x, Mapping):
            expected = "an array" if self.bare else f"a dictionary with {list(self.names)}"
            raise TypeError(f"{what} must be {expected}, got {type(x).__name__}.")
        parts = self.named(x)
        if set(parts) != set(self.names):
            raise ValueError(f"{what} must have {list(self.names)}, got {list(parts)}.")
        shown = {name: what if self.bare else f"{what}, in {name!r}," for name in self.names}
        arrays = {name: as_numbers(part, shown[name]) for name, part in parts.items()}
        got = {name: arrays[name].shape for name in self.names}
        single = got == self.shapes
        if not single and any(got[n][1:] != self.shapes[n] or not got[n] for n in got):
            raise ValueError(
                f"{what} must have the shape {self.show(self.shapes)}, or that behind one "
                f"axis for a batch; got {self.show(got)}."
            )
        if not single and len({shape[0] for shape in got.values()}) > 1:
            raise ValueError(f"The arrays of a batch must be equally long, got {self.show(got)}.")
        if single:
            arrays = {name: array[None] for name, array in arrays.items()}
        bad = ~finite_rows(*arrays.values())
        if not len(bad):
            raise ValueError(f"{what} is a batch of no datasets: pass at least one.")
        if bad.any():
            where = "" if single else f" at {np.flatnonzero(bad)[:5].tolist()} of the batch"
            if all(np.isfinite(array).all() for array in arrays.values()):
                raise ValueError(
                    f"{what} has values beyond {largest()}, the largest number of "
                    f"{computed_in()}{where}: rescale the data, in the simulator too."
                )
            raise ValueError(f"{what} has NaN or infinite values{where}: it has no posterior.")
        return arrays, not single

    def show(self, shapes: dict[str, tuple[int, ...]]) -> str:
        return str(shapes[DATA] if self.bare else shapes)


class DataSpace(eqx.Module):
    """A layout with the scale of a training set: data in and out of the standard form.

    `tails`: the arrays with entries that are put on another scale first, and how.
    """

    loc: dict[str, Array]
    scale: dict[str, Array]
    layout: Layout = eqx.field(static=True)
    tails: dict[str, Tails] = eqx.field(default_factory=dict)

    def standardise(self, x: Data) -> dict[str, Array]:
        """One dataset, named, on the scale of the training set; a mask as ones and zeros."""
        return self._scaled(self._named(x))

    def dequantise(self, x: Data, key: PRNGKey | None) -> dict[str, Array]:
        """As `standardise`, for a learned likelihood: counts are real numbers, by their roots.

        They are uniform within their unit, or its middle without a key.
        """
        parts = self._named(x)
        scaled = self._scaled(parts)
        for i, name in enumerate(self._counts):
            shape = parts[name].shape
            shift = 0.5 if key is None else jax.random.uniform(jax.random.fold_in(key, i), shape)
            scaled[name] = (root(parts[name] + shift) - root(self.loc[name])) / self.spread(name)
        return scaled

    def log_scale(self, x: Data) -> Float[Array, "units n"]:
        """What `dequantise` did to the density of one dataset: the log scale of every value.

        Of counts: in the middle of their unit.
        """
        parts = self._named(x)
        full = {n: jnp.broadcast_to(self.spread(n), self.layout.shapes[n]) for n in self.scale}
        for name in self._counts:
            full[name] = full[name] / root_slope(parts[name] + 0.5)
        for name, tails in self.tails.items():
            full[name] = self.scale[name] * jnp.exp(-tails.log_slope(parts[name]))
        if self.layout.mask_name is not None:
            full[self.layout.mask_name] = jnp.ones(self.layout.rows)
        return jnp.log(self.layout.units(full).values)

    def from_units(self, values: Float[Array, "units n"], aside: dict[str, Any]) -> Data:
        """Data in the user's form from values on a likelihood's scale and what is not simulated."""
        result = dict(aside)
        for name, part in self.layout.from_units(values).items():
            if name in self.tails:
                result[name] = self.tails[name].back(part * self.scale[name] + self.loc[name])
                continue
            result[name] = part * self.spread(name)
            if name in self._counts:
                result[name] = jnp.floor(unroot(result[name] + root(self.loc[name])))
            else:
                result[name] = result[name] + self.loc[name]
        return self.layout.unnamed(result)

    def spread(self, name: str) -> Array:
        """The standard deviation of an array's entries; of counts, about that of their roots.

        Of entries on another scale, that of their middle.
        """
        scale = self.scale[name]
        if name in self.tails:
            tails = self.tails[name]
            return scale * jnp.exp(-tails.log_slope(tails.back(self.loc[name])))
        return scale * root_slope(self.loc[name]) if name in self._counts else scale

    @property
    def _counts(self) -> tuple[str, ...]:
        return self.layout.data_names if self.layout.kind.counts else ()

    def _named(self, x: Data) -> dict[str, Array]:
        parts = self.layout.named(x)
        return {name: jnp.asarray(parts[name], dtype=float) for name in self.layout.names}

    def _scaled(self, parts: dict[str, Array]) -> dict[str, Array]:
        moved = {n: self.tails[n].forward(p) if n in self.tails else p for n, p in parts.items()}
        return {
            name: (part - self.loc[name]) / self.scale[name] if name in self.loc else part
            for name, part in moved.items()
        }


def data_space(x: Data, kind: Kind | None) -> DataSpace:
    """The space of simulated data with a leading axis of runs, standardised by them."""
    layout = layout_of(x, kind)
    arrays = {name: np.asarray(part) for name, part in layout.named(x).items()}
    mask = arrays[layout.mask_name].astype(bool) if layout.mask_name is not None else None
    loc, scale, tails = {}, {}, {}
    varying = [array for name, array in arrays.items() if name in layout.data_names]
    n = len(varying[0])
    if n > 1 and all((array == array[:1]).all() for array in varying):
        warn_caller(
            f"The data are the same in all {n} runs, so that nothing can be learned from them. "
            f"Where they should vary by less than {computed_in()} resolves, subtract a constant."
        )
    for name, array in arrays.items():
        if name != layout.mask_name:
            pooled = isinstance(layout.kind, Set) and layout.by_row(name)
            what = "The data" if layout.bare else f"The data {name!r}"
            values = _rows(array, mask) if pooled else array.astype(float)
            warn_if_coarse(values, what)
            found = None if layout.kind.counts else find_tails(values)
            if found is not None:
                tails[name] = found
                values = np.asarray(found.forward(on_device(values)), float)
            loc[name], scale[name] = _moments(values)
    return DataSpace(loc=loc, scale=scale, layout=layout, tails=tails)


def layout_of(x: Any, kind: Kind | None) -> Layout:
    """The layout of one of the datasets in `x`, which has a leading axis of runs."""
    bare = not isinstance(x, Mapping)
    parts = {DATA: x} if bare else x
    return make_layout({name: np.shape(part)[1:] for name, part in parts.items()}, kind, bare)


def make_layout(shapes: dict[str, tuple[int, ...]], kind: Kind | None, bare: bool) -> Layout:
    """The layout of arrays of these shapes, once they are seen to fit the kind."""
    if not shapes:
        raise ValueError("x must be an array or a dictionary with at least one array of data.")
    kind = default_kind(shapes) if kind is None else kind
    if not isinstance(kind, Kind):
        raise TypeError(
            f"data must be cs.Vector(), cs.Series() or cs.Set(), got {type(kind).__name__}."
        )
    layout = Layout(kind, tuple(shapes), tuple(shapes.values()), bare)
    if not set(layout.aside) <= set(shapes) or not layout.data_names:
        raise ValueError(
            f"{kind} names {sorted(layout.aside)} beside the data, but x has {sorted(shapes)}: "
            "x must be a dictionary with these and at least one array of data."
        )
    data = [shapes[name] for name in layout.data_names]
    if not isinstance(kind, Vector) and (len(data) > 1 or not data[0]):
        raise ValueError(
            f"A {type(kind).__name__} has one array of data with a leading axis of rows, "
            f"got the shapes {data}. Concatenate them, or declare `data=cs.Vector()`."
        )
    return layout


def _rows(array: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """All rows of all sets, without padding."""
    values = array.astype(float)
    return values[mask] if mask is not None else values.reshape(-1, *array.shape[2:])


def _moments(values: np.ndarray) -> tuple[Array, Array]:
    """Mean and standard deviation of each entry."""
    loc, scale = values.mean(axis=0), values.std(axis=0)
    # A constant entry says nothing: it becomes zero, not a division by zero. Below the least
    # normal number, a device may take a scale for zero.
    constant = scale <= np.maximum(1e-9 * np.abs(loc), np.finfo(computed_in()).tiny)
    scale = np.where(constant, 1.0, scale)
    return on_device(loc), on_device(scale)
