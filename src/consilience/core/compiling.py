"""Compilation: `compiled` is `eqx.filter_jit` with the options that suit the machine."""

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

CPU_OPTIONS: dict[str, Any] = {
    # Faster to compile, and no slower to run, than the default, 3.
    "xla_backend_optimization_level": 1,
    # Products by Eigen, not by YNNPACK: faster at the sizes of a training step.
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE",
}
"""Options of XLA for a CPU; other devices take the defaults."""

QUICK_OPTIONS: dict[str, Any] = {**CPU_OPTIONS, "xla_cpu_use_fusion_emitters": False}
"""Options for what runs only briefly: compiles in half the time, and runs a fifth slower."""


def compiled(function: Callable[P, R], *, quick: bool = False) -> Callable[P, R]:
    """Compile a function once for each shape of its arrays and each other argument.

    `quick`: it will not run for long, so compilation should be short.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return _jitted(function, jax.default_backend(), quick)(*args, **kwargs)

    return call


def keep_compiled(folder: str | Path | None = None) -> Path:
    """Keep what is compiled in a folder, for other processes to take from there.

    The first fit or the first draws of a process then start in a fraction of the time, where
    an earlier process has worked with the same shapes and functions. Call it before anything
    else: `cs.keep_compiled()`. The default is `consilience` in the user's folder for caches.
    """
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "consilience"
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def on_device(values: Any) -> jax.Array:
    """Numbers on the device in the default precision; unlike `jnp.asarray`, compiles nothing."""
    return jax.device_put(np.asarray(values, jnp.result_type(float)))


@functools.cache
def _jitted(function: Callable, backend: str, quick: bool) -> Callable:
    options: Any = {"compiler_options": _options(backend, quick)}
    return eqx.filter_jit(function, **options)


@functools.cache
def _options(backend: str, quick: bool) -> dict[str, Any] | None:
    """The options that this version of XLA knows, or None for its defaults."""
    if backend != "cpu":
        return None
    options = QUICK_OPTIONS if quick else CPU_OPTIONS
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        logger.info("XLA takes its default options: %s", error)
        return None
    return options
