"""Simulators that worker processes import; NumPy alone, so that they start quickly."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import numpy as np

from consilience.model.run import Outcome, run_chunk


def noisy(rng, mu, sigma):
    return mu + sigma * rng.normal(size=3)


def fragile(rng, mu, sigma):
    """Fails in every way that a run can, by where sigma in (0, 2) lies."""
    if sigma > 1.9:
        os.abort()
    if sigma > 1.7:
        raise ValueError("sigma is too large")
    if sigma > 1.5:
        return np.full(3, np.inf)
    if sigma > 1.3:
        return np.zeros(4)
    return noisy(rng, mu, sigma)


def hangs(rng, mu, sigma):
    """Stuck for one half of the runs in Python, for some of them where no signal is heard."""
    if sigma > 1.6:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    if sigma > 1.0:
        time.sleep(60)
    return noisy(rng, mu, sigma)


def forks(rng, mu, sigma):
    """Leaves a child that comes back with data of its own, as after an exec that failed."""
    if sigma < 1.0 and os.fork() == 0:
        return np.full(3, 1e6)
    return noisy(rng, mu, sigma)


def in_a_thread(task, numbers, theta):
    """A chunk run as on a user's `ThreadPoolExecutor`."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run_chunk, task, numbers, theta).result()


def forks_in_c(rng, mu, sigma):
    """The same, unseen by Python."""
    if sigma < 1.0 and ctypes.CDLL(None).fork() == 0:
        return np.full(3, 1e6)
    return noisy(rng, mu, sigma)


def dies_with_a_child(rng, mu, sigma):
    """Dies, for some runs, while a child of its own holds all that it had open."""
    if sigma > 1.6:
        if ctypes.CDLL(None).fork() == 0:
            time.sleep(10)
            os._exit(0)
        os._exit(3)
    return noisy(rng, mu, sigma)


def forges(rng, mu, sigma):
    """Sends outcomes of other runs to whoever listens."""
    wrong = np.full(3, 1e6)
    for end in gc.get_objects():
        if isinstance(end, Connection) and end.writable:
            for number in range(-1, 60):
                end.send([(number, Outcome(wrong, None, 0.0, number, "another chunk"))])
                end.send([(5, Outcome(wrong, None, 0.0, number, ""))])
    return noisy(rng, mu, sigma)


def holds_on(rng, mu, sigma):
    """Starts a process in a session of its own, then holds Python's lock without end."""
    subprocess.Popen(["sleep", "304"], start_new_session=True)
    with open(os.environ["TEST_LOG"], "a") as log:
        log.write("\n")
    ctypes.PyDLL(None).sleep(60)


def serves_nothing(connection, current, task):
    """A worker that dies whenever it gets runs."""
    connection.send("ready")
    connection.recv()
    os._exit(3)


def noisy_pair(rng, theta):
    return theta + rng.normal(size=2)


def waits(rng, mu, sigma):
    time.sleep(60)
    return noisy(rng, mu, sigma)


def has_jax(rng, mu, sigma):
    return np.array([float("jax" in sys.modules)])


def runs_nothing(task, numbers, theta):
    """To be submitted in place of `run_chunk`."""
    pairs = zip(numbers.tolist(), theta["mu"], strict=True)
    return [Outcome(np.array([mu]), None, 0.0, number, task.mark) for number, mu in pairs]


def mixes_up(task, numbers, theta):
    """To be submitted in place of `run_chunk`."""
    return [outcome._replace(number=7) for outcome in run_chunk(task, numbers, theta)]


def raises(task, numbers, theta):
    """To be submitted in place of `run_chunk`."""
    raise KeyError("by the function itself")


def raises_locked(task, numbers, theta):
    """To be submitted in place of `run_chunk`: what it raises cannot be pickled."""
    error = LookupError("it holds a lock")
    error.lock = threading.Lock()
    raise error


class NeedsTwoError(Exception):
    """One that is pickled, but cannot be made again from its text."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raises_two(task, numbers, theta):
    """To be submitted in place of `run_chunk`: what it raises cannot be read."""
    raise NeedsTwoError("this", "that")


class Own:
    """A user's simulator, which inherits from nothing; the library stops its runs."""

    keeps_time = False

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds

    @property
    def name(self):
        return "own"

    @property
    def function(self):
        return type(self)

    @property
    def program(self):
        return ("own", type(self), self.seconds)

    def check(self, shapes):
        if set(shapes) != {"mu", "sigma"}:
            raise ValueError(f"The parameters are mu and sigma, got {sorted(shapes)}.")

    def run(self, rng, theta, timeout):
        time.sleep(self.seconds)
        return noisy(rng, **theta)


class Patient(Own):
    """One that keeps time by itself."""

    keeps_time = True

    def run(self, rng, theta, timeout):
        time.sleep(timeout)
        raise TimeoutError


class Runs:
    """Half of a simulator outside JAX."""

    def run(self, rng, theta, timeout):
        return np.zeros(1)


class Compiled:
    """A simulator in JAX that is an object."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def __call__(self, key, theta):
        return self.scale * theta["mu"]
