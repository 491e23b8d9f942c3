"""The five experiments of Schmitt et al. (2024, arXiv:2310.04395), cell by cell. Imports `tasks`
and folders above it. Read experiment.py first.
"""
