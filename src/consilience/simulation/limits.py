"""Room for runs: numbers of runs that no machine could hold are refused before anything starts."""

import math
import os
import shutil
from pathlib import Path

from consilience.core.arrays import computed_in
from consilience.simulation.lock import StoreError

MOST = 2**32 - 2**16
"""Runs of one key: each has a random stream of its own, told apart by 32 bits."""

PER_RUN = 64
"""Bytes of memory for each run of a campaign, beside its parameters and data."""


def check_memory(n: int, size: int, advice: str):
    """Refuse `n` runs of `size` bytes each that are more than this machine's memory."""
    need, room = n * (size + PER_RUN), physical_memory()
    if n > MOST:
        raise ValueError(f"{n} runs are too many: a key serves {MOST} at most.")
    if need > room:
        raise ValueError(
            f"{n} runs take at least {in_bytes(need)} of memory, and this machine has "
            f"{in_bytes(room)}: {advice}."
        )


def check_draws(n: int, size: int):
    """Refuse `n` draws of `size` numbers each that are more than this machine's memory."""
    need, room = n * size * computed_in().itemsize, physical_memory()
    if need > room:
        raise MemoryError(
            f"{n} draws take at least {in_bytes(need)} of memory, and this machine has "
            f"{in_bytes(room)}: draw fewer at a time."
        )


def check_disk(folder: Path, name: str, n: int, size: int):
    """Refuse `n` more runs of `size` bytes each that do not fit on the disk of a folder."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    total, _, free = shutil.disk_usage(folder)
    # Some network file systems do not know their size.
    if total and n * size > free:
        raise StoreError(
            f"{n} more runs of {in_bytes(size)} each do not fit into {name}: its disk has "
            f"{in_bytes(free)} left. Ask for fewer runs, or pass a store on another disk."
        )


def physical_memory() -> int:
    """The memory of this machine in bytes."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**33  # not known here: as if 8 GB


def in_bytes(size: int) -> str:
    """A number of bytes for people.

    >>> in_bytes(23_400_000)
    '23.4 MB'
    """
    power = min(4, max(0, math.floor(math.log10(max(size, 1)) / 3)))
    return f"{size / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"
