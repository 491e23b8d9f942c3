"""From simulations to a fit: defaults, the training loop, epochs, batches, and sequential rounds.
Imports `posterior` and folders above it. Read train.py first.
"""
