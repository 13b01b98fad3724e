"""Bytes per device: resident tensors over time, and the peak.

Decides how much memory choices take at every moment of a step. Knows nothing of limits or solvers.
"""
