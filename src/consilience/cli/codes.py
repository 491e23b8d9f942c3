"""The exit codes of commands, beside 0 for success, 1 for missing runs and 2 for bad input."""

from consilience.diagnostics.verdicts import AS_IS, CORRECTED, MCMC, MODEL

INTERRUPTED = 130
NO_MEMORY = 6
CODES = {AS_IS: 0, CORRECTED: 3, MCMC: 4, MODEL: 5}
"""Exit codes of `check`, by verdict."""
