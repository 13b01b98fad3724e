"""Annotations, foreign plans and presets, translated to masks over candidate strategies or to errors.

Decides which choices annotations, foreign plans and presets leave. Knows nothing of memory limits or solvers.
"""
