"""How worker processes start: clean, where they can import the simulator, or as forks.

Nothing here imports JAX, and so no worker does.
"""

import contextlib
import multiprocessing
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

from consilience.model.external import External


class StartError(RuntimeError):
    """The processes of the default executor cannot start."""


def start_method(simulator: External) -> str:
    """How to start processes that can run a simulator."""
    methods = multiprocessing.get_all_start_methods()
    clean = "forkserver" if "forkserver" in methods else "spawn"
    if importable(simulator):
        return clean
    if "fork" in methods:
        return "fork"
    raise StartError(
        f"The simulator {simulator.name!r} cannot be sent to other processes: define it in a "
        "module of its own, or pass executor=ThreadPoolExecutor()."
    )


def importable(simulator: External) -> bool:
    """Whether a clean process can import a simulator and the user's function that it calls."""
    part = simulator.function
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None and getattr(part, "__module__", None) == "__main__":
        return False  # a notebook
    if script is not None and not Path(script).exists():
        return False  # a script from standard input, which no process can import
    try:
        pickle.dumps(simulator)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


_hiding = threading.Lock()


@contextlib.contextmanager
def script_hidden(simulator: External) -> Iterator[None]:
    """Processes that start in here do not import the script, unless the simulator is in it.

    Importing would run all of a script that has no `if __name__ == "__main__":`.
    """
    part = simulator.function
    elsewhere = isinstance(part, types.FunctionType) and part.__module__ != "__main__"
    if part is not None and not elsewhere:
        yield
        return
    with _hiding:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script
