"""Files that outlive a crash: written whole or not at all, and one writer to a folder."""

import os
from pathlib import Path


def write(path: Path, content: bytes, part: str = ".part"):
    """Put a file in place in one step, on the disk when this returns.

    `part`: the end of the name that it has before; of one's own where several may write.
    """
    unfinished = path.with_name(path.name + part)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        _sync_folder(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def append(path: Path, line: bytes):
    """Add a line to a file, on the disk when this returns; after an error the file is as before."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if size == 0:
            _sync_folder(path.parent)
    except BaseException:
        if path.exists():
            os.truncate(path, size)
        raise


def _sync_folder(folder: Path):
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
