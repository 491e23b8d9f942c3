"""Simulators that worker processes import; NumPy alone, so that they start quickly."""

import os
import signal
import time

import numpy as np


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
