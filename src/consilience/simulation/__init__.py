"""Runs of a model: compiled, or by a campaign of worker processes, in memory or in a store that
survives crashes; and the runs that failed. Imports `model` and `core`. Read simulate.py first.
"""
