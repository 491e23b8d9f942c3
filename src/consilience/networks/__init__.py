"""Neural networks that know nothing of Bayes: conditional flows, summary networks, and the
probability that a run is valid. Imports `simulation` and folders above it. Read flow.py first.
"""
