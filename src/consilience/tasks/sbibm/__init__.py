"""Six tasks of the SBI benchmark (Lueckmann et al. 2021): a model, observations and reference
posterior draws each. Imports what `tasks` may. Read gaussian_linear.py first, then registry.py.
"""
