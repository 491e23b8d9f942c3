"""The five experiments of Schmitt et al. (2024, arXiv:2310.04395) and the SBI benchmark, cell by
cell. Imports `tasks` and folders above it. Read experiment.py first.
"""
