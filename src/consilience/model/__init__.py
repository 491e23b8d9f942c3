"""What a user brings: a prior, a simulator in JAX or outside it, a log-likelihood, and data of a
kind; and how parameters become the vectors that networks see. Imports `core`. Read model.py
first.
"""
