"""A fit as a user has it: draws, densities, evidence, Markov chains, model comparison, and files.
Imports `identity` and folders above it. Read fit.py first.
"""
