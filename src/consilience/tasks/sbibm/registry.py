"""The six tasks by name, and the benchmark's own files for them."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from consilience.tasks.sbibm import (
    bernoulli_glm,
    gaussian_linear,
    gaussian_mixture,
    sir,
    slcp,
    two_moons,
)
from consilience.tasks.sbibm.task import Task

TASKS: dict[str, Task] = {
    module.__name__.rpartition(".")[2]: module.TASK
    for module in (gaussian_linear, gaussian_mixture, two_moons, slcp, bernoulli_glm, sir)
}


class Problem(NamedTuple):
    """Observations of a task, the parameters that made them, and draws of each posterior."""

    observations: Float[np.ndarray, "m dim_x"]
    parameters: Float[np.ndarray, "m dim_theta"]
    reference: Float[np.ndarray, "m n dim_theta"]


def sbibm_data(folder: str | Path, task: str) -> Problem:
    """The benchmark's own observations and reference posterior of a task, from TASK.npz.

    The file has the arrays `observations` (m, dim x), `parameters` (m, dim theta) and
    `reference` (m, draws, dim theta).
    """
    path = data_file(folder, task)
    with np.load(path) as arrays:
        missing = [name for name in Problem._fields if name not in arrays]
        if missing:
            raise ValueError(
                f"{path} must have the arrays {', '.join(Problem._fields)}, but "
                f"{', '.join(missing)} is missing: it has {', '.join(arrays)}."
            )
        problem = Problem(*(arrays[name] for name in Problem._fields))
    _check(problem, task, path)
    return problem


def _check(problem: Problem, task: str, path: Path):
    """Refuse arrays that are not those of the task."""
    layout = TASKS[task].model().layout
    assert layout is not None
    (dim_x,), dim = layout.shapes[layout.names[0]], TASKS[task].observations().parameters.shape[1]
    m = len(problem.observations)
    n = problem.reference.shape[1] if problem.reference.ndim == 3 else 0
    expected = {"observations": (m, dim_x), "parameters": (m, dim), "reference": (m, n, dim)}
    for name, shape in expected.items():
        found = getattr(problem, name)
        if found.shape != shape or not found.size or not np.isfinite(found).all():
            raise ValueError(
                f"{name} in {path} must be finite numbers of the shape "
                f"{str(shape).replace(' 0,', ' draws,')}, got {found.shape}."
            )


def data_file(folder: str | Path, task: str) -> Path:
    """The file of a task, once it is seen to be there."""
    if task not in TASKS:
        raise ValueError(f"There is no task {task!r}, only {', '.join(TASKS)}.")
    path = Path(folder) / f"{task}.npz"
    if not path.is_file():
        raise ValueError(f"There is no {path}: pass the folder that has {task}.npz with --data.")
    return path


def fingerprint(path: Path) -> str:
    """What tells one version of a file from another."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
