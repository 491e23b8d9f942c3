"""A command at work: its log, and its errors as one line and an exit code."""

import argparse
import logging
import sys

import jax

from consilience.cli.codes import INTERRUPTED, NO_MEMORY
from consilience.simulation.starting import StartError
from consilience.training.epochs import TrainingError


def run(options: argparse.Namespace) -> int:
    """Run the command that was asked for; the exit code comes back."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for noisy in ("jax", "matplotlib", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        code = options.command(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except (ValueError, OSError, StartError, TrainingError) as error:
        print(f"consilience: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        return _no_memory(error, options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _no_memory(error, options)
    except KeyboardInterrupt as stop:
        print(f"consilience: stopped. {str(stop) or options.stopped}", file=sys.stderr)
        return INTERRUPTED


def _no_memory(error: Exception, options: argparse.Namespace) -> int:
    said = (str(error).strip() or "no more could be had").splitlines()[0].rstrip(".")
    print(f"consilience: out of memory ({said}). {options.smaller}", file=sys.stderr)
    return NO_MEMORY
