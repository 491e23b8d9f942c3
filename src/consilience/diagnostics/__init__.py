"""How far to trust a fit: calibration over many runs, the verdict at one observation, scores.
Imports `training`, `plots` and folders above them. Read check.py first.
"""
