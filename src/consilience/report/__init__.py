"""The HTML page of a fit: findings are computed once, and sections show them. Imports `diagnostics`
and folders above it. Read findings.py first.
"""
