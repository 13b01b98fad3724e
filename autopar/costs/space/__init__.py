"""The search space: candidate strategies per decision, and edges between decisions.

Decides what may be chosen. Knows nothing of pins, memory limits or solvers.
"""
