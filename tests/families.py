"""Processes that descend from one that a test has started, wherever their parents are."""

import time

import psutil

NAME = "TEST_FAMILY"
"""The environment variable that tells a family; processes hand it on to those that they start."""


def family(name):
    """Processes that descend from one that was started with this name in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(NAME) == name:
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_none_left(name, seconds=2.0):
    """Called when the first of the family has been killed."""
    killed = time.monotonic()
    while (left := family(name)) and time.monotonic() - killed < seconds:
        time.sleep(0.05)
    assert not left, [f"{process.pid}: {' '.join(process.cmdline())}" for process in left]


def with_argument(text):
    seen = psutil.process_iter(["cmdline"])
    return [process for process in seen if text in (process.info["cmdline"] or [])]


def assert_end(processes):
    """Or become zombies: nobody may be there to collect them."""
    deadline = time.monotonic() + 5.0
    while left := [p for p in processes if p.is_running() and p.status() != "zombie"]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
