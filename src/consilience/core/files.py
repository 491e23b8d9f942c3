"""Files that outlive a crash: written whole or not at all, and on the disk when a call returns."""

import contextlib
import glob
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

STALE = 600.0
"""Seconds after which an unfinished file that nobody writes to was left by a killed process."""


@contextlib.contextmanager
def whole(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """The path of an unfinished file, which takes the place of `path` when the block ends.

    After an error `path` is as it was. Without `shared`, one process at a time may write it.
    With `shared`, several may: each has an unfinished file of its own, and those that killed
    processes left are removed.
    """
    own = f".{secrets.token_hex(4)}" if shared else ""
    unfinished = path.with_name(f"{path.name}{own}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shared:
            _remove_stale(path)
        yield unfinished
        _sync(unfinished)
        os.replace(unfinished, path)
        _sync(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write(path: Path, content: bytes, *, shared: bool = False):
    """Put a file in place in one step, on the disk when this returns; `shared` as for `whole`."""
    with whole(path, shared=shared) as unfinished:
        unfinished.write_bytes(content)


def append(path: Path, line: bytes):
    """Add a line to a file, on the disk when this returns; after an error the file is as before."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if size == 0:
            _sync(path.parent)
    except BaseException:
        if path.exists():
            os.truncate(path, size)
        raise


def _remove_stale(path: Path):
    pattern = glob.escape(path.name) + "." + 8 * "[0-9a-f]" + ".part"
    for left in path.parent.glob(pattern):
        # Another process may remove it first, or own it.
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE:
                left.unlink()


def _sync(path: Path):
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
