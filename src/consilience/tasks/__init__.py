"""Problems with a known answer: each module gives a `model()` and its reference posterior. Imports
`metrics`, `report` and folders above them. Read gmm.py first.
"""
