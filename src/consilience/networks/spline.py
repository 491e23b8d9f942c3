r"""Monotone rational-quadratic splines on an interval, the identity outside it.

With knots $(x_k, y_k)$, bin widths $w_k$, heights $h_k$, mean slopes $s_k = h_k / w_k$,
knot derivatives $d_k$ and $\xi = (x - x_k) / w_k$, the spline in bin $k$ is
$$y = y_k + \frac{h_k\,(s_k \xi^2 + d_k\,\xi(1-\xi))}{s_k + (d_{k+1} + d_k - 2 s_k)\,\xi(1-\xi)}$$
(Durkan et al. 2019, Neural Spline Flows, arXiv:1906.04032). The derivative at an inner knot
is the harmonic mean of the two slopes that meet there, times a learned, bounded factor: a
derivative free of its neighbours lets the curve go flat inside a bin, where no float32
inverse is accurate and the log density has a spike.

Bins lie on the leading axis and are unrolled, so that every operation is one vectorised
loop over values: gathers, and the scatters of their gradients, are slow on a CPU. Finding
the bin and the way forward have their derivatives written out; that of the inverse is left
to autodiff.
"""

import functools
import itertools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import select
from jaxtyping import Array, Float

MIN_SHARE = 0.1
"""The narrowest bin, in units of an even share of the interval."""
MAX_LOG_FACTOR = 2.0
"""The bound on the log of a knot derivative over the harmonic mean of its slopes."""


class _Side(NamedTuple):
    """The bin found, on one axis: the share of the interval before, in and around it."""

    before: Float[Array, "*d"]
    share: Float[Array, "*d"]
    previous: Float[Array, "*d"]
    next: Float[Array, "*d"]


class _Bin(NamedTuple):
    """The bin that a value falls into, with the bounded numbers of its two knots."""

    number: Float[Array, "*d"]
    x: _Side
    y: _Side
    level: Float[Array, "*d"]
    next_level: Float[Array, "*d"]


_EMPTY = _Bin(0, _Side(0, 0, 0, 0), _Side(0, 0, 0, 0), 0, 0)  # type: ignore[arg-type]


def n_raw(bins: int) -> int:
    """How many raw numbers describe one spline: widths, heights, inner knot factors."""
    return 3 * bins - 1


def spline(
    value: Float[Array, "*d"],
    raw: Float[Array, "p *d"],
    *,
    bound: float,
    inverse: bool = False,
) -> tuple[Float[Array, "*d"], Float[Array, "*d"]]:
    """Map `d` values through `d` splines on `[-bound, bound]`, the identity beyond.

    `raw` holds `3 * bins - 1` unconstrained numbers for each spline; zeros give the
    identity. Returns the values and the log derivatives of the direction taken.

    >>> y, log_det = spline(jnp.array([0.3]), jnp.zeros((11, 1)), bound=3.0)
    >>> round(float(y[0]), 4), round(float(log_det[0]), 4)
    (0.3, 0.0)
    """
    inside, unit = _to_unit(value, bound)
    result, log_det = _unit_spline(inverse, unit, raw)
    return _from_unit(inside, value, result, log_det, bound)


def record(value, raw, *, bound: float, inverse: bool):
    """As `spline`, with a record from which `pull` gives the derivative of the way forward."""
    inside, unit = _to_unit(value, bound)
    shares, found = _find_bin(inverse, unit, raw)
    result, log_det = _evaluate(inverse, unit, found, raw.shape[0])
    # In one array: to store and to fetch many small ones takes longer.
    rows = jnp.stack([*(s.total for s in shares), *jax.tree.leaves(found)])
    saved = jnp.concatenate([*(s.parts for s in shares), rows])
    return *_from_unit(inside, value, result, log_det, bound), saved


def pull(value, saved, grad_result, grad_log_det, *, bound: float):
    """The derivative of the spline, not of its inverse, for the value and the raw numbers.

    `value`: on the side of the data, which in the inverse is the result.
    """
    inside, unit = _to_unit(value, bound)
    bins = (len(saved) - 2 - len(jax.tree.leaves(_EMPTY))) // 2
    parts, totals, rows = jnp.split(saved, [2 * bins, 2 * bins + 2])
    shares = tuple(_Shares(parts[i * bins : (i + 1) * bins], totals[i]) for i in range(2))
    found = jax.tree.unflatten(jax.tree.structure(_EMPTY), list(rows))
    grad = 2 * bound * jnp.where(inside, grad_result, 0.0), jnp.where(inside, grad_log_det, 0.0)
    grad_unit, grad_raw = _unit_spline_bwd(False, (unit, shares, found), grad)
    return jnp.where(inside, grad_unit / (2 * bound), grad_result), grad_raw


def _to_unit(value, bound: float):
    inside = jnp.abs(value) < bound
    # Outside, the formula runs on a harmless point: no NaN reaches the gradient.
    return inside, (jnp.where(inside, value, 0.0) + bound) / (2 * bound)


def _from_unit(inside, value, result, log_det, bound: float):
    result = 2 * bound * result - bound
    return jnp.where(inside, result, value), jnp.where(inside, log_det, 0.0)


def _size(share, bins):
    """A share of the softmax as a share of the interval, none below the least."""
    return MIN_SHARE / bins + (1 - MIN_SHARE) * share


def _edge(before, number, bins):
    return MIN_SHARE / bins * number + (1 - MIN_SHARE) * before


def _level(raw):
    return jnp.tanh(raw / MAX_LOG_FACTOR)


def _knot_slope(this, that, level, at_end):
    """The derivative at the knot between two bins with the slopes `this` and `that`."""
    factor = jnp.exp(MAX_LOG_FACTOR * level)
    return jnp.where(at_end, 1.0, factor * 2 * this * that / (this + that))


class _Corner(NamedTuple):
    """A bin in units of the interval: its corner, its sizes, its slopes."""

    x: Float[Array, "*d"]
    width: Float[Array, "*d"]
    y: Float[Array, "*d"]
    height: Float[Array, "*d"]
    mean: Float[Array, "*d"]
    left: Float[Array, "*d"]
    right: Float[Array, "*d"]


def _corner(found: _Bin, bins: int) -> _Corner:
    width, height = _size(found.x.share, bins), _size(found.y.share, bins)
    mean = height / width
    before = _size(found.y.previous, bins) / _size(found.x.previous, bins)
    after = _size(found.y.next, bins) / _size(found.x.next, bins)
    return _Corner(
        x=_edge(found.x.before, found.number, bins),
        width=width,
        y=_edge(found.y.before, found.number, bins),
        height=height,
        mean=mean,
        left=_knot_slope(mean, before, found.level, found.number == 0),
        right=_knot_slope(mean, after, found.next_level, found.number == bins - 1),
    )


def _clip(share):
    """To [0, 1], with the derivative of the inside at the ends: `jnp.clip` halves it there."""
    return jnp.where(share < 0, 0.0, jnp.where(share > 1, 1.0, share))


def _log_slope(xi, at: _Corner):
    between = xi * (1 - xi)
    top = at.right * xi**2 + 2 * at.mean * between + at.left * (1 - xi) ** 2
    bottom = at.mean + (at.left + at.right - 2 * at.mean) * between
    return jnp.log(top * (at.mean / bottom) ** 2)


def _evaluate(inverse: bool, value, found: _Bin, n: int):
    at = _corner(found, (n + 1) // 3)
    return _y_of_x(value, at) if not inverse else _x_of_y(value, at)


def _y_of_x(x, at: _Corner):
    xi = _clip((x - at.x) / at.width)
    between = xi * (1 - xi)
    bottom = at.mean + (at.left + at.right - 2 * at.mean) * between
    y = at.y + at.height * (at.mean * xi**2 + at.left * between) / bottom
    return y, _log_slope(xi, at)


def _x_of_y(y, at: _Corner):
    rise = _clip((y - at.y) / at.height)
    curve = rise * (at.left + at.right - 2 * at.mean)
    a = at.mean - at.left + curve
    b = at.left - curve
    c = -at.mean * rise
    root = jnp.sqrt(jnp.maximum(b * b - 4 * a * c, 0.0))
    # Of the two forms of the root, the one that does not cancel; a > 0 where b < 0.
    positive = b >= 0
    xi = _clip(
        jnp.where(
            positive,
            2 * c / jnp.where(positive, -b - root, -1.0),
            (root - b) / (2 * jnp.where(positive, 1.0, a)),
        )
    )
    return at.x + xi * at.width, -_log_slope(xi, at)


class _Shares(NamedTuple):
    """A softmax over bins, not yet divided by its total."""

    parts: Float[Array, "bins *d"]
    total: Float[Array, "*d"]


def _softmax(logits: Float[Array, "bins *d"]) -> _Shares:
    # Unrolled: one loop over values, several times faster on a CPU than a reduction.
    top = functools.reduce(jnp.maximum, list(logits))
    parts = jnp.exp(logits - top)
    return _Shares(parts, functools.reduce(operator.add, list(parts)))


def _find_bin(inverse, value, raw):
    # XLA computes cheap operations again in every loop that reads them, and compiles them as
    # often, but not sums over an axis, quotients and tanh: what is read often ends in these.
    bins = (raw.shape[0] + 1) // 3
    shares = _softmax(raw[:bins]), _softmax(raw[bins : 2 * bins])
    factors = raw[2 * bins :]
    zero = jnp.zeros_like(value)

    searched = shares[1] if inverse else shares[0]
    edges = itertools.accumulate(list(searched.parts)[:-1])
    past = [
        (value - _edge(0.0, k, bins)) * searched.total >= (1 - MIN_SHARE) * edge
        for k, edge in enumerate(edges, start=1)
    ]
    number = jnp.sum(jnp.stack(past), axis=0, dtype=value.dtype) if past else zero
    here = [number == k for k in range(bins)]

    def pick(rows):
        """The row of each value's own bin."""
        picked = rows[0]
        for mask, row in zip(here[1:], rows[1:], strict=True):
            picked = select(mask, row, picked)
        return picked

    def side(shares: _Shares) -> _Side:
        rows = list(shares.parts)
        before = pick([zero, *itertools.accumulate(rows[:-1])])
        picked = (before, pick(rows), pick(rows[:1] + rows[:-1]), pick(rows[1:] + rows[-1:]))
        return _Side(*(part / shares.total for part in picked))

    inner = list(factors)
    found = _Bin(
        number=number,
        x=side(shares[0]),
        y=side(shares[1]),
        level=_level(pick([zero, *inner])),
        next_level=_level(pick([*inner, zero])),
    )
    return shares, found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unit_spline(inverse, value, raw):
    return _unit_spline_fwd(inverse, value, raw)[0]


def _unit_spline_fwd(inverse, value, raw):
    shares, found = _find_bin(inverse, value, raw)
    return _evaluate(inverse, value, found, raw.shape[0]), (value, shares, found)


def _unit_spline_bwd(inverse, saved, grad_out):
    value, shares, found = saved
    bins = shares[0].parts.shape[0]
    if inverse:
        run = lambda v, f: _evaluate(True, v, f, n_raw(bins))  # noqa: E731
        grad_value, grad = jax.vjp(run, value, found)[1](grad_out)
    else:
        grad_value, grad = _pull_forward(value, found, bins, *grad_out)
    number = found.number
    j = jnp.arange(bins, dtype=number.dtype).reshape((bins,) + (1,) * number.ndim)

    def logits(shares: _Shares, side: _Side, g: _Side):
        g = _Side(*(part / shares.total for part in g))
        # The softmax's own derivative needs the mean of the gradient under its shares.
        mean = sum(a * b for a, b in zip(side, g, strict=True))
        picked = jnp.where(j < number, g.before, 0.0)
        picked += jnp.where(j == number, g.share, 0.0)
        picked += jnp.where(j == jnp.maximum(number - 1, 0), g.previous, 0.0)
        picked += jnp.where(j == jnp.minimum(number + 1, bins - 1), g.next, 0.0)
        return shares.parts * (picked - mean)

    inner = j[: bins - 1]
    factors = jnp.where(inner == number - 1, grad.level * (1 - found.level**2), 0.0)
    factors += jnp.where(inner == number, grad.next_level * (1 - found.next_level**2), 0.0)
    factors /= MAX_LOG_FACTOR
    blocks = (
        logits(shares[0], found.x, grad.x),
        logits(shares[1], found.y, grad.y),
        factors,
    )
    return grad_value, jnp.concatenate(blocks)


def _pull_forward(x, found: _Bin, bins: int, grad_y, grad_log):
    """The derivative of `_y_of_x` for the value and the bin, by hand.

    Autodiff gives the same numbers in many more operations, and XLA compiles them for longer.
    """
    width, height = _size(found.x.share, bins), _size(found.y.share, bins)
    mean = height / width
    knots = (
        _knot(mean, found.x.previous, found.y.previous, found.level, bins),
        _knot(mean, found.x.next, found.y.next, found.next_level, bins),
    )
    ends = found.number == 0, found.number == bins - 1
    left, right = (
        jnp.where(end, 1.0, knot.factor * knot.harmonic)
        for end, knot in zip(ends, knots, strict=True)
    )
    xi = _clip((x - _edge(found.x.before, found.number, bins)) / width)

    rest, between = 1 - xi, xi * (1 - xi)
    excess = left + right - 2 * mean
    bottom = mean + excess * between
    top = right * xi**2 + 2 * mean * between + left * rest**2
    share = (mean * xi**2 + left * between) / bottom
    grad_share = grad_y * mean * width / bottom
    grad_top = grad_log / top
    grad_bottom = -grad_share * share - 2 * grad_log / bottom
    turn = 1 - 2 * xi
    slope = mean**2 * top / bottom**2
    grad_xi = grad_y * width * slope + 2 * (
        grad_top * (right * xi + mean * turn - left * rest) - grad_log * excess * turn / bottom
    )
    grad_left = (grad_share + grad_bottom) * between + grad_top * rest**2
    grad_right = grad_bottom * between + grad_top * xi**2
    grad_mean = (
        grad_share * xi**2
        + grad_bottom * (1 - 2 * between)
        + 2 * grad_top * between
        + 2 * grad_log / mean
    )

    part = 1 - MIN_SHARE
    beyond, levels = [], []
    for end, knot, grad in zip(ends, knots, (grad_left, grad_right), strict=True):
        grad = jnp.where(end, 0.0, grad * knot.factor)
        beyond.append(part * 0.5 * grad * (knot.harmonic / knot.slope) ** 2 / knot.width)
        levels.append(MAX_LOG_FACTOR * grad * knot.harmonic)
        grad_mean += 0.5 * grad * (knot.harmonic / mean) ** 2
    grad_x = grad_xi / width
    grad_width = -part * (grad_xi * xi + grad_mean * mean) / width
    grad_height = part * (grad_y * share * width + grad_mean) / width
    falls = (-grad * knot.slope for grad, knot in zip(beyond, knots, strict=True))
    x_side = _Side(-part * grad_x, grad_width, *falls)
    y_side = _Side(part * grad_y, grad_height, *beyond)
    return grad_x, _Bin(jnp.zeros_like(x), x_side, y_side, *levels)


class _Knot(NamedTuple):
    """A knot as its derivative sees it: the bin beyond it, and the two factors of its slope."""

    width: Float[Array, "*d"]
    slope: Float[Array, "*d"]
    harmonic: Float[Array, "*d"]
    factor: Float[Array, "*d"]


def _knot(mean, width_share, height_share, level, bins: int) -> _Knot:
    width = _size(width_share, bins)
    slope = _size(height_share, bins) / width
    harmonic = 2 * mean * slope / (mean + slope)
    return _Knot(width, slope, harmonic, jnp.exp(MAX_LOG_FACTOR * level))


_unit_spline.defvjp(_unit_spline_fwd, _unit_spline_bwd)
