"""Problems with a known answer: each module gives a `model()` and its reference posterior, each in
`sbibm/` a `TASK`. Imports `metrics`, `report` and folders above them. Read gmm.py first.
"""
