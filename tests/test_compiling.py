"""Compilation: options that suit the machine, and a cache that other processes read."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from consilience.core import compiling
from tests.conftest import LONG_OPTIONS

PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import consilience as cs
from consilience.core.compiling import compiled

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
assert cs.keep_compiled(sys.argv[1]).is_dir()
assert float(compiled(lambda x: jnp.sum(jnp.sin(x)))(jnp.zeros(3))) == 0.0
print(sum("cache_hit" in event for event in hits))
"""


def test_a_second_process_takes_what_the_first_compiled(tmp_path):
    def run():
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "cache")]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert run() == 0
    assert any((tmp_path / "cache").iterdir())
    assert run() > 0


def test_options_that_xla_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setattr(compiling, "CPU_OPTIONS", {"xla_no_such_option": 1})
    assert compiling._options.__wrapped__("cpu", False) is None
    assert compiling._options.__wrapped__("gpu", False) is None


def test_options_are_known_here(monkeypatch):
    monkeypatch.setattr(compiling, "CPU_OPTIONS", LONG_OPTIONS)
    assert compiling._options.__wrapped__("cpu", False) == LONG_OPTIONS != compiling.QUICK_OPTIONS
    assert compiling._options.__wrapped__("cpu", True) == compiling.QUICK_OPTIONS


def test_numbers_go_to_the_device_without_compiling():
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: events.append(event)
    )
    found = compiling.on_device(np.arange(17.0))
    assert found.dtype == jnp.result_type(float)
    assert isinstance(found, jax.Array)
    assert not [event for event in events if "backend_compile" in event]
