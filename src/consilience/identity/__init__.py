"""The heart: learned posterior, likelihood and prior, the identity that joins them, and the loss
made from it. Imports `networks` and folders above it. Read evidence.py, then objective.py first.
"""
