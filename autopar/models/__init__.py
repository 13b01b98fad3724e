"""Models to try autopar with, and text to train them on.

Decides nothing about parallelism. Knows models and data only.
"""

from autopar.models.catalogue import NAMES, LanguageModel, built_in, language_model

__all__ = ["NAMES", "LanguageModel", "built_in", "language_model"]
