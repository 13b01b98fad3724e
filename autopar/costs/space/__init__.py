"""The search space: a menu of strategies per decision, and wires between decisions.

Decides what may be chosen. Knows nothing of pins, memory limits or solvers.
"""
