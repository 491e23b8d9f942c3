"""Problems with a known answer: each module gives a `model()` and its reference posterior."""
