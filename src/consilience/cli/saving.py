"""How a command saves a fit: seen to be possible before training, and never lost after it."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consilience.cli.inputs import InputError
from consilience.posterior.storage import SaveError, reason_of

ROOM = 2**22
"""Bytes that must be free where a fit will be saved: default networks take fewer."""


def check_room(path: Path):
    """Refuse a folder that nothing can be written to, by writing to it."""
    try:
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(ROOM))
            file.flush()
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {reason_of(error)}. Make room there, or name another place "
            "with --out; nothing was trained."
        ) from None


def save_somewhere(fit: Any, path: Path) -> Path:
    """Save a fit that took long to train; where it is comes back.

    Where `path` cannot be written, a person at a terminal is asked for another. With nobody there
    the fit goes to the current folder or that for temporary files, and a `SaveError` says so.
    """
    reason = _refusal(fit, path)
    if reason is None:
        return path
    for answer in _answers(path, reason):
        if _refusal(fit, answer) is None:
            return answer
    name = f"consilience-fit-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.safetensors"
    temporary = tempfile.gettempdir()
    for other in (Path(name), Path(temporary) / name):
        if _refusal(fit, other) is None:
            raise SaveError(path, reason, f"The fit is in {other.absolute()}: move it.")
    lost = f"Nor can the current folder or {temporary}: the fit is lost. Make room, and try again."
    raise SaveError(path, reason, lost)


def _refusal(fit: Any, path: Path) -> str | None:
    """Why a fit could not be saved; None once it is."""
    try:
        fit.save(path)
    except SaveError as error:
        return error.reason
    return None


def _answers(path: Path, reason: str) -> Iterator[Path]:
    """Other paths, as a person at the terminal types them; none where there is nobody."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr and sys.stderr.isatty()):
        return
    print(f"consilience: {path} cannot be written: {reason}.", file=sys.stderr)
    while True:
        print("Another path for the fit (Enter: choose one for me): ", end="", file=sys.stderr)
        sys.stderr.flush()
        try:
            answer = sys.stdin.readline().strip()
        except KeyboardInterrupt:
            return
        if not answer:
            return
        yield Path(os.path.expanduser(answer))
        print(f"consilience: {answer} cannot be written.", file=sys.stderr)
