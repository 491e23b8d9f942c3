"""Whether a store can be gone on with: the prior draws the same, the simulator does the same.

A simulator that keeps its name can change. Where its program is not that which made the store,
one stored run is made again and compared: changes of form go on, others are refused.
"""

import logging
from collections.abc import Callable

import numpy as np

from consilience.core.types import Theta
from consilience.model.run import Failure
from consilience.simulation.lock import StoreError
from consilience.simulation.metadata import check_type, other_draws
from consilience.simulation.store import Store

logger = logging.getLogger(__name__)

ROUNDING = 1e-5
"""Data that differ by less, relative to their size, count as equal."""

COMPARED = 4096
"""Runs whose parameters are drawn again."""

Again = Callable[[int], dict[str, np.ndarray] | Failure]
"""Makes one run again: named data, or why there are none."""


def check_theta(runs: Store, draw: Callable[[np.ndarray], Theta]):
    """Refuse a store whose parameters this prior and key do not give."""
    numbers = runs.numbers[:COMPARED]
    if not len(numbers):
        return
    drawn, held = draw(numbers), runs.theta(numbers)
    for name, array in held.items():
        check_type(str(runs), f"{name!r}", array.dtype, drawn[name].dtype)
    if not all(_same_draws(drawn[name], held[name]) for name in held):
        raise other_draws(str(runs))


def _same_draws(given: np.ndarray, held: np.ndarray) -> bool:
    """Equal up to rounding, and up to a thousandth of how much the draws vary."""
    if given.shape != held.shape:
        return False
    spread = 1e-3 * np.nan_to_num(held.astype(float).std(axis=0))
    rounding = 1e-6 * np.abs(held)
    return bool(np.all((np.abs(given - held) <= spread + rounding) | _equal(given, held)))


def _equal(given: np.ndarray, held: np.ndarray) -> np.ndarray:
    return (given == held) | (np.isnan(given) & np.isnan(held))


def check_program(runs: Store, program: str, n: int, again: Again):
    """Refuse a store of another program with the simulator's name; `n`: runs asked for.

    Stores of earlier versions do not know their program: they are compared when they go on.
    """
    held = runs.about.get("program")
    if runs.spec is None or held == program or (held is None and not len(runs.missing(n))):
        return
    done = runs.done
    if len(done):
        _compare(runs, int(done[0]), again)
    runs.remember(program=program)


def _compare(runs: Store, number: int, again: Again):
    """Make a run again, and refuse the store if it gives other data."""
    why = "the program of the simulator is not that which made its runs"
    if "program" not in runs.about:
        why = "it is of an earlier version, which did not keep the program of the simulator"
    logger.warning(
        "%s: %s. Run %d is made again, to see whether it gives the same.", runs, why, number
    )
    held = {name: array[0] for name, array in runs.x(np.array([number])).items()}
    made = again(number)
    if _agrees(made, held) or _agrees(second := again(number), held):
        logger.warning("%s: run %d gives the same: going on.", runs, number)
        return
    if not isinstance(made, Failure) and not _agrees(second, made):
        logger.warning(
            "%s: run %d gives other data each time, so that it cannot tell whether the simulator "
            "has changed: going on. Draw all random numbers from what the simulator is given.",
            *(runs, number),
        )
        return
    what = "gives other data now"
    if isinstance(made, Failure):
        what = f"fails now, {made.reason}: {made.message.rstrip('.')}"
    raise StoreError(
        f"The simulator has changed since {runs} was made: run {number} {what}. Pass another "
        "store for the new simulator, or bring back the old one to go on with these runs; if "
        f"they are of no use any more, delete {runs}."
    )


def _agrees(made: dict[str, np.ndarray] | Failure, held: dict[str, np.ndarray] | Failure) -> bool:
    if isinstance(made, Failure) or isinstance(held, Failure):
        return False
    return all(_same(made[name], held[name]) for name in held)


def _same(given: np.ndarray, held: np.ndarray) -> bool:
    """Equal up to rounding, of values near zero relative to the others."""
    given, held = np.asarray(given), np.asarray(held)
    if given.shape != held.shape:
        return False
    if held.dtype.kind == "b":
        return bool(np.array_equal(given, held))
    size = np.abs(held[np.isfinite(held)])
    near_zero = ROUNDING * 1e-2 * float(np.median(size)) if size.size else 0.0
    return bool(np.allclose(given, held, rtol=ROUNDING, atol=near_zero, equal_nan=True))
